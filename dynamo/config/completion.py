"""Options of ``dynamo completion``."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import option

__all__ = ["CompletionSettings"]


@dataclass(frozen=True, kw_only=True)
class CompletionSettings:
    """completion: for which shell"""

    shell: str = option("", "shell", choices=("bash", "zsh", "fish"), help="your shell")
