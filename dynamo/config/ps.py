"""Options of ``dynamo ps``."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import option

__all__ = ["PsSettings"]


@dataclass(frozen=True, kw_only=True)
class PsSettings:
    """ps: which deployment, and how to print it"""

    namespace: str | None = option(
        None,
        "--namespace",
        help="namespace of the deployment; default: DYN_NAMESPACE, else the only one",
    )
    json: bool = option(False, "--json", help="print JSON: all that is known, with every worker")
    api_key: str | None = option(
        None,
        "--api-key",
        env=("DYN_API_KEY", "OPENAI_API_KEY"),
        help="an operator's key, for the figures of a frontend that needs one",
    )
