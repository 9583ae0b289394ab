"""Options of ``dynamo doctor``."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import option

__all__ = ["DoctorSettings"]


@dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """doctor: what to examine"""

    graph: str = option(
        "", "graph", help="YAML file to check too; default: the graph of the running deployment"
    )
    namespace: str | None = option(
        None,
        "--namespace",
        help="namespace of the deployment; default: the one in the graph, else DYN_NAMESPACE",
    )
    json: bool = option(False, "--json", help="print the findings as JSON")
