"""Single actions of the local connector, in virtual time: what it does when a step fails."""

from __future__ import annotations

import asyncio
import functools
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from simulated_deployment import Faults, SimulatedDeployment, no_devices
from virtual_time import run_virtual

from dynamo.config.planner import PlannerSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import StatefileError
from dynamo.operations import operate
from dynamo.operations.operate import BoxActions
from dynamo.operations.planner_client import ask_planner
from dynamo.operations.reconcile import repair_loads
from dynamo.operations.steps import access, circus
from dynamo.operations.steps.access import LocalAccess, open_access
from dynamo.operations.steps.circus import CircusBusy, CircusEndpoint, CircusError
from dynamo.operations.steps.limits import ActionFailed, ActionLimits
from dynamo.operations.steps.sleeping import RemoteEngines
from dynamo.planner.__main__ import run_planner
from dynamo.planner.connector import ASLEEP, DRAINING, READY, STARTING
from dynamo.planner.live.local_connector import LocalConnector, service_now
from dynamo.runtime.discovery.layout import ensure_directories
from dynamo.runtime.process.os_process import host_id, start_ticks
from dynamo.serve.state.document import (
    GIVEN_UP,
    LOAD,
    STOPPED,
    Arbiter,
    Document,
    OperationOwner,
    RecordedProcess,
    Supervision,
)
from dynamo.serve.state.registered import RegisteredWorker
from dynamo.serve.state.view import DeploymentView

GRAPH = """
W: {run: dynamo.mocker, model-path: tiny, ServiceArgs: {resources: {gpu: 1}}}
P:
  run: dynamo.mocker
  model-path: tiny
  disaggregation-mode: prefill
  ServiceArgs: {resources: {gpu: 2}, min: 1, max: 3, priority: 5}
Free: {run: dynamo.mocker, model-path: tiny}
Other: {run: [sleep, '9']}
"""


class Fixture:
    """A deployment whose workers serve, and a connector to it."""

    def __init__(self, tmp_path: Path, engines: RemoteEngines | None, **limits: Any) -> None:
        self.world = SimulatedDeployment(tmp_path, GRAPH, 6, Random(0))
        logs = tmp_path / "logs"
        logs.mkdir()
        (logs / "dynamo_W_1.log").write_text("loading\nout of memory\n")
        limits = {"start_timeout_s": 60.0, **limits}
        self.access = LocalAccess(
            limits=ActionLimits(**limits),
            statefile=self.world.statefile,
            circus=self.world,
            registrations=self.world,
            logs=logs,
            devices=no_devices,
        )
        self.connector = LocalConnector(self.access, engines)

    def entry(self, name: str) -> Any:
        document = self.world.statefile.read()
        assert document is not None
        return document.components.get(f"dynamo_{name}")

    async def states(self, service: str) -> list[str]:
        return [one.state for one in (await self.connector.services())[service].workers]


Scenario = Callable[[Fixture], Awaitable[None]]


def simulated(
    engines: RemoteEngines | None = None, **limits: Any
) -> Callable[[Scenario], Callable[[Path], None]]:
    """Run a test in virtual time, five seconds after the start of its deployment."""

    def decorate(scenario: Scenario) -> Callable[[Path], None]:
        def test(tmp_path: Path) -> None:
            async def run() -> None:
                fixture = Fixture(tmp_path, engines, **limits)
                async with fixture.world:
                    await asyncio.sleep(5)
                    await scenario(fixture)

            run_virtual(run())

        test.__doc__, test.__name__ = scenario.__doc__, getattr(scenario, "__name__", "test")
        return test

    return decorate


def now_s() -> float:
    return asyncio.get_running_loop().time()


@simulated()
async def test_the_services_of_the_graph(given: Fixture) -> None:
    found = await given.connector.services()
    assert list(found) == ["W", "P", "Free"]
    assert (found["P"].pool, found["P"].gpus_per_worker, found["P"].workers[0].gpus) == (
        *("prefill", 2, ("1", "2")),
    )
    assert (found["P"].minimum, found["P"].maximum, found["P"].priority) == (1, 3, 5)
    assert (found["W"].pool, found["W"].model, found["Free"].gpus_per_worker) == (
        *("decode", "tiny", 1),
    )
    assert found["W"].workers[0].state == READY and found["W"].workers[0].worker_id


