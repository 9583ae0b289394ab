"""One run: a scenario from the start of the deployment to its stop, and the verdict."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import fake_os
from box import EXAMPLE_MODEL, Box, PoolEntry
from call import ANSWERS, Call
from calls import all_calls, unscripted
from chaos_load import make_pool
from checks import check_always, check_end, check_index, check_interrupted, check_quiet
from history import Answer, Request
from judge import EITHER, Judge
from machine import START_S, Livelock, Machine
from overlap import Overlap
from planned import check_decisions
from promises import met
from reached import Reached
from scenario import Scenario, Step
from shell import run_verb
from shown import check_shown, count_quiet
from visit import VISIT

from dynamo.frontend.requests import headers

if TYPE_CHECKING:
    from answer_cases import Case

__all__ = ["Outcome", "learn_answers", "run_scenario"]

START_LIMIT_S = 60.0
QUIET_LIMIT_S = 700.0
SETTLE_S = 45.0
"""After the last request: leases expire, planners act, probes of lost workers end."""
SETTLED_S = 12.0
"""In most runs it is enough that all is quiet so soon."""
EVENTS_S = 0.5
"""So long the last events of a worker may travel, while nothing disturbs them."""
UNDISTURBED_S = 4.0
STOP_LIMIT_S = 200.0
_CHECK_EVERY_S = 0.25


@dataclass
class Outcome:
    """What a run found. ``failures`` is empty if every promise was kept."""

    seed: int
    profile: str
    failures: list[str] = field(default_factory=list)
    history: list[str] = field(default_factory=list)
    steps: int = 0
    requests: int = 0
    complete: int = 0
    judged: dict[str, int] = field(default_factory=dict)
    """How many requests had to be complete, had to be refused, … See :class:`Judge`."""
    verbs: dict[str, tuple[int, int]] = field(default_factory=dict)
    """How often each operation ended as it should, and how often it was tried."""
    met: list[str] = field(default_factory=list)
    """The rows of docs/guarantees.md that the run met. See :mod:`promises`."""
    shown: tuple[int, int] = (0, 0)
    """How many verbs printed what was so while nothing changed, and how many there were."""
    faults: int = 0
    operations: int = 0
    virtual_s: float = 0.0
    reached: list[str] = field(default_factory=list)
    """The functions that ran, if they are counted."""


def run_scenario(
    scenario: Scenario, pool: list[PoolEntry], reached: Reached | None = None
) -> Outcome:
    """Run ``scenario`` on a machine of its own; ``reached`` collects the functions that run."""
    machine = Machine(scenario.seed)
    if scenario.overlap or scenario.has_shells:
        machine.has_threads = scenario.has_shells
        machine.overlap = Overlap(machine, scenario.seed, scenario.overlap)
        machine.overlap.on_thread = reached.start if reached is not None else lambda: None
    if reached is not None:
        reached.start()
    directory = _directory(scenario.seed)
    fake_os.use(machine)
    headers._RANDOM.seed(scenario.seed)  # made before there was a machine
    box = Box(machine, scenario, pool, directory)
    outcome = Outcome(scenario.seed, scenario.profile)
    try:
        _run(box, outcome)
    except Livelock as error:
        outcome.failures.append(f"livelock: {error}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    outcome.reached = reached.names() if reached is not None else []
    outcome.failures = list(dict.fromkeys([*machine.failures, *outcome.failures]))
    outcome.history = [line.replace(str(directory), "STATE") for line in machine.history]
    outcome.steps = machine.steps
    outcome.requests = len(box.requests)
    outcome.complete = sum(one.ending == "complete" and one.status == 200 for one in box.requests)
    outcome.faults = sum(step.kind == "fault" for step in box.done)
    outcome.operations = sum(step.kind == "operator" for step in box.done)
    outcome.virtual_s = machine.now_s - START_S
    outcome.verbs = {verb: (ends.count("ended"), len(ends)) for verb, ends in box.results.items()}
    return outcome


def _directory(seed: int) -> Path:
    """Make the state directory, in memory. A seed has the same one always: hashes depend on it."""
    root = Path("/dev/shm", f"dynamo-simulate-{os.getuid()}")
    root.mkdir(mode=0o700, exist_ok=True)
    for attempt in range(1000):
        found = root / (f"{seed}" if not attempt else f"{seed}.{attempt}")
        try:
            found.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return found
    raise RuntimeError(f"too many directories in {root}: remove it")


def _run(box: Box, outcome: Outcome) -> None:
    machine, failures = box.machine, outcome.failures
    box.start()
    if not machine.run(box.ready, START_S + START_LIMIT_S):
        failures.append(f"not ready after {START_LIMIT_S:g} s")
        return
    box.began()
    begin_s = machine.now_s
    machine.on_gpu_use = partial(_watch, box)
    _watch(box)
    _watch_waiting(box)
    visited = False
    for step in box.scenario.steps:
        if VISIT in step.details and not visited:
            visited = True
            begin_s = _rest(box, failures) - step.at_s
        at_s = begin_s + step.at_s
        machine.run(None, at_s)
        machine.now_s = max(machine.now_s, at_s)
        _do(box, step)
    if box.scenario.is_cut:
        box.heal()
        machine.run(lambda: box.is_up, machine.now_s + START_LIMIT_S)
    else:
        machine.run(None, machine.now_s + 1.0)
        box.heal()
        _until_quiet(box, failures)
        _judge(box, outcome)
        failures += _settled(box)
    box.stop()
    serve = box.serve
    if not machine.run(lambda: serve is None or not serve.alive, machine.now_s + STOP_LIMIT_S):
        failures.append(f"dynamo serve did not end within {STOP_LIMIT_S:g} s")
    if box.scenario.is_cut:
        _until_quiet(box, failures)
        _judge(box, outcome)
    failures += check_end(box)


def _rest(box: Box, failures: list[str]) -> float:
    """Let all that has begun end, and the box recover; return the time then."""
    machine = box.machine
    machine.run(None, machine.now_s + 1.0)
    box.heal()
    _until_quiet(box, failures)
    machine.run(None, machine.now_s + SETTLED_S)
    return machine.now_s


def _judge(box: Box, outcome: Outcome) -> None:
    judge = Judge(box)
    outcome.failures += judge.failures()
    outcome.failures += check_shown(box)
    outcome.failures += check_decisions(box)
    outcome.shown = count_quiet(box)
    outcome.judged = dict(judge.counts)
    outcome.met = met(box)
    either = {kind: count for kind, count in judge.counts.items() if kind.startswith(EITHER)}
    if box.scenario.is_calm and either:
        outcome.failures.append(f"not every request of a calm box was judged strictly: {either}")


def _do(box: Box, step: Step) -> None:
    box.done.append(step)
    if step.kind == "request":
        box.request(step)
    elif step.kind == "operator":
        box.operate(step)
    elif step.kind == "shell":
        run_verb(box, step)
    elif step.kind == "keys":
        box.change_keys(step)
    elif step.kind == "clock":
        box.set_clock(step)
    else:
        box.fault(step)


def _watch(box: Box) -> None:
    """Check what must hold always, at each change of a process."""
    for failure in check_always(box):
        if failure not in box.machine.failures:
            box.machine.note(f"VIOLATION {failure}")
            box.machine.failures.append(failure)


def _watch_waiting(box: Box) -> None:
    """Look for requests that nothing is in the way of, and more, every quarter of a second."""
    for failure in (*box.waiting.look(box), *box.steady.look(box)):
        box.machine.note(f"VIOLATION {failure}")
        box.machine.failures.append(failure)
    box.machine.after(_CHECK_EVERY_S, _watch_waiting, box)


def _until_quiet(box: Box, failures: list[str]) -> None:
    machine = box.machine

    def quiet() -> bool:
        return not box.open_requests and not box.open_operations

    if not machine.run(quiet, machine.now_s + QUIET_LIMIT_S):
        failures.append(f"{box.open_requests} requests and {box.open_operations} operators wait")
    for process in machine.processes.values():
        if process.state == "T":
            failures.append(f"{process} is still stopped")


def _settled(box: Box) -> list[str]:
    """Let the box come to rest; return what is not quiet then. One run of eight waits longer."""
    found = []
    box.machine.run(None, box.machine.now_s + EVENTS_S)
    if box.undisturbed_s() > UNDISTURBED_S:  # else a later query to a worker repairs the index
        found = list(check_index(box))
    if box.has_orphans():
        box.machine.run(None, box.machine.now_s + SETTLED_S / 4)
        found += check_interrupted(box)
        box.operate(Step(len(box.scenario.steps), 0.0, "operator", "repair", 0))
        box.machine.run(lambda: not box.open_operations, box.machine.now_s + SETTLE_S)
    unquiet = ["not looked yet"]
    wait_s = SETTLE_S if box.scenario.seed % 8 == 0 else SETTLED_S
    until_s = box.machine.now_s + wait_s + SETTLE_S - SETTLED_S
    while unquiet and box.machine.now_s < until_s:
        at_s = min(until_s, box.machine.now_s + wait_s)
        box.machine.run(None, at_s)
        box.machine.now_s = max(box.machine.now_s, at_s)
        unquiet, wait_s = list(check_quiet(box)), SETTLED_S
    if unquiet:  # a health check may be under way
        box.machine.run(None, box.machine.now_s + EVENTS_S)
        unquiet = list(check_quiet(box))
    return [*found, *unquiet]


def learn_answers(scenario: Scenario, size: int) -> list[PoolEntry]:
    """Ask an undisturbed deployment for the complete answer of every request of the pool."""
    unknown = Answer("", "", 0, 0)
    asked = [
        PoolEntry(api, {**body, "max_tokens": min(int(body["max_tokens"]), 80)}, unknown)
        for api, body in make_pool(1, 48)
        if len(str(body)) < 4000
    ][:size]
    machine = Machine(0)
    directory = _directory(0)
    fake_os.use(machine)
    box = Box(machine, replace(scenario, steps=()), asked, directory)
    box.start()
    machine.run(box.ready, START_S + START_LIMIT_S)
    for number in range(len(asked)):
        details = {"entry": number, "stream": False}
        box.request(Step(number, 0.0, "request", "one", 0, details))
    machine.run(lambda: not box.open_requests, machine.now_s + QUIET_LIMIT_S)
    found = {int(record.id.split()[1]): _answer(record) for record in box.requests}
    _learn_calls(box)
    box.stop()
    machine.run(lambda: not box.serve or not box.serve.alive, machine.now_s + STOP_LIMIT_S)
    shutil.rmtree(directory, ignore_errors=True)
    return [PoolEntry(one.api, one.body, found[n]) for n, one in enumerate(asked)]


def _answer(record: Request) -> Answer:
    """Return the answer that an undisturbed deployment gave."""
    text = "".join(
        event.text for event in record.events if event.kind == "text" and not event.index
    )
    reason = next((event.text for event in record.events if event.kind == "finish"), "")
    usage = next((event.usage for event in record.events if event.usage), None)
    if usage is None or record.status != 200:
        raise RuntimeError(f"no answer in an undisturbed run: {record}")
    return Answer(text, reason, usage[0], usage[1] // max(1, record.choices))


def _scripted(call: Call, case: Case, prompt: int, tokens: int) -> Answer:
    """Return the answer of a worker that writes ``case`` in ``tokens``."""
    limit = call.body.get("max_tokens") or call.body["max_output_tokens"]
    content = case.content or ""
    if tokens > limit:
        return Answer(content, "length", prompt, limit)
    named = call.api == "chat" and case.format == "named"  # as OpenAI has it
    return Answer(content, "tool_calls" if case.calls and not named else "stop", prompt, tokens)


def _later_names(name: str, call: Call) -> dict[str, str]:
    """Return the names of the calls that follow, by those of their requests."""
    found = {}
    for number, later in enumerate(call.then):
        if later.generates:
            found[f"{name}.{number}"] = later.name
            found |= _later_names(f"{name}.{number}", later)
    return found


def _learn_calls(box: Box) -> None:
    """Learn the answers of :mod:`calls`.

    Those of workers with a format are known; of these only the prompts are counted.
    """
    import tokenizers

    known = all_calls().values()
    calls = [one for one in known if one.generates and not one.is_later and one.answer is None]
    keyed = dict(unscripted(one) for one in calls if one.case)
    plain = [one for one in calls if one.case is None]
    names: dict[str, str] = {}
    for number, (name, call) in enumerate([*((one.name, one) for one in plain), *keyed.items()]):
        names[f"request {number + len(box.pool)}"] = name
        step = Step(number + len(box.pool), 0.0, "request", "one", 0, {"stream": False})
        names |= _later_names(f"request {step.number}", call)
        box.call(step, call)
    box.machine.run(lambda: not box.open_requests, box.machine.now_s + QUIET_LIMIT_S)
    ANSWERS.update((names[one.id], _answer(one)) for one in box.requests if one.id in names)
    tokenizer = tokenizers.Tokenizer.from_file(str(EXAMPLE_MODEL / "tokenizer.json"))
    for call in calls:
        if call.case is not None:
            tokens = len(tokenizer.encode(call.case.text, add_special_tokens=False).ids)
            prompt = ANSWERS[unscripted(call)[0]].prompt_tokens
            ANSWERS[call.name] = _scripted(call, call.case, prompt, tokens)
