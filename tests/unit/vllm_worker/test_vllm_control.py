"""Sleep and wake up: the worker is registered exactly while its engine is awake."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dynamo.errors import EngineFailure, InvalidArgument, Unavailable
from dynamo.protocols import codec
from dynamo.protocols.control import CLEAR_KV_BLOCKS, EngineCommand
from dynamo.runtime import Endpoint
from dynamo.runtime.requests.stream import ServerStream
from dynamo.vllm.engine import Engine
from dynamo.vllm.operations import EngineOperations
from dynamo.worker.engine_control import EngineControl


class Recorder:
    """An engine and an endpoint; ``calls`` has what was asked of both, in order."""

    def __init__(self) -> None:
        self.info = SimpleNamespace(can_profile=True)
        self.calls: list[str] = []
        self.asleep: set[str] = set()
        self.broken = False
        self.bad_weights = False
        self.in_use = False

    async def sleep(self, level: int = 1) -> None:
        self.calls.append(f"sleep {level}")
        if self.broken:
            raise EngineFailure("no memory")
        self.asleep = {"weights", "kv_cache"}

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self.calls.append("wake up")
        self.asleep -= {"weights", "kv_cache"} if tags is None else set(tags)

    async def reload_weights(self, path: str | None = None) -> None:
        self.calls.append("reload" if path is None else f"reload {path}")
        if self.bad_weights:
            raise EngineFailure("no such tensor")

    async def is_sleeping(self) -> bool:
        return bool(self.asleep)

    async def pause(self, keeps: bool, clears: bool) -> None:
        self.calls.append(f"pause {'keep' if keeps else 'wait'}")
        if self.broken:
            raise EngineFailure("no answer")

    async def resume(self) -> None:
        self.calls.append("resume")

    async def profile(self, starts: bool, prefix: str | None) -> None:
        self.calls.append(f"profile {starts} {prefix}")

    async def reset_prefix_cache(self) -> bool:
        return not self.in_use

    def on_cleared(self) -> None:
        self.calls.append("clear")

    async def unregister_endpoint_instance(self, asleep: bool = False, waits: bool = True) -> None:
        assert asleep, "an engine that sleeps must get no requests"
        self.calls.append("leave" if waits else "leave at once")

    async def register_endpoint_instance(self) -> None:
        self.calls.append("return")


def controlled() -> tuple[Recorder, EngineControl]:
    made: Any = Recorder()
    return made, EngineControl(cast(Endpoint, made), cast(Engine, made), made.on_cleared)


async def test_leave_sleep_wake_up_return() -> None:
    recorder, control = controlled()
    assert (await control.sleep({"level": 2}))["status"] == "ok"
    assert await control.is_sleeping(None) == {"is_sleeping": True}
    await control.sleep(None)  # no effect
    await control.wake_up(None)
    assert await control.is_sleeping({}) == {"is_sleeping": False}
    slept = ["leave", "sleep 2", "clear", "wake up", "reload", "clear", "return"]
    assert recorder.calls == slept
    await control.sleep(None)
    await control.wake_up(None)
    assert recorder.calls[7:] == ["leave", "sleep 1", "clear", "wake up", "clear", "return"]


async def test_the_prefix_cache_is_cleared_unless_requests_use_it() -> None:
    recorder, control = controlled()
    stream = Stream(closed=False)
    await control._answer(cast(ServerStream, stream), codec.encode(EngineCommand(CLEAR_KV_BLOCKS)))
    assert (recorder.calls, len(stream.sent)) == (["clear"], 1)
    recorder.in_use = True
    with pytest.raises(Unavailable, match="requests use its blocks"):
        await control.clear_kv_blocks(None)
    assert recorder.calls == ["clear"]


class Stream:
    """The call of a planner, which may have given up."""

    def __init__(self, closed: bool) -> None:
        self.closed = closed
        self.sent: list[bytes] = []

    def send(self, payload: bytes) -> None:
        self.sent.append(payload)

    def end(self) -> None:
        """The answer is complete."""


@pytest.mark.parametrize("gone", [False, True])
async def test_a_command_is_not_begun_for_a_caller_that_has_gone(gone: bool) -> None:
    """A worker that was stopped reads it late: its entry says that it is awake."""
    recorder, control = controlled()
    stream = Stream(gone)
    await control._answer(cast(ServerStream, stream), codec.encode(EngineCommand("sleep")))
    assert (recorder.calls, len(stream.sent)) == (
        ([], 0) if gone else (["leave", "sleep 1", "clear"], 1)
    )


async def test_a_part_awake_gets_no_requests() -> None:
    recorder, control = controlled()
    await control.sleep(None)
    await control.wake_up({"tags": ["weights"]})
    assert recorder.calls == ["leave", "sleep 1", "clear", "wake up"]
    await control.wake_up({"tags": ["kv_cache"]})
    assert recorder.calls[-1] == "return"


async def test_an_engine_that_fails_to_sleep_goes_on() -> None:
    recorder, control = controlled()
    recorder.broken = True
    with pytest.raises(EngineFailure):
        await control.sleep(None)
    assert recorder.calls == ["leave", "sleep 1", "return"]


async def test_a_sleep_that_is_cancelled_registers_the_worker_again() -> None:
    recorder, control = controlled()
    begun = asyncio.Event()

    async def sleep(level: int = 1) -> None:
        begun.set()
        await asyncio.Event().wait()

    recorder.sleep = sleep  # type: ignore[method-assign]
    sleeping = asyncio.ensure_future(control.sleep(None))
    await begun.wait()
    sleeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeping
    assert recorder.calls == ["leave", "return"]


@pytest.mark.parametrize("body", [{"level": 3}, {"level": "1"}, {"x": 1}, [1]])
async def test_bad_bodies(body: Any) -> None:
    _, control = controlled()
    with pytest.raises(InvalidArgument):
        await control.sleep(body)
    with pytest.raises(InvalidArgument):
        await control.wake_up({"tags": ["all"]} if isinstance(body, dict) else body)


def operated() -> tuple[Recorder, EngineControl, EngineOperations]:
    recorder, control = controlled()
    stands_for_both: Any = recorder
    return recorder, control, EngineOperations(stands_for_both, stands_for_both, control)


async def test_a_paused_engine_gets_no_requests() -> None:
    recorder, control, operations = operated()
    await operations.pause(None)
    await operations.pause({"mode": "keep"})  # no effect
    assert recorder.calls == ["leave", "pause wait", "clear"]
    assert await operations.is_paused(None) == {"is_paused": True}
    for route in (control.sleep, control.wake_up):
        with pytest.raises(Unavailable, match="/engine/resume"):
            await route(None)
    await operations.resume(None)
    assert recorder.calls[3:] == ["resume", "return"]
    recorder.calls.clear()
    await operations.pause({"mode": "keep", "clear_cache": False})
    assert recorder.calls == ["leave at once", "pause keep"]


async def test_an_engine_that_cannot_be_paused_goes_on() -> None:
    recorder, control, operations = operated()
    recorder.broken = True
    with pytest.raises(EngineFailure, match="no answer"):
        await operations.pause(None)
    assert recorder.calls == ["leave", "pause wait", "resume", "return"]
    assert not control.paused


async def test_weights_are_updated_between_requests(tmp_path: Path) -> None:
    recorder, control, operations = operated()
    (tmp_path / "model.safetensors").touch()
    await operations.update_weights({"weights_path": str(tmp_path)})
    assert recorder.calls == [
        "leave", "pause wait", "clear", f"reload {tmp_path}", "resume", "return"
    ]  # fmt: skip
    recorder.calls.clear()
    recorder.bad_weights = True
    with pytest.raises(EngineFailure, match="no such tensor"):
        await operations.update_weights(None)
    assert control.paused and recorder.calls == ["leave", "pause wait", "clear", "reload"]
    recorder.bad_weights = False
    await operations.update_weights(None)
    assert recorder.calls[4:] == ["reload", "resume", "return"] and not control.paused


async def test_an_engine_that_was_paused_stays_so_with_other_weights() -> None:
    recorder, control, operations = operated()
    await operations.pause(None)
    await operations.update_weights(None)
    assert control.paused and recorder.calls[-1] == "reload"
    await operations.resume(None)
    assert not control.paused and recorder.calls[-1] == "return"


@pytest.mark.parametrize(
    ("route", "body", "words"),
    [
        ("pause", {"mode": "abort"}, "'mode' must be wait or keep, got 'abort'"),
        ("pause", {"clear_cache": 1}, "'clear_cache' must be true or false"),
        ("pause", {"other": 1}, "'mode' and 'clear_cache' alone"),
        ("resume", {"a": 1}, "must be empty"),
        ("update_weights", {"weights_path": "/nowhere"}, "'weights_path' must be a directory"),
        ("update_weights", {"weights_path": 5}, "'weights_path' must be a directory"),
        ("start_profile", {"profile_prefix": 5}, "'profile_prefix' must be a text"),
    ],
)
async def test_bodies_of_operations(route: str, body: Any, words: str) -> None:
    recorder, _, operations = operated()
    with pytest.raises(InvalidArgument, match=words):
        await getattr(operations, route)(body)
    assert recorder.calls == []


async def test_an_engine_that_sleeps_is_not_operated() -> None:
    recorder, control, operations = operated()
    await control.sleep(None)
    recorder.calls.clear()
    for route in (operations.pause, operations.resume, operations.update_weights):
        with pytest.raises(Unavailable, match="/engine/wake_up"):
            await route(None)
    assert recorder.calls == []


async def test_profiles_need_a_profiler() -> None:
    recorder, _, operations = operated()
    await operations.start_profile({"profile_prefix": "slow"})
    await operations.stop_profile(None)
    assert recorder.calls == ["profile True slow", "profile False None"]
    recorder.info.can_profile = False
    with pytest.raises(InvalidArgument, match="--profiler-config"):
        await operations.start_profile(None)