@simulated()
async def test_a_worker_that_never_serves_is_undone(given: Fixture) -> None:
    given.world.faults = Faults(never_serves=1)
    began_s = now_s()
    adding = asyncio.get_running_loop().create_task(given.connector.add("W"))
    await asyncio.sleep(10)
    assert await given.states("W") == [READY, STARTING]
    with pytest.raises(ActionFailed, match=r"W_1: .*did not serve within 60 s; last output: out"):
        await adding
    assert given.entry("W_1") is None and "dynamo_W_1" not in given.world.watchers
    assert 60 <= now_s() - began_s < 75
    given.world.faults = Faults()
    assert await given.connector.add("W") == "dynamo_W_1"


@simulated()
async def test_a_worker_that_is_given_up_is_undone_at_once(given: Fixture) -> None:
    given.world.faults = Faults(death_every_s=0.001, start_s=(0.1, 0.2))
    given.world.faults.never_serves = 1
    began_s = now_s()
    with pytest.raises(ActionFailed, match="stopped, or given up; last output"):
        await given.connector.add("W")
    assert now_s() - began_s < 20 and given.entry("W_1") is None


@simulated()
async def test_a_watcher_that_circus_refuses_leaves_nothing(given: Fixture) -> None:
    async def refuse(name: str) -> None:
        raise CircusError("circus refused start: no such file")

    given.world.start = refuse  # type: ignore[method-assign]
    with pytest.raises(ActionFailed, match="no such file"):
        await given.connector.add("W")
    assert given.entry("W_1") is None and "dynamo_W_1" not in given.world.watchers


@simulated()
async def test_a_start_that_is_given_up_is_undone_at_once(given: Fixture) -> None:
    """Before its watcher is added, while it starts, and not once it serves."""
    given.world.faults = Faults(never_serves=1)
    for pause_s in (0.0, 0.5, 3.0):
        given.connector.give_up("W", "nothing to give up")
        began_s = now_s()
        adding = asyncio.ensure_future(given.connector.add("W"))
        await asyncio.sleep(pause_s)
        given.connector.give_up("W", "no request waits")
        with pytest.raises(ActionFailed, match=r"dynamo_W_\d: given up: no request waits"):
            await adding
        assert now_s() - began_s < pause_s + 10
        assert await given.states("W") == [READY] and given.entry("W_1") is None
        assert not given.access.active and not given.access.needs_repair
    given.world.faults = Faults()
    await given.connector.add("W")
    given.connector.give_up("W", "it serves")
    assert await given.states("W") == [READY, READY]


@simulated()
async def test_what_cannot_be_undone_is_repaired_by_the_next_action(given: Fixture) -> None:
    start, remove = given.world.start, given.world.remove

    async def refuse(name: str) -> None:
        raise CircusError("server error")

    given.world.start = given.world.remove = refuse  # type: ignore[method-assign]
    with pytest.raises(ActionFailed, match="server error"):
        await given.connector.add("W")
    assert given.entry("W_1").gpus == ("3",)
    given.world.start, given.world.remove = start, remove  # type: ignore[method-assign]
    assert await given.connector.add("P") == "dynamo_P_1"
    assert await given.connector.reconcile() == []


@simulated()
async def test_what_was_never_started_is_no_stopped_worker_while_it_is_removed(
    given: Fixture,
) -> None:
    """A load would start it again: by the start that fails, and by a repair after a crash."""
    start, remove = given.world.start, given.world.remove
    seen: list[tuple[str, bool]] = []

    async def refuse(name: str) -> None:
        raise CircusError("no such file")

    async def hang(name: str) -> None:
        await asyncio.Event().wait()

    async def look(name: str) -> None:
        entry = given.entry("W_1")
        seen.append((entry.state, entry.reserved_by is not None))
        await remove(name)

    async def fail(name: str) -> None:
        raise CircusError("server error")

    given.world.remove, given.world.start = look, refuse  # type: ignore[method-assign]
    with pytest.raises(ActionFailed, match="no such file"):
        await given.connector.add("W")
    given.world.start = hang  # type: ignore[method-assign]
    for failing in (False, True):  # and by the repair that follows one that failed
        adding = asyncio.ensure_future(given.connector.add("W"))
        await asyncio.sleep(1)
        adding.cancel()
        await asyncio.gather(adding, return_exceptions=True)
        if failing:
            given.world.remove = fail  # type: ignore[method-assign]
            with pytest.raises(ActionFailed, match="server error"):
                await repair_loads(given.access)
            given.world.remove = look  # type: ignore[method-assign]
        await repair_loads(given.access)
        assert given.entry("W_1") is None and "dynamo_W_1" not in given.world.watchers
    assert seen == [(DRAINING, True)] * 3
    given.world.start = start  # type: ignore[method-assign]
    assert await given.connector.add("W") == "dynamo_W_1"


