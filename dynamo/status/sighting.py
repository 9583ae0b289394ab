"""What was seen of a deployment at one time: the input of what ``ps`` and ``/ui`` show."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from dynamo.protocols.status import FrontendStatus, GpuStatus, PlannerReport
from dynamo.serve.state.registered import RegisteredWorker
from dynamo.serve.state.statefile import Document


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendSighting:
    """One frontend: its entry ``name``, its address, and its report if it answered.

    ``state`` is ready, draining or down. ``problem`` says why there is no ``status``.
    """

    name: str
    url: str
    state: str
    status: FrontendStatus | None = None
    problem: str = ""


def _nothing(name: str) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxSighting:
    """A deployment at ``at_s``, Unix time.

    ``uptimes`` has the recorded processes that live. ``reserved`` are the entries that a living
    process adds, removes or wakes. ``last_output`` returns the last line of a watcher. ``planner``
    is what a running one reports. ``uses_files``: workers register in files, else ``registered``
    has none.
    """

    document: Document
    at_s: float
    uptimes: Mapping[int, float] = field(default_factory=dict)
    registered: Mapping[int, RegisteredWorker] = field(default_factory=dict)
    reserved: Collection[str] = ()
    last_output: Callable[[str], str] = _nothing
    frontends: tuple[FrontendSighting, ...] = ()
    planner: PlannerReport | None = None
    gpus: tuple[GpuStatus, ...] = ()
    uses_files: bool = True

    def rejected(self, worker: str) -> str:
        """Return why a frontend rejects the worker with this id; "" if none does."""
        reports = (one.status for one in self.frontends if one.status)
        return next((one.rejected[worker] for one in reports if worker in one.rejected), "")

    def serves(self, model: str) -> bool:
        """Whether a frontend has a worker of ``model``."""
        return any(
            one.model == model and one.workers
            for frontend in self.frontends
            for one in (frontend.status.models if frontend.status else ())
        )
