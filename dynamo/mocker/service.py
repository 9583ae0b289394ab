"""The request handler of the simulated engine: decode, validate, choose a rank, start."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dynamo.errors import DynamoError, InvalidArgument
from dynamo.mocker.engine import EngineRank
from dynamo.mocker.reply import Reply, echo_reply, random_reply, sequence_reply
from dynamo.mocker.script import ReplyScript
from dynamo.protocols import codec
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.runtime.admission import AdmissionQueue
from dynamo.runtime.requests.stream import ServerStream

__all__ = ["DEFAULT_MAX_TOKENS", "MockerService"]

DEFAULT_MAX_TOKENS = 256
"""Reply length for a request without ``max_tokens``; less if the context is shorter."""

_DECODE = codec.decoder(PreprocessedRequest).decode


class MockerService:
    """A push handler over the ranks of one worker. ``script`` has the replies, where given."""

    def __init__(
        self,
        ranks: Sequence[EngineRank],
        admission: AdmissionQueue,
        reply: str = "random",
        script: ReplyScript | None = None,
    ) -> None:
        self.ranks = ranks
        self.admission = admission
        self._kind = reply
        self._script = script

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
        limit = request.stop_conditions.max_tokens
        if limit is None:
            limit = max(1, min(DEFAULT_MAX_TOKENS, rank.max_sequence_tokens - len(prompt)))
        if limit < 1:
            raise InvalidArgument(f"stop_conditions.max_tokens must be >= 1, got {limit}")
        if rank.prefill_only:
            return random_reply(1, request.sampling_options.seed)
        if self._script is not None:
            return self._script.reply(prompt, limit)
        seed = request.sampling_options.seed
        if self._kind == "echo":
            return echo_reply(prompt, limit, request.stop_conditions)
        if self._kind == "sequence":
            return sequence_reply(prompt, limit, seed)
        return random_reply(limit, seed)
