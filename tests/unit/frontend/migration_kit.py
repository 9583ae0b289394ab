"""Workers whose every token depends on all tokens before it, and faults at any point.

A request that continues on another worker gets the same answer as one without a fault only if no
token was lost, repeated or reordered, and all limits were adjusted.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Sequence
from typing import Any

from test_request import Stream
from test_reroute import Fleet

from dynamo.errors import (
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoError,
    EngineShutdown,
    StreamIncomplete,
    WorkerLeaving,
)
from dynamo.frontend.requests.dispatch import Dispatch
from dynamo.frontend.requests.errors import BackendSilent
from dynamo.frontend.requests.migration import MigrationMetrics, Migrations
from dynamo.protocols.engine import (
    CompletionUsage,
    EngineOutput,
    PreprocessedRequest,
    PromptTokensDetails,
)

LIMIT = 3
BROKEN: tuple[type[DynamoError], ...] = (
    BackendSilent,
    ConnectionTimeout,
    Disconnected,
    EngineShutdown,
    StreamIncomplete,
)
UNSENT: tuple[type[DynamoError], ...] = (CannotConnect, WorkerLeaving)


class MigratingFleet(Fleet):
    """A fleet whose requests may migrate."""

    def __init__(
        self,
        workers: int = 4,
        limit: int = LIMIT,
        max_seq_len: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(workers, **settings)
        self._opened = asyncio.Event()
        metrics = MigrationMetrics(self.metrics, "tiny")
        self.migrations = Migrations(limit, max_seq_len, metrics)
        self.entry.dispatch = Dispatch(self, self, None, self.migrations)  # type: ignore[arg-type]

    def open(self, worker_id: int, payload: bytes, sink: Any, headers: Any) -> Any:
        self._opened.set()
        return super().open(worker_id, payload, sink, headers)

    async def opened(self, count: int) -> None:
        """Wait until workers have got ``count`` requests."""
        async with asyncio.timeout(30):
            while len(self.streams) < count:
                self._opened.clear()
                await self._opened.wait()

    def settled(self) -> None:
        assert len(self.entry.dispatch._trials) == 0
        super().settled()

    def migrated(self, kind: str = "ongoing_request") -> float:
        name = "dynamo_frontend_model_migration_total"
        return self.sample(name, model="tiny", migration_type=kind)


def next_token(ids: Sequence[int], seed: int | None, vocabulary: int) -> int:
    """The token after ``ids``."""
    text = f"{seed}:{','.join(map(str, ids))}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest()) % vocabulary


class Worker:
    """The engine of one stream: it sends its answer in pieces of random sizes."""

    def __init__(self, stream: Stream, vocabulary: int, dice: random.Random) -> None:
        self.stream = stream
        self.request: PreprocessedRequest = stream.request
        self.dice = dice
        self.vocabulary = vocabulary
        self.ids = self.request.token_ids.tolist()
        self.sent = 0
        self.done = False

    @property
    def active(self) -> bool:
        return not self.done and not self.stream.killed

    def step(self) -> None:
        """Send one item; the last one has the finish reason, and the stream ends."""
        item = EngineOutput()
        if self.request.output_options.logprobs is not None:
            item.log_probs, item.top_logprobs = [], []
        if not self.sent and self.request.output_options.prompt_logprobs is not None:
            item.extra_args = {"prompt_logprobs": self._prompt_rows()}
        # Tokens behind a stop string in the same item count: with one in each, none are.
        pieces = (1,) if self.request.stop_conditions.stop else (1, 1, 1, 2, 5)
        for _ in range(self.dice.choice(pieces)):
            self._add(item)
            if item.finish_reason is not None:
                item.completion_usage = self._usage()
                break
        self.stream.say(item.token_ids, **_rest(item))
        if item.finish_reason is not None:
            self.done = True
            self.stream.sink.on_end()

    def fail(self, error: DynamoError) -> None:
        self.done = True
        self.stream.sink.on_error(error)

    def _add(self, item: EngineOutput) -> None:
        stop = self.request.stop_conditions
        token = next_token(self.ids, self.request.sampling_options.seed, self.vocabulary)
        item.token_ids.append(token)
        if item.log_probs is not None and item.top_logprobs is not None:
            logprob = -(token % 97) / 7 - len(self.ids) / 1000
            item.log_probs.append(logprob)
            item.top_logprobs.append([{"token_id": token, "logprob": logprob, "rank": 1}])
        self.ids.append(token)
        self.sent += 1
        ends = {*(stop.stop_token_ids or ()), *(stop.stop_token_ids_hidden or ())}
        if token in ends and self.sent > (stop.min_tokens or 0):
            item.finish_reason, item.stop_reason = "stop", token
        elif self.sent == stop.max_tokens:
            item.finish_reason = "length"

    def _prompt_rows(self) -> list[Any]:
        rows = [[{"token_id": each, "logprob": -0.5, "rank": 1}] for each in self.ids[1:]]
        return [None, *rows]

    def _usage(self) -> CompletionUsage:
        prompt = len(self.request.token_ids)
        details = PromptTokensDetails(cached_tokens=1)
        return CompletionUsage(prompt, self.sent, prompt + self.sent, details)


def _rest(item: EngineOutput) -> dict[str, Any]:
    names = ("log_probs", "top_logprobs", "extra_args", "finish_reason", "stop_reason")
    found = {name: getattr(item, name) for name in (*names, "completion_usage")}
    return {name: value for name, value in found.items() if value is not None}
