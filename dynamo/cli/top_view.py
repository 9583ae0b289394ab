"""The frames of ``dynamo top``: from the state of the box to lines of text. Pure.

A frame of rich tables takes 20 ms of CPU, 2 % of a core at one frame per second; these lines take
less than one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from dynamo.cli.text_table import aligned, cut, model_state, printable, wrap
from dynamo.protocols.status import BoxStatus, GpuStatus, ModelStatus, WorkerStatus
from dynamo.status.deployment import not_running
from dynamo.status.workers import natural_order

StyledLine = tuple[str, str]
"""Style (see ``dynamo.cli.top``) and text."""

PLAIN, TITLE, HEAD, CHOSEN, BAD = ("", "title", "head", "chosen", "bad")
WARN, DIM = ("warn", "dim")
_STATE_STYLES = {
    "failed": BAD,
    **dict.fromkeys(("loading", "draining"), WARN),
    **dict.fromkeys(("asleep", "stopped", "zero"), DIM),
}
_GIB, _BAR, _FEW_REQUESTS, _PROBLEM_LINES, _WIDE = 1 << 30, 8, 3, 5, 100
_KEYS = "↑↓ select  o sort  l logs  d drain{sleep}{planner}  q quit"

SORT_ORDERS: dict[str, Callable[[WorkerStatus], object]] = {
    "name": lambda worker: "",
    "state": lambda worker: worker.state,
    "in flight": lambda worker: -(worker.in_flight or 0),
    "KV use": lambda worker: -(worker.kv_use or 0.0),
    "VRAM": lambda worker: -(worker.vram_bytes or 0),
    "restarts": lambda worker: -worker.restarts,
}
"""How the workers can be sorted; equal ones by name."""


@dataclass(kw_only=True)
class TopView:
    """What the user has chosen: the ``selected`` worker and the ``sort`` order.

    ``message`` is shown above the keys. With ``log_of`` a worker, its ``log_lines`` are shown
    instead of the panes.
    """

    selected: str = ""
    sort: str = "name"
    message: str = ""
    message_style: str = PLAIN
    log_of: str = ""
    log_lines: Sequence[str] = field(default_factory=tuple)
    keys: bool = True


def frame(status: BoxStatus, view: TopView, width: int, height: int = 0) -> list[StyledLine]:
    """Return the lines of a frame, at most ``height`` of them; 0: as many as there are."""
    foot: list[StyledLine] = []
    if view.keys:
        foot = [(view.message_style, view.message), (DIM, _keys(status, view))]
    room = height - len(foot) if height else 0
    lines = _log(view, room) if view.log_of else _panes(status, view, room, width)
    if height:
        lines = [*lines[:room], *[(PLAIN, "")] * (room - len(lines))]
    return [(style, cut(printable(text), width, "…")) for style, text in [*lines, *foot]]


def _keys(status: BoxStatus, view: TopView) -> str:
    if view.log_of:
        return "q back"
    chosen = [worker for worker in status.workers if worker.name == view.selected]
    wakes = any(worker.state == "asleep" for worker in chosen)
    sleeps = any(worker.can_sleep for worker in chosen)
    return _KEYS.format(
        sleep="  s wake" if wakes else "  s sleep" if sleeps else "",
        planner="" if status.planner is None else "  p pause/resume planner",
    )


def sorted_workers(status: BoxStatus, sort: str) -> list[WorkerStatus]:
    """Return all processes, workers first, in the order ``sort``."""
    key: Any = SORT_ORDERS[sort]
    workers: list[WorkerStatus] = []
    for group in (status.workers, status.others):
        by_name = sorted(group, key=lambda worker: natural_order(worker.name))
        # A sort keeps the order of equal ones: those stay sorted by name.
        workers += sorted(by_name, key=key)
    return workers


def _log(view: TopView, room: int) -> list[StyledLine]:
    lines = view.log_lines[-(room - 1) :] if room > 1 else view.log_lines
    return [(TITLE, f"log of {view.log_of}"), *((PLAIN, line) for line in lines)]


def _panes(status: BoxStatus, view: TopView, room: int, width: int) -> list[StyledLine]:
    """Return all panes; the requests get the room that is left."""
    lines = [_headline(status)]
    lines += [(BAD, line) for problem in status.problems for line in _wrapped(problem, width)]
    if status.state != "running":
        return [*lines, (PLAIN, not_running(status.namespace))]
    lines += _gpus(status.gpus, width)
    lines += _models(status.models, width)
    planner = _planner(status)
    # 4: the titles and heads of the workers and of the requests.
    left = room - len(lines) - len(planner) - _FEW_REQUESTS - 4 if room else 0
    lines += _workers(status, view, left, width)
    lines += planner
    return lines + _requests(status, room - len(lines) if room else 0, width)


def _wrapped(text: str, width: int) -> list[str]:
    """Return ``text`` in a few lines, with its end, which names the remedy."""
    lines = wrap(printable(text), width, "  ")
    if len(lines) <= _PROBLEM_LINES:
        return lines
    # With the first line and the mark there are _PROBLEM_LINES of them.
    return [lines[0], "  …", *lines[2 - _PROBLEM_LINES :]]


def _headline(status: BoxStatus) -> StyledLine:
    clock = time.strftime("%H:%M:%S", time.localtime(status.at_s))
    url = f" {status.url}" if status.url else ""
    return TITLE, f"dynamo top   {status.namespace}   frontend {status.frontend}{url}   {clock}"


def _gpus(gpus: Sequence[GpuStatus], width: int) -> list[StyledLine]:
    rows = [
        (
            PLAIN,
            (
                gpu.gpu,
                gpu.name,
                _share(gpu.utilization, bar=True),
                f"{_gib(gpu.used_bytes)} / {_gib(gpu.total_bytes)}",
                _watts(gpu),
                "-" if gpu.celsius is None else f"{gpu.celsius} °C",
                ", ".join(gpu.workers) or "-",
                ", ".join(_foreign(gpu)) or "-",
            ),
        )
        for gpu in gpus
    ]
    head = ("GPU", "NAME", "UTIL", "VRAM", "POWER", "TEMP", "WORKERS", "OTHER PROGRAMS")
    return _table("GPUs", head, rows, "no GPU with an NVIDIA driver", width)


def _foreign(gpu: GpuStatus) -> Iterable[str]:
    for holder in gpu.holders:
        if not holder.worker:
            yield f"pid {holder.pid} {holder.name} {_gib(holder.used_bytes)}"


def _watts(gpu: GpuStatus) -> str:
    if gpu.watts is None:
        return "-"
    limit = "" if gpu.limit_watts is None else f" / {gpu.limit_watts:.0f}"
    return f"{gpu.watts:.0f}{limit} W"


def _models(models: Sequence[ModelStatus], width: int) -> list[StyledLine]:
    rows = []
    for model in models:
        figures = model.figures
        state = model_state(model.state, model.progress)
        workers = figures.workers if figures else ()
        uses = [worker.kv_use for worker in workers if worker.kv_use is not None]
        row = [model.model, state, f"{model.ready}/{model.wanted}"]
        if figures is None:
            row += ["-"] * 7
        else:
            row += [
                f"{figures.output_tokens_per_s:.0f}",
                _ms(figures.ttft_p50_s),
                _ms(figures.ttft_p99_s),
                str(figures.in_flight),
                str(figures.queued),
                _share(sum(uses) / len(uses) if uses else None, bar=width >= _WIDE),
                _share(figures.hit_rate),
            ]
        row.append(model.cause or _idle(model))
        rows.append((_STATE_STYLES.get(model.state, PLAIN), row))
    head = (
        *("MODEL", "STATE", "READY", "TOK/S", "TTFT P50", "P99", "IN FLIGHT"),
        *("QUEUED", "KV USE", "HIT RATE", ""),
    )
    return _table("models", head, rows, "no model", width, ("P99", "HIT RATE"))


def _idle(model: ModelStatus) -> str:
    left_s = model.idle_until_s
    return "" if left_s is None else f"gives up its GPUs in {left_s:.0f} s without requests"


def _workers(status: BoxStatus, view: TopView, room: int, width: int) -> list[StyledLine]:
    """Return at least three workers around the selected one, as many as ``room`` allows."""
    workers = sorted_workers(status, view.sort)
    names = [worker.name for worker in workers]
    at = names.index(view.selected) if view.selected in names else 0
    count = max(3, room - 2) if room else len(workers)
    # The selected one in the middle, but no empty rows at the beginning or the end.
    first = max(0, min(at - count // 2, len(workers) - count))
    rows = []
    for worker in workers[first : first + count]:
        style = _STATE_STYLES.get(worker.state, PLAIN)
        chosen = view.keys and worker.name == view.selected
        why = "; ".join(part for part in (worker.cause, worker.last_exit) if part)
        why += f"; try: {worker.remedy}" if worker.remedy and worker.state == "failed" else ""
        row = (
            worker.name,
            model_state(worker.state, worker.progress),
            ",".join(worker.gpus) or "-",
            _gib(worker.vram_bytes),
            "-" if worker.in_flight is None else str(worker.in_flight),
            _share(worker.kv_use, bar=width >= _WIDE),
            str(worker.restarts),
            _duration(worker.uptime_s),
            why or "-",
        )
        rows.append((CHOSEN if chosen else style, row))
    head = (
        *("WORKER", "STATE", "GPU", "VRAM", "IN FLIGHT", "KV USE"),
        *("RESTARTS", "UP", "CAUSE, LAST EXIT"),
    )
    title = f"workers by {view.sort}"
    if len(rows) < len(workers):
        title += f" ({first + 1} to {first + len(rows)} of {len(workers)})"
    return _table(title, head, rows, "no worker", width, ("RESTARTS", "UP"))


def _planner(status: BoxStatus) -> list[StyledLine]:
    planner = status.planner
    if planner is None:
        return [(TITLE, "planner: none runs")]
    due = "" if planner.next_s is None else f", next decision in {planner.next_s:.0f} s"
    style = WARN if planner.state == "paused" else TITLE
    head = (style, f"planner: {planner.state}, mode {planner.mode or '-'}{due}")
    return [head, *((PLAIN, f"  {text}") for text in planner.decisions)]


def _requests(status: BoxStatus, room: int, width: int) -> list[StyledLine]:
    names = {worker.worker: worker.name for worker in status.workers}
    requests = status.requests[: max(0, room - 2)] if room else status.requests
    rows = [
        (
            PLAIN if request.outcome == "ok" else BAD,
            (
                time.strftime("%H:%M:%S", time.localtime(request.received_at_s)),
                request.model,
                _ms(request.ttft_s),
                f"{request.duration_s:.2f} s",
                str(request.prompt_tokens),
                str(request.completion_tokens),
                names.get(request.worker, request.worker) or "-",
                f"{request.overlap_blocks}/{request.prompt_blocks}",
                request.outcome,
                request.request_id if width >= _WIDE else "",
            ),
        )
        for request in requests
    ]
    head = (
        *("TIME", "MODEL", "TTFT", "DURATION", "IN", "OUT", "WORKER"),
        *("BLOCKS", "OUTCOME", "ID" if width >= _WIDE else ""),
    )
    return _table("last requests", head, rows, "none yet", width)


def _table(
    title: str,
    head: Sequence[str],
    rows: Sequence[tuple[str, Sequence[str]]],
    none: str,
    width: int,
    least: Collection[str] = (),
) -> list[StyledLine]:
    """Return the table; a narrow terminal leaves out the columns ``least``, so that none is cut."""
    if not rows:
        return [(TITLE, f"{title}: {none}")]
    kept = [width >= _WIDE or name not in least for name in head]
    table = [list(compress(row, kept)) for row in (head, *(row for _, row in rows))]
    styles = [HEAD, *(style for style, _ in rows)]
    # 2: the rows are indented.
    lines = zip(styles, aligned(table, width - 2), strict=True)
    return [(TITLE, title), *((style, f"  {text}") for style, text in lines)]


def _share(value: float | None, bar: bool = False) -> str:
    if value is None:
        return "-"
    text = f"{value:4.0%}"
    if not bar:
        return text.strip()
    full = round(min(max(value, 0.0), 1.0) * _BAR)
    return f"{'█' * full}{'·' * (_BAR - full)} {text}"


def _gib(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / _GIB:.1f} GiB"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{left:02}s"
