"""What all frontends together count for each model and each worker. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dynamo.protocols.status import ModelFigures, WorkerFigures
from dynamo.status.sighting import BoxSighting

__all__ = ["model_figures", "worker_figures"]


def worker_figures(seen: BoxSighting) -> dict[str, WorkerFigures]:
    """Return the figures of each worker, by its id."""
    return _by_worker(one for model in _rows(seen) for one in model.workers)


def model_figures(seen: BoxSighting) -> dict[str, ModelFigures]:
    """Return the figures of each model, by its name; none if no frontend answered."""
    found: dict[str, list[ModelFigures]] = {}
    for one in _rows(seen):
        found.setdefault(one.model, []).append(one)
    return {model: _sum(rows) for model, rows in found.items()}


def _rows(seen: BoxSighting) -> Iterable[ModelFigures]:
    for frontend in seen.frontends:
        yield from frontend.status.models if frontend.status else ()


def _by_worker(rows: Iterable[WorkerFigures]) -> dict[str, WorkerFigures]:
    """Add the requests in flight; KV use is the same everywhere, or unknown to some."""
    found: dict[str, WorkerFigures] = {}
    for one in rows:
        before = found.get(one.worker)
        found[one.worker] = one if before is None else _merged(before, one)
    return found


def _merged(one: WorkerFigures, other: WorkerFigures) -> WorkerFigures:
    return WorkerFigures(
        worker=one.worker,
        in_flight=one.in_flight + other.in_flight,
        kv_use=_largest((one.kv_use, other.kv_use)),
        busy=one.busy or other.busy,
    )


def _sum(rows: Sequence[ModelFigures]) -> ModelFigures:
    """Add counts and rates; quantiles are those of the slowest, the hit rate of the busiest."""
    if len(rows) == 1:
        return rows[0]
    busiest = max(rows, key=lambda one: (one.hit_rate is not None, one.requests_per_s))
    workers = _by_worker(one for row in rows for one in row.workers)
    return ModelFigures(
        model=rows[0].model,
        in_flight=sum(one.in_flight for one in rows),
        queued=sum(one.queued for one in rows),
        window_s=max(one.window_s for one in rows),
        output_tokens_per_s=sum(one.output_tokens_per_s for one in rows),
        requests_per_s=sum(one.requests_per_s for one in rows),
        ttft_p50_s=_largest(one.ttft_p50_s for one in rows),
        ttft_p99_s=_largest(one.ttft_p99_s for one in rows),
        hit_rate=busiest.hit_rate,
        idle_s=min((one.idle_s for one in rows if one.idle_s is not None), default=None),
        workers=tuple(workers.values()),
    )


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
