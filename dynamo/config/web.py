"""Options of ``dynamo web``."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import option

__all__ = ["WebSettings"]


@dataclass(frozen=True, kw_only=True)
class WebSettings:
    """web: which deployment, and whether to open a browser"""

    namespace: str | None = option(
        None,
        "--namespace",
        help="namespace of the deployment; default: DYN_NAMESPACE, else the only one",
    )
    open: bool = option(
        True, "--open", help="open a browser, if this session has a display; --no-open prints alone"
    )
