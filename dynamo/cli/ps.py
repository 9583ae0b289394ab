"""``dynamo ps``: the models of a deployment, their workers, and what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from dynamo.box.collect import BoxCollector
from dynamo.config import from_env, load
from dynamo.config.ps import PsSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError
from dynamo.protocols.status import BoxStatus, ModelStatus, WorkerStatus

__all__ = ["main"]

DESCRIPTION = "Show the models of a deployment: their workers, GPUs, load, and what failed."
EPILOG = """Works also while the frontend is down; then the figures of requests are missing.
Exit status: 0 all is well, 1 something failed or there is no deployment, 2 a bad flag."""

_COLUMNS = (
    *("MODEL", "STATE", "READY", "GPUS", "VRAM", "TOK/S"),
    *("IN FLIGHT", "QUEUED", "HIT RATE", "IDLE UNTIL"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status."""
    (settings,) = load("dynamo ps", DESCRIPTION, [PsSettings], argv, epilog=EPILOG)
    try:
        runtime = from_env(RuntimeSettings)
        if settings.namespace:
            runtime = replace(runtime, namespace=settings.namespace)
        found = BoxCollector(runtime, settings.api_key).collect()
    except ConfigError as error:
        print(f"dynamo ps: {error.message}", file=sys.stderr)
        return 2
    if settings.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print("\n".join(_lines(found)))
    return 1 if has_failed(found) else 0


def has_failed(found: BoxStatus) -> bool:
    """Whether a part of the deployment failed, or there is none."""
    processes = (*found.workers, *found.others)
    return found.state != "running" or any(one.state == "failed" for one in processes)


def _lines(found: BoxStatus) -> Iterator[str]:
    if found.state != "running":
        yield f"no deployment runs in namespace {found.namespace!r}; start one: dynamo serve GRAPH"
        yield from found.problems
        return
    rows = [_COLUMNS, *map(_model_row, found.models), *map(_other_row, _unnamed(found))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        cells = (word.ljust(width) for word, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
    where = f" at {found.url}" if found.url else ""
    yield f"frontend: {found.frontend}{where}"
    for model in found.models:
        if model.cause and model.state != "failed":
            yield f"{model.model} is {model.state}: {model.cause}"
    yield from found.problems


def _model_row(model: ModelStatus) -> tuple[str, ...]:
    figures = model.figures
    state = model.state
    if model.progress is not None:
        state += f" {model.progress:.0%}"
    return (
        model.model,
        state,
        f"{model.ready}/{model.wanted}",
        ",".join(model.gpus) or "-",
        "-" if model.vram_bytes is None else f"{model.vram_bytes / 2**30:.1f} GiB",
        "-" if figures is None else f"{figures.output_tokens_per_s:.0f}",
        "-" if figures is None else str(figures.in_flight),
        "-" if figures is None else str(figures.queued),
        "-" if figures is None or figures.hit_rate is None else f"{figures.hit_rate:.0%}",
        "-" if model.idle_until_s is None else f"{model.idle_until_s:.0f} s",
    )


def _unnamed(found: BoxStatus) -> list[WorkerStatus]:
    """Return the processes that register no model, frontends and planners aside."""
    return [one for one in found.workers if not one.model]


def _other_row(worker: WorkerStatus) -> tuple[str, ...]:
    gpus = ",".join(worker.gpus) or "-"
    return (f"({worker.name})", worker.state, "-", gpus, *("-" for _ in _COLUMNS[4:]))
