"""What `dynamo serve` reports while it waits, and what "ready" counts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.config.runtime import RuntimeSettings
from dynamo.llm import ModelInput, ModelType, register_model
from dynamo.runtime import DistributedRuntime
from dynamo.serve import startup
from dynamo.serve.graph.watchers import DeploymentPlan, WatcherSpec
from dynamo.serve.startup import StartupReport
from dynamo.serve.state.registered import Leases
from dynamo.serve.supervision.output import LogFile, ServiceOutput

MODEL = Path(__file__).resolve().parents[3] / "examples/model"


class Announcements:
    """An announcer and an arbiter with the watchers ``names``."""

    stopping = False

    def __init__(self, *names: str) -> None:
        self.texts: list[str] = []
        self.said = asyncio.Event()
        self.watchers = [SimpleNamespace(name=n, given_up=None, deaths=0) for n in names]
        self.processes: dict[str, list[Any]] = {name: [] for name in names}

    def announce(self, text: str, level: int = 0) -> None:
        self.texts.append(text)
        self.said.set()

    def output(self, watcher: str, line: bytes) -> None:
        """Drop the output."""

    def alive(self) -> dict[str, list[Any]]:
        return self.processes


def spec(name: str, module: str) -> WatcherSpec:
    return WatcherSpec(
        name=name, service=name, argv=("python", "-m", module),
        env={"DYN_DISCOVERY_BACKEND": "file"}, working_dir="/", graceful_timeout_s=1,
    )  # fmt: skip


def report(tmp_path: Path, arbiter: Any, *specs: WatcherSpec, leases: Any = None) -> StartupReport:
    plan = DeploymentPlan(
        namespace="ns", specs=specs, config={}, gpu_ids=(), endpoint="e", pubsub_endpoint="p"
    )
    return StartupReport(plan, tmp_path, arbiter, lambda name: f"last of {name}", arbiter, leases)


async def first_reminder(made: StartupReport, arbiter: Announcements, leases: Leases) -> str:
    """Run the report until it reminds of what is not ready; return the text."""
    running = asyncio.ensure_future(made.run())
    async with asyncio.timeout(10):
        await arbiter.said.wait()
    running.cancel()
    await asyncio.wait([running])
    leases.close()
    return arbiter.texts[0]


def test_the_last_line_is_plain_text(tmp_path: Path) -> None:
    log_file = LogFile(tmp_path / "log", 10**6)
    with contextlib.closing(ServiceOutput("W", log_file, Announcements())) as output:
        assert output.last_line() == ""
        for line in (b"first", b"\x1b[32mLoading:  0%\rLoading: 50%\x1b[0m " + b"x" * 1500, b" "):
            output(line)
        assert output.last_line() == "Loading: 50% " + "x" * 987


async def test_the_reminder_names_what_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "_REMIND_EVERY_S", 0.05)
    arbiter = Announcements("ns_A", "ns_B")
    arbiter.processes["ns_A"] = [SimpleNamespace(pid=os.getpid())]
    leases = Leases(tmp_path / "store", lambda: None)
    made = report(
        tmp_path, arbiter, spec("ns_A", "dynamo.vllm"), spec("ns_B", "dynamo.attach"), leases=leases
    )
    first, *rest = (await first_reminder(made, arbiter, leases)).split("\n  ")
    assert first.startswith("not ready after ")
    assert first.endswith("1 of 2 processes are running; still waiting")
    assert rest == [
        "ns_A: loading; last output: last of ns_A",
        "ns_B: not running; last output: last of ns_B",
    ]


async def test_the_reminder_leaves_out_workers_that_were_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "_REMIND_EVERY_S", 0.05)
    arbiter, leases = Announcements("ns_A"), Leases(tmp_path / "store", lambda: None)
    made = report(
        tmp_path, arbiter, spec("ns_A", "dynamo.vllm"), spec("ns_B", "dynamo.vllm"), leases=leases
    )
    text = await first_reminder(made, arbiter, leases)
    assert "ns_A: not running" in text and "ns_B" not in text


def test_what_failed_is_named(tmp_path: Path) -> None:
    arbiter = Announcements("ns_A", "ns_B", "ns_C")
    arbiter.watchers[0].given_up = "5 deaths within 60 s"
    arbiter.watchers[1].deaths = 2
    made = report(
        tmp_path, arbiter, spec("ns_A", "dynamo.vllm"), leases=SimpleNamespace(different=dict)
    )
    assert made._failures() == ["given up: ns_A", "restarted: ns_B (2 exits)"]


async def test_a_model_card_makes_a_worker_ready(tmp_path: Path) -> None:
    """A lease alone does not: an engine holds one while it loads the model."""
    changes = asyncio.Event()
    leases = Leases(tmp_path / "store", changes.set)
    settings = RuntimeSettings(
        namespace="ns", file_kv=str(tmp_path / "store"), state_dir=str(tmp_path / "state")
    )
    runtime = DistributedRuntime(asyncio.get_running_loop(), settings)
    try:
        async with asyncio.timeout(20):
            await runtime.start()
            await runtime.granted()
            session = os.getsid(0)
            assert session in leases.by_session() and not leases.with_model()
            changes.clear()
            endpoint = runtime.endpoint("ns.backend.generate")
            await register_model(ModelInput.Tokens, ModelType.Chat, endpoint, str(MODEL))
            while session not in leases.served:
                await changes.wait()
                changes.clear()
            assert leases.with_model() == {session}
    finally:
        await runtime.close()
        leases.close()
    assert leases.served == {session} and not leases.with_model()
    leases.keep([session])
    assert leases.served == {session}
    leases.keep([])
    assert leases.served == set()


async def test_different_models_of_one_name_are_announced(tmp_path: Path) -> None:
    """Both are registered and healthy, but the frontend gives requests to one of them only."""
    other = shutil.copytree(MODEL, tmp_path / "other")
    (other / "chat_template.jinja").write_text("{{ messages }}")
    arbiter = Announcements("ns_A", "ns_B")
    arbiter.processes["ns_A"] = [SimpleNamespace(pid=os.getsid(0))]
    leases = Leases(tmp_path / "store", lambda: None)
    settings = RuntimeSettings(
        namespace="ns", file_kv=str(tmp_path / "store"), state_dir=str(tmp_path / "state")
    )
    runtimes = [DistributedRuntime(asyncio.get_running_loop(), settings) for _ in range(2)]
    try:
        for runtime, model in zip(runtimes, (MODEL, other), strict=True):
            assert leases.different() == {}
            endpoint = runtime.endpoint("ns.backend.generate")
            await register_model(
                ModelInput.Tokens, ModelType.Chat, endpoint, str(model), model_name="m"
            )
        assert leases.different() == {"m": {os.getsid(0)}}
        made = report(tmp_path, arbiter, spec("ns_A", "dynamo.mocker"), leases=leases)
        made._announce_ready("ready: x")
    finally:
        for runtime in runtimes:
            await runtime.close()
        leases.close()
    assert "ready: x   different models named m: ns_A, of which some get" in arbiter.texts[0]
