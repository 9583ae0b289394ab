"""What the planner needs of the system it scales: its services, and how to change them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from dynamo.config.planner import PlannerSettings

STARTING, READY, DRAINING, ASLEEP = "starting", "ready", "draining", "asleep"
"""States of a worker; one that has exited is not listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledWorker:
    """One worker of a service: the watcher ``name``, and its instance once it is ready.

    One that sleeps is ``wakeable`` while no other worker has its GPUs.
    """

    name: str
    state: str
    worker_id: int | None = None
    gpus: tuple[str, ...] = ()
    wakeable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledService:
    """A service of the graph whose workers the planner may add and remove.

    ``pool`` is ``decode`` (aggregated workers, too) or ``prefill``. The template is not a worker:
    a service without workers has an empty ``workers``. A worker counts ``gpus_per_worker`` in the
    budget, and gets ``assigned`` GPUs: 0 if none are assigned. Without requests for
    ``idle_timeout_s`` its last worker goes (None: as the planner's option says), and no other model
    of its ``groups`` is awake beside it. ``relayed``: its workers take whole HTTP requests.
    ``held`` says why its workers must not be changed now, else it is "". ``stopped`` is the watcher
    that an operator has stopped, if that leaves it without a worker. ``asked_at`` is the Unix time
    of an operator's last load of its model.
    """

    name: str
    model: str
    pool: str
    gpus_per_worker: float
    workers: tuple[ScaledWorker, ...] = ()
    assigned: float = 0.0
    minimum: int | None = None
    maximum: int | None = None
    priority: int = 0
    idle_timeout_s: float | None = None
    groups: tuple[str, ...] = ()
    relayed: bool = False
    held: str = ""
    stopped: str = ""
    asked_at: float = 0.0


class Connector(Protocol):
    """Changes the workers of a deployment."""

    def configure(self, settings: PlannerSettings) -> None:
        """Keep within the limits of ``settings`` from now on."""

    async def services(self) -> Mapping[str, ScaledService]:
        """Return the services as they are now, by name. Raises DynamoError while unknown."""

    async def add(self, service: str) -> str:
        """Wake or start one worker; return its watcher's name when it serves.

        Raises DynamoError when there are no GPUs, when circus or the API server refuses, or when
        it does not serve in time; then nothing of it is left. What a cancelled start leaves,
        :meth:`reconcile` repairs.
        """

    def give_up(self, service: str, reason: str) -> None:
        """Fail and undo the starts of ``service`` that :meth:`add` has begun, for ``reason``."""

    async def remove(self, service: str) -> str:
        """Remove the newest worker; return its watcher's name when it has exited.

        Its requests finish first. Raises DynamoError without a worker, or when it does not exit.
        """

    async def reconcile(self) -> list[str]:
        """Repair what a crash or a cancellation left; return what, one sentence each."""
