"""Judges what the verbs of operators print: it is true, its status is right, it comes in time.

While something changes, one of the states before and after is right. Where nothing does, all that
runs is shown, and nothing is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from exact_verbs import ASKING, check_exact
from machine import START_S
from presence import model_of, service_of
from recent_records import check_record
from recorded import check_recording
from states import SILENT_S, check_rows, check_status
from truth import Truth, may_serve

if TYPE_CHECKING:
    from box import Box
    from shell import Shown

__all__ = ["check_shown", "count_quiet"]

_LIMIT_S = 15.0
_ASKING_LIMIT_S = 45.0
"""Of verbs that ask a frontend: it may be stopped for as long as they wait."""
_COLD_LIMIT_S = 130.0
"""Of verbs that send requests: a first worker may have to start."""
_GAPS = re.compile(r" {2,}")
_PID = re.compile(r"pid (\d+)")
_WRITTEN_S = 0.5
"""So long a line may take to its file."""
_WRONG = {
    ("pss",): (2, "unknown verb"),
    ("ps", "--wrong"): (2, "unrecognized arguments"),
    ("logs", "Nothing"): (2, "Nothing"),
    ("state",): (2, "dynamo state show"),
    ("events", "--since", "never"): (2, "--since"),
    ("ps", "--namespace", "other"): (1, ""),
    ("explain", "--url", "nonsense"): (2, "nonsense"),
}


def count_quiet(box: Box) -> tuple[int, int]:
    """Return how many verbs ended while nothing changed, and how many there were."""
    ended = [one for one in box.shown if one.status is not None]
    quiet = sum(Truth(box, one.since_s, one.until_s).is_quiet for one in ended)
    return quiet, len(ended)


def check_shown(box: Box) -> Iterator[str]:
    """Yield what is not true of what verbs printed."""
    for shown in box.shown:
        if shown.status is None:
            continue  # it was killed, or its machine lost power
        for failure in _Judge(box, shown).failures():
            yield f"shell {shown.number}: {shown}: {failure}"


class _Judge:
    def __init__(self, box: Box, shown: Shown) -> None:
        self.box, self.shown = box, shown
        self.truth = Truth(box, shown.since_s, shown.until_s)

    def failures(self) -> Iterator[str]:
        shown = self.shown
        asks = shown.words[0] in ("route", "explain")
        limit_s = _ASKING_LIMIT_S if asks else _LIMIT_S
        if shown.words[0] in ASKING:
            limit_s = _COLD_LIMIT_S
        if shown.until_s - shown.since_s > limit_s:
            yield f"it took {shown.until_s - shown.since_s:.1f} s"
        if "Traceback" in shown.err + shown.out:
            yield f"a traceback: {shown.err[-300:]}"
        if self.box.was_full_at(shown.since_s, shown.until_s) and "No space left" in shown.err:
            return
        if shown.words in _WRONG:
            status, text = _WRONG[shown.words]
            if shown.status != status or text not in shown.err:
                yield f"status {shown.status} and {shown.err[:200]!r}"
            return
        if "--help" in shown.words:
            yield from self._help()
            return
        if shown.is_exact:
            yield from check_exact(self.box, shown, self._serves)
            return
        judge: Callable[[], Iterator[str]] | None = getattr(
            self, "_" + shown.words[0].strip("_").replace("-", "_"), None
        )
        if judge is not None:
            yield from judge()

    def _serves(self, model: str) -> bool:
        """Whether a worker of a model was live and awake all the time."""
        return self.truth.is_quiet and self.truth.ready(model)[0] > 0 and not self._sleepers(model)

    def _json(self) -> Any:
        return json.loads(self.shown.out)

    # -- the state of the box

    def _ps(self) -> Iterator[str]:
        if "--json" in self.shown.words:
            found = self._json()
            yield from check_status(self.truth, found, self.shown.status)
            return
        lines = self.shown.out.splitlines()
        if not lines or not lines[0].startswith("MODEL"):
            if not self.truth.may_not_run():
                yield f"a deployment runs: {self.shown.out[:200]!r}"
            return
        for line in lines[1:]:
            cells = _GAPS.split(line)
            if len(cells) >= 10 and cells[0] in self.box.profile.models:
                yield from self._model(cells[0], int(cells[2].partition("/")[0]))
        if self.truth.is_pristine and self.shown.status:
            yield f"status {self.shown.status} where all is well: {self.shown.out[-300:]}"

    def _model(self, model: str, ready: int) -> Iterator[str]:
        """A number of ready workers; those that are stopped count for a while."""
        least, most = self.truth.ready(model)
        stopped = [one for one in self.truth.workers() if self.truth.stopped(one, SILENT_S)]
        most += sum(model_of(one) == model for one in stopped)
        if ready > most:
            yield f"{ready} workers of {model} are ready, at most {most} were live"
        left = self._sleepers(model) + self.truth.interrupted()
        if self.truth.is_quiet and ready < least - left:
            yield f"{ready} workers of {model} are ready, {least} were live"

    def _sleepers(self, model: str) -> int:
        """Return how many live workers of a model may have slept."""
        workers = [one for one in self.truth.workers() if model_of(one) == model]
        return sum(self.truth.asleep(one)[1] for one in workers)

    def _top(self) -> Iterator[str]:
        lines = self.shown.out.splitlines()
        if not any(line.startswith("models") for line in lines):
            if self.shown.status != 1 or not self.truth.may_not_run():
                yield f"a deployment runs: {self.shown.out[:300]!r}"
            return
        if self.shown.status:
            yield f"status {self.shown.status}"
        rows: list[dict[str, Any]] = []
        section = ""
        for line in lines:
            if not line.startswith("  "):
                section = line.partition(" ")[0]
            elif section == "workers" and not line.startswith("  WORKER"):
                cells = _GAPS.split(line.strip())
                gpus = [] if cells[2] == "-" else cells[2].split(",")
                rows.append({"name": cells[0], "state": cells[1].split()[0], "gpus": gpus})
        yield from check_rows(self.truth, rows, exact=False)

    def _state(self) -> Iterator[str]:
        shown, truth = self.shown, self.truth
        if shown.status:
            if not truth.may_not_run():
                yield f"status {shown.status}: {shown.err[:200]}"
            return
        if "--json" not in shown.words:
            if not re.search(r"arbiter: pid \d+, (running|hung|dead)", shown.out):
                yield f"no arbiter in {shown.out[-200:]!r}"
            return
        found = self._json()
        arbiter = truth.process(found["arbiter_pid"])
        if arbiter is None or arbiter.name != "serve":
            yield f"{found['arbiter_pid']} was no arbiter"
        elif found["arbiter_alive"] and not truth.lived(arbiter):
            yield f"{arbiter} did not run"
        for row in found["components"]:
            yield from self._component(row)
        if truth.is_quiet:
            names = {row["component"] for row in found["components"] if row["pids"]}
            missing = {one.name for one in truth.workers() if truth.throughout(one)} - names
            if missing:
                yield f"it lacks {sorted(missing)}"

    def _component(self, row: Mapping[str, Any]) -> Iterator[str]:
        truth, name = self.truth, row["component"]
        for pid in (*row["pids"], *row["dead_pids"]):
            process = truth.process(pid)
            if process is None or process.name != name:
                yield f"pid {pid} of {name} is {process}"
            elif pid in row["pids"] and not truth.lived(process):
                yield f"{process} did not live"
            elif pid in row["dead_pids"] and truth.throughout(process):
                yield f"{process} lived"
        alive = [truth.process(pid) for pid in row["pids"]]
        models = {model_of(one) for one in alive if one is not None}
        if row["model"] and not any(one and may_serve(one, row["model"]) for one in alive):
            yield f"{name} serves {row['model']!r}, not {models}"
        owner = truth.owner(row["lease"]) if row["lease"] else None
        if owner is not None and owner.name != name:
            yield f"the lease {row['lease']} of {name} is of {owner}"
        if row["state"] == "ready" and models and not any(map(truth.live(name).__getitem__, (1,))):
            known = any(
                truth.stopped(one, SILENT_S) or truth.is_sleep_unwritten(one)
                for one in alive
                if one is not None
            )
            if not known and not truth.disturbed(self._removed()):
                yield f"{name} is ready, it was not live"

    def _removed(self) -> Iterator[Any]:
        """The spans in which files of workers were removed."""
        return (one.span for one in self.box.causes.found if one.why.startswith("removed"))

    def _web(self) -> Iterator[str]:
        runs = self.box.processes("frontend") and not self.truth.may_not_run()
        if self.truth.is_quiet and self.shown.status and runs:
            yield f"status {self.shown.status}: {self.shown.err[:300]}"
        if not self.shown.status and not self.shown.out.startswith("http://127.0.0.1:800"):
            yield f"it printed {self.shown.out!r}"

    # -- the planner, logs and events

    def _planner(self) -> Iterator[str]:
        shown, truth = self.shown, self.truth
        planners = [one for one in self.box.machine.lived if one.program == "dynamo.planner"]
        ran = any(truth.lived(one) for one in planners)
        all_time = any(truth.throughout(one) and not truth.stopped(one, 1.0) for one in planners)
        running = shown.status == 0
        if running and not ran:
            yield "no planner ran"
        if not running and all_time and truth.is_quiet:
            yield f"a planner ran: {shown.err[:200]}"
        if "--json" in shown.words and shown.out:
            found = self._json()
            if found["running"] != running:
                yield f"running is {found['running']}, the status {shown.status}"
            text = json.dumps(found)
            if any(f'"model": "{one}"' in text for one in ("far", "")):
                yield f"it plans a model without a service: {text[:300]}"

    def _logs(self) -> Iterator[str]:
        """The last lines of each process, in the order in which it wrote them."""
        shown, box = self.shown, self.box
        number = int(shown.words[2])
        if shown.status:
            name = f"box_{shown.words[3]}" if len(shown.words) > 3 else ""
            ran = any(f"{log}_".startswith(f"{name}_") or not name for log in box.machine.logged)
            if ran and not self.truth.may_not_run() and self.truth.is_quiet:
                yield f"status {shown.status}: {shown.err[:200]}"
            return
        lines: dict[str, list[str]] = {}
        for line in shown.out.splitlines():
            name, bar, text = line.partition("|")
            known = bar and f"box_{name.strip()}" in box.machine.logged
            key = f"box_{name.strip()}" if known else shown.words[-1]
            lines.setdefault(key, []).append(text.removeprefix(" ") if known else line)
        for name, found in lines.items():
            if name not in box.machine.logged:
                yield f"{name} wrote nothing"
                continue
            yield from self._lines(name, found, number)

    def _lines(self, name: str, found: list[str], number: int) -> Iterator[str]:
        logged = [line for at_s, line in self.box.machine.logged[name]]
        if len(found) > number:
            yield f"{len(found)} lines of {name}"
        at = 0
        for line in found:
            try:
                at = logged.index(line, at) + 1
            except ValueError:
                yield f"{name} did not write {line!r} there"
                return
        if not self.truth.is_whole or not self.truth.is_quiet:
            return
        due_s = self.shown.since_s - _WRITTEN_S + START_S
        due = sum(at_s <= due_s for at_s, _ in self.box.machine.logged[name])
        if (at < due and number) or len(found) < min(number, due):
            yield f"{len(found)} lines of {name}, up to {at} of {due}"

    def _events(self) -> Iterator[str]:
        from dynamo.protocols.status import EVENT_KINDS

        if self.shown.status:
            yield f"status {self.shown.status}: {self.shown.err[:200]}"
        if "--json" not in self.shown.words:
            return
        events = [json.loads(line) for line in self.shown.out.splitlines()]
        for event in events:
            if event["kind"] not in EVENT_KINDS:
                yield f"an event of the kind {event['kind']}"
            yield from self._event(event)
        if len(self.shown.words) == 2 and self.truth.is_whole:
            yield from self._missing_events(events)

    def _event(self, event: Mapping[str, Any]) -> Iterator[str]:
        """A process that began, ended or serves is one that did."""
        pid = _PID.match(event.get("text", ""))
        if pid is not None and event["kind"] in ("started", "died"):
            process = self.truth.process(int(pid[1]))
            if process is None or process.name != event["name"]:
                yield f"{event}: that is {process}"
            elif event["kind"] == "died" and process.alive:
                yield f"{event}: it lives"
        if event["kind"] == "serving" and event.get("model"):
            service = event["name"].split("_")[1]
            lives = [one for one in self.box.machine.lived if service_of(one) == service]
            if lives and not may_serve(lives[0], event["model"]):
                yield f"{event}: it serves {model_of(lives[0])}"

    def _missing_events(self, events: list[dict[str, Any]]) -> Iterator[str]:
        """Each process that began has its event."""
        started = {
            int(pid[1])
            for event in events
            if event["kind"] == "started" and (pid := _PID.match(event.get("text", "")))
        }
        missing = [one for one in self.truth.begun() if one.pid not in started]
        if missing and not self.box.clock_set():  # else they may be older than a day
            yield f"no event of the start of {missing}"

    # -- a frontend's answers

    def _is_asked(self) -> bool:
        """Whether its frontend had to answer: it lived, and was not stopped."""
        port = 8000
        if "--url" in self.shown.words:
            port = int(self.shown.words[self.shown.words.index("--url") + 1].rpartition(":")[2])
        lives = [one for one in self.box.frontend_lives if self.box.life_ports[id(one)] == port]
        process = next(
            (self.truth.process(one.pid) for one in lives if one.from_s < self.shown.since_s), None
        )
        return process is not None and self.truth.is_quiet and self.truth.throughout(process)

    def _explain(self) -> Iterator[str]:
        shown = self.shown
        if "--model-fit" in shown.words:
            yield from self._fits()
            return
        if shown.status:
            ids = ("nothing answered 404", "last answered 404", "answered 401", "answered 403")
            known = any(text in shown.err for text in (*ids, "No request", "digits"))
            if self._is_asked() and not known:
                yield f"status {shown.status}: {shown.err[:300]}"
        elif "--json" in shown.words:
            yield from check_record(self.truth, self._json())

    def _fits(self) -> Iterator[str]:
        costs = "router-cost: seconds" in self.box.scenario.graph
        learns = costs and "router-mode: kv" in self.box.scenario.graph
        if not self.shown.status and not learns:
            yield "no router learns the speed of workers"

    def _record(self) -> Iterator[str]:
        yield from check_recording(self.box, self.shown, self._is_asked())

    def _route(self) -> Iterator[str]:
        shown = self.shown
        is_kv = "router-mode: kv" in self.box.scenario.graph
        if shown.status:
            keyed = "{keys}" in self.box.scenario.graph and "answered 40" in shown.err
            known = not is_kv and "only --router-mode kv" in shown.err
            if self._is_asked() and not (keyed or known or self._has_no_worker()):
                yield f"status {shown.status}: {shown.err[:300]} {shown.out[:200]}"
            return
        if not is_kv:
            yield "it explains a router that has no costs"
        if "--json" not in shown.words:
            return
        found = self._json()
        chosen = [row for row in found["candidates"] if row["chosen"]]
        if len(chosen) != 1:
            yield f"{len(chosen)} workers are chosen"
        for row in found["candidates"]:
            owner = self.truth.owner(f"{row['worker_id']:x}")
            model = self._asked_model()
            if owner is None or (model and not may_serve(owner, model)):
                yield f"worker {row['worker_id']:x} is {owner}"

    def _asked_model(self) -> str:
        words = self.shown.words
        return words[words.index("--model") + 1] if "--model" in words else ""

    def _has_no_worker(self) -> bool:
        model = self._asked_model()
        models = (model,) if model else self.box.profile.models
        return any(self.truth.ready(one)[0] == 0 or self._sleepers(one) for one in models)

    # -- words

    def _help(self) -> Iterator[str]:
        from dynamo.cli.completion import verb_options

        verb, *more = [word for word in self.shown.words if word != "--help"]
        if self.shown.status or "usage: dynamo" not in self.shown.out:
            yield f"status {self.shown.status}: {self.shown.out[:100]!r} {self.shown.err[:200]!r}"
            return
        if (verb, *more) == ("planner",):
            return
        for flag in verb_options(verb, *more[:1]).flags:
            if not flag.startswith("--no-") and flag not in self.shown.out:
                yield f"its help lacks {flag}"

    def _complete(self) -> Iterator[str]:
        from dynamo.cli.main import VERBS

        if self.shown.status:
            yield f"status {self.shown.status}: {self.shown.err[:200]}"
        shell, *words = self.shown.words[1:]
        lines = self.shown.out.splitlines()
        if shell == "bash":
            words, lines = [*words[0].split(" ")[1:]], lines[1:]
        found = {line.partition("\t")[0] for line in lines}
        if words in ([""], []) and not found >= set(VERBS):
            yield f"it lacks {set(VERBS) - found}"
        if words[:1] in (["restart"], ["logs"]) and self.truth.is_quiet:
            missing = {one.name for one in self.truth.workers() if self.truth.throughout(one)}
            missing -= found
            if missing and not self.truth.may_not_run():
                yield f"it lacks {sorted(missing)}"
        known = {*re.findall(r"model-name: ([^\s=]+)", self.box.graph_text())}  # far=one: far
        if words[:1] == ["load"] and not found <= known:
            yield f"it offers {found - known}"
