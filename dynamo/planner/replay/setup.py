"""The simulated deployment: its service model, limits, delays and targets."""

from __future__ import annotations

from dataclasses import dataclass, field

from dynamo.simulation.service_model import ServiceModel, service_model

__all__ = ["ReplaySetup"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySetup:
    """What is simulated.

    A worker needs ``start_up_s`` from its start to its first request, and ``stop_s`` from its last
    request to its exit. ``prefill_workers`` is None for aggregated serving. At most ``max_queue``
    requests wait for their first token; more are rejected. ``pull_s`` is the time between metric
    pulls. A request attains its targets if its TTFT and its mean ITL are within them.
    """

    model: ServiceModel = field(default_factory=lambda: service_model("qwen3-8b-h100"))
    start_up_s: float = 60.0
    stop_s: float = 0.0
    max_gpus: float = 8
    gpus_per_worker: float = 1.0
    gpus_per_prefill_worker: float = 1.0
    minimum: int = 1
    workers: int = 1
    prefill_workers: int | None = None
    max_queue: int | None = None
    pull_s: float = 1.0
    ttft_ms: float = 2000.0
    itl_ms: float = 50.0
