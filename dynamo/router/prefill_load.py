"""Estimates how much of the prompts booked on a slot is computed by now.

Pure: time is handed in. A slot computes its prefills in order, so elapsed time is credited to the
oldest one, the anchor: of its tokens, ``elapsed / expected seconds`` count as done, at most all.
Without an expectation it counts in full.

The expectation is fitted, from AIConfigurator, or a caller's function. The fit to observed times is
a robust regression:

    seconds = a * prefills + b * tokens + c * (tokens * (cached prefix + tokens / 2))

``a`` is the fixed cost of a prompt, ``b`` the work of a token, ``c`` its attention to all tokens
before it: a prompt's n tokens attend to the cached prefix and, on average, to n / 2 of their own.
No coefficient is negative. Outliers in either direction get little weight.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from statistics import median
from typing import Any, NamedTuple, TypeAlias

from dynamo._fast.prefill_progress import PrefillProgress
from dynamo._fast.seconds import SecondsCost
from dynamo.config.router import RouterSettings
from dynamo.errors import ConfigError

Predictor = Callable[[int, int], float | None]
"""(tokens to compute, cached prefix tokens) to seconds; None: unknown."""
_INTERVAL_PREFILLS = 8
MIN_SAMPLES = 8
"""With fewer samples there is no prediction."""
_WINDOW = 128
_REFIT_SAMPLES = 8
_REFIT_S = 1.0
_ROUNDS = 6
_DESCENT = 60
_LEAST_SPREAD = 0.02
_LEAST_S = 1e-6
_SLOWNESS_SHARE = 0.05
_SLOWEST = 16.0
_PRIOR = (0.02, 1e-4, 0.0)
"""Of the cost in seconds until prefills are measured: 10,000 tokens a second."""
log = logging.getLogger(__name__)
Row = tuple[float, float, float]
PrefillModel: TypeAlias = "StaticModel | PrefillFit"
"""Predicts the seconds of prefills, None where unknown, and may learn from observed ones."""
_FLAG = "--router-prefill-load-model"
_TOKENS = (256, 2048, 8192, 32768)
_CACHED = (0, 16384)


class BusyInterval(NamedTuple):
    """A period in which a slot computed prompts without a pause.

    ``attention`` sums, over its ``prefills``, tokens × (cached tokens + half of the tokens).
    """

    prefills: int
    tokens: int
    attention: float
    seconds: float


class StaticModel:
    """A model that calls ``predictor`` and learns nothing."""

    hurries = False

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def predict(self, tokens: int, cached_tokens: int) -> float | None:
        """Return the predictor's result."""
        return self._predictor(tokens, cached_tokens)

    def observe(self, interval: BusyInterval, now_s: float) -> None:
        """Ignore the observation."""