@simulated(max_gpus=5)
async def test_the_budget_counts_all_services(given: Fixture) -> None:
    """1 + 2 GPUs, and one worker without GPUs, which counts as one."""
    with pytest.raises(ActionFailed, match=r"4 GPUs are in use and a worker needs 2: .* 5"):
        await given.connector.add("P")
    assert await given.connector.add("W") == "dynamo_W_1"
    with pytest.raises(ActionFailed, match="--max-gpu-budget 5"):
        await given.connector.add("Free")
    await given.connector.remove("Free")
    assert await given.connector.add("W") == "dynamo_W_2"


def test_fractions_add_up_to_the_budget(tmp_path: Path) -> None:
    """15 times 0.2 is more than 3 in binary."""

    async def run() -> None:
        graph = "W: {run: dynamo.mocker, ServiceArgs: {workers: 14, resources: {gpu: 0.2}}}"
        world = SimulatedDeployment(tmp_path, graph, 3, Random(0))
        access = LocalAccess(
            limits=ActionLimits(max_gpus=3, start_timeout_s=60.0),
            statefile=world.statefile,
            circus=world,
            registrations=world,
            logs=tmp_path,
            devices=no_devices,
        )
        async with world:
            await asyncio.sleep(5)
            connector = LocalConnector(access)
            assert await connector.add("W") == "dynamo_W_14"
            with pytest.raises(ActionFailed, match=r"3 GPUs are in use and a worker needs 0\.2"):
                await connector.add("W")

    run_virtual(run())


@simulated(max_gpus=2, model="other")
async def test_the_budget_is_that_of_the_scaled_model(given: Fixture) -> None:
    assert await given.connector.add("W") == "dynamo_W_1"


@simulated(max_gpus=20)
async def test_starts_overlap_and_share_nothing(given: Fixture) -> None:
    names = await asyncio.gather(*(given.connector.add(name) for name in ("W", "P", "Free")))
    assert names == ["dynamo_W_1", "dynamo_P_1", "dynamo_Free_1"]
    assert given.entry("W_1").gpus == ("3",)
    assert given.entry("P_1").gpus == ("4", "5")
    assert given.entry("Free_1").gpus == ()
    with pytest.raises(ActionFailed, match="W_2 needs 1 GPU, 0 of 6 free"):
        await given.connector.add("W")
    with pytest.raises(ActionFailed, match="Other: not a service with workers that register"):
        await given.connector.add("Other")


@simulated()
async def test_a_worker_that_hangs_is_killed_after_its_drain_timeout(given: Fixture) -> None:
    given.world.faults = Faults(hangs=1)
    began_s = now_s()
    assert await given.connector.remove("W") == "dynamo_W"
    assert 20 <= now_s() - began_s < 35  # it drains, then circus stops it
    assert given.entry("W").gpus == () and not given.world.workers().get(1)


@simulated()
async def test_a_worker_that_dies_while_it_drains_is_not_restarted(given: Fixture) -> None:
    given.world.faults = Faults(drain_s=(5, 5))
    removing = asyncio.get_running_loop().create_task(given.connector.remove("W"))
    await asyncio.sleep(1)
    assert await given.states("W") == [DRAINING]
    (process,) = given.world.watchers["dynamo_W"].processes
    given.world.kill(process)
    assert await removing == "dynamo_W" and given.entry("W").gpus == ()
    assert not [one for one in given.world.processes() if one.watcher.spec.service == "W"]


@simulated()
async def test_a_worker_whose_watcher_is_stopped_does_not_wait_for_its_drain_timeout(
    given: Fixture,
) -> None:
    """Its process exits, and the arbiter keeps the watcher: it was stopped before the drain."""
    given.world.faults = Faults(drain_s=(1, 1))
    stopping = asyncio.get_running_loop().create_task(given.world.stop("dynamo_W"))
    began_s = now_s()
    assert await given.connector.remove("W") == "dynamo_W"
    await stopping
    assert 1 <= now_s() - began_s < 8
    assert given.entry("W").gpus == () and "dynamo_W" not in given.world.watchers


