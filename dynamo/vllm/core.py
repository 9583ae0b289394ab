"""vLLM's EngineCore, driven below AsyncLLM's output processing: token ids in, token ids out.

This module depends on vLLM's internal interface: ``engine.TESTED_VERSIONS`` says on which versions
it is tested. EngineCore is a process of its own behind two ZMQ sockets. One message
has the outputs of one step for all requests; :meth:`CoreEngine._receive` passes them on in one
turn of the loop, so they leave in one write per connection.

With ``DYN_VLLM_CORE_ADDRESSES='INPUT OUTPUT'`` no process is started: the two addresses are bound
(ROUTER and PULL), and an EngineCore that another process runs connects to them. It is a DEALER with
the identity ``00 00`` that sends a MessagePack ``EngineCoreReadyResponse`` first, and a PUSH socket
for outputs. Benchmarks use it to measure this code without a model.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.tasks import POOLING_TASKS
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.executor import Executor
from vllm.v1.metrics.stats import IterationStats
from vllm.version import __version__

from dynamo.errors import DynamoError, EngineDied, EngineKilled, InvalidArgument
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.protocols.pooling import PoolingFacts
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.requests.stream import ServerStream
from dynamo.vllm.engine import EngineInfo, OutputSink, StepStats
from dynamo.vllm.engine_inputs import (
    CLIENT_ERRORS,
    ImageInputs,
    ParamsBuilder,
    can_profile,
    check_context,
    expansions,
    failure,
    image_limit,
    in_input_thread,
    lora_problem,
    priority,
)
from dynamo.vllm.metrics import EngineMetrics, RunningRequest
from dynamo.vllm.plain_requests import PlainRequests
from dynamo.vllm.plain_tokens import PlainTokens, StepDecoder
from dynamo.vllm.pooling_model import find_pooling_facts
from dynamo.vllm.sampling import has_reasoning, is_costly, refusal

_CLOSE_TIMEOUT_S = 5.0
_TASKS = ("generate",)
_SIGNAL = re.compile(r"status -(?:2|9|15)\b")  # SIGINT, SIGKILL, SIGTERM: from another process
_WAIT, _KEEP = "wait", "keep"  # running requests finish first, or are held
log = logging.getLogger(__name__)


class CoreEngine:
    """An engine process and its client; implements ``Engine``."""

    def __init__(self, config: Any, params: ParamsBuilder, client: Any) -> None:
        self.on_stats: StepStats | None = None
        self._processor = InputProcessor(config)
        renderer = self._processor.renderer
        self._images = ImageInputs(renderer, config.model_config)
        self.info = _info(config, client, image_limit(renderer.mm_processor))
        self._params = params
        self._make_params = params.pooling if self.info.pooling else params.sampling
        # The service requests the one task that the engine has said it computes.
        self._supported_tasks = POOLING_TASKS if self.info.pooling else _TASKS
        self._metrics = EngineMetrics(config, client.engine_ranks_managed)
        self._client = client
        self._running: dict[str, RunningRequest] = {}
        self._outbox: deque[EngineCoreRequest | str] = deque()
        self._posted = asyncio.Event()
        self._requests = PlainRequests(config, client)
        self._plain = PlainTokens(self._metrics.gaps)
        self._step_s = 0.0  # the engine's time of the message that is read
        client.decoder = StepDecoder(client.decoder, self._plain)
        self._tasks = Tasks("vllm engine")
        self._tokenizing = asyncio.Lock()
        self._messages = 0

    @classmethod
    def start(cls, config: Any, params: ParamsBuilder, addresses: Sequence[str]) -> CoreEngine:
        """Start the processes and load the model; blocks for seconds to minutes."""
        external = None
        if addresses:
            external = {"input_address": addresses[0], "output_address": addresses[1]}
        client = EngineCoreClient.make_async_mp_client(
            config, Executor.get_class(config), True, external
        )
        return cls(config, params, client)

    def submit(self, request: PreprocessedRequest, sink: OutputSink, dp_rank: int | None) -> str:
        """See ``Engine``."""
        number = self._params.new_id()
        routing = request.routing
        running = RunningRequest(
            sink,
            request.stop_conditions.max_tokens,
            None if routing is None else routing.lora_name,
        )
        # It may follow the request: outputs arrive in a later turn of this loop.
        if dp_rank is None and self._requests.send(request, number):
            self._running[number] = running
            return number
        if request.multi_modal_data is not None:
            params = self._make_params(request)
            self._running[number] = running
            work = self._or_reject(self._with_images, number, request, params, dp_rank)
            self._tasks.spawn(work, name="images")
        elif is_costly(request.sampling_options):
            self._running[number] = running
            work = self._or_reject(self._prepare, number, request, dp_rank)
            self._tasks.spawn(work, name="prepare a request")
        else:
            engine_request = self._request(request, number, self._make_params(request), dp_rank)
            self._requests.learn(request, engine_request)
            self._running[number] = running
            self._post(engine_request)
        return number

    def pass_tokens(
        self, request_id: str, stream: ServerStream, on_full: Callable[[], None]
    ) -> None:
        """See ``Engine``."""
        running = self._running.get(request_id)
        if running is not None:
            running.passing = True
            # The step that is read now has a token of the request.
            self._plain.add(request_id, stream, on_full, self._step_s)

    def stop_passing(self, request_id: str) -> int:
        """See ``Engine``."""
        tokens, last_s = self._plain.remove(request_id)
        running = self._running.get(request_id)
        if running is not None and running.passing:
            running.passed(tokens, last_s)
        return tokens

    def abort(self, request_id: str, stopped: bool = False) -> None:
        """See ``Engine``."""
        running = self._running.pop(request_id, None)
        if running is not None:
            self._post(request_id)
            self._metrics.aborted(request_id, running, stopped)
            if not self._running:
                self._report_idle()

    def progress(self) -> tuple[int, int]:
        """See ``Engine``."""
        return len(self._running), self._messages

    def metrics(self) -> str:
        """See ``Engine``."""
        return self._metrics.text()

    async def run(self) -> None:
        """See ``Engine``."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._send())
                group.create_task(self._receive())
        # A task group raises an exception group, also for one task that fails.
        except* EngineDeadError:
            cause = self._cause()
            kind = EngineKilled if _SIGNAL.search(cause) else EngineDied
            raise kind(f"the vLLM engine died: {cause}") from None

    async def close(self) -> None:
        """See ``Engine``."""
        await self._tasks.close()
        # In a thread: it blocks until the processes of the engine have ended.
        await in_input_thread(self._client.shutdown, _CLOSE_TIMEOUT_S)
        for endpoint in (
            *self.info.event_endpoints.values(),
            *self.info.replay_endpoints.values(),
        ):
            if endpoint.startswith("ipc://"):  # a killed engine leaves its sockets
                Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    async def sleep(self, level: int = 1) -> None:
        """See ``Engine``."""
        await self._client.sleep_async(level, _WAIT)
        self._metrics.sleeps(level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See ``Engine``."""
        if await self._client.wake_up_async(None if tags is None else list(tags)):
            self._metrics.sleeps(0)

    async def reload_weights(self, path: str | None = None) -> None:
        """See ``Engine``."""
        fields = {} if path is None else {"weights_path": path}
        await self._client.collective_rpc_async("reload_weights", kwargs=fields)

    async def pause(self, keeps: bool, clears: bool) -> None:
        """See ``Engine``."""
        await self._client.pause_scheduler_async(_KEEP if keeps else _WAIT, clears)

    async def resume(self) -> None:
        """See ``Engine``."""
        await self._client.resume_scheduler_async()

    async def profile(self, starts: bool, prefix: str | None) -> None:
        """See ``Engine``."""
        await self._client.profile_async(starts, prefix)

    async def is_sleeping(self) -> bool:
        """See ``Engine``."""
        return bool(await self._client.is_sleeping_async())

    async def load_lora(self, name: str, path: str, version: str) -> object:
        """See ``ControlledEngine``."""
        adapter = self._params.new_lora(name, path, version)
        await in_input_thread(self._params.shapes.check, path)
        try:
            await self._client.add_lora_async(adapter)
        except EngineDeadError:
            raise EngineDied("the vLLM engine died") from None
        except Exception as error:  # noqa: BLE001 - the engine sends its error as a plain Exception
            # vLLM finds shapes of another model when it has already added the adapter.
            await self.remove_lora(adapter)
            raise InvalidArgument(lora_problem(name, path, error)) from None
        return adapter

    def use_lora(self, name: str, weights: Any) -> frozenset[str]:
        """See ``ControlledEngine``."""
        self._params.use_lora(name, weights)
        return frozenset(number for number, of in self._running.items() if of.lora == name)

    def any_running(self, requests: frozenset[str]) -> bool:
        """See ``ControlledEngine``."""
        return not requests.isdisjoint(self._running)

    async def remove_lora(self, weights: Any) -> None:
        """See ``ControlledEngine``."""
        await self._client.remove_lora_async(weights.adapter_id)

    async def pooling_facts(self) -> PoolingFacts:
        """See ``Engine``."""
        return find_pooling_facts(self._processor, await self._client.get_supported_tasks_async())

    async def reset_prefix_cache(self) -> bool:
        """See ``Engine``."""
        return bool(await self._client.reset_prefix_cache_async())

    def _request(
        self,
        request: PreprocessedRequest,
        number: str,
        params: SamplingParams | PoolingParams,
        rank: int | None,
        prompt: Any = None,
    ) -> EngineCoreRequest:
        """Return vLLM's request, checked as its own server does. Raises InvalidArgument.

        A structured output compiles its grammar here, and bad words are tokenized, which takes
        milliseconds. ``prompt`` is the processed one of a request with images.
        """
        routing = request.routing
        if prompt is None:
            prompt = {"type": "token", "prompt_token_ids": request.token_ids.tolist()}
            if routing is not None and routing.cache_namespace is not None:
                prompt["cache_salt"] = routing.cache_namespace
        try:
            engine_request = self._processor.process_inputs(
                number,
                prompt,
                params,
                self._supported_tasks,
                arrival_time=time.time(),
                lora_request=self._params.lora(routing),
                priority=priority(routing),
                data_parallel_rank=rank,
            )
        except CLIENT_ERRORS as error:
            raise refusal(request, error) from None
        engine_request.external_req_id = number
        if has_reasoning(request.sampling_options.guided_decoding):
            # The engine's own parser of reasoning would begin the grammar behind it.
            engine_request.reasoning_ended = True
        return engine_request

    def _post(self, item: EngineCoreRequest | str) -> None:
        """Queue a request, or the id of one to abort; bounded by the worker's admission."""
        self._outbox.append(item)
        self._posted.set()

    async def _prepare(self, number: str, request: PreprocessedRequest, rank: int | None) -> None:
        """Make vLLM's request in a thread.

        One with bad words at a time: a tokenizer that two threads use at once may raise.
        """
        turn = self._tokenizing if request.sampling_options.bad_words else nullcontext()
        async with turn:
            engine_request = await in_input_thread(self._prepared, request, number, rank)
        self._requests.learn(request, engine_request)
        # The client may have cancelled the request while the thread prepared it.
        if number in self._running:
            self._post(engine_request)

    def _prepared(
        self, request: PreprocessedRequest, number: str, rank: int | None
    ) -> EngineCoreRequest:
        return self._request(request, number, self._make_params(request), rank)

    async def _with_images(
        self, number: str, request: PreprocessedRequest, params: Any, rank: int | None
    ) -> None:
        inputs = await self._images.process(request)
        tokens = len(inputs["prompt_token_ids"])
        check_context(tokens, self.info.context_length)
        engine_request = await in_input_thread(self._request, request, number, params, rank, inputs)
        running = self._running.get(number)
        if running is not None:
            running.sink.on_images(tokens, expansions(request.token_ids, inputs))
            self._post(engine_request)

    async def _or_reject(self, work: Callable[..., Awaitable[None]], number: str, *of: Any) -> None:
        """Await ``work``; whatever it raises ends its request, which nothing else would."""
        try:
            await work(number, *of)
        except BaseException as error:  # noqa: BLE001 - also a panic in Rust
            self._reject(number, failure(error))

    def _reject(self, number: str, error: DynamoError) -> None:
        running = self._running.pop(number, None)
        if running is not None:
            running.sink.on_rejected(error)

    async def _send(self) -> None:
        """Send requests and aborts in their order."""
        client, outbox = self._client, self._outbox
        while True:
            await self._posted.wait()
            self._posted.clear()
            while outbox:
                item = outbox.popleft()
                if isinstance(item, str):
                    await client.abort_requests_async([item])
                # A request that was aborted in the outbox is not sent at all.
                elif item.request_id in self._running:
                    await self._add(item)

    async def _add(self, item: EngineCoreRequest) -> None:
        try:
            await self._client.add_request_async(item)
        except (TypeError, ValueError, OverflowError) as error:  # a value MessagePack cannot encode
            text = f"the request cannot be sent to vLLM: {error}"
            self._reject(item.request_id, InvalidArgument(text))

    async def _receive(self) -> None:
        client, metrics, counts = self._client, self._metrics, self._plain.counts
        while True:
            outputs = await client.get_output_async()
            self._messages += 1
            rank, stats = outputs.engine_index, outputs.scheduler_stats
            # Tokens that went straight to their streams count for this step, too.
            plain = counts.popleft() if counts else 0
            step = metrics.step(rank, plain)
            if outputs.outputs:
                # Read now, and passed on below: plain tokens of later messages may follow.
                self._plain.read += 1
                self._deliver(outputs, step)
            # A message of statistics alone ends no step.
            ends_step = plain or outputs.outputs or step.finished_requests
            metrics.record(rank, stats, step if ends_step else None)
            if stats is not None and self.on_stats is not None:
                waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
                self.on_stats(rank, stats.num_running_reqs, waiting, stats.kv_cache_usage)

    def _deliver(self, outputs: Any, step: IterationStats) -> None:
        """Count the outputs of a message for ``step`` and pass each to its sink."""
        requests, metrics = self._running, self._metrics
        rank, timestamp = outputs.engine_index, outputs.timestamp
        self._step_s = timestamp
        for output in outputs.outputs:
            number = output.request_id
            running = requests.get(number)
            if running is None:  # aborted
                continue
            if running.passing:
                running.stats.last_token_ts = self._plain.stamp(number, timestamp)
            metrics.output(step, rank, timestamp, running, output)
            running.sink.on_output(output)
            if output.finish_reason is not None:
                requests.pop(number, None)
                # After the sink, which gets the count of plain tokens.
                metrics.finished(step, number, running, output.finish_reason)

    def _report_idle(self) -> None:
        """Report empty ranks: an engine without requests sends no statistics after an abort."""
        for rank in range(self.info.data_parallel_size):
            if self.on_stats is not None:
                self.on_stats(rank, 0, 0, 0.0)

    def _cause(self) -> str:
        manager = self._client.resources.engine_manager
        ended = {} if manager is None else manager.finished_procs()
        exits = ", ".join(f"{name} exited with status {code}" for name, code in ended.items())
        return exits or "see the engine's log above"


def _info(config: Any, client: Any, max_images: int) -> EngineInfo:
    """Return the sizes that the started processes reported."""
    cache, ranks = config.cache_config, config.parallel_config.data_parallel_size
    sources = client.get_kv_event_sources()
    return EngineInfo(
        driver="EngineCore",
        version=__version__,
        block_size=cache.effective_attention_block_size or cache.block_size,
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
        event_endpoints={
            # The address is the one that the engine binds: nothing can connect to "*".
            rank: source.endpoint.replace("*", "127.0.0.1")
            for rank, source in sources.items()
        },
        replay_endpoints={
            rank: source.replay_endpoint.replace("*", "127.0.0.1")
            for rank, source in sources.items()
            if source.replay_endpoint
        },
    )