class PrefillLoad:
    """The active prefills by slot, oldest first. Every call is O(1) but :meth:`subtract_done`.

    Memory is bounded by the booked requests.
    """

    def __init__(self, model: PrefillModel, seconds: SecondsCost | None = None) -> None:
        self._model = model
        self._slots: dict[int, _SlotPrefills] = {}
        self._progress = PrefillProgress()
        self._seconds = seconds
        if seconds is not None and isinstance(model, PrefillFit):
            seconds.set_fit(*model.estimate)

    def begin(
        self, slot: int, request_id: str, tokens: int, cached_tokens: int, now_s: float
    ) -> None:
        """Add a booked prompt with ``tokens`` to compute; one without is no load."""
        if tokens <= 0:
            return
        expected_s = self._model.predict(tokens, cached_tokens)
        rate = tokens / expected_s if expected_s is not None and 0 < expected_s < math.inf else 0.0
        prefill = _Prefill(tokens, cached_tokens, rate if rate < math.inf else 0.0)
        active = self._slots.get(slot)
        if active is None:
            active = self._slots[slot] = _SlotPrefills(prefill, now_s)
            self._progress.set(slot, 0.0, prefill.rate, now_s, tokens)
        active.add(request_id, prefill)
        self._show(slot, active)

    def first_token(self, slot: int, request_id: str, now_s: float) -> None:
        """Remove a computed prompt. Ignores unknown requests."""
        active = self._slots.get(slot)
        prefill = active.pop(request_id) if active is not None else None
        if active is None or prefill is None:
            return
        active.count(prefill)
        oldest = active.oldest
        if prefill is oldest:
            self._advance_anchor(slot, active, now_s)
        elif oldest.rate and prefill.rate:
            # A younger prefill overtook the anchor and used part of the time credited to it. Take
            # its tokens back from the anchor: the sum over both, and so the reported load, does not
            # jump. Tokens are whole numbers, so the subtraction is exact in floating point.
            left = max(self._progress.value(slot, now_s) - prefill.tokens, 0.0)
            self._progress.set(slot, left, oldest.rate, now_s, oldest.tokens)
        self._show(slot, active)
        interval = active.take_interval(now_s, 1 if self._model.hurries else _INTERVAL_PREFILLS)
        if interval is not None:
            self._observe(slot, interval, now_s)

    def mark_waiting(self, slot: int) -> None:
        """Note that prompts of ``slot`` wait for memory: the interval measures no speed."""
        active = self._slots.get(slot)
        if active is not None:
            active.abandoned = True

    def abandon(self, slot: int, request_id: str, now_s: float) -> None:
        """Remove a request that ended before its first token: it was dropped, not computed."""
        active = self._slots.get(slot)
        prefill = active.pop(request_id) if active is not None else None
        if active is None or prefill is None:
            return
        # How much of it was computed is unknown: the interval measures nothing.
        active.abandoned = True
        if prefill is active.oldest:
            self._advance_anchor(slot, active, now_s)
        self._show(slot, active)

    def drop_slot(self, slot: int) -> None:
        """Remove all prefills of a worker that was removed."""
        if self._slots.pop(slot, None) is not None:
            self._progress.set(slot, 0.0, 0.0, 0.0, 0.0)
            if self._seconds is not None:
                self._seconds.set_queue(slot, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    def done_tokens(self, slot: int, now_s: float) -> int:
        """Return the estimate of computed tokens on ``slot``."""
        return int(self._progress.value(slot, now_s))

    def subtract_done(self, prefill_tokens: array[int], now_s: float) -> None:
        """Subtract the estimates from a column (i64) by slot. O(slots), compiled."""
        self._progress.subtract_done(prefill_tokens, now_s)

    def _advance_anchor(self, slot: int, active: _SlotPrefills, now_s: float) -> None:
        """Make the oldest remaining prefill the anchor; its time starts now."""
        if not active.prefills:
            self.drop_slot(slot)
            return
        oldest = active.oldest = next(iter(active.prefills.values()))
        active.since_s = now_s
        self._progress.set(slot, 0.0, oldest.rate, now_s, oldest.tokens)

    def _show(self, slot: int, active: _SlotPrefills) -> None:
        """Say in seconds what waits on ``slot``, unless nothing does."""
        if self._seconds is not None and active.prefills:
            oldest, count = active.oldest, len(active.prefills)
            self._seconds.set_queue(
                slot,
                count,
                active.tokens,
                active.attention,
                oldest.tokens,
                oldest.attention,
                active.since_s,
            )

    def _observe(self, slot: int, interval: BusyInterval, now_s: float) -> None:
        """Learn from an interval: first how slow this worker is, then, without that, the model."""
        seconds = self._seconds
        if seconds is not None and isinstance(self._model, PrefillFit):
            slowness = self._model.slowness(interval, seconds.slowness(slot))
            seconds.set_slowness(slot, slowness)
            interval = interval._replace(seconds=interval.seconds / slowness)
        self._model.observe(interval, now_s)
        if seconds is not None and isinstance(self._model, PrefillFit):
            seconds.set_fit(*self._model.estimate)


class _Prefill(NamedTuple):
    """``rate`` in tokens a second; 0: unknown."""

    tokens: int
    cached_tokens: int
    rate: float

    @property
    def attention(self) -> float:
        """The tokens, times the tokens before each of them on average."""
        return self.tokens * (self.cached_tokens + self.tokens / 2)


class _SlotPrefills:
    """The active prefills of one slot, and the totals of the current interval.

    ``tokens`` and ``attention`` are the sums of all active ones; the oldest began at ``since_s``.
    """

    __slots__ = (
        "_attention",
        "_count",
        "_since_s",
        "_tokens",
        "abandoned",
        "attention",
        "oldest",
        "prefills",
        "since_s",
        "tokens",
    )

    def __init__(self, oldest: _Prefill, now_s: float) -> None:
        self.prefills: dict[str, _Prefill] = {}
        self.oldest = oldest
        self.since_s = now_s
        self.tokens, self.attention = 0, 0.0
        self._restart(now_s)

    def add(self, request_id: str, prefill: _Prefill) -> None:
        """Add an active prefill."""
        self.prefills[request_id] = prefill
        self.tokens += prefill.tokens
        self.attention += prefill.attention

    def pop(self, request_id: str) -> _Prefill | None:
        """Remove an active prefill, if it is one."""
        prefill = self.prefills.pop(request_id, None)
        if prefill is not None:
            self.tokens -= prefill.tokens
            self.attention -= prefill.attention
        return prefill

    def count(self, prefill: _Prefill) -> None:
        """Add a computed prefill to the totals."""
        self._count += 1
        self._tokens += prefill.tokens
        self._attention += prefill.attention

    def take_interval(self, now_s: float, limit: int) -> BusyInterval | None:
        """End the interval and return it once the slot is idle or has computed ``limit`` prefills,
        else None.

        Times of single prefills that overlap cannot be told apart; their sum can be measured. The
        limit keeps a slot that is never idle from never being observed.
        """
        if not self.abandoned and self.prefills and self._count < limit:
            return None
        abandoned, seconds = self.abandoned, now_s - self._since_s
        found = BusyInterval(self._count, self._tokens, self._attention, seconds)
        self._restart(now_s)
        return None if abandoned or seconds <= 0 else found

    def _restart(self, now_s: float) -> None:
        self._since_s = now_s
        self._count = self._tokens = 0
        self._attention = 0.0
        self.abandoned = False


class PrefillFit:
    """A model of one pool of equal workers, fitted to observed prefills.

    Keeps the last 128 intervals; fits again after 8 more, at most once a second (about a
    millisecond). ``terms`` are a, b and c; None until there are enough samples.
    """

    def __init__(self, prior: Row | None = None) -> None:
        self.terms: Row | None = None
        self._prior = prior
        self._samples: deque[BusyInterval] = deque(maxlen=_WINDOW)
        self._new = 0
        self._fitted_s = -math.inf

    def __len__(self) -> int:
        return len(self._samples)

    def predict(self, tokens: int, cached_tokens: int) -> float | None:
        """Return the seconds for one prompt, or None. O(1)."""
        terms = self.terms or self._prior
        if terms is None:
            return None
        a, b, c = terms
        return a + b * tokens + c * tokens * (cached_tokens + tokens / 2)

    @property
    def estimate(self) -> Row:
        """The terms, or the prior as long as there are none; 0 without one."""
        return self.terms or self._prior or (0.0, 0.0, 0.0)

    @property
    def hurries(self) -> bool:
        """Whether the first measurements are wanted, however rough: the prior knows no GPU."""
        return self._prior is not None and self.terms is None

    def slowness(self, interval: BusyInterval, before: float) -> float:
        """Return how many times as long as expected a worker takes, ``before`` and now.

        Each prefill counts a twentieth: 50 of them find a worker that has become twice as slow.
        """
        a, b, c = self.estimate
        expected_s = interval.prefills * a + interval.tokens * b + interval.attention * c
        if self.terms is None or expected_s <= 0:
            return before
        kept = (1 - _SLOWNESS_SHARE) ** interval.prefills
        found = math.pow(before, kept) * math.pow(interval.seconds / expected_s, 1 - kept)
        return min(max(found, 1 / _SLOWEST), _SLOWEST)

    def observe(self, interval: BusyInterval, now_s: float) -> None:
        """Add a sample, and fit again when due."""
        self.remember(interval)
        enough = len(self._samples) >= MIN_SAMPLES and self._new >= _REFIT_SAMPLES
        if not enough or now_s - self._fitted_s < _REFIT_S:
            return
        self._fitted_s = now_s
        first = self.terms is None
        self.fit()
        level = logging.INFO if first else logging.DEBUG
        text = "prefill load model: %.3g s + %.3g s a token + %.3g s a token and token before it"
        log.log(level, text, *(self.terms or ()))

    def remember(self, interval: BusyInterval) -> None:
        """Add a sample. Below ``MIN_SAMPLES``, it scales the prior."""
        self._samples.append(interval)
        self._new += 1
        if self._prior is not None and self.terms is None:
            a, b, c = self._prior
            factor = median(
                one.seconds / (one.prefills * a + one.tokens * b + one.attention * c)
                for one in self._samples
            )
            self._prior = a * factor, b * factor, c * factor

    def fit(self) -> None:
        """Fit to the samples, of which there must be at least one."""
        self._new = 0
        self.terms = _fit(self._samples)


def _fit(samples: Sequence[BusyInterval]) -> Row:
    """Fit by iteratively reweighted least squares, starting from the median rate."""
    features = [(float(one.prefills), float(one.tokens), one.attention) for one in samples]
    seconds = [max(one.seconds, _LEAST_S) for one in samples]
    rate = median(took / row[1] for took, row in zip(seconds, features, strict=True))
    terms: Row = (0.0, rate, 0.0)
    for _ in range(_ROUNDS):
        x, y, z = terms
        expected = [max(x * a + y * b + z * c, _LEAST_S) for a, b, c in features]
        # Errors are ratios: 10 % of a long prefill weighs as much as 10 % of a short one.
        errors = [math.log(took / wish) for took, wish in zip(seconds, expected, strict=True)]
        # 1.4826 * median |error| estimates a normal distribution's standard deviation, and ignores
        # outliers up to half of the samples.
        spread = max(1.4826 * median(map(abs, errors)), _LEAST_SPREAD)
        # Cauchy weights over the squared size, which makes squared errors relative. The larger of
        # both times: otherwise a tiny expectation would give an outlier a huge weight.
        weights = [
            1 / (1 + (error / spread) ** 2) / max(took, wish) ** 2
            for error, took, wish in zip(errors, seconds, expected, strict=True)
        ]
        terms = _least_squares(features, seconds, weights, terms)
    return terms


def _least_squares(
    features: Sequence[Row], seconds: Sequence[float], weights: Sequence[float], start: Row
) -> Row:
    """Solve weighted least squares with non-negative unknowns.

    Coordinate descent on the normal equations: each step minimises exactly along one axis and
    clamps it at 0. The problem is convex, so this converges to the constrained minimum.
    """
    aa = ab = ac = bb = bc = cc = at = bt = ct = 0.0
    for (a, b, c), took, weight in zip(features, seconds, weights, strict=True):
        wa, wb, wc = weight * a, weight * b, weight * c
        aa += wa * a
        ab += wa * b
        ac += wa * c
        bb += wb * b
        bc += wb * c
        cc += wc * c
        at += wa * took
        bt += wb * took
        ct += wc * took
    x, y, z = start
    for _ in range(_DESCENT):
        x = max((at - ab * y - ac * z) / aa, 0.0)
        y = max((bt - ab * x - bc * z) / bb, 0.0)
        z = max((ct - ac * x - bc * y) / cc, 0.0)
    return x, y, z


def prefill_model(settings: RouterSettings) -> PrefillModel | None:
    """Return the model of ``settings``, a new one for each pool; None: prompts count in full.

    Raises ConfigError when the model is unavailable. AIConfigurator is called once per process, at
    the first call, which takes seconds.
    """
    if settings.mode != "kv":
        return None
    if settings.prefill_load_predictor is not None:
        return StaticModel(settings.prefill_load_predictor)
    if settings.in_seconds and settings.prefill_load_model in ("none", "fitted"):
        return PrefillFit(_PRIOR)
    if settings.prefill_load_model == "none":
        return None
    if not settings.track_prefill_tokens:
        raise ConfigError(
            f"{_FLAG}={settings.prefill_load_model} needs --router-track-prefill-tokens"
        )
    if settings.prefill_load_model == "fitted":
        return PrefillFit()
    return _of_aiconfigurator(settings)


def _of_aiconfigurator(settings: RouterSettings) -> PrefillModel:
    named = {
        "--ais-backend": settings.ais_backend,
        "--ais-system": settings.ais_system,
        "--ais-model-path": settings.ais_model_path,
    }
    missing = [flag for flag, value in named.items() if value is None]
    if missing:
        raise ConfigError(f"{_FLAG}={settings.prefill_load_model} needs {', '.join(missing)}")
    return _estimated(
        settings.ais_model_path,
        settings.ais_system,
        settings.ais_backend,
        settings.ais_backend_version,
        settings.ais_tp_size,
    )


@cache
def _estimated(
    model: str, system: str, backend: str, version: str | None, tp_size: int
) -> PrefillModel:
    """Fit the terms to AIConfigurator's estimates; an estimate for each decision would be slow."""
    estimate = _estimator()
    fit = PrefillFit()
    for tokens, cached in product(_TOKENS, _CACHED):
        try:
            found = estimate(
                model,
                system,
                mode="static_ctx",
                backend_name=backend,
                backend_version=version,
                isl=tokens + cached,
                prefix=cached,
                osl=2,
                batch_size=1,
                tp_size=tp_size,
            )
        except Exception as error:
            raise ConfigError(
                f"AIConfigurator has no estimate for {model} on {system} with {backend}: {error}"
            ) from error
        attention = tokens * (cached + tokens / 2)
        fit.remember(BusyInterval(1, tokens, attention, found.ttft / 1e3))
    fit.fit()
    log.info("prefill load model: AIConfigurator for %s on %s with %s", model, system, backend)
    return StaticModel(fit.predict)


def _estimator() -> Callable[..., Any]:
    try:
        from aiconfigurator.cli.api import cli_estimate
    except ImportError as error:
        raise ConfigError(
            f"{_FLAG}=aic needs AIConfigurator ({error}): pip install 'dynamo-appliance[aic]', "
            "or use --router-prefill-load-model=fitted"
        ) from None
    estimate: Callable[..., Any] = cli_estimate
    return estimate
