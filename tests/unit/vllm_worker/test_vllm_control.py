"""Sleep and wake up: the worker is registered exactly while its engine is awake."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from dynamo.errors import EngineFailure, InvalidArgument, Unavailable
from dynamo.protocols import codec
from dynamo.protocols.control import CLEAR_KV_BLOCKS, EngineCommand
from dynamo.runtime import Endpoint
from dynamo.runtime.requests.stream import ServerStream
from dynamo.vllm.engine import Engine
from dynamo.worker.engine_control import EngineControl


class Recorder:
    """An engine and an endpoint; ``calls`` has what was asked of both, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.asleep: set[str] = set()
        self.broken = False
        self.in_use = False

    async def sleep(self, level: int = 1) -> None:
        self.calls.append(f"sleep {level}")
        if self.broken:
            raise EngineFailure("no memory")
        self.asleep = {"weights", "kv_cache"}

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self.calls.append("wake up")
        self.asleep -= {"weights", "kv_cache"} if tags is None else set(tags)

    async def reload_weights(self) -> None:
        self.calls.append("reload")

    async def is_sleeping(self) -> bool:
        return bool(self.asleep)

    async def reset_prefix_cache(self) -> bool:
        return not self.in_use

    def on_cleared(self) -> None:
        self.calls.append("clear")

    async def unregister_endpoint_instance(self, asleep: bool = False) -> None:
        assert asleep, "an engine that sleeps must get no requests"
        self.calls.append("leave")

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
