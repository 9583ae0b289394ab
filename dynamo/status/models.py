"""The state of each model from its workers and frontends: what was seen, summed, judged. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dynamo.errors import as_argument
from dynamo.protocols.status import (
    FrontendStatus,
    GpuStatus,
    LoadEffect,
    ModelFigures,
    ModelStatus,
    PlannerReport,
    WorkerFigures,
    WorkerStatus,
)
from dynamo.serve.state.view import DeploymentView

_ORDER = ("ready", "loading", "draining", "asleep", "failed", "stopped")
"""States of workers; the first that a worker has is that of its model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendView:
    """One frontend: its entry ``name``, its address, and its report if it answered.

    ``state`` is ready, draining or down. ``problem`` says why there is no ``status``.
    """

    name: str
    url: str
    state: str
    status: FrontendStatus | None = None
    problem: str = ""


def _nothing(name: str) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxView:
    """A ``deployment`` at ``at_s``, Unix time, with the answers of its frontends and its planner.

    ``uptimes`` has the recorded processes that live. ``last_output`` returns the last line of a
    watcher. ``planner`` is what a running one reports. ``loads`` has what a load would do, by
    service. ``uses_files``: workers register in files, else none is registered. ``stopping``: the
    deployment stops.
    """

    deployment: DeploymentView
    at_s: float
    uptimes: Mapping[int, float] = field(default_factory=dict)
    last_output: Callable[[str], str] = _nothing
    frontends: tuple[FrontendView, ...] = ()
    planner: PlannerReport | None = None
    gpus: tuple[GpuStatus, ...] = ()
    loads: Mapping[str, LoadEffect] = field(default_factory=dict)
    uses_files: bool = True
    stopping: bool = False

    def rejected(self, worker: str) -> str:
        """Return why a frontend rejects the worker with this id; "" if none does."""
        reports = (frontend.status for frontend in self.frontends if frontend.status)
        return next(
            (report.rejected[worker] for report in reports if worker in report.rejected), ""
        )

    def serves(self, model: str) -> bool:
        """Whether a frontend has a worker of ``model``."""
        return any(
            figures.model == model and figures.workers
            for frontend in self.frontends
            for figures in (frontend.status.models if frontend.status else ())
        )


def worker_figures(seen: BoxView) -> dict[str, WorkerFigures]:
    """Return the figures of each worker, by its id."""
    return _by_worker(worker for model in _rows(seen) for worker in model.workers)


def model_figures(seen: BoxView) -> dict[str, ModelFigures]:
    """Return the figures of each model, by its name; none if no frontend answered."""
    by_model: dict[str, list[ModelFigures]] = {}
    for figures in _rows(seen):
        by_model.setdefault(figures.model, []).append(figures)
    return {model: _sum(rows) for model, rows in by_model.items()}


def _rows(seen: BoxView) -> Iterable[ModelFigures]:
    for frontend in seen.frontends:
        yield from frontend.status.models if frontend.status else ()


def _by_worker(rows: Iterable[WorkerFigures]) -> dict[str, WorkerFigures]:
    """Add the requests in flight; KV use is the same everywhere, or unknown to some."""
    by_id: dict[str, WorkerFigures] = {}
    for row in rows:
        before = by_id.get(row.worker)
        by_id[row.worker] = row if before is None else _merged(before, row)
    return by_id


def _merged(first: WorkerFigures, other: WorkerFigures) -> WorkerFigures:
    return WorkerFigures(
        worker=first.worker,
        in_flight=first.in_flight + other.in_flight,
        kv_use=largest((first.kv_use, other.kv_use)),
        busy=first.busy or other.busy,
    )


