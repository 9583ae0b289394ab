"""A simulated worker with continuous batching, in spans of iterations instead of tokens.

The order is that of the mocker's scheduler: running sequences get one token each, then prompts are
computed in chunks up to the token budget. Between arrivals, finishes and prompts nothing about a
batch changes but its KV use, so up to ``_SPAN`` iterations are one event, at the duration of the
middle one.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from itertools import count, islice
from math import ceil

from dynamo.planner.capacity.observation import WorkerLoad
from dynamo_lab.simulation.request import BLOCK_TOKENS, RequestState, TrafficCounters
from dynamo_lab.simulation.service_model import ServiceModel

_SPAN = 64


class BatchWorker:
    """An aggregated or decode worker.

    Call :meth:`submit`, and :meth:`finish_span` at :attr:`due_s`; :attr:`due_s` is None when idle.
    Each change of :attr:`due_s` increments :attr:`version`.
    """

    def __init__(
        self, number: int, model: ServiceModel, counters: TrafficCounters | None = None
    ) -> None:
        self.number = number
        self.model = model
        self.counters = counters or TrafficCounters()
        self.due_s: float | None = None
        self.version = 0
        self.waiting: deque[RequestState] = deque()
        self.prefilling: list[RequestState] = []
        self.decoding: dict[RequestState, None] = {}
        self.kv_used = 0
        self.prefill_tokens = 0
        self._queued_kv = 0
        self._decode_kv = 0
        self._held: dict[int, int] = {}
        self._idle: dict[int, None] = {}
        self._finishes: list[tuple[int, int, RequestState]] = []
        self._order = count()
        self._steps = 0
        self._span_steps = 0
        self._span_begin_s = 0.0
        self._step_s = 0.0
        self._chunks: list[tuple[RequestState, int]] = []

    @property
    def requests(self) -> int:
        """Requests that wait or run."""
        return len(self.waiting) + len(self.prefilling) + len(self.decoding)

    def overlap(self, blocks: tuple[int, ...]) -> int:
        """Return the prompt tokens in leading ``blocks`` that the cache holds."""
        in_use, idle, count = self._held, self._idle, 0
        for block in blocks:
            if block not in in_use and block not in idle:
                break
            count += 1
        return count * BLOCK_TOKENS

    def cost(self, request: RequestState) -> int:
        """Return the tokens to prefill plus the tokens of KV if ``request`` came here.

        This is the cost of Dynamo's KV router with its default weight.
        """
        return self.prefill_tokens + self.kv_used + self._queued_kv - self.overlap(request.blocks)

    def submit(self, request: RequestState, now_s: float) -> None:
        """Queue ``request``; a running span ends with the iteration in progress."""
        request.estimate = 0 if request.transferred else request.isl - self.overlap(request.blocks)
        self.prefill_tokens += request.estimate
        self._queued_kv += request.prompt
        self.waiting.append(request)
        if self.due_s is None:
            self._plan(now_s)
        elif self._span_steps > 1:
            self._cut(now_s)

    def finish_span(self) -> list[RequestState]:
        """Complete the span that is due, begin the next; return the requests that finished."""
        now_s = self.due_s
        assert now_s is not None
        steps, batch = self._span_steps, len(self.decoding)
        self._steps += steps
        self.kv_used += batch * steps
        self._decode_kv += batch * steps
        self.counters.tokens += batch * steps
        self.counters.token_s += batch * steps * self._step_s
        finished = self._finished(now_s)
        if self._chunks:
            self._finish_chunks(now_s, finished)
        self._plan(now_s)
        return finished

    def load(self) -> WorkerLoad:
        """Return the load report."""
        block = self.model.block_size
        return WorkerLoad(
            worker_id=self.number,
            kv_used_blocks=min(self.kv_used, self.model.kv_tokens) // block,
            kv_total_blocks=self.model.kv_tokens // block,
            running=len(self.prefilling) + len(self.decoding),
            waiting=len(self.waiting),
            active_prefill_tokens=sum(r.prompt for r in self.prefilling),
        )

    def _cut(self, now_s: float) -> None:
        steps = max(1, ceil((now_s - self._span_begin_s) / self._step_s))
        if steps < self._span_steps:
            self._set_span(self._span_begin_s, steps, self._step_s)

    def _set_span(self, begin_s: float, steps: int, step_s: float) -> None:
        self._span_begin_s, self._span_steps, self._step_s = begin_s, steps, step_s
        self.due_s = begin_s + steps * step_s
        self.version += 1

    def _plan(self, now_s: float) -> None:
        # After a preemption nothing is admitted: it would take the space just freed.
        if not self._preempt(now_s) and self.waiting:
            self._admit()
        batch, model = len(self.decoding), self.model
        if self.prefilling:
            tokens, attended, joining = self._take_chunks(model.max_num_batched_tokens - batch)
            # Decodes read the KV of their own sequences, not that of prompts in computation.
            read = self._decode_kv + sum(r.prompt for r, _ in self._chunks if r.transferred)
            usage = min(1.0, read / model.kv_tokens)
            step_s = model.time.iteration_s(tokens, attended, batch + joining, usage)
            self._set_span(now_s, 1, step_s)
        elif batch:
            steps = self._steps_to_finish()
            # The span ends at a full cache: then the newest are preempted. One alone goes on.
            if batch > 1:
                steps = max(1, min(steps, (model.kv_tokens - self.kv_used) // batch))
            usage = min(1.0, (self._decode_kv + batch * steps / 2) / model.kv_tokens)
            self._set_span(now_s, steps, model.time.iteration_s(0, 0.0, batch, usage))
        else:
            self.due_s = None
            self.version += 1

    def _steps_to_finish(self) -> int:
        finishes = self._finishes
        while finishes[0][2].finish_step != finishes[0][0]:  # preempted after it was pushed
            heappop(finishes)
        return min(_SPAN, finishes[0][0] - self._steps)

    def _admit(self) -> None:
        model, waiting = self.model, self.waiting
        budget = model.max_num_batched_tokens - len(self.decoding)
        budget -= sum(r.prompt - r.computed for r in self.prefilling)
        running = len(self.prefilling) + len(self.decoding)
        while waiting and budget > 0 and running < model.max_num_seqs:
            request = waiting[0]
            shared = sum(block in self._held for block in request.blocks) * BLOCK_TOKENS
            # An idle worker takes any prompt: nothing would ever make room for it.
            if running and self.kv_used + request.prompt - shared > model.kv_tokens:
                return
            waiting.popleft()
            running += 1
            self._queued_kv -= request.prompt
            if request.transferred:
                request.computed = request.prompt - 1
            else:
                request.computed = min(self.overlap(request.blocks), request.prompt - 1)
            self._hold(request, shared)
            self.prefilling.append(request)
            budget -= request.prompt - request.computed

    def _take_chunks(self, budget: int) -> tuple[int, float, int]:
        """Choose the prompt tokens of the next iteration.

        Return them, the mean context that they see, and how many sequences that were prefilled
        elsewhere join with their last prompt token, as a decode.
        """
        chunks, tokens, attended, joining = [], 0, 0.0, 0
        for request in self.prefilling:
            chunk = min(request.prompt - request.computed, max(1, budget) - tokens - joining)
            if chunk <= 0:
                break
            chunks.append((request, chunk))
            if request.transferred:
                joining += 1
            else:
                tokens += chunk
                attended += chunk * (request.computed + chunk / 2)
        self._chunks = chunks
        return tokens, attended / tokens if tokens else 0.0, joining

    def _finish_chunks(self, now_s: float, finished: list[RequestState]) -> None:
        for request, chunk in self._chunks:
            request.computed += chunk
            if request.computed < request.prompt:
                continue
            self.prefilling.remove(request)
            self.prefill_tokens -= request.estimate
            request.estimate = 0
            if request.first_s < 0:
                request.first_s = now_s
                self.counters.first_token(request)
            else:  # computed again
                self.counters.tokens += 1
                self.counters.token_s += now_s - request.preempted_s
            request.left -= 1
            if request.left:
                request.finish_step = self._steps + request.left
                self.decoding[request] = None
                self._decode_kv += request.prompt
                heappush(self._finishes, (request.finish_step, next(self._order), request))
            else:
                self._release(request, 0)
                request.end_s = now_s
                finished.append(request)
        self._chunks = []

    def _finished(self, now_s: float) -> list[RequestState]:
        finishes, ended = self._finishes, []
        while finishes and finishes[0][0] <= self._steps:
            step, _, request = heappop(finishes)
            if request.finish_step != step or request.end_s >= 0:
                continue
            del self.decoding[request]
            self._decode_kv -= request.prompt + request.left
            self._release(request, request.left)
            request.end_s = now_s
            ended.append(request)
        return ended

    def _preempt(self, now_s: float) -> bool:
        """Move the newest sequences back to the queue until every other one can grow."""
        preempted = False
        while len(self.decoding) > 1 and self.kv_used + len(self.decoding) > self.model.kv_tokens:
            request, _ = self.decoding.popitem()
            left = request.finish_step - self._steps
            generated = request.left - left
            self._decode_kv -= request.prompt + generated
            self._release(request, generated)
            request.prompt += generated
            request.left = left
            request.finish_step = -1
            request.preempted_s = now_s
            request.transferred = False
            preempted = True
            self._queued_kv += request.prompt
            self.waiting.appendleft(request)
        return preempted

    def _hold(self, request: RequestState, shared: int) -> None:
        """Allocate the KV of a prompt; running sequences hold ``shared`` tokens of it already.

        A prompt that is admitted later finds its blocks: it is computed in the same iteration as
        the end of this one, or after it.
        """
        in_use, idle = self._held, self._idle
        for block in request.blocks:
            in_use[block] = in_use.get(block, 0) + 1
            idle.pop(block, None)
        self.kv_used += request.prompt - shared
        self._evict()

    def _release(self, request: RequestState, generated: int) -> None:
        """Free the KV of a sequence; blocks that no other one holds stay cached."""
        in_use, idle, kept = self._held, self._idle, 0
        for block in request.blocks:
            holders = in_use.pop(block)
            if holders > 1:
                in_use[block] = holders - 1
                kept += BLOCK_TOKENS
            else:
                idle[block] = None
        self.kv_used -= request.prompt + generated - kept
        self._evict()

    def _evict(self) -> None:
        """Drop the cached blocks that were released first, where running sequences need space."""
        idle = self._idle
        surplus = len(idle) - max(0, self.model.kv_tokens - self.kv_used) // BLOCK_TOKENS
        for block in list(islice(idle, max(0, surplus))):
            del idle[block]
