"""Judges a state of a box, as ``dynamo ps``, ``top`` and the page show it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from machine import START_S, Process
from presence import model_of
from recent_records import check_record
from truth import Truth, may_serve

__all__ = ["SILENT_S", "check_rows", "check_status"]

SILENT_S = 12.0
"""So long a stopped worker counts as ready."""
_UPTIME_S = 0.6
Rows = list[dict[str, Any]]


def check_status(truth: Truth, found: Mapping[str, Any], status: int | None) -> Iterator[str]:
    """Yield what is not so of a state of the box, and why ``status`` is not its exit status."""
    rows = [*found.get("workers", ()), *found.get("others", ())]
    failed = [row["name"] for row in rows if row["state"] == "failed"]
    wrong = found["state"] != "running" or bool(failed) or bool(found.get("hung"))
    if status is not None and status != wrong:
        yield f"status {status}: state {found['state']}, {failed} failed"
    if found["state"] != "running":
        if not truth.may_not_run():
            yield f"a deployment runs: {found}"
        return
    if not truth.may_run():
        yield "no deployment runs"
        return
    yield from check_rows(truth, rows)
    for model in found.get("models", ()):
        yield from _check_model(truth, model, found.get("workers", ()))
    for record in found.get("requests", ()):
        yield from check_record(truth, record)
    if truth.is_pristine:
        if found.get("problems") or found.get("hung"):
            yield f"problems where all is well: {found['problems']}"
        if found["frontend"] != "ready":
            yield f"the frontend is {found['frontend']}"


def _check_model(truth: Truth, model: Mapping[str, Any], workers: Any) -> Iterator[str]:
    name = model["model"]
    if name not in truth.box.profile.models:
        return
    ready = sum(row["state"] == "ready" and row.get("model") == name for row in workers)
    if ready != model.get("ready", 0):
        yield f"{model.get('ready', 0)} workers of {name} are ready, {ready} are shown"
    figures = model.get("figures") or {}
    waiting = figures.get("in_flight", 0) + figures.get("queued", 0)
    most = truth.open_requests(name)
    if waiting > most:
        yield f"{waiting} requests of {name} are in flight, clients wait for {most}"


def check_rows(truth: Truth, rows: Rows, exact: bool = True) -> Iterator[str]:
    for row in rows:
        yield from _check_row(truth, row)
    names = {row["name"] for row in rows}
    if not truth.is_quiet or truth.may_not_run():
        return
    for process in truth.workers():
        if truth.throughout(process) and process.name not in names:
            yield f"{process} is not shown"
    for row in rows:
        live = truth.live(row["name"])
        sleeps = any(truth.asleep(one)[1] for one in _lives(truth, row["name"]))
        states = ("ready", "draining", *(["failed"] if truth.interrupted() else []))
        if live == (1, 1) and not sleeps and row["state"] not in states:
            yield f"{row['name']} is {row['state']}, it was live"
        if exact and live == (1, 1) and not row.get("pids"):
            yield f"{row['name']} has no pid"


def _lives(truth: Truth, name: str) -> list[Process]:
    return [one for one in truth.box.machine.lived if one.name == name and truth.lived(one)]


def _check_row(truth: Truth, row: Mapping[str, Any]) -> Iterator[str]:
    name, lives = row["name"], _lives(truth, row["name"])
    for pid in row.get("pids", ()):
        if pid not in {one.pid for one in lives}:
            yield f"pid {pid} of {name} did not live; {lives} did"
    if row["state"] == "asleep" and not any(truth.asleep(one)[1] for one in lives):
        yield f"{name} is asleep, no engine was"
    is_worker = any(map(model_of, lives))
    if row["state"] == "ready" and is_worker and not truth.live(name)[1]:
        removed = (one.span for one in truth.box.causes.found if one.why.startswith("removed"))
        known = any(truth.stopped(one, SILENT_S) or truth.is_sleep_unwritten(one) for one in lives)
        if not known and not truth.disturbed(removed):
            yield f"{name} is ready, it was not live"
    if row["state"] == "failed" and truth.is_pristine:
        yield f"{name} failed, and nothing had happened: {row.get('cause')}"
    if row.get("worker"):
        yield from _check_registered(truth, row, lives)
    pids = row.get("pids", ())
    process = truth.process(pids[0]) if len(pids) == 1 else None
    if process is not None:
        yield from _check_process(truth, row, process)


def _check_registered(
    truth: Truth, row: Mapping[str, Any], lives: Sequence[Process]
) -> Iterator[str]:
    owner, model = truth.owner(row["worker"]), row.get("model", "")
    if owner is not None and owner.name != row["name"]:
        yield f"the worker {row['worker']} of {row['name']} is {owner}"
    if not any(may_serve(one, model) for one in lives):
        yield f"{row['name']} serves {model}"


def _check_process(truth: Truth, row: Mapping[str, Any], process: Process) -> Iterator[str]:
    """The GPUs and the age of the only process of a worker."""
    gpus = list(row.get("gpus", ()))
    if row["state"] in ("ready", "loading") and not truth.may_hold(process, gpus):
        yield f"{row['name']} has the GPUs {gpus}"
    age_s, since_s = row.get("uptime_s", 0.0), process.started_s - START_S
    least, most = truth.since_s - since_s - _UPTIME_S, truth.until_s - since_s + _UPTIME_S
    if not least <= age_s <= most:
        yield f"{row['name']} has run for {age_s:.2f} s, not {least:.2f} to {most:.2f}"
