"""The models on disk, as the web page lists, downloads and changes them."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError, DeadlineExceeded, InvalidArgument, Overloaded
from dynamo.frontend.ui import model_store
from dynamo.frontend.ui.model_store import ModelStore
from dynamo.operations.pull import HubHit
from dynamo.runtime.process.tasks import Tasks

NAME = "acme/tiny"


class Verbs:
    """Stands for the processes that run verbs: ``lines`` of output, then ``end`` or a failure."""

    def __init__(self) -> None:
        self.begun: list[Sequence[str]] = []
        self.ended = 0
        self.lines: list[bytes] = [b'{"done_bytes": 3, "total_bytes": 10}', b"not JSON"]
        self.go_on = asyncio.Event()
        self.result = (0, "")

    async def run(
        self, words: Sequence[str], on_line: Callable[[bytes], object]
    ) -> tuple[int, str]:
        self.begun.append(words)
        for line in self.lines:
            on_line(line)
        try:
            await self.go_on.wait()
        finally:
            self.ended += 1
        return self.result


@pytest.fixture
def verbs(monkeypatch: pytest.MonkeyPatch) -> Verbs:
    found = Verbs()
    monkeypatch.setattr(model_store, "_run", found.run)
    return found


@pytest.fixture
async def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ModelStore]:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    tasks = Tasks("test")
    yield ModelStore(RuntimeSettings(), tasks, lambda: None)
    await tasks.close()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_download_at_a_time_which_can_be_cancelled(
    store: ModelStore, verbs: Verbs
) -> None:
    assert await store.pull(NAME) == f"downloading {NAME}"
    await settled()
    assert verbs.begun == [["pull", "--json", NAME]]
    download = store.download
    assert download is not None
    assert (download.state, download.done_bytes, download.total_bytes) == ("running", 3, 10)
    with pytest.raises(ConfigError, match="is being downloaded; wait, or cancel it"):
        await store.pull("acme/other")
    with pytest.raises(InvalidArgument, match="acme/other is not being downloaded"):
        await store.cancel("acme/other")
    with pytest.raises(ConfigError, match="cancel that first"):
        await store.delete(NAME)
    assert "was cancelled" in await store.cancel(NAME)
    assert (download.state, verbs.ended) == ("cancelled", 1)
    await store.pull("acme/other")


async def test_a_failure_is_shown_without_the_name_of_the_verb(
    store: ModelStore, verbs: Verbs
) -> None:
    verbs.result = (2, "dynamo pull: it needs 9.0 GB more, and 1.0 GB are free")
    verbs.go_on.set()
    await store.pull(NAME)
    await settled()
    assert store.download is not None and store.download.state == "failed"
    (outcome,) = store.outcomes
    assert outcome.failed and outcome.text == "it needs 9.0 GB more, and 1.0 GB are free"


@pytest.mark.parametrize(
    "name", ["", "--help", "no such model", "~no-such-user/x", "~no-such-user/x.gguf", "a" * 5000]
)
async def test_what_is_no_model_is_refused(store: ModelStore, verbs: Verbs, name: str) -> None:
    for action in (store.pull, store.add):
        with pytest.raises((ConfigError, InvalidArgument)):
            await action(name)
    assert verbs.begun == []


async def test_without_a_deployment_nothing_is_added(store: ModelStore, verbs: Verbs) -> None:
    for action in (store.add, store.remove):
        with pytest.raises(ConfigError, match="no deployment runs in namespace 'dynamo'"):
            await action(NAME)
    assert verbs.begun == []


async def test_a_search_that_hangs_is_left_alone(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them at most: no other search waits behind them."""
    go_on = threading.Event()

    def hang(text: str) -> list[HubHit]:
        go_on.wait(60)
        raise OSError("too late")

    monkeypatch.setattr(model_store, "find_on_hub", hang)
    monkeypatch.setattr(model_store, "_DEADLINE_S", 0.05)
    try:
        for _ in range(2):
            with pytest.raises(DeadlineExceeded, match="the search took more than"):
                await store.find("tiny")
        with pytest.raises(Overloaded, match="have not ended"):
            await store.find("tiny")
    finally:
        go_on.set()


async def test_a_verb_that_does_not_end_is_killed_when_the_frontend_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    ignoring = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    program.write_text(
        f"#!{sys.executable}\nimport os, signal, time\n{ignoring}\n"
        "print(os.getpid(), flush=True)\ntime.sleep(600)\n"
    )
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    pid: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    tasks = Tasks("test")
    running = tasks.spawn(model_store._run(["pull"], lambda line: pid.set_result(int(line))))
    async with asyncio.timeout(60):
        number = await pid
        running.cancel()  # by the button
        await settled()
        await tasks.close()
        with pytest.raises(ProcessLookupError):
            while True:
                os.kill(number, 0)
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # the loop closes its ends of the pipes


async def test_a_second_click_on_cancel_waits_for_the_first(
    store: ModelStore, verbs: Verbs, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = asyncio.Event()
    cancelled = 0

    async def run(words: Sequence[str], on_line: Callable[[bytes], object]) -> tuple[int, str]:
        nonlocal cancelled
        try:
            await asyncio.Event().wait()
        finally:
            try:
                await ended.wait()
            except asyncio.CancelledError:
                cancelled += 1
        raise AssertionError

    monkeypatch.setattr(model_store, "_run", run)
    await store.pull(NAME)
    await settled()
    tasks = Tasks("clicks")
    clicks = [tasks.spawn(store.cancel(NAME)) for _ in range(2)]
    await settled()
    assert not cancelled and not any(one.done() for one in clicks)
    ended.set()
    assert all(["was cancelled" in await one for one in clicks])
