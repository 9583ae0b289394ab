"""The deployment of a run: starts ``dynamo serve``, clients and operators; lets faults happen."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import keys
import msgspec
import planes
import programs
from api_tokens import EYES
from attempts import Attempts
from call import Call
from caller import Caller
from calls import all_calls, script_of
from disk import Disk
from exact_verbs import ASKING, write_files
from excuses import RESTART_S, Causes, target_of
from history import Answer, Life, Request
from machine import START_S, Machine, Process
from network import Network
from pins import Pin, pinned
from presence import SERVED_BY, Presence, Span, decoders, model_of, service_of
from recording_client import Plan
from records import Order, check_after_power_loss
from scenario import PROFILES, Profile, Scenario, Step
from shell import Shown
from steady import SILENT_S, Steady, connections_to, silent_too_long
from surface import HEADERS, TAIL, rank_of
from verbs import unexpected
from waiting import Waiting

__all__ = ["Box", "PoolEntry"]

REQUEST_TIMEOUT_S = 150.0
OPERATION_TIMEOUT_S = 300.0
WARNED_S = 10.0
"""So long after a fault or an operation a log may warn of it."""
_SILENT_CACHE = re.compile("worker (\\w+) has served prompts but published no KV event")
FULL_S = 1.0
"""So long after it was full the disk may still be the reason of an error in a log."""
NAMESPACE = "box"
EXAMPLE_MODEL = Path(__file__).resolve().parents[2] / "examples/model"
EXTRA = """run: dynamo.mocker
model-path: {model_path}
model-name: extra
"""
"""A service that comes and goes; requests do not ask for it."""
_KEPT_ALIVE = 0.8
"""The share of connections that a client uses again."""
_SHORT_TOKENS, _SHORT_CHARACTERS = 4, 1000
_LONGEST = 8


class PoolEntry(msgspec.Struct, frozen=True):
    """A request body without its model and stream fields, and its complete answer."""

    api: str
    body: dict[str, Any]
    answer: Answer


class Box:
    """One simulated machine with a deployment. ``requests`` and ``operations`` are what ended."""

    def __init__(
        self, machine: Machine, scenario: Scenario, pool: list[PoolEntry], directory: Path
    ) -> None:
        self.machine = machine
        self.scenario = scenario
        self.profile: Profile = PROFILES[scenario.profile]
        self.pool = pool
        self._short = [one for one in pool if _is_short(one.body)]
        self._long = sorted(pool, key=lambda one: len(str(one.body)))[-_LONGEST:]
        self.state = directory
        self.requests: list[Request] = []
        self.operations: list[tuple[Step, str]] = []
        self.open_requests = 0
        self.open_operations = 0
        self.serve: Process | None = None
        self.wanted = True
        self.done: list[Step] = []
        self.ready_s = 0.0
        self.frontend_lives: list[Life] = []
        self.life_ports: dict[int, int] = {}
        self.ports: dict[str, int] = {}
        """The port of each request, by its id."""
        self.models: dict[str, str] = {}
        """The model of each request."""
        self.causes = Causes(lambda name: bool(self.presence.live(name)))
        self.causes.reload_returns = not self.profile.planner
        machine.attempts = Attempts()
        machine.attempts.on_accept = self._accepted
        self._deaths = 0
        """So many workers die when they get a request, of one model."""
        self._dying = ""
        self._doomed: set[int] = set()
        self.presence = Presence(machine)
        self.presence.on_end = self._process_ended
        self._order = Order(machine)
        machine.on_file = self._file_changed
        self.stops: dict[int, list[Span]] = {}
        """When each process was stopped by SIGSTOP."""
        self.removed_records: list[tuple[str, float]] = []
        """The models whose on-demand record a fault has removed, and when."""
        self.results: dict[str, list[str]] = {}
        """How each verb ended."""
        self._result: dict[int, str] = {}
        self.begun: dict[int, float] = {}
        self.acts: list[tuple[float, float]] = []
        """The times of the operations that have ended."""
        self.shown: list[Shown] = []
        """What verbs printed that operators read with."""
        self.env = {
            "DYN_LOCAL_STATE_DIR": str(directory),
            "HOME": str(directory),
            "PATH": os.environ.get("PATH", ""),
            "DYN_SYSTEM_PORT": "0",
            "DYN_SERVE_RESTART_BURST": str(scenario.restarts[0]),
            "DYN_SERVE_RESTART_WINDOW_S": str(scenario.restarts[1]),
            "DYN_LOG": "info",
            **scenario.limits.env,
        }
        self._armed: Callable[[Process, str], bool] | None = None
        self._writes_left = 0
        self._full_until_s = 0.0
        self._thaw: list[Process] = []
        machine.file_faults = self._file_fault
        machine.on_warning = self._warned
        machine.is_disk_full = partial(self.was_full, FULL_S)
        machine.lacks_inodes = scenario.seed % 2 == 1
        machine.last_asked_s = self._last_asked_s
        machine.records_load = scenario.limits.blocks > 0
        self.waiting = Waiting()
        self.steady = Steady()
        self.needs: dict[str, str] = {}
        """What a request needs, unless it is a worker. See :mod:`calls`."""
        self.slow_s: dict[str, float] = {}
        """How long a slow reader pauses."""
        self.pins: dict[str, Pin] = {}
        """The worker that a request names."""
        self.served_by: dict[str, dict[str, int]] = {}
        """The workers that the answer of a request names."""
        self.constrained: set[str] = set()
        """Requests whose output has a grammar: no worker goes on with what another has begun."""
        self.adapters: dict[str, str] = {}
        """The adapter that a request names, if it comes and goes."""
        self.open: dict[str, Caller] = {}
        """The connections of requests that have not ended."""
        if any(step.what == "power loss" for step in scenario.steps):
            machine.disk = Disk(random.Random(scenario.seed), lambda: machine.now_s)
        network = Network.of(machine)
        network.on_listen, network.on_close = self._listening, self._closed
        self.clients = machine.spawn("clients", dict(self.env), _forever)
        self._idle: dict[int, list[Caller]] = {}
        self.asked: dict[str, tuple[str, dict[str, Any]]] = {}
        """Whose key each request had, and its fields, if the box demands keys."""
        self.key_changes: list[tuple[float, bool]] = []
        """When the late key was added, or removed."""
        self._keys = directory / "keys.txt"
        if "{keys}" in scenario.graph:
            self._write_keys("alice", "bob")
        self._graph = directory / "graph.yaml"
        self.model_path = EXAMPLE_MODEL
        if scenario.has_shells:
            write_files(directory)
        if "eyes" in scenario.graph:
            _write_eyes()
        self._write_graph(scenario.graph)

    def _write_graph(self, text: str) -> None:
        replies = self.state / "replies.jsonl"
        if self.scenario.format:
            replies.write_text(script_of(self.scenario.format), encoding="utf-8")
        full = text.format(model_path=EXAMPLE_MODEL, keys=self._keys, replies=replies)
        self._graph.write_text(f"namespace: {NAMESPACE}\n{full}")

    def graph_text(self) -> str:
        """Return the graphs so far: that of the start, and what was added."""
        return self._graph.read_text() + EXTRA

    def _file_changed(self, path: Any, exists: bool) -> None:
        self.presence.file_changed(path, exists)
        self._order.file(path, exists)

    def _write_keys(self, *names: str) -> None:
        self._keys.write_text(keys.file_text(names))  # at once: nothing runs in between
        self._keys.chmod(0o600)

    def change_keys(self, step: Step) -> None:
        """Add or remove the late key, as an editor does."""
        self.machine.note(f"keys {step.number}: {step.what} {keys.LATE}")
        added = step.what == "add"
        self._write_keys("alice", "bob", *([keys.LATE] if added else []))
        self.key_changes.append((self.clock(), added))

    # -- processes

    def start(self) -> None:
        """Start ``dynamo serve``; start it again when it ends while it is wanted."""
        main = programs.arbiter(str(self._graph), gpus=self.profile.gpus)

        async def serve(process: Process) -> int:
            try:
                return await main(process)
            except Exception as error:  # noqa: BLE001 - a refused start is repeated
                self.machine.note(f"serve failed: {error!r}")
                self._refused(error)
                return 1

        self.serve = self.machine.spawn("serve", dict(self.env), serve)
        self.serve.on_death[self._serve_ended] = None

    def _refused(self, error: Exception) -> None:
        from dynamo.errors import DynamoError

        if not isinstance(error, (DynamoError, OSError)):
            self.machine.failures.append(f"dynamo serve failed: {error!r}")

    def _process_ended(self, process: Process) -> None:
        if process.program == "dynamo.planner":
            self.causes.started_again("planner", self.clock())

    def _serve_ended(self) -> None:
        self.causes.started_again("arbiter", self.clock())
        if self.wanted:
            self.machine.after(1.0, self._start_again)

    def _start_again(self) -> None:
        if self.wanted and (self.serve is None or not self.serve.alive):
            self.start()

    @property
    def is_up(self) -> bool:
        """Whether ``dynamo serve`` runs and handles signals; before, its guard would clean up."""
        return self.serve is not None and self.serve.alive and signal.SIGTERM in self.serve.handlers

    def processes(self, module: str) -> list[Process]:
        """The living processes of a program: frontend, mocker, planner."""
        return [
            one
            for one in self.machine.processes.values()
            if one.alive and one.program in (module, f"dynamo.{module}")
        ]

    def began(self) -> None:
        """The deployment is ready: the steps begin."""
        self.ready_s = self.clock()
        workers = (*self.processes("mocker"), *self.processes("api_worker"))
        self.causes.of_the_graph |= {one.name for one in workers}

    def ready(self) -> bool:
        """Whether the deployment said that it is ready, or has ended."""
        return any("ready: " in line or "started: " in line for line in self.machine.history)

    def _listening(self, process: Process, address: Any) -> None:
        if isinstance(address, tuple) and 8000 <= address[1] < 8010 and process.program:
            life = Life("frontend", process.name, self.clock(), pid=process.pid)
            self.life_ports[id(life)] = address[1]
            self.frontend_lives.append(life)
            process.on_death[partial(self._closed, process)] = None

    def _closed(self, process: Process, address: Any = None) -> None:
        for life in self.frontend_lives:
            if life.pid == process.pid and life.until_s is None:
                life.closing_s = self.clock() if life.closing_s is None else life.closing_s
                self._idle.pop(self.life_ports[id(life)], None)  # clients of this machine see it
                if not process.alive:
                    life.until_s = self.clock()

    # -- requests

    def request(self, step: Step) -> None:
        """Send the request of ``step``, mostly over a connection that served another one."""
        details = step.details
        if "call" in details:
            self.call(step, all_calls()[details["call"]])
            return
        pool = self._short if "short" in details else self._long if "long" in details else self.pool
        entry = pool[details["entry"] % len(pool)]
        body = dict(entry.body) | {"model": step.what}
        if details["stream"]:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if "n" in details:
            body["n"] = details["n"]
        fields = dict(details.get("fields", {}))
        headers = "".join(f"{name}: {fields.pop(name)}\r\n" for name in HEADERS if name in fields)
        if "key" in details:
            headers += keys.header(details["key"])
            self.asked[f"request {step.number}"] = details["key"], details.get("fields", {})
        headers += self._id_header(step)
        rank = rank_of(details.get("fields", {}))
        if rank is not None:
            self.machine.attempts.ranks[f"request-{step.number}"] = rank
        session = _add_fields(body, entry, fields)
        if "pin" in details:
            headers += pinned(self, step, f"request {step.number}", body)
        plan = _plan(step, entry.api, body, entry.answer)
        self._send(plan._replace(session=session, headers=headers), step, None)

    def call(self, step: Step, call: Call) -> None:
        """Send a request of :mod:`calls`, and those that follow it."""
        details = step.details
        call = call.of_graph(self.scenario.graph)
        body = call.request_body(step.what, "")
        if details["stream"]:
            body["stream"] = True
            if call.api in ("chat", "completions"):
                body["stream_options"] = {"include_usage": True}
        if not call.counts:
            body["n"] = 0  # answers of a model
        elif call.prompts > 1:
            body["n"] = call.prompts  # so many answers
        if call.name.startswith("late key") and not (self.key_changes and self.key_changes[-1][1]):
            call = replace(call, api="refusal", status=401)
        if "{worker}" in call.headers:
            call = replace(call, headers=self._named(call.headers))
        plan = _plan(step, call.api, body, call.expected)._replace(headers=self._id_header(step))
        if call.is_constrained:
            self.constrained.add(plan.id)
        if "slow" in details:
            self.slow_s[plan.id] = details["slow"]
        self._send(plan, step, call)

    @property
    def has_asking_verbs(self) -> bool:
        """Whether verbs have sent requests of their own."""
        return any(one.words[0] in ASKING and "--help" not in one.words for one in self.shown)

    def _last_asked_s(self, model: str) -> float:
        ends = [one.ended_s for one in self.requests if self.models[one.id] == model]
        if any(self.models[name] == model for name in self.open) or self.has_asking_verbs:
            ends.append(self.clock())
        return max(ends, default=-1000.0) + START_S

    def _id_header(self, step: Step) -> str:
        """Return the header with an id of its client, which half of the requests have.

        Those that name their rank have one: their worker receives it.
        """
        named = self.scenario.has_shells and step.number % 2 == 0
        named = named or rank_of(step.details.get("fields", {})) is not None
        return f"x-request-id: request-{step.number}\r\n" if named else ""

    def _named(self, headers: str) -> str:
        """Return headers with the instance id of the API worker."""
        live = self.presence.live("Api")
        found = [lease for lease, one in self.presence.owners.items() if one in live]
        return headers.replace("{worker}", str(int(found[0], 16) if found else 1))

    def _send(self, plan: Plan, step: Step, call: Call | None) -> None:
        port = 8000 + step.details.get("frontend", 0)
        self.open_requests += 1
        self.machine.note(f"{plan.id}: {step.what}, {step.details}")
        loop = self.clients.loop
        loop.call_soon(lambda: loop.create_task(self._perform(plan, port, step, call)))
        self._expect(plan, port, step.what, call)

    def _expect(self, plan: Plan, port: int, model: str, call: Call | None) -> None:
        self.ports[plan.id], self.models[plan.id] = port, model
        if call is not None:
            self.needs[plan.id] = call.needs
            self.adapters[plan.id] = call.adapter

    async def _perform(self, plan: Plan, port: int, step: Step, call: Call | None) -> None:
        from dynamo.http.client import Target

        idle = self._idle.setdefault(port, [])
        connection = None
        while idle and (connection is None or not connection.usable):
            connection = idle.pop()
        if connection is None or not connection.usable:
            connection = Caller(Target("127.0.0.1", port, False), self.clock)
        await self._exchange(connection, plan, call, step)
        if call is not None:
            await self._follow(connection, plan, call, step)
        if connection.usable and self.machine.random.random() < _KEPT_ALIVE:
            idle.append(connection)
        else:
            connection.close()
        self.open_requests -= 1

    async def _exchange(
        self, connection: Caller, plan: Plan, call: Call | None, step: Step
    ) -> None:
        connection.ask(call, step.what, step.details.get("slow", 0.0))
        if call is None or (call.api != "watch" and not call.drip_s):  # which wait for themselves
            self.open[plan.id] = connection
        record = await connection.perform(plan, REQUEST_TIMEOUT_S)
        self.open.pop(plan.id, None)
        if call is not None and call.api == "watch" and self._stops(self.ports[plan.id]):
            record.ending = "cancelled"  # a drain ends the streams that nothing else ends
        self.requests.append(record)
        if plan.id in self.pins:
            self.served_by[plan.id] = connection.workers
        for problem in connection.check():
            self.machine.failures.append(f"{plan.id}: {problem}")
        self.machine.note(f"{plan.id} ended: {record.ending} {record.status} {_end_of(record)}")

    def _stops(self, port: int) -> bool:
        """Whether the latest frontend of a port got a stop signal."""
        lives = [one for one in self.frontend_lives if self.life_ports[id(one)] == port]
        return bool(lives) and lives[-1].pid in self.machine.stop_signals_s

    async def _follow(self, connection: Caller, plan: Plan, call: Call, step: Step) -> None:
        """Send what follows on an answer, as long as the same frontend answers."""
        for number, later in enumerate(call.then):
            done = connection.record
            failed = done.status != 200 or any(one.kind == "error" for one in done.events)
            if failed or done.ending != "complete" or not connection.usable:
                return
            body = later.request_body(step.what, connection.answer_id)
            body |= {} if later.counts else {"n": 0}
            then = Plan(f"{plan.id}.{number}", later.api, body, later.expected)
            self._expect(then, self.ports[plan.id], step.what, later)
            await self._exchange(connection, then, later, step)
            if later.generates:
                await self._follow(connection, then, later, step)

    # -- operators

    def operate(self, step: Step) -> None:
        """Run the operation of ``step`` in a process of its own, as the CLI does."""
        name = f"{step.what} {' '.join(map(str, step.details.values()))}"
        self.open_operations += 1

        async def operator(process: Process) -> int:
            from dynamo.errors import DynamoError

            result = "ended"
            try:
                async with asyncio.timeout(OPERATION_TIMEOUT_S):
                    await self._operation(step)
            except DynamoError as error:
                result = f"refused: {error.message}"
            except TimeoutError:
                result = "never ended"
            except Exception as error:  # noqa: BLE001 - no verb may show a traceback
                result = f"failed: {error!r}"
                if process.alive and not (isinstance(error, OSError) and self.was_full(1.0)):
                    self.machine.failures.append(f"operator {step.number} {name} {result}")
            self.operations.append((step, result))
            self._result[step.number] = result
            self.machine.note(f"operator {step.number} {name}: {result}")
            return 0

        self.machine.note(f"operator {step.number}: {name}")
        self.causes.verb(step, self.clock())
        self.begun[step.number] = self.clock()
        process = self.machine.spawn(f"operator {step.number}", dict(self.env), operator)
        process.on_death[partial(self._operator_ended, step)] = None

    def _operator_ended(self, step: Step) -> None:
        self.open_operations -= 1
        result = self._result.pop(step.number, "killed")
        begun_s = self.begun.pop(step.number)
        why = unexpected(self, step, result, begun_s)
        if why:
            self.machine.failures.append(f"operator {step.number} ({step.what}): {why}")
        self.acts.append((begun_s, self.clock()))
        self.results.setdefault(step.what, []).append(result)
        self.causes.verb_ended(step, result, self.clock())

    def clock(self) -> float:
        """Seconds since the start of the run."""
        return self.machine.now_s - START_S

    def was_full(self, ago_s: float = 0.0) -> bool:
        """Whether the disk is full, or was so long ago."""
        return self.machine.now_s < self._full_until_s + ago_s

    def was_full_at(self, since_s: float, until_s: float) -> bool:
        """Whether the disk was full for a moment of this time, or shortly before."""
        return any(one.meets(since_s - RESTART_S, until_s) for one in self.full())

    def full(self) -> list[Span]:
        """Return the times in which the disk was full, in order."""
        return [
            Span(one.since_s, one.until_s - RESTART_S)
            for one in self.causes.found
            if one.why == "the disk was full"
        ]

    def clock_set(self) -> bool:
        """Whether someone has set the clock."""
        return any(one.kind == "clock" for one in self.done)

    def undisturbed_s(self) -> float:
        """How long no fault has happened, and no process but operators has begun or ended."""
        moments = [
            one.at_s + self.ready_s + one.details["seconds"]
            for one in self.done
            if one.kind == "fault"
        ]
        for process in self.machine.lived:
            if process.program:
                ended_s = 0.0 if process.alive else process.ended_s
                moments.append(max(process.started_s, ended_s) - START_S)
        moments += [until_s for _, until_s in self.acts]
        return float(self.clock() - max(moments))

    def _warned(self, text: str) -> None:
        """A log has a warning: it needs a cause, a fault or an operation."""
        begun = self.ready_s and self.wanted and not self.begun
        signals = self.machine.stop_signals_s  # a drain may last longer than a fault is felt
        content = "recording of content" in text or "the content of requests" in text
        records = self.scenario.has_shells and content
        drains = records or any(
            one.alive and one.pid in signals for one in self.machine.processes.values()
        )
        silent = _SILENT_CACHE.search(text)
        if silent is not None and (
            "enable-prefix-caching: false" in self.scenario.graph
            or service_of(self.presence.owners[silent[1]]) == "Api"  # most of its models
        ):
            return
        if begun and not drains and self.undisturbed_s() > WARNED_S:
            self.machine.failures.append(f"a warning without a cause: {text}")

    def disturbed(self, step: Step, since_s: float) -> bool:
        """Whether a fault or another operation may have changed what ``step`` does."""
        since_s -= RESTART_S
        return (
            not self.wanted
            or bool(self.begun)
            or any(until_s >= since_s for _, until_s in self.acts)
            or any(
                one.at_s + self.ready_s + one.details["seconds"] >= since_s
                for one in self.done
                if one.kind in ("fault", "clock")
            )
        )

    async def _operation(self, step: Step) -> None:
        from dynamo.cli import state
        from dynamo.config import from_env
        from dynamo.config.runtime import RuntimeSettings
        from dynamo.operations.operate import BoxActions

        if step.what == "reload":
            await self._reload(step)
            return
        if step.what == "repair":
            runtime = from_env(RuntimeSettings, namespace=NAMESPACE)
            for text in await state._repair_running(runtime, False):
                self.machine.note(f"operator {step.number}: {text}")
            return
        if step.what.startswith("circus"):
            await self._circus(step)
            return
        actions = BoxActions(from_env(RuntimeSettings, namespace=NAMESPACE))
        if "planner" in step.what:
            verb = actions.pause_planner if "pause" in step.what else actions.resume_planner
            steps = verb()
        elif "model" in step.details:
            steps = getattr(actions, step.what)(step.details["model"])
        else:
            steps = getattr(actions, step.what)(target_of(step))
        async for text in steps:
            self.machine.note(f"operator {step.number}: {text}")

    def has_orphans(self) -> bool:
        """Whether an operation was interrupted: ``dynamo state repair`` finishes or undoes it."""
        from dynamo.errors import StatefileError
        from dynamo.serve.state.statefile import Statefile

        try:
            document = Statefile(self.state, NAMESPACE).read()
        except StatefileError:
            return False
        entries = document.components.values() if document is not None else ()
        owners = {one.reserved_by.pid for one in entries if one.reserved_by is not None}
        return not owners <= self.machine.processes.keys()

    async def _reload(self, step: Step) -> None:
        change, service, value = (step.details[key] for key in ("change", "service", "value"))
        words: dict[str, list[str]] = {
            "workers": [f"--{service}.ServiceArgs.workers={value}"],
            "flag": [f"--{service}.max-num-seqs={4 + value}"],
            "env": [f"--{service}.ServiceArgs.envs.SOME={value}"],
            "frontend": [f"--Frontend.router-temperature=0.{value}"],
        }
        if self.profile.planner and change == "workers":
            words["workers"] = [f"--{service}.ServiceArgs.max={1 + value}"]
        request: dict[str, Any] = {"graph": str(self._graph), "overrides": words.get(change, [])}
        if change == "extra":
            request = {"add": {"Extra": EXTRA.format(model_path=EXAMPLE_MODEL)}}
            if "\nExtra:" in self._graph.read_text():
                request = {"remove": ["Extra"]}
        await self._ask_circus("reload_graph", {**request, "waiting": True})

    async def _circus(self, step: Step) -> None:
        command = step.what.partition(" ")[2]
        worker = max(0, step.details["worker"])
        name = f"{NAMESPACE}_{step.details['service']}" + (f"_{worker}" if worker else "")
        waiting = command in ("stop", "start", "restart")
        await self._ask_circus(command, {"name": name, "waiting": waiting, "match": "simple"})

    async def _ask_circus(self, command: str, properties: dict[str, Any]) -> None:
        from dynamo.errors import StatefileError
        from dynamo.operations.steps.circus import CircusEndpoint
        from dynamo.serve.state.process_table import runs_here
        from dynamo.serve.state.statefile import Statefile

        document = Statefile(self.state, NAMESPACE).read()
        if document is None or not runs_here(document.arbiter):
            raise StatefileError("no deployment runs")
        circus = CircusEndpoint(document.circus_endpoint)
        try:
            reply = await circus._exchange(command, properties, lambda: runs_here(document.arbiter))
        finally:
            circus.close()
        self.machine.note(f"circus {command} {properties.get('name', '')}: {reply}")
        if reply.get("status") != "ok":
            raise StatefileError(str(reply.get("reason", reply)))

    # -- faults

    def fault(self, step: Step) -> None:
        """Let the fault of ``step`` happen."""
        dice = random.Random(step.dice)
        if step.what == "kill live worker":
            live = sorted(self.presence.live(step.details["service"]), key=lambda one: one.name)
            self._signal(next(iter(live), None), signal.SIGKILL)
            return
        act = getattr(self, "_" + step.what.replace(" ", "_"))
        self.machine.note(f"fault {step.number}: {step.what} {step.details}")
        act(dice, step.details["seconds"])

    def set_clock(self, step: Step) -> None:
        """Set the machine's clock. No fault: no program may notice."""
        self.machine.note(f"clock {step.number}: set {step.what} by {step.details['seconds']:g} s")
        self.machine.clock_off_s += step.details["seconds"] * (-1 if step.what == "back" else 1)

    def heal(self) -> None:
        """End the faults that last."""
        self._full_until_s = 0.0
        self._armed = None
        self._deaths = 0
        for process in self._thaw:
            self._continue(process)
        self._thaw.clear()

    def _any(self, dice: random.Random, module: str) -> Process | None:
        found = sorted(self.processes(module), key=lambda one: one.pid)
        return dice.choice(found) if found else None

    def _signal(self, process: Process | None, signum: int) -> None:
        if process is not None and process.alive:
            self.causes.hit(process, f"signal {signum} to", self.clock())
            self.machine.kill(process.pid, signum)

    def _stop_for(self, process: Process | None, seconds: float) -> None:
        if process is not None and process.alive:
            self._thaw.append(process)
            now_s = self.clock()
            self.causes.hit(process, "stopped", now_s, seconds)
            self.stops.setdefault(process.pid, []).append(Span(now_s, now_s + seconds))
            self.machine.kill(process.pid, signal.SIGSTOP)
            self.machine.after(seconds, self._continue, process)
            if seconds > SILENT_S:
                busy = [connection for _, connection in connections_to(self, process)]
                self.machine.after(SILENT_S, self._look_at_silent, process, now_s, busy)

    def _look_at_silent(self, process: Process, since_s: float, busy: list[object]) -> None:
        self.machine.failures += silent_too_long(self, process, since_s, busy)

    def _continue(self, process: Process) -> None:
        if process.alive:
            self.machine.kill(process.pid, signal.SIGCONT)

    def _kill_worker(self, dice: random.Random, seconds: float) -> None:
        self._signal(self._any(dice, "mocker"), signal.SIGKILL)

    def _kill_busy_worker(self, dice: random.Random, seconds: float) -> None:
        """Kill a worker that has the most requests: some lose one worker after the other."""
        loads = {
            one: sum(rank.load for part in one.parts for rank in getattr(part, "ranks", ()))
            for one in sorted(self.processes("mocker"), key=lambda one: one.pid)
        }
        self._signal(max(loads, key=loads.__getitem__, default=None), signal.SIGKILL)

    def _kill_at_request(self, dice: random.Random, seconds: float) -> None:
        """Kill the next two workers of a model that get a request, before its first token."""
        self._deaths, self._dying = 2, ""

    def _accepted(self, process: Process) -> None:
        model = model_of(process)
        able = service_of(process) in decoders(model) and process.pid not in self._doomed
        if self._deaths and able and self._dying in ("", model):
            self._deaths -= 1
            self._dying = model
            self._doomed.add(process.pid)
            self.machine.after(0.0, self._signal, process, signal.SIGKILL)

    def _terminate_worker(self, dice: random.Random, seconds: float) -> None:
        self._signal(self._any(dice, "mocker"), signal.SIGTERM)

    def _stop_worker(self, dice: random.Random, seconds: float) -> None:
        self._stop_for(self._any(dice, "mocker"), seconds)

    def _kill_relay(self, dice: random.Random, seconds: float) -> None:
        self._signal(self._any(dice, "attach"), signal.SIGKILL)

    def _stop_relay(self, dice: random.Random, seconds: float) -> None:
        self._stop_for(self._any(dice, "attach"), seconds)

    def _kill_api(self, dice: random.Random, seconds: float) -> None:
        self._signal(self._any(dice, "api_worker"), signal.SIGKILL)

    def _stop_api(self, dice: random.Random, seconds: float) -> None:
        self._stop_for(self._any(dice, "api_worker"), seconds)

    def _kill_frontend(self, dice: random.Random, seconds: float) -> None:
        self._signal(self._any(dice, "frontend"), signal.SIGKILL)

    def _terminate_frontend(self, dice: random.Random, seconds: float) -> None:
        self._signal(self._any(dice, "frontend"), signal.SIGTERM)

    def _stop_frontend(self, dice: random.Random, seconds: float) -> None:
        self._stop_for(self._any(dice, "frontend"), 2 * seconds)

    def _kill_planner(self, dice: random.Random, seconds: float) -> None:
        self._signal(self._any(dice, "planner"), signal.SIGKILL)

    def _stop_planner(self, dice: random.Random, seconds: float) -> None:
        self._stop_for(self._any(dice, "planner"), seconds)

    def _stop_arbiter(self, dice: random.Random, seconds: float) -> None:
        self._stop_for(self.serve, seconds)

    def _kill_arbiter(self, dice: random.Random, seconds: float) -> None:
        self._signal(self.serve, signal.SIGKILL)

    def _kill_operator(self, dice: random.Random, seconds: float) -> None:
        found = [
            one
            for one in self.machine.processes.values()
            if one.alive and one.name.startswith("operator")
        ]
        if found:
            signum = dice.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGINT))
            self._signal(dice.choice(sorted(found, key=lambda one: one.pid)), signum)

    def _kill_at_file(self, dice: random.Random, seconds: float) -> None:
        """Kill some process in one of its next changes of files.

        Half of the time any process but the arbiter, in the middle of an atomic write: what it has
        written so far is left.
        """
        able = [
            one
            for one in self.machine.processes.values()
            if one.alive and not one.name.startswith("client")
        ]
        self._writes_left = dice.randrange(1, 12)
        if dice.random() < 0.5:
            self._armed = lambda process, name: process is not self.serve and name[:1] == "."
        elif able:
            chosen = dice.choice(sorted(able, key=lambda one: one.pid))
            self._armed = lambda process, name: process is chosen

    def _kill_planner_at_file(self, dice: random.Random, seconds: float) -> None:
        """Kill the planner in the middle of its next atomic write: what it wrote is left."""
        self._writes_left = 3  # after both steps of its open(2)
        self._armed = lambda process, name: process.program == "dynamo.planner" and name[:1] == "."

    def _cut_requests(self, dice: random.Random, seconds: float) -> None:
        found = [
            one
            for one in Network.of(self.machine).connections
            if isinstance(one.address, str) and one.address.endswith(".sock")
        ]
        if found:
            chosen = dice.choice(found)
            self.causes.lose(chosen.loop.process, [self.clock()])
            chosen.cut()

    def _cut_events(self, dice: random.Random, seconds: float) -> None:
        import fake_os

        assert fake_os.machine() is self.machine
        found = list(planes.EventHub.here().links)
        if found:
            dice.choice(found).cut()

    def _remove_lease(self, dice: random.Random, seconds: float) -> None:
        self._remove(dice, self.state / NAMESPACE / "store/leases")

    def _remove_record(self, dice: random.Random, seconds: float) -> None:
        buckets = self.state / NAMESPACE / "store/v1"
        with suppress(OSError):
            self._remove(dice, dice.choice(sorted(buckets.iterdir())))

    def _remove_socket(self, dice: random.Random, seconds: float) -> None:
        with suppress(OSError):
            run = self.state / NAMESPACE
            found = [
                path
                for path in sorted(run.iterdir())
                if path.name.endswith(".sock") and "circus" not in path.name
            ]
            if found:
                self._remove_file(dice.choice(found))

    def _remove(self, dice: random.Random, directory: Path) -> None:
        with suppress(OSError):
            found = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
            if found:
                self._remove_file(dice.choice(found))

    def _remove_file(self, path: Path) -> None:
        """Remove a file of a process, whose name has the lease."""
        lease = path.name.rpartition("%2F")[2].partition(".")[0]
        owner = self.presence.owners.get(lease)
        if owner is not None:
            self.causes.hit(owner, f"removed {path.name} of", self.clock())
            if path.parent.name == "on_demand":
                service = path.name.split("%2F")[1]
                self.removed_records.append((SERVED_BY[service], self.clock()))
            if path.parent.name == "leases" and owner.alive:  # it drains from then on
                self.machine.stop_signals_s.setdefault(owner.pid, self.machine.now_s)
        path.unlink()

    def _disk_full(self, dice: random.Random, seconds: float) -> None:
        self.causes.everywhere("the disk was full", self.clock(), seconds)
        self._full_until_s = self.machine.now_s + seconds

    def _power_loss(self, dice: random.Random, seconds: float) -> None:
        """Every process of the deployment dies at once, and what no one synced may be lost."""
        self.causes.everywhere("power loss", self.clock(), 0.0)
        for process in list(self.machine.processes.values()):
            if process.alive and not process.name.startswith("client"):
                process.state = "R"
                self._signal(process, signal.SIGKILL)
        assert self.machine.disk is not None
        for path in self.machine.disk.lose_power(self.machine.unix_s):
            self.machine.note(f"lost or torn: {path}")
        self.machine.failures += check_after_power_loss(self)

    def _file_fault(self, process: Process, path: Any, grows: bool) -> None:
        if self._armed is not None:
            name = "an open file" if isinstance(path, int) else Path(path).name
            self._writes_left -= self._armed(process, name)
            if self._writes_left <= 0:
                self._armed = None
                self.machine.note(f"killed while it changes {name}")
                self.causes.hit(process, "killed at a file:", self.clock())
                self.machine.kill(process.pid, signal.SIGKILL)
        if grows and self.machine.now_s < self._full_until_s:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    # -- the end

    def stop(self) -> None:
        """Stop the deployment."""
        self.wanted = False
        self.causes.everywhere("the stop", self.clock(), float("inf"))
        if self.serve is not None and self.serve.alive:
            self.machine.kill(self.serve.pid, signal.SIGTERM)

    def remove(self) -> None:
        """Remove the state directory."""
        shutil.rmtree(self.state, ignore_errors=True)


