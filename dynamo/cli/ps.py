"""``dynamo ps``: the models of a deployment, their workers, and what is wrong.

It takes at most 60 ms of CPU: the arbiter collects the state, and few modules are imported here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo.cli.text_table import aligned, cell_len, model_state
from dynamo.config import load
from dynamo.config.option import flag, option
from dynamo.runtime.process.paths import planned_socket_path
from dynamo.status.deployment import STATUS_SOCKET, ask, chosen_runtime, not_running

DESCRIPTION = "Show the models of a deployment: their workers, GPUs, load, and what failed."
EPILOG = """Works also while the frontend is down; then the figures of requests are missing.
Exit status: 0 all is well, 1 something failed or there is no deployment, 2 a bad flag."""

_COLUMNS = (
    *("MODEL", "STATE", "READY", "GPUS", "VRAM", "TOK/S"),
    *("IN FLIGHT", "QUEUED", "HIT RATE", "UNLOADS IN"),
)

Status = Mapping[str, Any]
"""A BoxStatus, or a part of it, as decoded from JSON: empty fields are absent."""


@dataclass(frozen=True, kw_only=True)
class PsSettings:
    """ps: which deployment, and how to print it"""

    namespace: str | None = flag(
        None, help="namespace of the deployment; default: DYN_NAMESPACE, else the only one"
    )
    json: bool = flag(False, help="print JSON: all that is known, with every worker")
    api_key: str | None = option(
        None,
        env=("DYN_API_KEY", "OPENAI_API_KEY"),
        help="an operator's key, for the figures of a frontend that needs one",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status."""
    (settings,) = load("dynamo ps", DESCRIPTION, [PsSettings], argv, epilog=EPILOG)
    runtime = chosen_runtime(settings.namespace)
    try:
        answer = ask(planned_socket_path(runtime, STATUS_SOCKET), settings.api_key)
    except OSError:
        answer = b""
    if not answer:  # collect the state here; imported here, because it takes 0.1 s
        from dynamo.status.reading import report

        answer = report(runtime, settings.api_key)
    return _show(answer, settings.json)


def _show(answer: bytes, as_json: bool) -> int:
    """Print the status; return the exit status."""
    status = json.loads(answer)
    # Not shutil.get_terminal_size: the import takes some of the 60 ms.
    width = os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else 0
    print(json.dumps(status, indent=2) if as_json else "\n".join(_lines(status, width)))
    return 1 if _has_failed(status) else 0


def _has_failed(status: Status) -> bool:
    """Whether a part of the deployment failed, or there is none."""
    if status.get("hung") or status["state"] != "running":
        return True
    processes = (*status.get("workers", ()), *status.get("others", ()))
    return any(process["state"] == "failed" for process in processes)


def _lines(status: Status, width: int = 0) -> Iterator[str]:
    """Yield the lines; with ``width`` for a terminal, which breaks longer ones."""
    problems = status.get("problems", ())
    if status["state"] != "running":
        if not problems:
            yield not_running(status["namespace"])
        yield from problems
        return
    models = status.get("models", ())
    others = [worker for worker in status.get("workers", ()) if not worker.get("model")]
    rows = [_COLUMNS, *map(_model_row, models), *map(_other_row, others)]
    table = _fitting(rows, width)
    # aligned() counts and cuts all columns but the last one.
    last = max(cell_len(row[-1]) for row in table)
    yield from aligned(table, max(1, width - last) if width else 0)
    where = f" at {status['url']}" if status.get("url") else ""
    yield f"frontend: {status['frontend']}{where}"
    yield from _format_lines(models)
    for part in (*models, *others, *status.get("others", ())):
        if part.get("cause") and part["state"] not in ("ready", "failed"):
            remedy = f"; try: {part['remedy']}" if part.get("remedy") else ""
            state = "" if part["state"] == "zero" else f" is {part['state']}"
            yield f"{part.get('model') or part['name']}{state}: {part['cause']}{remedy}"
    yield from problems


def _format_lines(models: Sequence[Status]) -> Iterator[str]:
    """Yield how the answers of each model are parsed, if they are."""
    for model in models:
        figures: Status = model.get("figures") or {}
        names = [figures.get(f"{kind}_parser") for kind in ("tool_call", "reasoning")]
        if any(names):
            tool, reasoning = (name or "none" for name in names)
            yield f"{model['model']}: tool calls as {tool}, reasoning as {reasoning}"


def _fitting(rows: Sequence[Sequence[str]], width: int) -> Sequence[Sequence[str]]:
    """Leave out columns without a value on a terminal that is too narrow for all of them."""
    if not width or max(map(cell_len, aligned(rows))) <= width:
        return rows
    columns = list(zip(*rows, strict=True))
    kept = [column for column in columns if any(cell != "-" for cell in column[1:])]
    return list(zip(*kept, strict=True))


def _model_row(model: Status) -> tuple[str, ...]:
    figures: Status = model.get("figures") or {}
    has_figures, rate = bool(figures), figures.get("hit_rate")
    vram, progress, idle_s = (model.get(key) for key in ("vram_bytes", "progress", "idle_until_s"))
    return (
        model["model"],
        model_state(model["state"], progress),
        f"{model.get('ready', 0)}/{model.get('wanted', 0)}",
        ",".join(model.get("gpus", ())) or "-",
        "-" if vram is None else f"{vram / 2**30:.1f} GiB",
        f"{figures.get('output_tokens_per_s', 0):.0f}" if has_figures else "-",
        str(figures.get("in_flight", 0)) if has_figures else "-",
        str(figures.get("queued", 0)) if has_figures else "-",
        "-" if rate is None else f"{rate:.0%}",
        "-" if idle_s is None else f"{idle_s:.0f} s",
    )


def _other_row(worker: Status) -> tuple[str, ...]:
    """Return the row of a process that registers no model."""
    gpus = ",".join(worker.get("gpus", ())) or "-"
    return (f"({worker['name']})", worker["state"], "-", gpus, *("-" for _ in _COLUMNS[4:]))
