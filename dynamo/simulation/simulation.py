"""Run one policy on one trace in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.planner.connector import DRAINING, READY, STARTING
from dynamo.planner.policies.base import DECODE, PREFILL, Policy
from dynamo.simulation.cluster import ReplayCluster
from dynamo.simulation.request import ReplayRequest
from dynamo.simulation.result import ReplayResult, Sample, summarize
from dynamo.simulation.scaling import ReplayPlanner
from dynamo.simulation.service_model import ReplaySetup, VirtualClock

_PATIENCE_S = 3600.0
_SAMPLE_S = 10.0


def simulate(
    policy: Policy, requests: Sequence[ReplayRequest], setup: ReplaySetup, name: str | None = None
) -> ReplayResult:
    """Run ``policy`` on ``requests``, which are sorted by arrival; ``name`` is for the result.

    The replay ends with the last request. One that has not ended an hour after the last arrival
    counts as failed.
    """
    clock = VirtualClock()
    cluster = ReplayCluster(clock, setup, requests)
    planner = ReplayPlanner(clock, cluster, policy)
    samples: list[Sample] = []

    def sample() -> None:
        samples.append(_sample(cluster, clock.now_s))
        clock.at(clock.now_s + _SAMPLE_S, sample)

    clock.at(0.0, sample)
    last_s = (requests[-1].at_s if requests else 0.0) + _PATIENCE_S
    while not cluster.complete and clock.now_s <= last_s:
        clock.run_next()
    for pool in cluster.pools.values():
        pool.finish()
    return summarize(name or policy.name, cluster, planner, samples, clock.now_s)


def _sample(cluster: ReplayCluster, now_s: float) -> Sample:
    decode, prefill = cluster.pools[DECODE], cluster.pools.get(PREFILL)
    return Sample(
        at_s=now_s,
        ready=decode.count(READY),
        starting=decode.count(STARTING),
        draining=decode.count(DRAINING),
        prefill_ready=prefill.count(READY) if prefill else 0,
        arrived=cluster.counters.arrived,
        queued=cluster.counters.arrived - cluster.counters.rejected - cluster.counters.first_tokens,
    )
