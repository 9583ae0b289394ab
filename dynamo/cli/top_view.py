"""The frames of ``dynamo top``: from the state of the box to lines of text. Pure.

A frame of rich tables takes 20 ms of CPU, 2 % of a core at one frame per second; these lines take
less than one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
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
    "name": lambda one: "",
    "state": lambda one: one.state,
    "in flight": lambda one: -(one.in_flight or 0),
    "KV use": lambda one: -(one.kv_use or 0.0),
    "VRAM": lambda one: -(one.vram_bytes or 0),
    "restarts": lambda one: -one.restarts,
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
    chosen = [one for one in status.workers if one.name == view.selected]
    wakes = any(one.state == "asleep" for one in chosen)
    sleeps = any(one.can_sleep for one in chosen)
    return _KEYS.format(
        sleep="  s wake" if wakes else "  s sleep" if sleeps else "",
        planner="" if status.planner is None else "  p pause/resume planner",
    )


def sorted_workers(status: BoxStatus, sort: str) -> list[WorkerStatus]:
    """Return all processes, workers first, in the order ``sort``."""
    key: Any = SORT_ORDERS[sort]
    return [
        one
        for group in (status.workers, status.others)
        for one in sorted(sorted(group, key=lambda one: natural_order(one.name)), key=key)
    ]


def _log(view: TopView, room: int) -> list[StyledLine]:
    lines = view.log_lines[-(room - 1) :] if room > 1 else view.log_lines
    return [(TITLE, f"log of {view.log_of}"), *((PLAIN, line) for line in lines)]


def _panes(status: BoxStatus, view: TopView, room: int, width: int) -> list[StyledLine]:
    """Return all panes; the requests get the room that is left."""
    lines = [_headline(status)]
    lines += [(BAD, line) for one in status.problems for line in _wrapped(one, width)]
    if status.state != "running":
        return [*lines, (PLAIN, not_running(status.namespace))]
    lines += _gpus(status.gpus, width)
    lines += _models(status.models, width)
    planner = _planner(status)
    others = len(lines) + len(planner)
    left = room - others - _FEW_REQUESTS - 4 if room else 0
    lines += _workers(status, view, left, width)
    lines += planner
    return lines + _requests(status, room - len(lines) if room else 0, width)


def _wrapped(text: str, width: int) -> list[str]:
    """Return ``text`` in a few lines, with its end, which names the remedy."""
    lines = wrap(printable(text), width, "  ")
    if len(lines) <= _PROBLEM_LINES:
        return lines
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
    for one in gpu.holders:
        if not one.worker:
            yield f"pid {one.pid} {one.name} {_gib(one.used_bytes)}"


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
        uses = [one.kv_use for one in figures.workers if one.kv_use is not None] if figures else []
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
        rows.append((_STATE_STYLES.get(model.state, PLAIN), _fitting(row, width, 5, 9)))
    head = (
        *("MODEL", "STATE", "READY", "TOK/S", "TTFT P50", "P99", "IN FLIGHT"),
        *("QUEUED", "KV USE", "HIT RATE", ""),
    )
    return _table("models", _fitting(head, width, 5, 9), rows, "no model", width)


def _idle(model: ModelStatus) -> str:
    left_s = model.idle_until_s
    return "" if left_s is None else f"gives up its GPUs in {left_s:.0f} s without requests"


def _workers(status: BoxStatus, view: TopView, room: int, width: int) -> list[StyledLine]:
    """Return at least three workers around the selected one, as many as ``room`` allows."""
    workers = sorted_workers(status, view.sort)
    names = [one.name for one in workers]
    at = names.index(view.selected) if view.selected in names else 0
    shown = max(3, room - 2) if room else len(workers)
    first = max(0, min(at - shown // 2, len(workers) - shown))
    rows = []
    for one in workers[first : first + shown]:
        style = _STATE_STYLES.get(one.state, PLAIN)
        chosen = view.keys and one.name == view.selected
        why = "; ".join(part for part in (one.cause, one.last_exit) if part)
        why += f"; try: {one.remedy}" if one.remedy and one.state == "failed" else ""
        rows.append(
            (
                CHOSEN if chosen else style,
                _fitting(
                    (
                        one.name,
                        one.state + ("" if one.progress is None else f" {one.progress:.0%}"),
                        ",".join(one.gpus) or "-",
                        _gib(one.vram_bytes),
                        "-" if one.in_flight is None else str(one.in_flight),
                        _share(one.kv_use, bar=width >= _WIDE),
                        str(one.restarts),
                        _duration(one.uptime_s),
                        why or "-",
                    ),
                    width,
                    6,
                    7,
                ),
            )
        )
    head = (
        *("WORKER", "STATE", "GPU", "VRAM", "IN FLIGHT", "KV USE"),
        *("RESTARTS", "UP", "CAUSE, LAST EXIT"),
    )
    title = f"workers by {view.sort}"
    if len(rows) < len(workers):
        title += f" ({first + 1} to {first + len(rows)} of {len(workers)})"
    return _table(title, _fitting(head, width, 6, 7), rows, "no worker", width)


def _planner(status: BoxStatus) -> list[StyledLine]:
    planner = status.planner
    if planner is None:
        return [(TITLE, "planner: none runs")]
    due = "" if planner.next_s is None else f", next decision in {planner.next_s:.0f} s"
    style = WARN if planner.state == "paused" else TITLE
    head = (style, f"planner: {planner.state}, mode {planner.mode or '-'}{due}")
    return [head, *((PLAIN, f"  {text}") for text in planner.decisions)]


def _requests(status: BoxStatus, room: int, width: int) -> list[StyledLine]:
    names = {one.worker: one.name for one in status.workers}
    requests = status.requests[: max(0, room - 2)] if room else status.requests
    rows = [
        (
            PLAIN if one.outcome == "ok" else BAD,
            (
                time.strftime("%H:%M:%S", time.localtime(one.received_at_s)),
                one.model,
                _ms(one.ttft_s),
                f"{one.duration_s:.2f} s",
                str(one.prompt_tokens),
                str(one.completion_tokens),
                names.get(one.worker, one.worker) or "-",
                f"{one.overlap_blocks}/{one.prompt_blocks}",
                one.outcome,
                one.request_id if width >= _WIDE else "",
            ),
        )
        for one in requests
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
) -> list[StyledLine]:
    if not rows:
        return [(TITLE, f"{title}: {none}")]
    texts = aligned([head, *(row for _, row in rows)], width - 2)
    styles = [HEAD, *(style for style, _ in rows)]
    return [(TITLE, title), *((s, f"  {text}") for s, text in zip(styles, texts, strict=True))]


def _fitting(row: Sequence[str], width: int, *least: int) -> tuple[str, ...]:
    """Leave out the columns ``least`` on a narrow terminal, so that none is cut."""
    return tuple(text for at, text in enumerate(row) if width >= _WIDE or at not in least)


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
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"
