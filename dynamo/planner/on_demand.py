"""Models on demand, as frontends see them: their records, and the requests that wait for a worker.

The records are under the planner's lease: they end with the deployment, and a restarted planner
writes them again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from dynamo.errors import DynamoError
from dynamo.planner.sharing.zero import ModelDemand
from dynamo.protocols import codec
from dynamo.protocols.control import ON_DEMAND, OnDemandModel
from dynamo.protocols.load import ON_DEMAND_STATE, OnDemandState
from dynamo.runtime import DistributedRuntime

__all__ = ["OnDemandRegistry"]

_COMPONENT = "planner"
_STALE_S = 3.5  # frontends report every second
_FRONTENDS = 64
_decode = codec.decoder(OnDemandState).decode
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _StateReport:
    at_s: float
    state: OnDemandState


class OnDemandRegistry:
    """Announces the models of this planner; collects the reports of the frontends.

    ``on_waiting`` is called when the first request of a model waits. ``clock`` is the planner's.
    """

    def __init__(self, runtime: DistributedRuntime, clock: Callable[[], float]) -> None:
        self.on_waiting: Callable[[], object] | None = None
        self._runtime = runtime
        self._clock = clock
        self._announced: dict[str, OnDemandModel] = {}
        self._reports: dict[int, dict[str, _StateReport]] = {}

    async def start(self) -> None:
        """Receive the reports of present and future frontends."""
        namespace = self._runtime.settings.namespace
        await self._runtime.start()
        self._runtime.subscribe(
            namespace, _COMPONENT, ON_DEMAND_STATE, self._on_report, None, self._on_frontend
        )

    def demand(self, model: str) -> ModelDemand:
        """Return the requests of ``model`` in all frontends that report."""
        since_s = self._clock() - _STALE_S
        states = [
            reports[model].state
            for reports in self._reports.values()
            if model in reports and reports[model].at_s > since_s
        ]
        if not states:
            return ModelDemand()
        return ModelDemand(
            waiting=sum(state.waiting for state in states),
            oldest_s=max(state.oldest_s for state in states),
            idle_s=min(state.idle_s for state in states),
        )

    async def announce(self, records: Mapping[str, OnDemandModel]) -> None:
        """Write ``records``, by the names of their services, and delete all others."""
        for service in self._announced.keys() - records.keys():
            await self._runtime.discovery.delete(self._key(service))
            del self._announced[service]
        for service, record in records.items():
            if self._announced.get(service) == record:
                continue
            try:
                lease = await self._runtime.granted()
                value = msgspec.json.encode(record)
                await self._runtime.discovery.put(self._key(service), value, lease.id)
            except DynamoError as error:
                log.warning("%s: its requests cannot wait for a worker: %s", service, error)
                continue
            self._announced[service] = record
            log.info("model %s has workers on demand (service %s)", record.model, service)

    def _key(self, service: str) -> str:
        settings = self._runtime.settings
        return f"{ON_DEMAND}{settings.namespace}/{service}/{self._runtime.instance_id:x}"

    def _on_report(self, publisher: int, sequence: int, payload: bytes) -> None:
        try:
            state = _decode(payload)
        except msgspec.MsgspecError as error:
            log.warning("invalid report of frontend %x: %s", publisher, error)
            return
        if publisher not in self._reports and len(self._reports) >= _FRONTENDS:
            return
        reports = self._reports.setdefault(publisher, {})
        if state.model not in {record.model for record in self._announced.values()}:
            reports.pop(state.model, None)
            return
        before = reports.get(state.model)
        reports[state.model] = _StateReport(self._clock(), state)
        first = state.waiting and (before is None or not before.state.waiting)
        if first and self.on_waiting is not None:
            self.on_waiting()

    def _on_frontend(self, publisher: int, added: bool) -> None:
        if not added:
            self._reports.pop(publisher, None)
