"""The simulated engine: requests in, iterations of a scheduler, tokens out.

Each data-parallel rank is one task. With a speed-up of 0 an iteration takes no time, and the task
yields to the event loop after each one. All tokens of an iteration are sent in one write per
connection.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from dynamo.errors import DynamoError
from dynamo.mocker.blocks import BlockPool, CacheChange, SequenceBlocks
from dynamo.mocker.replies import Reply
from dynamo.mocker.scheduler import Batch, Limits, Scheduler, Sequence
from dynamo.mocker.timing import Timing, Transfer, cached_tokens
from dynamo.observability.metrics import Registry, counter, gauge, histogram
from dynamo.protocols import codec
from dynamo.protocols.engine import EngineOutput, PreprocessedRequest, token_item, usage
from dynamo.protocols.kv import KvMetrics
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.requests.context import CancelKind
from dynamo.runtime.requests.stream import ServerStream

_REPORT_INTERVAL_S = 0.05
_LAG_LIMIT_S = 0.1
_SHORTEST_TRANSFER_S = 0.0005  # the loop's timers round up to 1 ms: shorter ones take none
_ABSOLUTE = 1
_libc = ctypes.CDLL(None, use_errno=True)
# fmt: off
_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)
_ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80
)
_LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680
)
# fmt: on
_ENGINE = "engine model_name"
_RUNNING = gauge("vllm:num_requests_running", "Sequences being computed", _ENGINE)
_WAITING = gauge("vllm:num_requests_waiting", "Sequences waiting", _ENGINE)
_KV_USAGE = gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0..1", _ENGINE)
_GPU_USAGE = gauge(
    "vllm:gpu_cache_usage_perc", "Share of the KV cache in use, 0..1 (old name)", _ENGINE
)
_PREEMPTIONS = counter("vllm:num_preemptions_total", "Sequences that lost their blocks", _ENGINE)
_TTFT = histogram(
    "vllm:time_to_first_token_seconds",
    "Seconds from arrival to the first token",
    _TTFT_BUCKETS,
    _ENGINE,
)
_ITL = histogram(
    "vllm:inter_token_latency_seconds",
    "Seconds between two tokens of a sequence",
    _ITL_BUCKETS,
    _ENGINE,
)
_LATENCY = histogram(
    "vllm:e2e_request_latency_seconds",
    "Seconds from arrival to the last token",
    _LATENCY_BUCKETS,
    _ENGINE,
)


class MockerMetrics:
    """The ``vllm:*`` metrics of one data-parallel rank, labelled (engine, model_name)."""

    def __init__(self, registry: Registry, engine: str, model_name: str) -> None:
        labels = (engine, model_name)
        self._registry = registry
        self._labels = labels
        self._preemptions = registry.child(_PREEMPTIONS, *labels)
        self._ttft = registry.child(_TTFT, *labels)
        self._itl = registry.child(_ITL, *labels)
        self._latency = registry.child(_LATENCY, *labels)
        self._now = 0.0

    def export_gauges(self, scheduler: Scheduler) -> None:
        """Read the gauges from ``scheduler`` at scrape."""
        pool = scheduler.pool
        for spec, read in (
            (_RUNNING, lambda: len(scheduler.running)),
            (_WAITING, lambda: len(scheduler.waiting)),
            (_KV_USAGE, lambda: pool.used / pool.capacity),
            (_GPU_USAGE, lambda: pool.used / pool.capacity),
        ):
            self._registry.child(spec, *self._labels).function = read

    def iteration(self, now: float, batch: Batch, preemptions: int) -> None:
        """Record an iteration that ended at ``now`` (monotonic), before its tokens are sent."""
        if batch.decodes:
            self._itl.observe(now - self._now, batch.decodes)
        self._now = now
        self._preemptions.value = preemptions

    def first_token(self, started: float) -> None:
        """Record the first token, in this iteration, of a request that arrived at ``started``."""
        self._ttft.observe(max(0.0, self._now - started))

    def finished(self, started: float) -> None:
        """Record the end of a request that arrived at ``started``."""
        self._latency.observe(asyncio.get_running_loop().time() - started)


class _Timerspec(ctypes.Structure):
    """``struct itimerspec``: interval, then value, each as seconds and nanoseconds."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class TimerFd:
    """A timer for one waiting task; a context manager, on the running loop. Linux only.

    uvloop rounds timers up to whole milliseconds; an iteration of a sped-up engine is shorter. A
    timerfd is exact to some ten microseconds, on any event loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        flags = os.O_NONBLOCK | os.O_CLOEXEC  # TFD_NONBLOCK | TFD_CLOEXEC
        self._fd: int = _libc.timerfd_create(time.CLOCK_MONOTONIC, flags)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> TimerFd:
        self._loop.add_reader(self._fd, self._on_expired)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    async def sleep_until(self, when_s: float) -> None:
        """Sleep until ``time.monotonic()`` reaches ``when_s``; only yield to the loop if it has."""
        if when_s <= time.monotonic():
            await asyncio.sleep(0)
            return
        whole_s = int(when_s)
        when = _Timerspec(0, 0, whole_s, int((when_s - whole_s) * 1e9))
        if _libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(when), None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        self._waiter = self._loop.create_future()
        await self._waiter

    def _on_expired(self) -> None:
        try:
            # The eight bytes are the count of expiries: unread, the descriptor stays readable.
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # settime() cleared an expiry that a cancelled sleep had not read
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Responder:
    """Sends the tokens of one sequence, which :meth:`Scheduler.commit` passes on."""

    __slots__ = ("_done", "_engine", "_on_done", "_started", "_unsent", "sequence", "stream")

    sequence: Sequence

    def __init__(
        self, stream: ServerStream, engine: EngineRank, on_done: Callable[[], None]
    ) -> None:
        self.stream = stream
        self._engine = engine
        self._on_done = on_done
        self._done = False
        self._started = asyncio.get_running_loop().time()
        self._unsent: list[int] = []

    def allocated(self) -> None:
        """Start the transfer into the blocks of a prompt that a prefill worker computed; pause the
        sequence until it is complete. Called from :meth:`Scheduler.schedule`."""
        self._engine.transfer(self.sequence)

    def token(self, token_id: int) -> None:
        """Send one token, or keep it until there are as many as an output has; pause the sequence
        if the reader is slow."""
        stream = self.stream
        if self._engine.shape.stream_interval == 1:
            stream.send(token_item(token_id))
        else:
            self._unsent.append(token_id)
            full = len(self._unsent) >= self._engine.shape.stream_interval
            if full or self.sequence.generated == 1:
                stream.send(codec.encode(EngineOutput(token_ids=self._unsent)))
                self._unsent = []
        if self.sequence.generated == 1:
            self._engine.metrics.first_token(self._started)
        if stream.above_high_water and not self.sequence.paused:
            self._engine.pause(self.sequence, True)
            self._engine.tasks.spawn(self._resume(), name="slow reader")

    def finish(self, token_id: int, reason: str) -> None:
        """Send the last token with the reason and the usage, and end the stream."""
        if self.sequence.generated == 1:
            self._engine.metrics.first_token(self._started)
        self._end([*self._unsent, token_id], reason)

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


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """Size and speed of every rank."""

    blocks: int
    block_size: int
    prefix_caching: bool
    limits: Limits
    timing: Timing
    prefill_only: bool = False
    transfer: Transfer = field(default_factory=Transfer)
    stream_interval: int = 1
    host_blocks: int = 0


class EngineRank:
    """One scheduler and the task that runs it.

    ``on_events(dp_rank, changes)`` gets the blocks that each iteration stored and removed,
    ``on_load`` the state, at most every 50 ms and once more before the rank becomes ``idle``.
    """

    def __init__(
        self,
        number: int,
        shape: EngineShape,
        metrics: MockerMetrics,
        tasks: Tasks,
        on_events: Callable[[int, list[CacheChange]], None],
        on_load: Callable[[KvMetrics], None],
        worker_id: int = 0,
    ) -> None:
        self.worker_id = worker_id
        self.number = number
        self.shape = shape
        self.pool = BlockPool(
            shape.blocks, shape.block_size, shape.prefix_caching, shape.host_blocks
        )
        self.scheduler = Scheduler(self.pool, shape.limits)
        self.metrics = metrics
        self.tasks = tasks
        self.prefill_only = shape.prefill_only
        self._on_events = on_events
        self._on_load = on_load
        self.idle = asyncio.Event()
        self._work = asyncio.Event()
        self._last_report: KvMetrics | None = None
        self._last_report_s = 0.0
        metrics.export_gauges(self.scheduler)

    @property
    def load(self) -> int:
        """Running and waiting requests."""
        return len(self.scheduler.running) + len(self.scheduler.waiting)

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of the longest sequence, prompt and output together, that can be computed."""
        return self.scheduler.max_sequence_tokens

    def submit(
        self,
        stream: ServerStream,
        request: PreprocessedRequest,
        reply: Reply,
        on_done: Callable[[], None],
    ) -> None:
        """Queue ``request`` and answer on ``stream``; ``on_done`` is called once, at its end."""
        try:
            self.scheduler.check_length(len(request.token_ids), reply.length)
        except DynamoError as error:
            stream.error(error)
            on_done()
            return
        routing = request.routing
        blocks = SequenceBlocks(
            request.token_ids,
            self.shape.block_size,
            routing.lora_name if routing else None,
            routing.cache_namespace if routing else None,
        )
        responder = Responder(stream, self, on_done)
        sequence = responder.sequence = Sequence(blocks, reply, responder)
        if request.prefill_result is not None and not self.prefill_only:
            sequence.expect_transfer(cached_tokens(request.prefill_result))
        self.scheduler.add(sequence)
        self.idle.clear()
        self._work.set()
        stream.context.on_cancel(responder.cancel)

    def clear_cache(self) -> None:
        """Drop all cached blocks; nothing is dropped while requests use some."""
        self.pool.clear()
        self._publish()

    def abort(self, sequence: Sequence) -> None:
        """Remove ``sequence`` and free its blocks."""
        # Its blocks are free: a waiting sequence may start.
        self.scheduler.abort(sequence)
        self._work.set()

    def transfer(self, sequence: Sequence) -> None:
        """Pause ``sequence`` for the time that the transfer from the prefill worker takes."""
        delay_s = self.shape.transfer.seconds(sequence.prompt_tokens)
        if delay_s >= _SHORTEST_TRANSFER_S:
            sequence.paused = True
            asyncio.get_running_loop().call_later(delay_s, self.pause, sequence, False)

    def transfer_params(self, sequence: Sequence) -> dict[str, Any] | None:
        """Return what the decode worker needs for the transfer; None from other ranks."""
        if not self.prefill_only:
            return None
        return self.shape.transfer.transfer_params(
            self.worker_id, self.number, sequence.prompt_tokens, self.shape.block_size
        )

    def pause(self, sequence: Sequence, paused: bool) -> None:
        """Pause or resume ``sequence``."""
        sequence.paused = paused
        self._work.set()

    async def run(self) -> None:
        """Run iterations until cancelled."""
        with TimerFd() as timer:
            await self._iterate(timer)

    async def _iterate(self, timer: TimerFd) -> None:
        timing, pool, scheduler = self.shape.timing, self.pool, self.scheduler
        due = time.monotonic()
        self._report(due)
        while True:
            self._work.clear()
            batch = scheduler.schedule()
            if not batch.producing and not batch.prefill_tokens:
                self._report(time.monotonic())
                if not self.load:
                    self.idle.set()
                await self._work.wait()
                due = time.monotonic()
                continue
            usage = batch.decode_kv / (pool.capacity * pool.block_size)
            spent_s = timing.iteration_s(batch.prefill_tokens, batch.decodes, usage)
            # From the last due time, not from now: late wake-ups must not slow the engine down.
            # Only up to the limit: after a long stall a burst would follow.
            due = max(due, time.monotonic() - _LAG_LIMIT_S) + spent_s
            # At the start: the load shows the prompts that are computed until the end.
            if due - self._last_report_s >= _REPORT_INTERVAL_S:
                self._report(time.monotonic())
            if spent_s:
                await timer.sleep_until(due)
            self._finish(batch, time.monotonic())
            if not spent_s:
                await asyncio.sleep(0)

    def _finish(self, batch: Batch, now: float) -> None:
        self.metrics.iteration(now, batch, self.scheduler.preemptions)
        self.scheduler.commit(batch)
        self._publish()

    def _publish(self) -> None:
        if self.pool.changes:
            self._on_events(self.number, self.pool.changes)
            self.pool.changes = []

    def _report(self, now: float) -> None:
        running = self.scheduler.running
        state = KvMetrics(
            worker_id=0,
            dp_rank=self.number,
            active_decode_blocks=self.pool.used,
            active_prefill_tokens=sum(s.prompt_tokens for s in running if not s.generated),
            kv_used_blocks=self.pool.used,
            kv_total_blocks=self.pool.capacity,
            num_requests_running=len(running),
            num_requests_waiting=len(self.scheduler.waiting),
        )
        if state != self._last_report:
            self._last_report, self._last_report_s = state, now
            self._on_load(state)
