"""The response to one request: tokens become response items, cancellation frees its blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from dynamo.mocker.metrics import MockerMetrics
from dynamo.mocker.scheduler import Sequence
from dynamo.protocols import codec
from dynamo.protocols.engine import EngineOutput
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.requests.context import CancelKind
from dynamo.runtime.requests.stream import ServerStream
from dynamo.worker.items import token_item, usage

__all__ = ["EngineHooks", "Responder"]


class EngineHooks(Protocol):
    """The functions of an engine rank that a responder calls."""

    metrics: MockerMetrics
    tasks: Tasks

    def abort(self, sequence: Sequence) -> None:
        """Remove ``sequence`` and free its blocks."""

    def transfer(self, sequence: Sequence) -> None:
        """Fetch the prompt's blocks from the prefill worker."""

    def transfer_params(self, sequence: Sequence) -> dict[str, Any] | None:
        """Return what the decode worker needs for the transfer; None from other ranks."""

    def pause(self, sequence: Sequence, paused: bool) -> None:
        """Pause or resume ``sequence``."""


class Responder:
    """Sends the tokens of one sequence; implements ``scheduler.Output``."""

    __slots__ = ("_done", "_engine", "_on_done", "_started", "sequence", "stream")

    sequence: Sequence

    def __init__(
        self, stream: ServerStream, engine: EngineHooks, on_done: Callable[[], None]
    ) -> None:
        self.stream = stream
        self._engine = engine
        self._on_done = on_done
        self._done = False
        self._started = asyncio.get_running_loop().time()

    def allocated(self) -> None:
        """Start the transfer of a prompt that a prefill worker computed."""
        self._engine.transfer(self.sequence)

    def token(self, token_id: int) -> None:
        """Send one token; pause the sequence if the reader is slow."""
        stream = self.stream
        stream.send(token_item(token_id))
        if self.sequence.generated == 1:
            self._engine.metrics.first_token(self._started)
        if stream.above_high_water and not self.sequence.paused:
            self._engine.pause(self.sequence, True)
            self._engine.tasks.spawn(self._resume(), name="slow reader")

    def finish(self, token_id: int, reason: str) -> None:
        """Send the last token with the reason and the usage, and end the stream."""
        if self.sequence.generated == 1:
            self._engine.metrics.first_token(self._started)
        self._end([token_id], reason)

    def cancel(self, kind: CancelKind) -> None:
        """Free the blocks at once: the client stopped the request or disconnected."""
        if self._done:
            return
        self._engine.abort(self.sequence)
        self._end([], "cancelled")

    def _end(self, token_ids: list[int], reason: str) -> None:
        self._done = True
        stream = self.stream
        if not stream.closed:
            item = EngineOutput(
                token_ids=token_ids,
                finish_reason=reason,
                completion_usage=usage(
                    self.sequence.prompt_tokens,
                    self.sequence.generated,
                    self.sequence.cached_tokens,
                ),
                disaggregated_params=self._engine.transfer_params(self.sequence),
            )
            stream.send(codec.encode(item))
            stream.end()
        self._engine.metrics.finished(self._started)
        self._on_done()

    async def _resume(self) -> None:
        await self.stream.drained()
        self._engine.pause(self.sequence, False)