@simulated()
async def test_the_newest_goes_first(given: Fixture) -> None:
    for _ in range(2):
        await given.connector.add("W")
    removed = [await given.connector.remove("W") for _ in range(3)]
    assert removed == ["dynamo_W_2", "dynamo_W_1", "dynamo_W"]
    with pytest.raises(ActionFailed, match="W: no worker to remove"):
        await given.connector.remove("W")


@simulated()
async def test_processes_of_circusctl_incr_are_workers(given: Fixture) -> None:
    await given.world.incr("dynamo_Free")
    await asyncio.sleep(5)
    assert await given.states("Free") == [READY, READY]
    assert await given.connector.remove("Free") == "dynamo_Free"
    await asyncio.sleep(5)
    assert await given.states("Free") == [READY]
    assert given.world.watchers["dynamo_Free"].numprocesses == 1


@simulated()
async def test_a_busy_arbiter_is_asked_again(given: Fixture) -> None:
    start, calls = given.world.start, list[float]()

    async def busy(name: str) -> None:
        calls.append(now_s())
        if len(calls) < 6:
            raise CircusBusy("arbiter is already running rm command")
        await start(name)

    given.world.start = busy  # type: ignore[method-assign]
    assert await given.connector.add("W") == "dynamo_W_1"
    assert len(calls) == 6 and calls[5] - calls[4] > calls[1] - calls[0]


class SimulatedEngines(RemoteEngines):
    """Engines that sleep when they are told to."""

    def __init__(self) -> None:
        self.asleep: set[int] = set()

    async def can_sleep(self, lease: int) -> bool:
        return True

    async def is_sleeping(self, lease: int) -> bool | None:
        return lease in self.asleep

    async def sleep(self, lease: int) -> None:
        self.asleep.add(lease)

    async def wake(self, lease: int, timeout_s: float) -> None:
        self.asleep.remove(lease)


@functools.partial(simulated, SimulatedEngines())()
async def test_a_sleeping_worker_is_woken_first(given: Fixture) -> None:
    assert await given.connector.remove("W") == "dynamo_W"
    assert await given.states("W") == [ASLEEP]
    assert await given.connector.add("W") == "dynamo_W" and await given.states("W") == [READY]
    assert await given.connector.add("W") == "dynamo_W_1"


@simulated()
async def test_a_cancelled_removal_is_finished_by_the_next_planner(given: Fixture) -> None:
    given.world.faults = Faults(drain_s=(1, 1))
    for delay_s in (0.0, 0.005, 0.02, 0.5, 0.9):
        await given.connector.add("W")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(delay_s):
                await given.connector.remove("W")
        fresh = LocalAccess(
            limits=given.access.limits,
            statefile=given.world.statefile,
            circus=given.world,
            registrations=given.world,
            logs=given.access.logs,
            devices=no_devices,
        )
        await LocalConnector(fresh).reconcile()
        assert await LocalConnector(fresh).reconcile() == []
        assert DRAINING not in await given.states("W")


async def test_a_deleted_socket_of_circus_is_noticed_before_a_reply_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(circus, "_SOCKET_S", 0.02)
    endpoint = CircusEndpoint(f"ipc://{tmp_path}/gone", reply_timeout_s=60)
    try:
        with pytest.raises(CircusError, match="the socket was deleted"):
            async with asyncio.timeout(10):
                await endpoint.statuses()
    finally:
        endpoint.close()


