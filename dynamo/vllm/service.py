"""The request handler of a vLLM worker: from a request to the engine's steps as items."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from dynamo.errors import DynamoError, InvalidArgument
from dynamo.protocols import codec
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import (
    KV_TRANSFER,
    EngineOutput,
    PreprocessedRequest,
    token_item,
    usage,
)
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.requests.admission import AdmissionQueue
from dynamo.runtime.requests.context import CancelKind
from dynamo.runtime.requests.stream import ServerStream
from dynamo.vllm.engine import Engine, EngineStep, OutputSink

_DECODE = codec.decoder(PreprocessedRequest).decode
_REASONS = {"stop": "stop", "length": "length", "abort": "cancelled"}
_FAILED = "error"


def sample_rows(tensors: Any) -> tuple[list[float], list[list[dict[str, Any]]] | None]:
    """Return the log probability and the alternatives of each new token.

    The alternatives are None where none were requested.

    A row has the token itself first and then the most likely ones, so a request for N alternatives
    has N + 1 columns.
    """
    ids, logprobs = tensors[0].tolist(), tensors[1].tolist()
    own = [row[0] for row in logprobs]
    if not ids or len(ids[0]) < 2:
        return own, None
    top = [
        [
            {"rank": rank, "token_id": token_id, "logprob": logprob}
            for rank, (token_id, logprob) in enumerate(
                zip(row_ids[1:], row[1:], strict=True), start=1
            )
        ]
        for row_ids, row in zip(ids, logprobs, strict=True)
    ]
    return own, top


def prompt_rows(tensors: Any) -> list[list[dict[str, Any]]]:
    """Return one list per prompt token, that token first with its rank, then the alternatives."""
    ids, logprobs, ranks = tensors[0].tolist(), tensors[1].tolist(), tensors[2].tolist()
    return [
        [
            {"rank": rank if column == 0 else column, "token_id": token_id, "logprob": logprob}
            for column, (token_id, logprob) in enumerate(zip(row_ids, row, strict=True))
        ]
        for row_ids, row, rank in zip(ids, logprobs, ranks, strict=True)
    ]


class EngineResponse(OutputSink):
    """Sends the tokens of one request.

    Items of a client that does not read are held back, at most one request's output, and are sent
    when it reads again.

    :meth:`on_output` is the token path. A step with one token and nothing else is sent from a cache
    of encoded items; all steps of one engine message leave in one write per connection.
    """

    __slots__ = (
        "_cached",
        "_ended",
        "_expansions",
        "_fast",
        "_held",
        "_on_done",
        "_owner",
        "_passed",
        "_prompt",
        "_prompt_logprobs",
        "_tokens",
        "id",
        "prefill_only",
        "stream",
    )

    def __init__(
        self,
        stream: ServerStream,
        owner: VllmService,
        prompt_tokens: int,
        on_done: Callable[[], None],
    ) -> None:
        self.stream = stream
        self.id: str | None = None
        self.prefill_only = False
        self._owner = owner
        self._on_done = on_done
        self._prompt = prompt_tokens
        self._tokens = 0
        self._cached = 0
        self._fast = False  # until the first step, which has the prompt's statistics
        self._held: list[bytes] | None = None
        self._passed = False  # the engine sends plain tokens to the stream
        self._prompt_logprobs: list[Any] | None = None
        self._expansions: list[Tokens] | None = None
        self._ended = False

    def on_output(self, output: EngineStep) -> None:
        """Send what a step produced."""
        ids = output.new_token_ids
        if self._fast and output.finish_reason is None and len(ids) == 1:
            self._tokens += 1
            stream = self.stream
            stream.send(token_item(ids[0]))
            if stream.above_high_water:
                self._hold()
            return
        self._on_item(output, ids)

    def on_images(self, prompt_tokens: int, expansions: list[Tokens] | None) -> None:
        """Set the length of a prompt with images, and the tokens that stand for each, if known."""
        self._prompt = prompt_tokens
        self._expansions = expansions

    def on_rejected(self, error: DynamoError) -> None:
        """End the request: the engine did not accept it."""
        if not self._ended:
            self.stream.error(error)
            self._end()

    def cancel(self, kind: CancelKind) -> None:
        """Free the blocks at once: the client stopped the request or disconnected."""
        if self._ended:
            return
        self._take_back()
        self._owner.abort(self, kind == "stop")
        self._send_last(EngineOutput(finish_reason="cancelled", completion_usage=self._usage()))

    def _on_item(self, output: EngineStep, ids: list[int]) -> None:
        """Send a step that is more than one plain token."""
        if self._ended:
            return
        self._take_back()
        self._tokens += len(ids)
        if output.prefill_stats is not None:
            self._cached = output.prefill_stats.num_cached_tokens
        if output.new_prompt_logprobs_tensors is not None:  # a part of the prompt per step
            # None is the row of the first token: nothing precedes it, so it has no probability.
            rows = self._prompt_logprobs = self._prompt_logprobs or [None]
            rows += prompt_rows(output.new_prompt_logprobs_tensors)
        logprobs = output.new_logprobs
        item = EngineOutput(token_ids=ids)
        if output.prefill_stats is not None:  # the frontend may end the answer before the engine
            item.completion_usage = self._usage()
        if logprobs is not None:
            item.log_probs, item.top_logprobs = sample_rows(logprobs)
        if ids and (self._prompt_logprobs is not None or self._expansions is not None):
            item.extra_args = self._take_extra()
        if output.finish_reason is not None:
            self._finish(item, output)
        elif ids:
            self._send(codec.encode(item))
            self._fast = logprobs is None and self._held is None
            if self._fast:
                self._passed = True
                self.stream.on_pause = self.hold
                self._owner.pass_tokens(self)

    def _finish(self, item: EngineOutput, output: EngineStep) -> None:
        reason = str(output.finish_reason)
        item.finish_reason = _REASONS.get(reason, reason)
        # vLLM names a stop token or text in stop_reason, but not the end token of the model.
        if reason == "stop" and output.stop_reason is None:
            item.finish_reason = "eos"
        elif reason == _FAILED:
            item.finish_reason = f"{_FAILED}: the engine failed to compute the request"
        item.stop_reason = output.stop_reason
        item.completion_usage = self._usage()
        if output.kv_transfer_params is not None:
            item.disaggregated_params = {KV_TRANSFER: output.kv_transfer_params}
        elif self.prefill_only:
            item.disaggregated_params = {KV_TRANSFER: {}}
        self._send_last(item)

    def _take_extra(self) -> dict[str, Any]:
        """Return what the first item with tokens says about the prompt."""
        extra = {"prompt_logprobs": self._prompt_logprobs, "mm_expansions": self._expansions}
        self._prompt_logprobs = self._expansions = None
        return {name: value for name, value in extra.items() if value is not None}

    def _send_last(self, item: EngineOutput) -> None:
        # With items held back, _release() ends the stream behind the last of them.
        self._send(codec.encode(item))
        if self._held is None:
            self.stream.end()
        self._end()

    def hold(self) -> None:
        """Hold further items back until the client reads again, if it does not read."""
        if self._held is None and self.stream.above_high_water and not self._ended:
            self._hold()

    def _take_back(self) -> None:
        """Get the plain tokens again that the engine sends to the stream."""
        if self._passed:
            self._passed = False
            self.stream.on_pause = None  # breaks a reference cycle
            self._tokens += self._owner.stop_passing(self)

    def _end(self) -> None:
        self._take_back()
        self._ended = True
        self.stream.context.off_cancel(self.cancel)  # breaks a reference cycle
        self._on_done()

    def _usage(self) -> Any:
        return usage(self._prompt, self._tokens, self._cached)

    def _send(self, payload: bytes) -> None:
        if self._held is not None:
            self._held.append(payload)
            return
        self.stream.send(payload)
        if self.stream.above_high_water and not self.stream.closed:
            self._hold()

    def _hold(self) -> None:
        self._take_back()
        self._fast = False
        self._held = []
        self._owner.tasks.spawn(self._release(), name="slow reader")

    async def _release(self) -> None:
        await self.stream.drained()
        items, self._held = self._held or (), None
        for payload in items:
            self.stream.send(payload)
        if self._ended:
            self.stream.end()


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

    def abort(self, response: EngineResponse, stopped: bool) -> None:
        """End the request of ``response`` in the engine; ``stopped``: its text is complete."""
        if response.id is not None:
            self.engine.abort(response.id, stopped)

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
