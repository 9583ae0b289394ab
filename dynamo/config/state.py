"""Options of ``dynamo state``."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import option

__all__ = ["StateSettings"]


@dataclass(frozen=True, kw_only=True)
class StateSettings:
    """state: what to do, and with which deployment"""

    action: str = option(
        "",
        "action",
        choices=("show", "repair"),
        help="show: print the components; repair: make statefile and processes agree",
    )
    namespace: str | None = option(
        None,
        "--namespace",
        help="namespace of the deployment; default: DYN_NAMESPACE, else the only one",
    )
    json: bool = option(False, "--json", help="with show: print JSON")
    dry_run: bool = option(False, "--dry-run", help="with repair: only say what it would do")