async def test_a_command_does_not_go_on_with_the_next_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would remove workers, and give GPUs away, of which it has read in the last one."""

    async def nothing_to_repair(_: LocalAccess) -> None:
        pass

    monkeypatch.setattr(operate, "repair_loads", nothing_to_repair)
    monkeypatch.setattr(access, "check_answers", lambda document: None)
    statefile = Fixture(tmp_path, None).world.statefile
    endpoint = tmp_path / "circus.sock"
    endpoint.touch()
    with subprocess.Popen(["sleep", "1000"]) as arbiter:  # noqa: ASYNC220 - it starts at once
        ticks = start_ticks(arbiter.pid) or 0

        def serve(document: Document, pid: int = arbiter.pid) -> None:
            document.arbiter = Arbiter(pid=pid, start_ticks=ticks, host=host_id())
            document.circus_endpoint = f"ipc://{endpoint}"

        statefile.update(serve)
        runtime = RuntimeSettings(state_dir=str(tmp_path), namespace=statefile.namespace)
        async with BoxActions(runtime)._open() as opened:
            assert opened.document().arbiter.pid == arbiter.pid
            opened.statefile.update(lambda document: None)
            arbiter.kill()
            arbiter.wait()
            with pytest.raises(CircusError, match="the deployment ended before 'rm' was complete"):
                await opened.circus.remove("dynamo_W")
            statefile.update(functools.partial(serve, pid=1))
            for use in (opened.document, lambda: opened.statefile.update(serve)):
                with pytest.raises(
                    StatefileError, match=r"was started again .* repeat the command"
                ):
                    use()
            found = statefile.read()
            assert found is not None and found.arbiter.pid == 1


async def test_a_command_while_its_deployment_ends_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is removed between its creation and the watches, with the statefile or not."""
    fixture = Fixture(tmp_path, None)
    runtime = RuntimeSettings(state_dir=str(tmp_path), namespace="dynamo")
    store = tmp_path / "dynamo" / "store"

    def removed(path: Path) -> None:
        ensure_directories(path)
        shutil.rmtree(path)

    monkeypatch.setattr(access, "ensure_directories", removed)
    with pytest.raises(StatefileError, match="ended while this command began"):
        async with open_access(runtime, ActionLimits()):
            pass
    assert not store.exists()

    def all_removed(path: Path) -> None:
        removed(path)
        fixture.world.statefile.remove()

    monkeypatch.setattr(access, "ensure_directories", all_removed)
    with pytest.raises(StatefileError, match="no deployment runs in namespace 'dynamo'"):
        async with open_access(runtime, ActionLimits()):
            pass


async def test_nothing_is_created_for_a_namespace_without_a_deployment(tmp_path: Path) -> None:
    runtime = RuntimeSettings(state_dir=str(tmp_path), namespace="nope")
    with pytest.raises(StatefileError, match="no deployment runs in namespace 'nope'"):
        await run_planner(PlannerSettings(), runtime)
    assert await ask_planner(runtime) is None
    assert list(tmp_path.iterdir()) == []


def test_a_watcher_whose_process_is_replaced_is_one_worker(tmp_path: Path) -> None:
    fixture = Fixture(tmp_path, None)
    document = fixture.world.statefile.read()
    assert document is not None
    registered = {7: RegisteredWorker(pid=7, leases=(1,), worker_id=1, model="tiny")}
    document.components["dynamo_W"].processes = (RecordedProcess(7), RecordedProcess(8))

    def workers() -> list[tuple[str, int | None]]:
        view = DeploymentView(document=document, registered=registered, changes=lambda entry: False)
        service = service_now(view.services["W"], view, ActionLimits())
        return [(one.state, one.worker_id) for one in service.workers]

    assert workers() == [(READY, 1)]
    registered.clear()
    assert workers() == [(STARTING, None)]


@pytest.mark.parametrize(
    ("status", "kept", "owner", "stopped"),
    [
        ("stopped", STOPPED, None, "dynamo_W"),
        ("stopped", GIVEN_UP, None, ""),  # a request may start another one
        ("active", STOPPED, None, ""),  # it is started again
        ("stopped", STOPPED, OperationOwner(operation=LOAD), ""),  # added, and never started
    ],
)
def test_a_service_whose_only_watcher_was_stopped_by_a_command(
    tmp_path: Path, status: str, kept: str, owner: OperationOwner | None, stopped: str
) -> None:
    document = Fixture(tmp_path, None).world.statefile.read()
    assert document is not None
    document.components["dynamo_W"].processes = ()
    document.components["dynamo_W"].watcher = Supervision(status=kept)
    document.components["dynamo_W"].reserved_by = owner
    view = DeploymentView(
        document=document,
        registered={},
        changes=lambda entry: False,
        keeps=lambda entry: status == "active",
    )
    service = service_now(view.services["W"], view, ActionLimits())
    assert service.stopped == stopped
