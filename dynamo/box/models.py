"""The state of each model of a deployment, from its workers and the frontends. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dynamo.box.sighting import BoxSighting
from dynamo.protocols.status import ModelFigures, ModelStatus, WorkerStatus
from dynamo.serve.entries import read_services, service_config

__all__ = ["model_statuses"]

_ORDER = ("ready", "loading", "draining", "asleep", "failed", "stopped")
"""States of workers; the first that a worker has is that of its model."""


def model_statuses(seen: BoxSighting, workers: Sequence[WorkerStatus]) -> tuple[ModelStatus, ...]:
    """Return the models of the graph, those without workers too, in the graph's order."""
    models: dict[str, list[WorkerStatus]] = {}
    for service in read_services(seen.document).values():
        models.setdefault(_served_name(service.name, service.model, workers), [])
    for worker in workers:
        if worker.model:
            models.setdefault(worker.model, []).append(worker)
    figures = _figures(seen)
    wanted = _wanted(seen, workers)
    return tuple(_model(name, found, seen, figures, wanted) for name, found in models.items())


def _served_name(service: str, model: str, workers: Sequence[WorkerStatus]) -> str:
    """Return the name that a worker of ``service`` has registered, else the graph's."""
    names = (one.model for one in workers if one.service == service and one.worker)
    return next(names, model)


def _model(
    name: str,
    workers: Sequence[WorkerStatus],
    seen: BoxSighting,
    figures: Mapping[str, ModelFigures],
    wanted: Mapping[str, int],
) -> ModelStatus:
    states = {worker.state for worker in workers}
    state = next((one for one in _ORDER if one in states), "zero")
    failed = next((one for one in workers if one.state == "failed"), None)
    first = failed or next((one for one in workers if one.state == state), None)
    found = figures.get(name)
    told = first is not None and (failed is not None or state != "ready")
    vram = [worker.vram_bytes for worker in workers if worker.vram_bytes is not None]
    progress = [one.progress for one in workers if one.progress is not None]
    return ModelStatus(
        model=name,
        state=state,
        ready=sum(worker.state == "ready" for worker in workers),
        wanted=wanted.get(name, 0),
        progress=min(progress, default=None) if state == "loading" else None,
        cause=first.cause if first is not None and told else "",
        remedy=first.remedy if first is not None and told else "",
        gpus=tuple(dict.fromkeys(gpu for worker in workers for gpu in worker.gpus)),
        vram_bytes=sum(vram) if vram else None,
        idle_until_s=_idle_until_s(seen.idle_timeouts.get(name), found),
        figures=found,
        workers=tuple(worker.name for worker in workers),
    )


def _idle_until_s(timeout_s: float | None, figures: ModelFigures | None) -> float | None:
    """Return the time until an idle model loses its workers, None if it does not."""
    if timeout_s is None or figures is None or figures.idle_s is None or figures.in_flight:
        return None
    return max(0.0, timeout_s - figures.idle_s)


def _wanted(seen: BoxSighting, workers: Sequence[WorkerStatus]) -> dict[str, int]:
    """Return the workers that the planner wants of each model; without one, those of the graph,
    and those that were added by hand."""
    config = service_config(seen.document)
    found: dict[str, int] = {}
    for service in read_services(seen.document).values():
        model = _served_name(service.name, service.model, workers)
        number = seen.wanted.get((model, "prefill" if service.is_prefill else "decode"))
        if number is None:
            number = max(_in_graph(config.get(service.name)), _kept(service.name, workers))
        found[model] = found.get(model, 0) + number
    return found


def _in_graph(service: object) -> int:
    args = service.get("ServiceArgs") if isinstance(service, Mapping) else None
    number = args.get("workers", 1) if isinstance(args, Mapping) else 1
    return number if isinstance(number, int) else 1


def _kept(service: str, workers: Iterable[WorkerStatus]) -> int:
    leaving = ("draining", "asleep", "stopped")
    return sum(one.service == service and one.state not in leaving for one in workers)


def _figures(seen: BoxSighting) -> dict[str, ModelFigures]:
    """Return the figures of each model, summed over the frontends that answered."""
    found: dict[str, list[ModelFigures]] = {}
    for frontend in seen.frontends:
        for one in frontend.status.models if frontend.status else ():
            found.setdefault(one.model, []).append(one)
    return {model: _sum(rows) for model, rows in found.items()}


def _sum(rows: Sequence[ModelFigures]) -> ModelFigures:
    """Add counts and rates; quantiles are those of the slowest, the hit rate of the busiest."""
    if len(rows) == 1:
        return rows[0]
    busiest = max(rows, key=lambda one: one.requests_per_s)
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
        workers=tuple(one for row in rows for one in row.workers),
    )


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
