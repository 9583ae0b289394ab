"""vLLM's AsyncLLM as the driver, for versions on which ``core`` is not tested.

It uses only vLLM's public engine interface, and costs a task per request and vLLM's output
processing per token. Prompt log probabilities are not supported.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.version import __version__

from dynamo.errors import DynamoError, EngineDied, InvalidArgument
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.protocols.pooling import PoolingFacts
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.requests.stream import ServerStream
from dynamo.vllm.engine import EngineInfo, EngineStep, OutputSink, StepStats
from dynamo.vllm.engine_inputs import (
    CLIENT_ERRORS,
    ParamsBuilder,
    can_profile,
    failure,
    image_limit,
    image_loader,
    in_input_thread,
    load_images,
    lora_problem,
    priority,
)
from dynamo.vllm.metrics import vllm_page
from dynamo.vllm.sampling import has_reasoning, refusal

_CHECK_S = 1.0
"""AsyncLLM has no callback for the death of an idle engine."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class CachedTokens:
    """The part of vLLM's prefill statistics that a response reports."""

    num_cached_tokens: int


class SchedulerStatsLogger(StatLoggerBase):  # type: ignore[misc]
    """Forwards the statistics of the scheduler to ``engine``'s ``on_stats``."""

    def __init__(self, engine: AsyncLLMEngine, config: Any, engine_index: int = 0) -> None:
        self._engine = engine
        self._rank = engine_index

    def record(self, scheduler_stats: Any, *rest: Any, **more: Any) -> None:
        """Forward one step's statistics."""
        self._engine.steps += 1
        if scheduler_stats is not None and self._engine.on_stats is not None:
            self._engine.on_stats(
                self._rank,
                scheduler_stats.num_running_reqs,
                scheduler_stats.num_waiting_reqs,
                scheduler_stats.kv_cache_usage,
            )

    def log_engine_initialized(self) -> None:
        """Do nothing; vLLM requires the method."""


