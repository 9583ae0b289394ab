"""What a request calls on its answer, however the answer is made: generated here, or relayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from dynamo.errors import DynamoError
from dynamo.frontend.answer.generation import Usage
from dynamo.protocols.engine import EngineOutput

__all__ = ["Answer", "AnswerChoice"]


class AnswerChoice(Protocol):
    """One choice of an answer; see :class:`Choice`."""

    def push(self, output: EngineOutput, /) -> bool:
        """Add an engine output; return whether the choice is finished."""

    def close(self) -> None:
        """The engine's stream of the choice has ended. Idempotent."""


class Answer(Protocol):
    """From what a worker sends to what the client reads; see :class:`GenerationStream`.

    ``final_usage`` is set once the counts are final; ``worker_id`` is shown to clients that ask for
    it.
    """

    final_usage: Usage | None
    worker_id: dict[str, Any] | None

    @property
    def choices(self) -> Sequence[AnswerChoice]:
        """One for each engine request."""

    def opening(self) -> bytes:
        """The bytes before the first output of a stream; often none."""

    def flush(self) -> bytes:
        """The bytes of everything pushed since the last time."""

    def end(self) -> bytes:
        """The last bytes of a stream."""

    def error(self, error: DynamoError, /) -> bytes:
        """The last bytes of a stream that failed."""

    def unary(self) -> bytes:
        """The whole answer as one body."""

    def usage(self) -> Usage:
        """The tokens so far."""
