"""What must hold in a run: after every step, when all is quiet, and after the stop."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from aftermath import IN_FLIGHT
from leaks import check_leaks
from leftovers import check_leftovers, check_structures
from lower_tiers import check_lower_tiers
from machine import Process
from network import Network
from pools import check_least, check_most
from presence import asleep, gpus_of, share_of
from steady import slow_drains
from sums import check_labels, check_sums

if TYPE_CHECKING:
    from box import Box

    from dynamo.observability.metrics import Registry
    from dynamo.router.caches.indexer import Indexer
    from dynamo.serve.state.document import Document, Entry

__all__ = ["check_always", "check_end", "check_index", "check_interrupted", "check_quiet"]

Held = dict[tuple[str, int], set[int]]
"""The blocks of each worker, by its component and instance id."""
_SHARE_ERROR = 1e-6
_LEASED_S = 10.0
_ROUNDED_S = 0.001
_SECRET = re.compile(r"dyn-(\w+)-0123456789abcdef")
_DEATH = re.compile(
    r" *([\d.]+)  serve .*serve: (box_(?!Frontend|Planner)\w+) \(pid (\d+)\).*; restarting it"
)


def check_always(box: Box) -> Iterator[str]:
    """No GPU is used beyond one, by processes that are awake. Stopped ones keep their memory."""
    used: dict[str, float] = defaultdict(float)
    users: dict[str, list[str]] = defaultdict(list)
    for process in box.processes("mocker"):
        if not asleep(process):
            for gpu in gpus_of(process):
                used[gpu] += share_of(process)
                users[gpu].append(str(process))
    for gpu, share in used.items():
        if share > 1 + _SHARE_ERROR:
            yield f"GPU {gpu} is used {share:g} times: {', '.join(users[gpu])}"
    yield from check_most(box)


def check_quiet(box: Box) -> Iterator[str]:
    """Nothing is in flight, the records agree with the processes, the index with the caches."""
    yield from _check_gauges(box)
    yield from check_drained(box, True)
    yield from _check_statefile(box)
    yield from check_least(box)
    yield from _check_leases(box)
    yield from _check_health(box)
    yield from check_index(box)
    yield from check_sums(box)
    yield from check_leftovers(box)
    yield from check_structures(box)
    yield from check_leaks(box)
    for process in (*box.processes("frontend"), *box.processes("mocker")):
        yield from box.steady.counters(process)
        yield from check_labels(process)
    for step, result in box.operations:
        if result == "never ended":
            yield f"operator {step.number} ({step.what}) did not end"
    if box.open_operations:
        yield f"{box.open_operations} operators still run"


def _check_gauges(box: Box) -> Iterator[str]:
    for process in (*box.processes("frontend"), *box.processes("mocker")):
        for part in process.parts:
            if hasattr(part, "metrics") and hasattr(part, "serving"):  # the runtime
                yield from _check_families(process, part.metrics)


def _check_families(process: Process, registry: Registry) -> Iterator[str]:
    for bring_up_to_date in registry.before_render:
        bring_up_to_date()
    counts: dict[str, float] = defaultdict(float)
    for name, family in registry._families.items():
        in_flight = IN_FLIGHT.fullmatch(name)
        if in_flight or name.startswith("dynamo_frontend_requests"):
            for sample in (one for part in family.metrics() for one in part.samples):
                counts[name] += sample.value
                if in_flight and sample.value:
                    yield f"{process.name}: {name} {dict(sample.labels)!r} is {sample.value:g}"
    started = counts["dynamo_frontend_requests_started_total"]
    ended = counts["dynamo_frontend_requests_total"]
    if started > ended:
        yield f"{process.name}: {started:g} requests were accepted, {ended:g} ended"


def check_drained(box: Box, repaired: bool) -> Iterator[str]:
    """A worker that drains ends by itself, also if the operator that drains it was killed.

    One that had exited before the drain began waits for a repair.
    """
    from dynamo.errors import StatefileError
    from dynamo.serve.state.statefile import Statefile

    try:
        document = Statefile(box.state, "box").read()
    except StatefileError:
        return
    for name, entry in document.components.items() if document is not None else ():
        lives = [one for one in box.machine.lived if one.name == name]
        if entry.draining and not any(one.alive for one in lives):
            begun = entry.reserved_by
            ended_s = max((one.ended_s for one in lives), default=0.0)
            comparable = box.machine.clock_off_s == 0  # else it may be of another clock
            if repaired or begun is None or (comparable and ended_s > begun.since):
                yield f"statefile: {name} drains and has no process"


def check_interrupted(box: Box) -> Iterator[str]:
    """What is true of the statefile before a repair: only what was interrupted waits for one."""
    yield from check_drained(box, False)
    yield from _check_statefile(box, repaired=False)


def _check_statefile(box: Box, repaired: bool = True) -> Iterator[str]:
    from dynamo.errors import StatefileError
    from dynamo.serve.state.statefile import Statefile

    try:
        document = Statefile(box.state, "box").read()
    except StatefileError as error:
        yield f"statefile: {error.message}"
        return
    if document is None:
        yield "there is no statefile"
        return
    alive = {
        p.pid: p
        for kind in ("mocker", "frontend", "planner", "attach", "api_worker")
        for p in box.processes(kind)
    }
    recorded = set()
    for name, entry in document.components.items():
        if repaired or entry.reserved_by is None:
            yield from _check_entry(name, entry, alive)
        recorded |= {process.pid for process in entry.processes}
    for pid, process in alive.items():
        if pid not in recorded:
            yield f"statefile: {process} is not recorded"
    yield from _check_ledger(document, alive)


def _check_entry(name: str, entry: Entry, alive: dict[int, Process]) -> Iterator[str]:
    for one in entry.processes:
        if one.pid not in alive:
            yield f"statefile: {name} has process {one.pid}, which does not run"
    if entry.reserved_by is not None:
        yield f"statefile: {name} is reserved by {entry.reserved_by.written()}"
    process = next((alive[one.pid] for one in entry.processes if one.pid in alive), None)
    is_worker = process is not None and process.program == "dynamo.mocker"
    if process is not None and is_worker and not entry.draining:
        sleeps = asleep(process)
        if sleeps != entry.asleep:
            what = "sleeps" if sleeps else "is awake"
            yield f"statefile: {name} has state {entry.state!r}, but its engine {what}"


def _check_ledger(document: Document, alive: dict[int, Process]) -> Iterator[str]:
    from dynamo.serve.state.process_table import ledger_of

    held: dict[str, float] = defaultdict(float)
    for name, shares in ledger_of(document).held.items():
        for gpu, share in shares.items():
            held[gpu] += share
        entry = document.components[name]
        ended = entry.watcher is not None and entry.watcher.status in ("given up", "absent")
        if ended and not any(process.pid in alive for process in entry.processes):
            yield f"statefile: {name} holds {shares} without a process"
    for gpu, share in held.items():
        if share > 1 + _SHARE_ERROR:
            yield f"statefile: GPU {gpu} is held {share:g} times"


def _check_health(box: Box) -> Iterator[str]:
    """The health checks of a worker without work succeed."""
    for process in box.processes("mocker"):
        for part in process.parts:
            if type(part).__name__ == "Canary" and part.problem:
                yield f"{process} is unhealthy: {part.problem}"


def _check_leases(box: Box) -> Iterator[str]:
    store = box.state / "box/store"
    leases = {path.name: path for path in _files(store / "leases")}
    owners: dict[str, int] = {}
    for name, path in leases.items():
        pid = msgspec.json.decode(path.read_bytes())["pid"]
        owners[name] = pid
        process = box.machine.processes.get(pid)
        if process is None or not process.alive:
            yield f"lease {name} belongs to process {pid}, which does not run"
    for bucket in sorted((store / "v1").iterdir()) if (store / "v1").exists() else ():
        for path in _files(bucket):
            lease = _lease_of(path)
            if lease not in leases:
                yield f"record {path.name} has lease {lease}, which does not exist"
    for process in (*box.processes("mocker"), *box.processes("frontend")):
        if process.started_s < box.machine.now_s - _LEASED_S:
            yield from _check_registered(process, process.pid in owners.values())


def _check_registered(process: Process, leased: bool) -> Iterator[str]:
    if not leased:
        yield f"{process} has no lease"
    for part in process.parts:
        if hasattr(part, "metrics") and hasattr(part, "serving") and part.lease is not None:
            yield from (
                f"{process} has no record {path.name}"
                for path in part.lease.keys
                if not path.exists()
            )


def _lease_of(path: Path) -> str:
    from dynamo.runtime.discovery.layout import decode_stored

    return f"{decode_stored(path.read_bytes()).lease_id:x}"


def _files(directory: Path) -> list[Path]:
    if not directory.exists():
        return []
    return sorted(path for path in directory.iterdir() if not path.name.startswith("."))


def check_index(box: Box) -> Iterator[str]:
    """The index of each router has exactly the blocks that its workers hold."""
    held: Held = {}
    host: Held = {}  # the index keeps lower tiers apart
    for process in (*box.processes("mocker"), *box.processes("api_worker")):
        for part in process.parts:
            if hasattr(part, "ranks") and part.publishes_events:
                worker = part.endpoint.component, part.endpoint.runtime.instance_id
                held[worker] = set().union(*(rank.pool.hashes() for rank in part.ranks))
                host[worker] = set().union(*(rank.pool.host_hashes() for rank in part.ranks))
    for process in box.processes("frontend"):
        for part in process.parts:
            if hasattr(part, "recovering_slots") and part._streams:  # an Indexer
                yield from _check_blocks(process, part, held, host)
    yield from check_lower_tiers(box)


def _check_blocks(process: Process, indexer: Indexer, held: Held, host: Held) -> Iterator[str]:
    """A decode worker behind prefill workers publishes nothing, and is in no index."""
    indexed: dict[int, set[int]] = {worker: set() for worker, _ in indexer._streams}
    for worker, _, _, dumped, _ in indexer._index.dump():
        indexed.setdefault(worker, set()).update(dumped)
    component = indexer._counts._labels.component
    for worker, blocks in indexed.items():
        own = held.get((component, worker))
        extra = blocks - (own or set()) - host.get((component, worker), set())
        if extra:
            yield (
                f"{process.name}: the index has {len(extra)} blocks of {worker:x} that "
                "it does not hold" + ("" if own is not None else ": it does not run")
            )
        missing = (own or set()) - blocks
        if missing:
            yield (
                f"{process.name}: the index lacks {len(missing)} of the "
                f"{len(own or ())} blocks of {worker:x}"
            )


def check_end(box: Box) -> Iterator[str]:
    """The stop leaves nothing: no process, file, socket or listener."""
    for process in box.machine.processes.values():
        if process.alive and not process.name.startswith(("client", "operator")):
            yield f"{process} still runs after the stop"
    gave_up = any("serve: gave up" in line for line in box.machine.history)
    if box.serve is not None and box.serve.status and not gave_up:
        yield f"dynamo serve ended with status {box.serve.status}"
    for path in sorted(box.state.rglob("*")):
        relative = path.relative_to(box.state)
        kept = relative.parts[0] in ("graph.yaml", "keys.txt", "replies.jsonl", ".prefill-speed")
        kept = kept or relative.parts[1:2] == ("logs",) or relative.parts[0][:9] == "recorded-"
        if path.is_dir() or kept:
            continue
        yield f"left after the stop: {relative}"
    yield from slow_drains(box)
    yield from _check_secrets(box)
    yield from _check_deaths(box)
    if Network.of(box.machine).listeners:
        yield f"left after the stop: {list(Network.of(box.machine).listeners)}"


def _check_secrets(box: Box) -> Iterator[str]:
    """No key is in a log, in what verbs print, or in a file that is left."""
    texts = {f"the log of {name}": [line for _, line in lines]
             for name, lines in box.machine.logged.items()}  # fmt: skip
    texts["the history"] = [*box.machine.history]
    texts |= {str(one): [one.out, one.err] for one in box.shown if one.words[0] != "key"}
    texts |= {
        path.name: [path.read_text(errors="replace")]
        for path in box.state.rglob("*")
        if path.is_file() and path.name != "graph.yaml"
    }
    for where, lines in texts.items():
        found = next((one[1] for line in lines if (one := _SECRET.search(line))), None)
        if found is not None:
            yield f"the key of {found} is in {where}"


def _check_deaths(box: Box) -> Iterator[str]:
    """Only a worker that a fault has hit dies; one that is stopped is not restarted.

    One that a fault let drain dies when its requests have ended, however much later.
    """
    for line in box.machine.history:
        death = _DEATH.match(line)
        if death is not None:
            at_s, name = float(death[1]), death[2]
            faults = (one for one in box.causes.found if not one.verb and one.names(name))
            drains = re.compile(rf"(signal 15 to|removed \w+ of) {name}\[{death[3]}\]")
            if not any(
                one.since_s <= at_s + _ROUNDED_S
                and (at_s + _ROUNDED_S <= one.until_s or drains.fullmatch(one.why))
                for one in faults
            ):
                yield f"{name} was restarted at {at_s:.3f} s, and no fault has hit it"