def _sum(rows: Sequence[ModelFigures]) -> ModelFigures:
    """Add counts and rates; quantiles are those of the slowest, the hit rate of the busiest."""
    if len(rows) == 1:
        return rows[0]
    busiest = max(rows, key=lambda figures: (figures.hit_rate is not None, figures.requests_per_s))
    workers = _by_worker(worker for row in rows for worker in row.workers)
    return ModelFigures(
        model=rows[0].model,
        tool_call_parser=rows[0].tool_call_parser,
        reasoning_parser=rows[0].reasoning_parser,
        in_flight=sum(figures.in_flight for figures in rows),
        queued=sum(figures.queued for figures in rows),
        window_s=max(figures.window_s for figures in rows),
        output_tokens_per_s=sum(figures.output_tokens_per_s for figures in rows),
        requests_per_s=sum(figures.requests_per_s for figures in rows),
        ttft_p50_s=largest(figures.ttft_p50_s for figures in rows),
        ttft_p99_s=largest(figures.ttft_p99_s for figures in rows),
        hit_rate=busiest.hit_rate,
        idle_s=min(
            (figures.idle_s for figures in rows if figures.idle_s is not None), default=None
        ),
        workers=tuple(workers.values()),
    )


def largest(values: Iterable[float | None]) -> float | None:
    """Return the largest of the known ``values``; None without one."""
    return max((value for value in values if value is not None), default=None)


def model_statuses(seen: BoxView, workers: Sequence[WorkerStatus]) -> tuple[ModelStatus, ...]:
    """Return the models of the graph, those without workers too, in the graph's order.

    Then others that frontends list for the same workers.
    """
    models: dict[str, list[WorkerStatus]] = {}
    loads: dict[str, list[LoadEffect]] = {}
    decode_models: set[str] = set()
    for service in seen.deployment.services.values():
        name = _served_name(service.name, service.model, workers)
        models.setdefault(name, [])
        decode_models |= set() if service.is_prefill else {name}
        if service.name in seen.loads:
            loads.setdefault(name, []).append(seen.loads[service.name])
    for worker in workers:
        if worker.model:
            models.setdefault(worker.model, []).append(worker)
    figures = model_figures(seen)
    by_id = {worker.worker: worker for worker in workers if worker.worker}
    # Adapters, and further models of one server.
    for name in sorted(figures.keys() - models.keys()):
        same_workers = [by_id[row.worker] for row in figures[name].workers if row.worker in by_id]
        if same_workers:
            models[name] = same_workers
    wanted, timeouts_s = _wanted(seen, workers), _idle_timeouts_s(seen)
    waits = {
        planned.model: planned.waits_for
        for planned in (seen.planner.models if seen.planner else ())
    }
    return tuple(
        _model(
            name,
            model_workers,
            _state(model_workers, name in decode_models),
            timeouts_s,
            figures,
            wanted,
            loads,
            waits,
        )
        for name, model_workers in models.items()
    )


def _served_name(service: str, model: str, workers: Sequence[WorkerStatus]) -> str:
    """Return the name that a worker of ``service`` has registered, else the graph's."""
    names = (worker.model for worker in workers if worker.service == service and worker.worker)
    return next(names, model)


def _state(workers: Sequence[WorkerStatus], decoded: bool) -> str:
    """Return the state of a model; one that is ``decoded`` here needs more than prefill workers."""
    states = {worker.state for worker in workers if not (decoded and worker.pool == "prefill")}
    return next((state for state in _ORDER if state in states), "zero")


