"""When a dead process is restarted, and when the policy gives up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from circus.process import DEAD_OR_ZOMBIE
from hypothesis import given
from hypothesis import strategies as st

from dynamo.serve.state.document import ACTIVE, STOPPED
from dynamo.serve.supervision.arbiter import SupervisingArbiter
from dynamo.serve.supervision.supervised import RestartPolicy, Restarts, SupervisedWatcher
from dynamo.serve.supervision.supervised_process import describe_exit


def test_the_first_restart_is_immediate_then_it_backs_off() -> None:
    restarts = Restarts(RestartPolicy(burst=5, window_s=60))
    verdicts = [restarts.died(float(second), 1.0, -9) for second in range(5)]
    assert verdicts == [0.0, 0.5, 1.0, 2.0, "5 deaths within 60 s"]


def test_old_deaths_are_forgotten() -> None:
    restarts = Restarts(RestartPolicy(burst=3, window_s=10))
    assert [restarts.died(now, 1.0, 1) for now in (0.0, 11.0, 22.0, 33.0)] == [0.0] * 4


def test_a_rejected_command_line_is_not_retried() -> None:
    restarts = Restarts(RestartPolicy())
    assert restarts.died(0.0, 0.4, 2) == "its command line was rejected (exit status 2)"
    assert restarts.died(0.0, 1000.0, 2) == 0.0  # it ran for long: the status has another cause


def test_a_program_of_ours_says_by_its_status_why_it_ended() -> None:
    restarts = Restarts(RestartPolicy(burst=2))
    assert restarts.died(0.0, 90.0, 2, served=False, is_ours=True) == (
        "it refused to start (exit status 2)"
    )
    delays = [restarts.died(now, 1.0, 75, served=False, is_ours=True) for now in range(2000)]
    assert delays[:8] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0] and delays[-1] == 30.0
    assert restarts.died(2000.0, 1.0, 1, served=False, is_ours=True) == 0.0


def test_starts_that_never_serve_are_counted_beyond_the_window() -> None:
    """A model that takes longer to load than the window must not be loaded for ever."""
    restarts = Restarts(RestartPolicy(burst=3, window_s=10))
    died = [restarts.died(now, 99.0, 1, served=False) for now in (100.0, 200.0)]
    assert died == [0.0, 0.5]
    assert restarts.died(300.0, 99.0, 1, served=True) == 0.0
    assert [restarts.died(now, 99.0, -9, served=False) for now in (400.0, 500.0, 600.0)] == [
        0.0,
        0.5,
        "3 starts in a row ended before the model was served",
    ]


def test_a_manual_start_forgets_deaths() -> None:
    restarts = Restarts(RestartPolicy(burst=2))
    assert restarts.died(0.0, 1.0, 1) == 0.0
    restarts.forget()
    assert restarts.died(1.0, 1.0, 1) == 0.0


@given(st.integers(1, 8), st.lists(st.floats(0, 100), max_size=40))
def test_never_more_than_a_burst_in_a_window(burst: int, gaps: list[float]) -> None:
    restarts, now, started = Restarts(RestartPolicy(burst, 60.0)), 0.0, []
    for gap in gaps:
        now += gap
        verdict = restarts.died(now, gap, 1)
        if isinstance(verdict, str):
            break
        now += verdict
        started.append(now)
    for first in started:
        assert sum(first <= later <= first + 60.0 for later in started) <= burst


KV = "ValueError: To serve at least one request with the model's max seq len (40960), 4 GiB KV …"
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"


def test_a_first_start_is_not_repeated_after_an_error_that_cannot_pass() -> None:
    never = "a start with the same settings cannot succeed"
    for cause in (
        KV,
        "ValueError: … is less than desired CPU memory utilization (0.92). To resolve: decrease …",
        "ValueError: Sleep mode is not supported on current platform.",
        "NotImplementedError",
        "error: unrecognized arguments: --enforce",
        "error: invalid argument: --ctx",  # llama.cpp
    ):
        restarts = Restarts(RestartPolicy())
        assert restarts.died(0.0, 40.0, 1, served=False, cause=cause) == never, cause
        served = Restarts(RestartPolicy())
        served.died(0.0, 40.0, 1, served=True, cause="ValueError: x")
        assert served.died(1.0, 40.0, 1, served=False, cause=cause) == 0.5, cause
    restarts = Restarts(RestartPolicy())
    died = [restarts.died(now, 40.0, 1, served=False, cause=OUT_OF_MEMORY) for now in (0.0, 40.0)]
    assert died == [0.0, never]  # the first time, another process may just have exited
    for cause in ("ConnectionError: reset by peer", "bye", ""):
        assert Restarts(RestartPolicy()).died(0.0, 40.0, 1, served=False, cause=cause) == 0.0


def test_run_gives_up_a_model_that_cannot_be_downloaded() -> None:
    policy, cause = RestartPolicy(unreachable_starts=3), "'m' cannot be downloaded: 'dynamo pull m'"

    def died(restarts: Restarts, *causes: str) -> list[float | str]:
        return [restarts.died(0.0, 1.0, 75, served=False, cause=text) for text in causes]

    assert died(Restarts(policy), cause, cause, cause) == [0.5, 1.0, f"{cause} (3 starts)"]
    silent = "the model cannot be downloaded (3 starts)"
    assert died(Restarts(policy), "", "", "") == [0.5, 1.0, silent]
    assert died(Restarts(policy), cause, "other", cause, cause) == [0.5, 0.5, 0.5, 1.0]
    served = Restarts(policy)
    served.died(0.0, 9.0, -9, served=True)
    assert died(served, *[cause] * 4) == [0.5, 1.0, 2.0, 4.0]


class Process:
    """A process that a watcher has started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stopping = False
        self.exited = asyncio.Event()
        self.signals: list[tuple[int, bool]] = []

    def send_signal(self, number: int) -> None:
        self.signals.append((number, self.stopping))
        self.exited.set()


