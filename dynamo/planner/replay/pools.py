"""The workers of a replay: how they start, serve, drain and exit, and the GPUs that they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dynamo.planner.connector import DRAINING, READY, STARTING
from dynamo.planner.observation import Pool
from dynamo.planner.replay.clock import VirtualClock
from dynamo.planner.replay.setup import ReplaySetup
from dynamo.serve.gpus.gpus import fits
from dynamo.simulation.batch_worker import BatchWorker

__all__ = ["ReplayPool", "ReplayWorker"]


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

    def __init__(  # noqa: PLR0913 - one parameter for each collaborator
        self,
        clock: VirtualClock,
        setup: ReplaySetup,
        gpus_per_worker: float,
        budget: GpuBudget,
        make: Callable[[int], BatchWorker | None],
        on_ready: Callable[[ReplayWorker], None],
    ) -> None:
        self.workers: list[ReplayWorker] = []
        self.gpus_per_worker = gpus_per_worker
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
            gpus_per_worker=self.gpus_per_worker,
            minimum=self._setup.minimum,
        )

    def add(self, done: Callable[[], None], start_up_s: float | None = None) -> bool:
        """Start a worker and call ``done`` when it serves; return False without free GPUs."""
        if not fits(self._budget.free, self.gpus_per_worker):
            return False
        self._budget.free -= self.gpus_per_worker
        worker = ReplayWorker(self._number, self._clock.now_s, self._make(self._number))
        self._number += 1
        self.workers.append(worker)
        delay_s = self._setup.start_up_s if start_up_s is None else start_up_s
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
            self.gpu_s += (self._clock.now_s - worker.begin_s) * self.gpus_per_worker
        self.workers = []

    def _serve(self, worker: ReplayWorker, done: Callable[[], None]) -> None:
        worker.state = READY
        self._on_ready(worker)
        done()

    def _exit(self, worker: ReplayWorker) -> None:
        self.workers.remove(worker)
        self.gpu_s += (self._clock.now_s - worker.begin_s) * self.gpus_per_worker
        self._budget.free += self.gpus_per_worker
        self._exits.pop(worker)()
