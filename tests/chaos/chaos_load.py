"""The load of a chaos run: a pool of requests with known answers, and clients that draw from it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import orjson
from history import Answer, Request
from recording_client import CANCEL_STAGES, Plan, RecordingClient

from dynamo.http.client import Target

__all__ = ["Load", "PoolEntry", "ask_answers", "make_pool", "pause"]

REQUEST_TIMEOUT_S = 60.0
CANCELLED_SHARE = 0.2
LENGTHS = (1, 4, 16, 40, 80, 160, 320)
PROMPT_WORDS = (3, 20, 80, 300, 1200)
_WORDS = ("the", "water", "city", "field", "issue", "member", "help", "may", "other", "time")


class PoolEntry(NamedTuple):
    """A request body without its stream fields, and its complete answer."""

    api: str
    body: dict[str, Any]
    answer: Answer


def make_pool(seed: int, size: int = 48) -> list[tuple[str, dict[str, Any]]]:
    """Return (api, body) of requests with prompts and answers of different lengths."""
    dice = random.Random(f"pool {seed}")
    pool = []
    for number in range(size):
        words = dice.choice(PROMPT_WORDS)
        # Numbered, so that a repetition or a loss is visible; the first words are shared by some
        # prompts, which then meet the blocks that others left in the caches.
        shared = number % 3
        text = f"prompt {shared}: " + " ".join(
            f"{dice.choice(_WORDS) if at > words // 2 else _WORDS[at % len(_WORDS)]} {at}"
            for at in range(words)
        )
        length = LENGTHS[number % len(LENGTHS)]
        body: dict[str, Any] = {"model": "tiny", "max_tokens": length, "temperature": 0}
        if number % 2:
            body["messages"] = [{"role": "user", "content": f"{text} ({number})"}]
        else:
            body["prompt"] = f"{text} ({number})"
        pool.append(("chat" if number % 2 else "completions", body))
    return pool


async def ask_answers(
    target: Target, pool: list[tuple[str, dict[str, Any]]], clock: Callable[[], float]
) -> list[PoolEntry]:
    """Ask for every complete answer, before the faults begin."""
    unknown = Answer("", "", 0, 0)
    slots = asyncio.Semaphore(16)

    async def ask(number: int, api: str, body: dict[str, Any]) -> PoolEntry:
        client = RecordingClient(target, clock)
        async with slots:
            record = await client.perform(Plan(f"answer {number}", api, body, unknown), 60)
        client.close()
        text = "".join(event.text for event in record.events if event.kind == "text")
        reason = next((event.text for event in record.events if event.kind == "finish"), "")
        usage = next((event.usage for event in record.events if event.usage), (0, 0))
        if record.status != 200 or not reason:
            raise RuntimeError(f"no answer before the first fault: {record}")
        return PoolEntry(api, body, Answer(text, reason, *usage))

    return await asyncio.gather(*(ask(number, *one) for number, one in enumerate(pool)))


async def pause(stopping: asyncio.Event, seconds: float) -> None:
    """Sleep, but not beyond the event."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stopping.wait()


class Load:
    """``clients`` clients, each with one request after the other, until :meth:`stop`.

    ``on_done`` gets every history. What client ``c`` sends as its ``n``-th request depends on the
    seed alone.
    """

    def __init__(
        self,
        target: Target,
        pool: list[PoolEntry],
        seed: int,
        clock: Callable[[], float],
        on_done: Callable[[Request], None],
    ) -> None:
        self._target = target
        self._pool = pool
        self._seed = seed
        self._clock = clock
        self._on_done = on_done
        self._stopping = asyncio.Event()

    async def run(self, clients: int) -> None:
        """Run until all clients have ended their last request after :meth:`stop`."""
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._client(number))

    def stop(self) -> None:
        """Begin no more requests."""
        self._stopping.set()

    async def _client(self, number: int) -> None:
        connection = RecordingClient(self._target, self._clock)
        sent = 0
        while not self._stopping.is_set():
            dice = random.Random(f"{self._seed}/{number}/{sent}")
            plan = self._plan(dice, f"{number}-{sent}")
            sent += 1
            record = await connection.perform(plan, REQUEST_TIMEOUT_S)
            self._on_done(record)
            if not connection.usable or dice.random() < 0.3:
                connection.close()
                connection = RecordingClient(self._target, self._clock)
            # A client backs off after a failure, as SDKs do.
            failed = record.ending in ("refused", "closed") or record.status >= 500
            await pause(
                self._stopping, dice.uniform(0.5, 1.0) if failed else dice.uniform(0.0, 0.2)
            )
        connection.close()

    def _plan(self, dice: random.Random, name: str) -> Plan:
        entry = dice.choice(self._pool)
        body = dict(entry.body)
        cancel = dice.choice(CANCEL_STAGES) if dice.random() < CANCELLED_SHARE else ""
        stream = dice.random() < 0.7 or cancel in CANCEL_STAGES[2:]
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if dice.random() < 0.1:
            body["n"] = 2
        after = dice.randrange(1, 30)
        return Plan(name, entry.api, orjson.loads(orjson.dumps(body)), entry.answer, cancel, after)