class AsyncLLMEngine:
    """An engine behind AsyncLLM; implements ``Engine``. Building it blocks until it is loaded."""

    def __init__(self, config: Any, params: ParamsBuilder) -> None:
        self.on_stats: StepStats | None = None
        self.steps = 0
        self._params = params
        self._tasks = Tasks("vllm requests")
        self._running: dict[str, asyncio.Task[None]] = {}
        factory = functools.partial(SchedulerStatsLogger, self)
        self._llm = AsyncLLM.from_vllm_config(config, stat_loggers=[factory])
        limit = image_limit(getattr(self._llm.renderer, "mm_processor", None))
        self.info = _info(config, limit)
        self._loader = image_loader(config.model_config)

    def submit(self, request: PreprocessedRequest, sink: OutputSink, dp_rank: int | None) -> str:
        """See ``Engine``."""
        if self.info.pooling:
            raise InvalidArgument(f"embeddings are not supported with vLLM {__version__}")
        if request.output_options.prompt_logprobs is not None:
            raise InvalidArgument(f"prompt_logprobs is not supported with vLLM {__version__}")
        number = self._params.new_id()
        params = self._params.sampling(request)
        # By default each step repeats all tokens before it.
        params.output_kind = RequestOutputKind.DELTA
        work = self._generate(request, number, params, sink, dp_rank)
        self._running[number] = self._tasks.spawn(work, name=f"request {number}")
        return number

    def pass_tokens(
        self, request_id: str, stream: ServerStream, on_full: Callable[[], None]
    ) -> None:
        """See ``Engine``. Ignored: AsyncLLM makes an object of each step."""

    def stop_passing(self, request_id: str) -> int:
        """See ``Engine``."""
        return 0

    def abort(self, request_id: str, stopped: bool = False) -> None:
        """See ``Engine``. To vLLM's own metrics all of them are aborted."""
        task = self._running.pop(request_id, None)
        if task is not None:
            # AsyncLLM aborts the request in the engine when the task that reads it is cancelled.
            task.cancel()

    def progress(self) -> tuple[int, int]:
        """See ``Engine``."""
        return len(self._running), self.steps

    def metrics(self) -> str:
        """See ``Engine``."""
        return vllm_page()

    async def run(self) -> None:
        """See ``Engine``."""
        while not self._llm.errored:  # noqa: ASYNC110 - it calls nothing when it fails
            await asyncio.sleep(_CHECK_S)
        raise EngineDied("the vLLM engine died: see the engine's log above")

    async def close(self) -> None:
        """See ``Engine``."""
        await self._tasks.close()
        await in_input_thread(self._llm.shutdown)

    async def sleep(self, level: int = 1) -> None:
        """See ``Engine``."""
        await self._llm.sleep(level, "wait")

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See ``Engine``."""
        await self._llm.wake_up(None if tags is None else list(tags))

    async def reload_weights(self, path: str | None = None) -> None:
        """See ``Engine``."""
        fields = {} if path is None else {"weights_path": path}
        await self._llm.collective_rpc("reload_weights", kwargs=fields)

    async def pause(self, keeps: bool, clears: bool) -> None:
        """See ``Engine``."""
        await self._llm.pause_generation(mode="keep" if keeps else "wait", clear_cache=clears)

    async def resume(self) -> None:
        """See ``Engine``."""
        await self._llm.resume_generation()

    async def profile(self, starts: bool, prefix: str | None) -> None:
        """See ``Engine``."""
        if starts:
            await self._llm.start_profile(profile_prefix=prefix)
        else:
            await self._llm.stop_profile()

    async def is_sleeping(self) -> bool:
        """See ``Engine``."""
        return bool(await self._llm.is_sleeping())

    async def load_lora(self, name: str, path: str, version: str) -> object:
        """See ``ControlledEngine``."""
        adapter = self._params.new_lora(name, path, version)
        await in_input_thread(self._params.shapes.check, path)
        try:
            await self._llm.add_lora(adapter)
        except EngineDeadError:
            raise EngineDied("the vLLM engine died") from None
        except Exception as error:  # noqa: BLE001 - the engine sends its error as a plain Exception
            await self.remove_lora(adapter)  # see CoreEngine.load_lora
            raise InvalidArgument(lora_problem(name, path, error)) from None
        return adapter

    def use_lora(self, name: str, weights: Any) -> frozenset[str]:
        """See ``ControlledEngine``. The requests are those of all adapters and of the model."""
        self._params.use_lora(name, weights)
        return frozenset(self._running)

    def any_running(self, requests: frozenset[str]) -> bool:
        """See ``ControlledEngine``."""
        return not requests.isdisjoint(self._running)

    async def remove_lora(self, weights: Any) -> None:
        """See ``ControlledEngine``."""
        await self._llm.remove_lora(weights.adapter_id)

    async def pooling_facts(self) -> PoolingFacts:
        """See ``Engine``. Nothing is asked: :meth:`submit` refuses every request."""
        return PoolingFacts()

    async def reset_prefix_cache(self) -> bool:
        """See ``Engine``."""
        return bool(await self._llm.reset_prefix_cache())

    async def _generate(
        self,
        request: PreprocessedRequest,
        number: str,
        params: SamplingParams,
        sink: OutputSink,
        rank: int | None,
    ) -> None:
        routing = request.routing
        images = request.multi_modal_data is not None
        try:
            if images:
                prompt = await load_images(request, self._loader)
            else:
                prompt = TokensPrompt(prompt_token_ids=request.token_ids.tolist())
                if routing is not None and routing.cache_namespace is not None:
                    prompt["cache_salt"] = routing.cache_namespace
            async for output in self._llm.generate(
                prompt,
                params,
                number,
                lora_request=self._params.lora(routing),
                priority=priority(routing),
                data_parallel_rank=rank,
                reasoning_ended=has_reasoning(request.sampling_options.guided_decoding) or None,
            ):
                if images:
                    images = False
                    sink.on_images(len(output.prompt_token_ids), None)
                sink.on_output(_step(output, params))
        except DynamoError as error:
            sink.on_rejected(error)
        except EngineDeadError:
            sink.on_rejected(EngineDied("the vLLM engine died"))
        except CLIENT_ERRORS as error:
            sink.on_rejected(refusal(request, error))
        except BaseException as error:  # noqa: BLE001 - also a panic in Rust
            sink.on_rejected(failure(error))
        finally:
            self._running.pop(number, None)


def _step(output: Any, params: SamplingParams) -> EngineStep:
    done, logprobs = output.outputs[0], params.logprobs
    return EngineStep(
        new_token_ids=list(done.token_ids),
        new_logprobs=None if logprobs is None else _rows(done, logprobs, params.logprob_token_ids),
        finish_reason=done.finish_reason,
        stop_reason=done.stop_reason,
        kv_transfer_params=output.kv_transfer_params,
        prefill_stats=CachedTokens(output.num_cached_tokens or 0),
    )


def _rows(done: Any, alternatives: int, wanted: list[int] | None) -> tuple[Any, Any]:
    """Return arrays of ids and log probabilities, the sampled token first in each row.

    The others are the most likely ones, or those ``wanted``.
    """
    ids, values = [], []
    for token_id, entries in zip(done.token_ids, done.logprobs or (), strict=False):
        # vLLM adds the sampled token to the alternatives: cut to as many as were requested.
        if wanted:
            top = [(token, entries[token]) for token in wanted]
        else:
            top = sorted(entries.items(), key=lambda item: item[1].rank)[:alternatives]
        ids.append([token_id, *(top_id for top_id, _ in top)])
        values.append([entries[token_id].logprob, *(entry.logprob for _, entry in top)])
    return np.array(ids), np.array(values)


def _info(config: Any, max_images: int) -> EngineInfo:
    cache, ranks = config.cache_config, config.parallel_config.data_parallel_size
    return EngineInfo(
        driver="AsyncLLM",
        version=__version__,
        block_size=cache.block_size,
        # vLLM's number is that of all ranks.
        blocks=(cache.num_gpu_blocks or 0) // ranks,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        context_length=config.model_config.max_model_len,
        data_parallel_size=ranks,
        pooling=config.model_config.runner_type == "pooling",
        max_images=max_images,
        can_sleep=bool(getattr(config.model_config, "enable_sleep_mode", False)),
        can_profile=can_profile(config),
        structural_tags=config.structured_outputs_config.backend in ("auto", "xgrammar"),
        event_endpoints=_endpoints(config.kv_events_config, "endpoint", ranks),
        replay_endpoints=_endpoints(config.kv_events_config, "replay_endpoint", ranks),
    )


def _endpoints(events: Any, field: str, ranks: int) -> dict[int, str]:
    """Return the endpoint of each rank: the port, or what looks like one, plus the rank."""
    if events is None or not events.enable_kv_cache_events:
        return {}
    endpoint = getattr(events, field)
    if not endpoint:
        return {}
    # The address is the one that the engine binds: nothing can connect to "*".
    base, _, port = endpoint.replace("*", "127.0.0.1").rpartition(":")
    return {rank: f"{base}:{int(port) + rank}" for rank in range(ranks)}
