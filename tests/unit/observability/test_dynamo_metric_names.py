"""docs/observability.md says of every metric name of Dynamo 1.6.1 why it is not here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from metric_specs import absent_names, declarations

from dynamo import prometheus_names

NOT_METRICS = ("component_names", "labels", "name_prefix", "router_request")
LABELS = re.compile(r"_|.*_LABEL$|.*_ENV$|STAGE_(PREPROCESS|ROUTE|DISPATCH)$")
"""Keys of labels and their values."""
PREFIXES = {
    "frontend_service": "dynamo_frontend_",
    "frontend_perf": "dynamo_frontend_",
    "request_plane": "dynamo_request_plane_",
    "routing_overhead": "dynamo_router_",
    "transport": "dynamo_transport_",
    "work_handler": "dynamo_work_handler_",
    "trtllm_additional": "",
}
"""Of the metrics of a class; ``dynamo_component_`` for the others."""


def names() -> Iterator[tuple[str, str]]:
    """Yield class and name of each metric."""
    for owner in prometheus_names.__all__:
        if owner not in NOT_METRICS:
            yield from _names(owner, getattr(prometheus_names, owner))


def _names(owner: str, group: type) -> Iterator[tuple[str, str]]:
    for key, value in vars(group).items():
        if inspect.isclass(value) and owner == "transport":
            yield from _names(owner, value)
        elif isinstance(value, str) and not LABELS.match(key):
            yield owner, value


def is_absent(name: str) -> bool:
    return any(
        name.startswith(row[:-1]) if row.endswith("…") else name == row for row in absent_names()
    )


def test_every_name_is_exported_or_explained() -> None:
    exported = {spec.name for spec in declarations()}
    everywhere = {"", "dynamo_component_", "dynamo_component_router_", *PREFIXES.values()}
    for owner, name in names():
        full = PREFIXES.get(owner, "dynamo_component_") + name
        here = any(prefix + name in exported for prefix in everywhere)
        assert here != is_absent(full), full


def test_no_declared_metric_is_called_absent() -> None:
    assert [spec.name for spec in declarations() if is_absent(spec.name)] == []
