"""The request handler of the simulated engine: decode, validate, choose a rank, start."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence

import msgspec

from dynamo.errors import DynamoError, InvalidArgument
from dynamo.mocker.engine import EngineRank
from dynamo.mocker.replies import Reply, echo_reply, random_reply, rest_of, sequence_reply
from dynamo.mocker.script import ReplyScript
from dynamo.protocols import codec
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import GENERATED_TOKENS, PreprocessedRequest
from dynamo.runtime.endpoints.admission import AdmissionQueue
from dynamo.runtime.requests.stream import ServerStream

__all__ = ["DEFAULT_MAX_TOKENS", "MockerService"]

DEFAULT_MAX_TOKENS = 256
"""Reply length for a request without ``max_tokens``; less if the context is shorter."""

log = logging.getLogger(__name__)
_DECODE = codec.decoder(PreprocessedRequest).decode


class MockerService:
    """A push handler over the ranks of one worker. ``script`` has the replies, where given.

    A request with ``fatal_seed`` kills the process.
    """

    def __init__(
        self,
        ranks: Sequence[EngineRank],
        admission: AdmissionQueue,
        reply: str = "random",
        script: ReplyScript | None = None,
        fatal_seed: int | None = None,
    ) -> None:
        self.ranks = ranks
        self.admission = admission
        self._kind = reply
        self._script = script
        self._fatal_seed = fatal_seed

    def handle(self, stream: ServerStream, payload: bytes) -> None:
        """Answer one ``PreprocessedRequest``; an error ends the stream."""
        try:
            request = _DECODE(payload)
            rank = self._rank(request)
            reply = self._reply(request, rank)
            done = self.admission.release
            self.admission.enter(stream, lambda: rank.submit(stream, request, reply, done))
        except msgspec.MsgspecError as error:
            stream.error(InvalidArgument(f"not a request for a Tokens model: {error}"))
        except DynamoError as error:
            stream.error(error)

    def _rank(self, request: PreprocessedRequest) -> EngineRank:
        number = request.routing.dp_rank if request.routing else None
        if number is None:
            return min(self.ranks, key=lambda rank: rank.load)
        if not 0 <= number < len(self.ranks):
            raise InvalidArgument(
                f"routing.dp_rank {number} does not exist; this worker has {len(self.ranks)}"
            )
        return self.ranks[number]

    def _reply(self, request: PreprocessedRequest, rank: EngineRank) -> Reply:
        prompt = request.token_ids
        if not prompt:
            raise InvalidArgument("token_ids is empty; send at least one token")
        seed = request.sampling_options.seed
        if seed is not None and seed == self._fatal_seed:
            log.error("a request has the fatal seed %d: killing this process", seed)
            os.kill(os.getpid(), signal.SIGKILL)
        limit = request.stop_conditions.max_tokens
        if limit is None:
            limit = max(1, min(DEFAULT_MAX_TOKENS, rank.max_sequence_tokens - len(prompt)))
        if limit < 1:
            raise InvalidArgument(f"stop_conditions.max_tokens must be >= 1, got {limit}")
        if rank.prefill_only:
            return random_reply(1, seed)
        if self._script is not None or self._kind == "echo":
            return self._fixed_reply(request, limit)
        if self._kind == "sequence":
            return sequence_reply(prompt, limit, seed)
        return random_reply(limit, seed)

    def _fixed_reply(self, request: PreprocessedRequest, limit: int) -> Reply:
        """The reply to the prompt, from where it was when the request migrated here."""
        prompt, sent = _prompt_of(request)
        if self._script is not None:
            return rest_of(self._script.reply(prompt, limit + sent), sent)
        return rest_of(echo_reply(prompt, limit + sent, request.stop_conditions), sent)


def _prompt_of(request: PreprocessedRequest) -> tuple[Tokens, int]:
    """The prompt without the output that a migrated request has behind it, and that output's size.

    Raises InvalidArgument where the size is none.
    """
    ids, sent = request.token_ids, (request.extra_args or {}).get(GENERATED_TOKENS, 0)
    if not isinstance(sent, int) or not 0 <= sent < len(ids):
        raise InvalidArgument(
            f"extra_args.{GENERATED_TOKENS} must be from 0 to {len(ids) - 1}, got {sent!r:.40}"
        )
    return ids[: len(ids) - sent], sent