def _model(
    name: str,
    workers: Sequence[WorkerStatus],
    state: str,
    timeouts_s: Mapping[str, tuple[float, float]],
    figures: Mapping[str, ModelFigures],
    wanted: Mapping[str, int],
    loads: Mapping[str, Sequence[LoadEffect]],
    waits: Mapping[str, str],
) -> ModelStatus:
    failed = next((worker for worker in workers if worker.state == "failed"), None)
    first = failed or next((w for w in workers if w.state == state and state != "ready"), None)
    own_figures = figures.get(name)
    vram = [worker.vram_bytes for worker in workers if worker.vram_bytes is not None]
    progress = [worker.progress for worker in workers if worker.progress is not None]
    cause, remedy = (first.cause, first.remedy) if first is not None else ("", "")
    holds = any(worker.state in ("ready", "loading") for worker in workers)
    if not workers and wanted.get(name):
        cause, remedy = "no worker runs", f"dynamo load {as_argument(name)}"
    if state == "zero" and waits.get(name):  # requests, for a first worker
        cause, remedy = waits[name], "dynamo planner explain"
    return ModelStatus(
        model=name,
        state=state,
        ready=sum(worker.state == "ready" for worker in workers),
        wanted=wanted.get(name, len(workers)),
        progress=min(progress, default=None) if state == "loading" else None,
        cause=cause,
        remedy=remedy,
        gpus=tuple(
            dict.fromkeys(gpu for worker in workers if _holds(worker) for gpu in worker.gpus)
        ),
        vram_bytes=sum(vram) if vram else None,
        idle_until_s=_idle_until_s(timeouts_s.get(name), own_figures) if holds else None,
        figures=own_figures,
        workers=tuple(worker.name for worker in workers),
        load=() if state in ("ready", "loading") else tuple(loads.get(name, ())),
    )


def _holds(worker: WorkerStatus) -> bool:
    """Whether a worker holds the GPUs in its entry: one that sleeps leaves them to others."""
    return worker.state != "asleep"


def _idle_timeouts_s(seen: BoxView) -> Mapping[str, tuple[float, float]]:
    """Return after which idle time the planner removes the last worker of each model, and the time
    since an operator loaded it; models that it keeps are not there."""
    planner = seen.planner
    if planner is None or planner.state != "running" or planner.idle_timeout_s is None:
        return {}
    timeouts_s = dict.fromkeys(planner.on_demand, planner.idle_timeout_s)
    asked_at = dict.fromkeys(timeouts_s, 0.0)
    for service in seen.deployment.services.values():
        if service.model in timeouts_s:
            idle_timeout_s = service.facts.model_args.idle_timeout
            if idle_timeout_s is not None:
                timeouts_s[service.model] = idle_timeout_s
            asked_at[service.model] = max(asked_at[service.model], service.asked_at)
    return {
        model: (seconds, seen.at_s - asked_at[model])
        for model, seconds in timeouts_s.items()
        if seconds != math.inf
    }


def _idle_until_s(
    timeouts_s: tuple[float, float] | None, figures: ModelFigures | None
) -> float | None:
    """Return the time until an idle model loses its workers, None if it does not."""
    if timeouts_s is None or figures is None or figures.idle_s is None or figures.in_flight:
        return None
    timeout_s, asked_s = timeouts_s
    # Idle since the last request or load, whichever is later. A step of the clock may give a
    # time below 0.
    return max(0.0, timeout_s - max(0.0, min(figures.idle_s, asked_s)))


def _wanted(seen: BoxView, workers: Sequence[WorkerStatus]) -> dict[str, int]:
    """Return the workers that the planner wants of each model; without one, those of the graph,
    and those that were added by hand."""
    planned = _planned(seen)
    totals: dict[str, int] = {}
    for service in seen.deployment.services.values():
        model = _served_name(service.name, service.model, workers)
        number = planned.get((model, service.facts.pool))
        if number is None:
            number = max(service.facts.workers, _kept(service.name, workers))
        totals[model] = totals.get(model, 0) + number
    return totals


def _planned(seen: BoxView) -> dict[tuple[str, str], int]:
    """Return the workers that an acting planner wants, by model and pool."""
    planner = seen.planner
    if planner is None or planner.state == "observing":
        return {}
    return {
        (model.model, pool): number
        for model in planner.models
        for pool, number in model.wanted.items()
    }


def _kept(service: str, workers: Iterable[WorkerStatus]) -> int:
    leaving = ("draining", "asleep", "stopped")
    return sum(worker.service == service and worker.state not in leaving for worker in workers)
