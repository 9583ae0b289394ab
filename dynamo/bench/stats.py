"""Statistics of a run. Pure; a missing figure is None, not zero."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from dynamo.errors import ConfigError


@dataclass(slots=True)
class Outcome:
    """The result of one request. Times in seconds; ``gaps_s`` are inter-token latencies.

    ``started_s`` is the start of its clock: the scheduled time (open loop), else just before the
    connect. ``sent_s`` is the time of sending, after the connect. ``pieces`` of output arrived in
    the stream; the tokens are those of the usage, None without one.
    """

    started_s: float = 0.0
    sent_s: float = 0.0
    schedule_lag_s: float | None = None
    first_token_s: float | None = None
    finished_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    pieces: int = 0
    cached_tokens: int | None = None
    worker_id: int | None = None
    error: str | None = None
    status: int = 0

    @property
    def generated(self) -> int | None:
        """Output tokens: of the usage, else the pieces of the stream; None when not streamed."""
        return self.pieces or None if self.output_tokens is None else self.output_tokens

    @property
    def latency_s(self) -> float:
        """Seconds from the start of the clock to the last byte."""
        return self.finished_s - self.started_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the start of the clock to the first token; None when not streamed."""
        return None if self.first_token_s is None else self.first_token_s - self.started_s


class Spread(msgspec.Struct):
    """The distribution of one figure."""

    avg: float
    min: float
    p50: float
    p90: float
    p99: float
    max: float


class Goodput(msgspec.Struct, omit_defaults=True):
    """Limits in milliseconds; a good request meets all that are set."""

    ttft: float | None = None
    itl: float | None = None
    latency: float | None = None


class Summary(msgspec.Struct, omit_defaults=True):
    """The figures of one run. Times in milliseconds, rates per second of wall clock.

    ``ttft_ms`` and ``latency_ms`` start at ``measured_from``. ``schedule_lag_ms`` is the part of
    them before a request of an open loop was started; it includes failed requests. ``interrupted``
    by Ctrl-C, the requests in flight and later ones are left out. ``counted`` says that an answer
    without usage was among them: each piece of its stream counts as an output token, and sums that
    remain unknown are null.
    """

    requests: int
    completed: int
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float | None
    total_tokens_per_s: float | None
    prompt_tokens: int | None
    output_tokens: int | None
    interrupted: bool = False
    counted: bool = False
    measured_from: str = ""
    schedule_lag_ms: Spread | None = None
    ttft_ms: Spread | None = None
    itl_ms: Spread | None = None
    latency_ms: Spread | None = None
    cached_tokens: int | None = None
    hit_rate: float | None = None
    workers: dict[str, int] = {}
    busiest_share: float | None = None
    imbalance: float | None = None
    busiest_work_share: float | None = None
    work_imbalance: float | None = None
    errors: dict[str, int] = {}
    goodput: Goodput | None = None
    good_requests: int | None = None
    good_requests_per_s: float | None = None


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile of an ascending, non-empty sequence; ``share`` in 0..1."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def parse_goodput(text: str) -> Goodput:
    """Parse limits like ``ttft:2000,itl:25``. Raises ConfigError that names the wrong part."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, colon, value = part.strip().partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            colon = ""
        if not colon or name not in ("ttft", "itl", "latency"):
            raise ConfigError(
                f"--goodput {part!r} is not NAME:MILLISECONDS with NAME one of ttft, itl, latency"
            )
    return Goodput(**limits)


def summarize(
    outcomes: Sequence[Outcome], duration_s: float, goodput: Goodput | None = None
) -> Summary:
    """Return all figures of a run of ``duration_s`` seconds."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    lags = [o.schedule_lag_s for o in outcomes if o.schedule_lag_s is not None]
    wall_s = max(duration_s, 1e-9)
    prompt = _sum(outcome.prompt_tokens for outcome in done)
    output = _sum(outcome.generated for outcome in done)
    both = None if prompt is None or output is None else prompt + output
    summary = Summary(
        requests=len(outcomes),
        completed=len(done),
        duration_s=duration_s,
        requests_per_s=len(done) / wall_s,
        output_tokens_per_s=None if output is None else output / wall_s,
        total_tokens_per_s=None if both is None else both / wall_s,
        prompt_tokens=prompt,
        output_tokens=output,
        counted=any(outcome.output_tokens is None for outcome in done),
        measured_from="the scheduled time" if lags else "before the connection is made",
        schedule_lag_ms=_spread(lags),
        ttft_ms=_spread([o.ttft_s for o in done if o.ttft_s is not None]),
        itl_ms=_spread([gap for o in done for gap in o.gaps_s]),
        latency_ms=_spread([o.latency_s for o in done]),
        errors=dict(Counter(o.error for o in outcomes if o.error is not None).most_common()),
    )
    cached = [o.cached_tokens for o in done if o.cached_tokens is not None]
    if cached and prompt is not None:
        summary.cached_tokens = sum(cached)
        summary.hit_rate = sum(cached) / max(1, prompt)
    _balance(summary, done)
    if goodput is not None:
        summary.goodput = goodput
        summary.good_requests = sum(_is_good(outcome, goodput) for outcome in done)
        summary.good_requests_per_s = summary.good_requests / wall_s
    return summary


def _balance(summary: Summary, done: Sequence[Outcome]) -> None:
    """Set the shares of requests and of work: uncached prompt tokens plus output tokens."""
    served: Counter[int] = Counter()
    work: Counter[int] = Counter()
    for outcome in done:
        if outcome.worker_id is not None:
            computed = (outcome.prompt_tokens or 0) - (outcome.cached_tokens or 0)
            served[outcome.worker_id] += 1
            work[outcome.worker_id] += computed + (outcome.generated or 0)
    if not served:
        return
    summary.workers = {f"{worker:x}": count for worker, count in sorted(served.items())}
    summary.busiest_share = max(served.values()) / served.total()
    # 1 if all workers got the same number.
    summary.imbalance = summary.busiest_share * len(served)
    summary.busiest_work_share = max(work.values()) / max(1, work.total())
    summary.work_imbalance = summary.busiest_work_share * len(work)


def _sum(counts: Iterable[int | None]) -> int | None:
    """Return the sum; None if one of ``counts`` is unknown."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


def _spread(seconds: list[float]) -> Spread | None:
    if not seconds:
        return None
    ordered = sorted(value * 1000 for value in seconds)
    return Spread(
        avg=sum(ordered) / len(ordered),
        min=ordered[0],
        p50=percentile(ordered, 0.5),
        p90=percentile(ordered, 0.9),
        p99=percentile(ordered, 0.99),
        max=ordered[-1],
    )


def _is_good(outcome: Outcome, limits: Goodput) -> bool:
    itl_s = sum(outcome.gaps_s) / len(outcome.gaps_s) if outcome.gaps_s else None
    pairs = (
        (outcome.ttft_s, limits.ttft),
        (itl_s, limits.itl),
        (outcome.latency_s, limits.latency),
    )
    return all(limit is None or value is None or value * 1000 <= limit for value, limit in pairs)