def watcher_of(*processes: Process) -> Any:
    found: Any = object.__new__(SupervisedWatcher)  # without circus and its arbiter
    found.processes = {process.pid: process for process in processes}
    found.stop_signal, found.graceful_timeout = 15, 10.0
    found.numprocesses, found.given_up = len(processes), None
    found.arbiter = SimpleNamespace(
        killing=False,
        gave_up=lambda watcher, reason: None,
        drained=lambda watcher, stopped: False,
    )
    found._drained = False
    found.notify_event = lambda *event: None
    found._restarts = Restarts(RestartPolicy())
    return found


async def test_a_process_that_is_stopped_is_expected_to_exit_before_it_is_signalled() -> None:
    """Its exit may be reaped at once, and would count as a death."""
    process = Process(7)
    await watcher_of(process).kill_process(process)
    assert process.signals == [(15, True)]


@pytest.mark.parametrize("killing", [False, True])
async def test_a_process_that_does_not_exit_in_time_is_killed(killing: bool) -> None:
    """At once where the whole deployment is being killed."""
    process: Any = Process(7)
    process.send_signal = lambda number: None
    process.kill_session = process.exited.set
    watcher, overdue = watcher_of(process), []
    watcher.graceful_timeout = 3600.0 if killing else 0.01
    watcher.arbiter.killing = killing
    watcher.arbiter.overdue = lambda of, late: overdue.append((of, late))
    async with asyncio.timeout(20):
        await watcher.kill_process(process)
    assert overdue == [(watcher, process)]


def test_of_several_processes_the_others_go_on_when_one_is_given_up() -> None:
    living, leaving = Process(7), Process(8)
    leaving.stopping = True
    watcher = watcher_of(living, leaving)
    watcher._give_up("5 deaths within 60 s")
    assert (watcher.given_up, watcher.numprocesses) == (None, 1)
    alone = watcher_of(leaving)
    alone._give_up("5 deaths within 60 s")
    assert alone.given_up == "5 deaths within 60 s"


def test_a_watcher_without_processes_to_come_is_stopped() -> None:
    """By `circusctl decr` to none, which circus itself does not call a stop."""
    process = Process(7)
    watcher = watcher_of(process)
    watcher._status = "active"
    assert not watcher.is_stopped()
    watcher.numprocesses = 0
    assert (watcher.is_stopped(), watcher.status()) == (False, "stopping")
    watcher.processes.clear()
    assert (watcher.is_stopped(), watcher.status(), watcher.has_work()) == (True, "stopped", False)


