"""The request handler of a vLLM worker: decode, admit, submit to the engine."""

from __future__ import annotations

import msgspec

from dynamo.errors import DynamoError, InvalidArgument
from dynamo.protocols import codec
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.runtime.endpoints.admission import AdmissionQueue
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.requests.stream import ServerStream
from dynamo.vllm.engine import Engine
from dynamo.vllm.response import EngineResponse

__all__ = ["VllmService"]

_DECODE = codec.decoder(PreprocessedRequest).decode


class VllmService:
    """A push handler over one engine; ``prefill_only`` answers with transfer parameters."""

    def __init__(
        self, engine: Engine, admission: AdmissionQueue, tasks: Tasks, prefill_only: bool = False
    ) -> None:
        self.engine = engine
        self.admission = admission
        self.tasks = tasks
        self.prefill_only = prefill_only

    def handle(self, stream: ServerStream, payload: bytes) -> None:
        """Answer one ``PreprocessedRequest``; an error ends the stream."""
        try:
            request = _DECODE(payload)
            rank = self._rank(request)
            self.admission.enter(stream, lambda: self._start(stream, request, rank))
        except msgspec.MsgspecError as error:
            stream.error(InvalidArgument(f"not a request for a Tokens model: {error}"))
        except DynamoError as error:
            stream.error(error)

    def abort(self, response: EngineResponse) -> None:
        """Stop the request of ``response`` in the engine."""
        if response.id is not None:
            self.engine.abort(response.id)

    def pass_tokens(self, response: EngineResponse) -> None:
        """Let the engine send plain tokens to the stream of ``response``."""
        if response.id is not None:
            self.engine.pass_tokens(response.id, response.stream, response.hold)

    def stop_passing(self, response: EngineResponse) -> int:
        """Get all steps again; return the number of tokens that the stream got directly."""
        return 0 if response.id is None else self.engine.stop_passing(response.id)

    def _rank(self, request: PreprocessedRequest) -> int | None:
        number = request.routing.dp_rank if request.routing else None
        ranks = self.engine.info.data_parallel_size
        if number is not None and not 0 <= number < ranks:
            raise InvalidArgument(
                f"routing.dp_rank {number} does not exist; this worker has {ranks}"
            )
        return number if ranks > 1 else None

    def _start(self, stream: ServerStream, request: PreprocessedRequest, rank: int | None) -> None:
        response = EngineResponse(stream, self, len(request.token_ids), self.admission.release)
        response.prefill_only = self.prefill_only
        try:
            response.id = self.engine.submit(request, response, rank)
        except BaseException as error:
            self.admission.release()
            if not isinstance(error, DynamoError):
                raise  # it becomes the stream's error
            stream.error(error)
            return
        stream.context.on_cancel(response.cancel)
