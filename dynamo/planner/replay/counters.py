"""What the frontends count in a replay, and the difference between two points in time."""

from __future__ import annotations

from dynamo.planner.observation import Traffic
from dynamo.simulation.request import RequestState

__all__ = ["TrafficCounters"]


class TrafficCounters:
    """Sums since the start of the replay."""

    __slots__ = (
        "arrived",
        "finished",
        "first_tokens",
        "isl",
        "osl",
        "rejected",
        "request_s",
        "token_s",
        "tokens",
        "ttft_s",
    )

    def __init__(self) -> None:
        self.arrived = self.finished = self.rejected = self.first_tokens = self.tokens = 0
        self.isl = self.osl = 0
        self.ttft_s = self.token_s = self.request_s = 0.0

    def first_token(self, request: RequestState) -> None:
        """Count the first token of ``request``."""
        self.first_tokens += 1
        self.isl += request.isl
        self.ttft_s += request.ttft_s

    def finish(self, request: RequestState) -> None:
        """Count ``request`` as finished."""
        self.finished += 1
        self.osl += request.osl
        self.request_s += request.end_s - request.arrived_s

    def copy(self) -> TrafficCounters:
        """Return the sums as they are now."""
        other = TrafficCounters()
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        return other

    def since(self, before: TrafficCounters, duration_s: float) -> Traffic:
        """Return the traffic between ``before`` and now, ``duration_s`` later."""
        first = self.first_tokens - before.first_tokens
        finished = self.finished - before.finished
        tokens = self.tokens - before.tokens
        return Traffic(
            duration_s=duration_s,
            arrived=self.arrived - before.arrived,
            finished=finished,
            isl=_mean(self.isl - before.isl, first),
            osl=_mean(self.osl - before.osl, finished),
            ttft_ms=_mean(1000 * (self.ttft_s - before.ttft_s), first),
            itl_ms=_mean(1000 * (self.token_s - before.token_s), tokens),
            request_s=_mean(self.request_s - before.request_s, finished),
            queued=self.arrived - self.rejected - self.first_tokens,
            inflight=self.arrived - self.rejected - self.finished,
        )


def _mean(total: float, number: int) -> float | None:
    return total / number if number else None
