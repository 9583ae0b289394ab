"""Options of the verbs that ask a running frontend."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.client import ClientSettings
from dynamo.config.option import option

__all__ = ["FrontendClientSettings"]


@dataclass(frozen=True, kw_only=True)
class FrontendClientSettings(ClientSettings):
    """frontend: which one to ask, and how"""

    timeout_s: float = option(
        30.0, "--timeout-secs", minimum=0.1, help="seconds to wait for the frontend"
    )