def _write_eyes() -> None:
    """Write the files of the model that takes images, once for all runs."""
    from image_kit import write_eyes

    if not EYES.exists():
        own = EYES.with_name(f"eyes.{os.getpid()}")
        write_eyes(own)
        try:
            own.rename(EYES)
        except OSError:  # another run was first
            shutil.rmtree(own)


def _plan(step: Step, api: str, body: dict[str, Any], expected: Answer) -> Plan:
    cancel, after = step.details.get("cancel", ""), step.details.get("after", 0)
    return Plan(f"request {step.number}", api, body, expected, cancel, after)


def _add_fields(body: dict[str, Any], entry: PoolEntry, fields: dict[str, Any]) -> str:
    """Add ``fields`` to the body; return the session, which is no part of it."""
    session = str(fields.pop("session", ""))
    if "min_tokens" in fields:
        fields["min_tokens"] = min(fields["min_tokens"], body["max_tokens"])
    if TAIL in fields.get("stop", ()):
        fields["stop"] = [entry.answer.text[-3:] + "\u2603", *fields["stop"][1:]]
    if entry.api == "completions" and "logprobs" in fields:
        fields["logprobs"] = 2
    body |= fields
    return session


def _is_short(body: dict[str, Any]) -> bool:
    return int(body["max_tokens"]) <= _SHORT_TOKENS and len(str(body)) < _SHORT_CHARACTERS


async def _forever(process: Process) -> int:
    await asyncio.Event().wait()
    return 0


def _end_of(record: Request) -> str:
    return "; ".join(event.text for event in record.events if event.kind == "error")[:200]
