"""The simulated deployment: its workers and GPUs, and the path of a request through it.

A request goes to the ready worker with the lowest cost (see ``BatchWorker.cost``) and stays there;
without a ready worker it waits for one. In disaggregated serving it first passes the prefill queue,
first come first served, and its KV transfer; then the cheapest decode worker gets it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from dynamo.planner.capacity.observation import Pool, Pull
from dynamo.planner.connector import ASLEEP, DRAINING, READY, STARTING
from dynamo.serve.gpus.gpus import fits
from dynamo.serve.graph.facts import DECODE, PREFILL
from dynamo_lab.simulation.batch_worker import BatchWorker
from dynamo_lab.simulation.request import ReplayRequest, RequestState, TrafficCounters
from dynamo_lab.simulation.service_model import ReplaySetup, VirtualClock


@dataclass(slots=True, eq=False)
class ReplayWorker:
    """One worker from its start to its exit; ``engine`` is None in a prefill worker, which computes
    ``busy`` prompts."""

    number: int
    begin_s: float
    engine: BatchWorker | None
    state: str = STARTING
    busy: int = 0

    @property
    def idle(self) -> bool:
        """Whether it holds no request."""
        return not self.busy and (self.engine is None or not self.engine.requests)


@dataclass(slots=True)
class GpuBudget:
    """GPUs of the box that no worker holds."""

    free: float


class ReplayPool:
    """The workers of one kind.

    ``make`` makes the engine of a worker, ``on_ready`` is called when one begins to serve.
    """

    def __init__(
        self,
        clock: VirtualClock,
        setup: ReplaySetup,
        gpus_per_worker: float,
        minimum: int,
        budget: GpuBudget,
        make: Callable[[int], BatchWorker | None],
        on_ready: Callable[[ReplayWorker], None],
    ) -> None:
        self.workers: list[ReplayWorker] = []
        self.gpus_per_worker, self._minimum = gpus_per_worker, minimum
        self.gpu_s = 0.0
        self._clock, self._setup, self._budget = clock, setup, budget
        self._make, self._on_ready = make, on_ready
        self._number = 0
        self._exits: dict[ReplayWorker, Callable[[], None]] = {}

    @property
    def ready(self) -> list[ReplayWorker]:
        """The workers that take requests."""
        return [worker for worker in self.workers if worker.state == READY]

    def count(self, state: str) -> int:
        """Return the number of workers in ``state``."""
        return sum(worker.state == state for worker in self.workers)

    def view(self) -> Pool:
        """Return what a policy sees."""
        return Pool(
            ready=self.count(READY),
            starting=self.count(STARTING),
            draining=self.count(DRAINING),
            asleep=self.count(ASLEEP),
            gpus_per_worker=self.gpus_per_worker,
            minimum=self._minimum,
        )

    def add(self, done: Callable[[], None], start_up_s: float | None = None) -> bool:
        """Wake or start a worker and call ``done`` when it serves; return False without free GPUs.

        One that slept begins with an empty cache.
        """
        if not fits(self._budget.free, self.gpus_per_worker):
            return False
        self._budget.free -= self.gpus_per_worker
        asleep = next((worker for worker in self.workers if worker.state == ASLEEP), None)
        delay_s = self._setup.start_up_s if start_up_s is None else start_up_s
        if asleep is not None:
            self.workers.remove(asleep)
            delay_s = self._setup.wake_s or 0.0
        worker = ReplayWorker(self._number, self._clock.now_s, self._make(self._number))
        self._number += 1
        self.workers.append(worker)
        self._clock.at(self._clock.now_s + delay_s, self._serve, worker, done)
        return True

    def remove(self, done: Callable[[], None]) -> bool:
        """Let the newest ready worker finish its requests and call ``done`` when it has exited;
        return False if there is none."""
        worker = next((w for w in reversed(self.workers) if w.state == READY), None)
        if worker is None:
            return False
        worker.state = DRAINING
        self._exits[worker] = done
        if worker.idle:
            self.release(worker)
        return True

    def release(self, worker: ReplayWorker) -> None:
        """End a draining worker whose last request has finished."""
        self._clock.at(self._clock.now_s + self._setup.stop_s, self._exit, worker)

    def finish(self) -> None:
        """Count the GPU time of the workers that are left at the end."""
        for worker in self.workers:
            if worker.state == ASLEEP:
                continue
            self.gpu_s += (self._clock.now_s - worker.begin_s) * self.gpus_per_worker
        self.workers = []

    def _serve(self, worker: ReplayWorker, done: Callable[[], None]) -> None:
        worker.state = READY
        self._on_ready(worker)
        done()

    def _exit(self, worker: ReplayWorker) -> None:
        setup = self._setup
        if setup.wake_s is not None and self.count(ASLEEP) < setup.sleeping:
            worker.state = ASLEEP
        else:
            self.workers.remove(worker)
        self.gpu_s += (self._clock.now_s - worker.begin_s) * self.gpus_per_worker
        self._budget.free += self.gpus_per_worker
        self._exits.pop(worker)()


class ReplayCluster:
    """The deployment and the requests that pass through it."""

    def __init__(
        self, clock: VirtualClock, setup: ReplaySetup, requests: Sequence[ReplayRequest]
    ) -> None:
        self.setup = setup
        self.counters = TrafficCounters()
        self.ended: list[RequestState] = []
        self.pools: dict[str, ReplayPool] = {}
        self._clock = clock
        self._requests = requests
        self._children: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            if request.parent is not None:
                self._children.setdefault(request.parent, []).append(index)
        self._held: deque[RequestState] = deque()
        self._prefill_queue: deque[RequestState] = deque()
        self._add_pools(GpuBudget(setup.max_gpus))
        self._schedule_arrivals()

    @property
    def total(self) -> int:
        """The requests of the trace."""
        return len(self._requests)

    @property
    def complete(self) -> bool:
        """Whether every request has ended."""
        return len(self.ended) == len(self._requests)

    def pull(self) -> Pull:
        """Return what a metric pull shows now."""
        depth = None
        prefill = self.pools.get(PREFILL)
        if prefill is not None:
            slots = len(prefill.ready) * self.setup.model.prefill_slots
            depth = len(self._prefill_queue) / slots if slots else None
        loads = (w.engine.load() for w in self.pools[DECODE].ready if w.engine is not None)
        return Pull(at_s=self._clock.now_s, decode=tuple(loads), prefill_queue=depth)

    def _add_pools(self, budget: GpuBudget) -> None:
        setup = self.setup

        def batch_worker(number: int) -> BatchWorker:
            return BatchWorker(number, setup.model, self.counters)

        def no_engine(number: int) -> None:
            return None

        decode = ReplayPool(
            self._clock,
            setup,
            setup.gpus_per_worker,
            setup.minimum,
            budget,
            batch_worker,
            self._serve_held,
        )
        self.pools[DECODE] = decode
        if setup.prefill_workers is not None:
            self.pools[PREFILL] = ReplayPool(
                self._clock,
                setup,
                setup.gpus_per_prefill_worker,
                setup.prefill_minimum,
                budget,
                no_engine,
                self._start_prefills,
            )
        for pool, workers in ((DECODE, setup.workers), (PREFILL, setup.prefill_workers or 0)):
            for _ in range(workers):
                self.pools[pool].add(lambda: None, start_up_s=0.0)

    def _schedule_arrivals(self) -> None:
        # Only the next arrival is in the clock's queue, so that the queue stays short.
        self._first_turns = [i for i, r in enumerate(self._requests) if r.parent is None]
        self._next = 0
        self._schedule_next()

    def _schedule_next(self) -> None:
        if self._next < len(self._first_turns):
            index = self._first_turns[self._next]
            self._next += 1
            self._clock.at(self._requests[index].at_s, self._arrive_first, index)

    def _arrive_first(self, index: int) -> None:
        self._schedule_next()
        self._arrive(index)

    def _arrive(self, index: int) -> None:
        request = RequestState(index, self._requests[index], self._clock.now_s)
        counters, setup = self.counters, self.setup
        counters.arrived += 1
        waiting = counters.arrived - counters.rejected - counters.first_tokens - 1
        full = setup.max_queue is not None and waiting >= setup.max_queue
        if full or request.isl + request.osl > setup.model.kv_tokens:
            request.rejected = True
            counters.rejected += 1
            self._end(request)
        elif PREFILL in self.pools:
            self._prefill_queue.append(request)
            self._start_prefills()
        else:
            self._route(request)

    def _route(self, request: RequestState) -> None:
        best, lowest = None, 0
        for worker in self.pools[DECODE].workers:
            if worker.state != READY or worker.engine is None:
                continue
            cost = worker.engine.cost(request)
            if best is None or cost < lowest:
                best, lowest = worker, cost
        if best is None:
            self._held.append(request)
        else:
            self._submit(best, request)

    def _submit(self, worker: ReplayWorker, request: RequestState) -> None:
        engine = worker.engine
        assert engine is not None
        before = engine.version
        engine.submit(request, self._clock.now_s)
        if engine.version != before:
            self._schedule_span(worker, engine)

    def _schedule_span(self, worker: ReplayWorker, engine: BatchWorker) -> None:
        if engine.due_s is not None:
            self._clock.at(engine.due_s, self._finish_span, worker, engine, engine.version)

    def _finish_span(self, worker: ReplayWorker, engine: BatchWorker, version: int) -> None:
        if engine.version != version:  # an arrival has cut the span short
            return
        for request in engine.finish_span():
            self.counters.finish(request)
            self._end(request)
        self._schedule_span(worker, engine)
        if worker.state == DRAINING and worker.idle:
            self.pools[DECODE].release(worker)

    def _serve_held(self, _: ReplayWorker) -> None:
        # All that waited are spread over the workers that are ready now.
        waiting, self._held = self._held, deque()
        for request in waiting:
            self._route(request)

    def _start_prefills(self, _: ReplayWorker | None = None) -> None:
        queue, model = self._prefill_queue, self.setup.model
        for worker in self.pools[PREFILL].workers:
            while queue and worker.state == READY and worker.busy < model.prefill_slots:
                request = queue.popleft()
                worker.busy += 1
                due_s = self._clock.now_s + model.prefill_s(request.isl)
                self._clock.at(due_s, self._finish_prefill, worker, request)

    def _finish_prefill(self, worker: ReplayWorker, request: RequestState) -> None:
        worker.busy -= 1
        request.transferred = True
        due_s = self._clock.now_s + self.setup.model.transfer.seconds(request.isl)
        self._clock.at(due_s, self._route, request)
        if worker.state == DRAINING and worker.idle:
            self.pools[PREFILL].release(worker)
        self._start_prefills()

    def _end(self, request: RequestState) -> None:
        self.ended.append(request)
        for child in self._children.get(request.index, ()):
            planned = self._requests[child]
            due_s = max(planned.at_s, self._clock.now_s + planned.delay_s)
            self._clock.at(due_s, partial(self._arrive, child))