@pytest.mark.parametrize("why", ["rolling", "stopping", "is stopped now", "waiting", "full"])
async def test_a_watcher_that_is_busy_or_waits_starts_nothing(why: str) -> None:
    watcher = watcher_of()
    started = refuse_starts(watcher, "taken")
    watcher.arbiter.stopping, watcher.rolling = why == "stopping", why == "rolling"
    watcher._status = "stopping" if why == "is stopped now" else "active"
    watcher._emptied, watcher.numprocesses = True, 1
    watcher._not_before_s = asyncio.get_running_loop().time() + 60 * (why == "waiting")
    if why == "full":
        watcher.processes[7] = Process(7)
        await watcher._start()
    else:
        await watcher.manage_processes()
    assert started == []


async def test_a_watcher_that_has_drained_starts_nothing_more() -> None:
    """The periodic check of circus may come before its removal."""
    watcher = watcher_of()
    watcher.arbiter.stopping, watcher._drained, watcher._status = False, True, "active"
    watcher.numprocesses = 1
    watcher.cmd = watcher.args = None  # nothing to start
    await watcher.spawn_processes()
    assert watcher.processes == {} and watcher.given_up is None


async def test_a_worker_that_is_drained_while_its_restart_waits_is_not_started() -> None:
    watcher, spawned, ends = watcher_of(), [], []

    def drained(_: object, stopped: bool) -> bool:
        ends.append(stopped)
        return True

    watcher.arbiter.stopping = watcher.rolling = watcher._emptied = False
    watcher._status, watcher.numprocesses, watcher._not_before_s = "active", 1, 0.0
    watcher.arbiter.drained = drained
    watcher.spawn_process = lambda: spawned.append(watcher)
    for _ in range(2):  # the second one is circus's periodic check, before the removal
        await watcher.manage_processes()
    assert (spawned, ends) == ([], [False])


async def test_an_incr_starts_a_worker_again_that_slept_when_decr_stopped_it() -> None:
    """Its entry is asleep still, as that of one whose engine died in its sleep."""
    watcher, started = watcher_of(), []
    watcher.arbiter.stopping = watcher.rolling = False
    watcher._status, watcher._not_before_s = "active", 0.0
    watcher._emptied, watcher.numprocesses = True, 1
    watcher.arbiter.drained = lambda watcher, stopped: True

    async def start() -> None:
        started.append(watcher)

    watcher._start = start
    await watcher.manage_processes()
    assert started == [watcher] and not watcher._drained


async def test_a_dead_process_is_replaced_without_a_new_claim_of_its_gpu() -> None:
    """It is its own still; and its deaths are not forgotten, as they are with a manual start."""
    watcher, spawned = watcher_of(), []
    watcher.arbiter.stopping = watcher.rolling = watcher._emptied = watcher._drained = False
    watcher._status, watcher.numprocesses, watcher.max_age = "active", 1, 0
    watcher._not_before_s, watcher.respawn = 0.0, True

    def spawn() -> bool:
        spawned.append(watcher)
        return False

    watcher.spawn_process = spawn
    watcher._restarts.died(0.0, 1.0, 1)
    await watcher.manage_processes()
    assert spawned == [watcher] and watcher.deaths == 1


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (None, "is running"),
        (0, "exited with status 0"),
        (3, "exited with status 3"),
        (75, "exited with status 75, a temporary failure"),
        (-9, "was killed by SIGKILL"),
        (-99, "was killed by signal 99"),
    ],
)
def test_how_a_process_ended(status: int | None, text: str) -> None:
    assert describe_exit(status) == text


def test_a_watcher_whose_processes_have_an_age_is_looked_after() -> None:
    process: Any = Process(7)
    process.status = "running"
    watcher = watcher_of(process)
    watcher._status, watcher.max_age = "active", 0
    assert not watcher.has_work()
    watcher.max_age = 60
    assert watcher.has_work()
    watcher.max_age, process.status = 0, DEAD_OR_ZOMBIE
    assert watcher.has_work()


def refuse_starts(watcher: Any, reason: str) -> list[Any]:
    """Let other workers hold the GPUs of ``watcher``; return the watchers that ask to start."""
    asked = []

    async def conflict(of: Any) -> str:
        asked.append(of)
        return reason

    watcher.arbiter.deployment = SimpleNamespace(conflict=conflict)
    return asked


