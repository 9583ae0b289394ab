"""The load of a soak: a trace, over and over, and the answer that each request must get."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from array import array
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from chaos_load import pause
from history import Answer, Request
from recording_client import CANCEL_STAGES, Plan, RecordingClient

from dynamo.bench.trace import read_trace
from dynamo.bench.workload import PlannedRequest, Prompts, from_trace
from dynamo.http.client import Target
from dynamo.mocker.replies import sequence_reply

__all__ = ["Answers", "TraceLoad"]

REQUEST_TIMEOUT_S = 60.0
CANCELLED_SHARE = 0.1
ELDER_SHARE = 0.34
MOST_IN_FLIGHT = 400
"""Arrivals beyond wait, and are counted as late."""


class Answers:
    """What ``reply: sequence`` of the mock engine answers, computed from the request."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
        config = json.loads((model / "tokenizer_config.json").read_text())
        template = jinja2.Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        ).from_string(config["chat_template"])
        messages = [{"role": "user", "content": "\0"}]
        text = template.render(messages=messages, add_generation_prompt=True)
        self._before, _, self._after = text.partition("\0")

    def answer(self, api: str, body: dict[str, Any]) -> Answer:
        """Return the complete answer to one choice."""
        text = body.get("prompt") or (self._before + body["messages"][0]["content"] + self._after)
        ids = array("I", self._tokenizer.encode(text, add_special_tokens=False).ids)
        reply = sequence_reply(ids, body["max_tokens"])
        tokens = list(islice(reply.ids, reply.length))
        said = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return Answer(said, reply.finish_reason, len(ids), reply.length)


class TraceLoad:
    """Sends the requests of the trace at their times over and over until :meth:`stop`.

    Each repetition has prompts of its own, so that caches meet new blocks for as long as it lasts.
    """

    def __init__(
        self,
        path: Path,
        target: Target,
        seed: int,
        clock: Callable[[], float],
        on_done: Callable[[Request], None],
        *,
        speed: float,
        block_tokens: int,
        output_scale: float,
        model: Path,
    ) -> None:
        self._planned = from_trace(
            read_trace(path),
            block_tokens=block_tokens,
            speedup=speed,
            output_scale=output_scale,
        )
        self.period_s = (self._planned[-1].at_s or 0.0) + 3.0 / speed
        self._target = target
        self._seed = seed
        self._clock = clock
        self._on_done = on_done
        self._answers = Answers(model)
        self._idle: list[RecordingClient] = []
        self._slots = asyncio.Semaphore(MOST_IN_FLIGHT)
        self._stopping = asyncio.Event()
        self.sent = 0
        self.in_flight = 0
        self.most_late_s = 0.0

    def stop(self) -> None:
        """Begin no more requests."""
        self._stopping.set()

    async def run(self) -> None:
        """Run until all requests have ended after :meth:`stop`."""
        begin_s = self._clock()
        async with asyncio.TaskGroup() as group:
            for number, at_s, plan in self._plans():
                late_s = self._clock() - begin_s - at_s
                self.most_late_s = max(self.most_late_s, late_s)
                if late_s < 0:
                    await pause(self._stopping, -late_s)
                await self._slots.acquire()
                if self._stopping.is_set():
                    break
                self.sent = number + 1
                group.create_task(self._one(plan))
        for client in self._idle:
            client.close()

    def _plans(self) -> Iterator[tuple[int, float, Plan]]:
        numbers = itertools.count()
        for repetition in itertools.count():
            prompts = Prompts(seed=self._seed * 1000 + repetition, cache_segments=1024)
            for planned in self._planned:
                number = next(numbers)
                at_s = repetition * self.period_s + (planned.at_s or 0.0)
                yield number, at_s, self._plan(number, prompts, planned)

    def _plan(self, number: int, prompts: Prompts, planned: PlannedRequest) -> Plan:
        dice = random.Random(f"{self._seed}/{number}")
        api = dice.choice(("chat", "completions"))
        text = prompts.text(planned.segments)
        body: dict[str, Any] = {
            "model": "elder" if dice.random() < ELDER_SHARE else "tiny",
            "max_tokens": planned.output_tokens,
            "temperature": 0,
        }
        if api == "chat":
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        answer = self._answers.answer(api, body)
        cancel = dice.choice(CANCEL_STAGES) if dice.random() < CANCELLED_SHARE else ""
        if dice.random() < 0.8 or cancel in CANCEL_STAGES[2:]:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return Plan(f"{number}", api, body, answer, cancel, dice.randrange(1, 30))

    async def _one(self, plan: Plan) -> None:
        client = self._idle.pop() if self._idle else RecordingClient(self._target, self._clock)
        self.in_flight += 1
        try:
            self._on_done(await client.perform(plan, REQUEST_TIMEOUT_S))
        finally:
            self.in_flight -= 1
            self._slots.release()
        # Every tenth connection is not kept, as clients come and go.
        if client.usable and len(self._idle) < 64 and int(plan.id) % 10:
            self._idle.append(client)
        else:
            client.close()
