"""The interface between the worker and a vLLM engine, free of vLLM's own types.

Two drivers implement :class:`Engine`: ``core`` (vLLM's EngineCore, the tested versions) and
``async_llm`` (any other version).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dynamo.errors import DynamoError
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.protocols.pooling import PoolingFacts
from dynamo.runtime.requests.stream import ServerStream

TESTED_VERSIONS = ("0.32",)
"""Versions of vLLM, major and minor, on which the driver ``core`` is tested."""


def is_tested(version: str) -> bool:
    """Return whether the driver ``core`` is tested on ``version`` of vLLM."""
    return ".".join(version.split(".")[:2]) in TESTED_VERSIONS


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """The size of a started engine.

    ``block_size`` is in tokens, ``blocks`` are those of one rank. ``event_endpoints`` are the ZMQ
    endpoints of its KV events by rank, empty without prefix caching or events, and
    ``replay_endpoints`` those that send lost ones again. ``max_images`` are those that the model
    takes in a prompt. ``can_sleep``, ``can_profile``: its sleep mode, its profiler is enabled.
    ``structural_tags``: its grammars are xgrammar's.
    """

    driver: str
    version: str
    block_size: int
    blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    context_length: int
    data_parallel_size: int = 1
    pooling: bool = False
    max_images: int = 0
    can_sleep: bool = False
    can_profile: bool = False
    structural_tags: bool = False
    event_endpoints: dict[int, str] = field(default_factory=dict)
    replay_endpoints: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class EngineStep:
    """What one step of the engine produced for one request.

    vLLM's ``EngineCoreOutput`` has these attributes; the driver over AsyncLLM builds its own.
    ``new_logprobs`` are rows of (token ids, log probabilities, ranks), the sampled token first;
    ``finish_reason`` is an enumeration whose text is stop, length, abort, error or repetition;
    ``pooling_output`` is the vector of an embedding model, a tensor.
    """

    new_token_ids: list[int]
    finish_reason: Any = None
    stop_reason: int | str | None = None
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    prefill_stats: Any = None
    pooling_output: Any = None


class OutputSink:
    """Receives the steps of one request, the last of them with a ``finish_reason``."""

    __slots__ = ()

    def on_output(self, output: EngineStep) -> None:
        """Send what a step produced. Called once per step: its cost is paid for each token."""

    def on_images(self, prompt_tokens: int, expansions: list[Tokens] | None) -> None:
        """Set the length of a prompt with images, and the tokens that stand for each, if known.

        Called before the first step.
        """

    def on_rejected(self, error: DynamoError) -> None:
        """End the request: the engine did not accept it."""


StepStats = Callable[[int, int, int, float], None]
"""Receives a rank's number, its running and waiting requests, and the share of blocks in use, 0 to
1, after a step."""


class Engine(Protocol):
    """A started vLLM engine. Use it on the loop's thread."""

    info: EngineInfo
    on_stats: StepStats | None

    def submit(
        self, request: PreprocessedRequest, sink: OutputSink, dp_rank: int | None
    ) -> str | None:
        """Start ``request``; return its id. Raises InvalidArgument with vLLM's text.

        Requests with images, a grammar, bad words or many biases are prepared in a thread: a
        refusal then reaches
        :meth:`OutputSink.on_rejected`.
        """

    def abort(self, request_id: str, stopped: bool = False) -> None:
        """Stop the request and free its blocks; its sink is not called again.

        ``stopped``: its text is complete, a stop string ended it.
        """

    def progress(self) -> tuple[int, int]:
        """Return the number of requests in the engine, and that of its messages so far."""

    def metrics(self) -> str:
        """Return vLLM's metrics in Prometheus's format."""

    def pass_tokens(
        self, request_id: str, stream: ServerStream, on_full: Callable[[], None]
    ) -> None:
        """Send further steps of one token and nothing else to ``stream``, not to the sink.

        A driver may ignore it. ``on_full`` is called when the connection is full.
        """

    def stop_passing(self, request_id: str) -> int:
        """Send every step to the sink again; return how many tokens went to the stream."""

    async def run(self) -> None:
        """Move requests and outputs until cancelled. Raises EngineDied."""

    async def close(self) -> None:
        """End the engine's processes."""

    async def sleep(self, level: int = 1) -> None:
        """Let the running requests finish, then free the GPU.

        Level 1 keeps the weights in CPU memory, 2 discards them.
        """

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Restore what :meth:`sleep` freed; ``tags`` are weights and kv_cache, default both."""

    async def reload_weights(self, path: str | None = None) -> None:
        """Read the weights in the directory ``path``, default the model's, in place."""

    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps, or is paused."""

    async def pause(self, keeps: bool, clears: bool) -> None:
        """Stop between two steps, when the running requests have finished or with them kept;
        ``clears`` drops the cached blocks."""

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""

    async def profile(self, starts: bool, prefix: str | None) -> None:
        """Begin a profile, whose files are named by ``prefix``, or end it."""

    async def load_lora(self, name: str, path: str, version: str) -> object:
        """See ``ControlledEngine``; requests select an adapter by ``routing.lora_name``."""

    def use_lora(self, name: str, weights: object | None) -> frozenset[str]:
        """See ``ControlledEngine``."""

    def any_running(self, requests: frozenset[str]) -> bool:
        """See ``ControlledEngine``."""

    async def remove_lora(self, weights: object) -> None:
        """See ``ControlledEngine``."""

    async def pooling_facts(self) -> PoolingFacts:
        """Ask a pooling engine what it computes. Raises ConfigError for what is not served."""

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks; False, and nothing is dropped, while requests use some."""