async def test_a_stopped_watcher_that_had_no_process_stays_stopped() -> None:
    watcher = watcher_of()
    started = refuse_starts(watcher, "taken")
    watcher.arbiter.stopping = watcher.rolling = False
    watcher._emptied, watcher._not_before_s, watcher._status = True, 0.0, "stopped"
    watcher.numprocesses = 1
    await watcher.manage_processes()
    assert started == []
    for _ in range(20):
        watcher._restarts.died(0.0, 1.0, 1)
    await watcher._start()  # by a command: earlier deaths count no longer
    assert started == [watcher] and watcher._restarts.died(0.0, 1.0, 1) == 0.0


async def test_a_watcher_without_processes_starts_only_on_gpus_that_no_other_has() -> None:
    """`circusctl incr` or `set numprocesses` after `decr` to none is a start."""
    watcher = watcher_of()
    asked = refuse_starts(watcher, "GPU 0 is in use by ns_B")
    watcher.arbiter.stopping = watcher.rolling = watcher._emptied = watcher.singleton = False
    watcher._not_before_s, watcher.max_age, watcher._status = 0.0, 0, "active"
    watcher._give_up = lambda reason: setattr(watcher, "given_up", reason)
    await watcher.set_numprocesses(0)
    assert not asked
    await watcher.set_numprocesses(1)
    assert (asked, watcher.given_up) == ([watcher], "GPU 0 is in use by ns_B")


async def test_a_watcher_that_looks_for_gpus_does_not_count_as_stopped() -> None:
    """A client whose command to start it has been accepted would take it for given up."""
    watcher = watcher_of()
    looks, found = asyncio.Event(), asyncio.Event()

    async def conflict(of: Any) -> str:
        looks.set()
        await found.wait()
        return ""

    watcher.arbiter.deployment = SimpleNamespace(conflict=conflict, changed=lambda: None)
    watcher.listener = SimpleNamespace(close=lambda: None)
    watcher._status, watcher.given_up, watcher.restarts = "stopped", None, 0
    watcher.last_exit = watcher.last_words = ""
    assert (watcher.status(), watcher.supervision.status) == ("stopped", STOPPED)
    start = asyncio.create_task(watcher._start())
    await looks.wait()
    assert (watcher.status(), watcher.supervision.status) == ("starting", ACTIVE)
    await watcher._stop()  # the start does not go on after it
    assert (watcher.status(), watcher.supervision.status) == ("stopped", STOPPED)
    found.set()
    await start
    assert watcher.status() == "stopped" and not watcher.processes


@pytest.mark.parametrize("flagged", [False, True])
async def test_a_start_of_all_does_not_mark_those_that_run(flagged: bool) -> None:
    """Else they would count as active when they are stopped later."""
    watcher = watcher_of(Process(1))
    watcher._status, watcher.autostart, watcher.restarts = "active", True, 0
    watcher.last_exit = watcher.last_words = ""
    watcher.starting = flagged  # by a start that another one has overtaken
    arbiter: Any = SimpleNamespace(_stopping=False)
    await SupervisingArbiter._start_watchers(arbiter, lambda: [watcher])
    assert not watcher.starting
    watcher.processes, watcher.numprocesses = {}, 0
    assert (watcher.status(), watcher.supervision.status) == ("stopped", STOPPED)


async def test_a_process_that_exits_at_once_does_not_stop_its_watcher() -> None:
    """Circus stops a watcher that has no process when its start is complete."""
    watcher: Any = SupervisedWatcher(
        *("a", "true"), env={}, policy=RestartPolicy(), on_line=lambda line: None
    )

    async def conflict(of: Any) -> str:
        return ""

    def spawn() -> float:
        watcher.processes[1] = Process(1)
        asyncio.get_running_loop().call_soon(watcher.processes.clear)
        return 1.0

    deployment = SimpleNamespace(conflict=conflict, changed=lambda: None)
    watcher.arbiter = SimpleNamespace(
        deployment=deployment, stopping=False, reap_processes=lambda: None
    )
    watcher.spawn_process, watcher.evpub_socket = spawn, None
    await watcher._start()
    assert watcher.status() == "active"
