"""Fits prefill seconds to observed times with a robust regression.

    seconds = a * prefills + b * tokens + c * (tokens * (cached prefix + tokens / 2))

``a`` is the fixed cost of a prompt, ``b`` the work of a token, ``c`` its attention to all tokens
before it: a prompt's n tokens attend to the cached prefix and, on average, to n / 2 of their own.
No coefficient is negative. Outliers in either direction get little weight.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from statistics import median

from dynamo.router.load.prefill_load import BusyInterval

__all__ = ["MIN_SAMPLES", "PrefillFit"]

MIN_SAMPLES = 8
"""With fewer samples there is no prediction."""

_WINDOW = 128
_REFIT_SAMPLES = 8
_REFIT_S = 1.0
_ROUNDS = 6
_DESCENT = 60
_LEAST_SPREAD = 0.02
_LEAST_S = 1e-6

log = logging.getLogger(__name__)

Row = tuple[float, float, float]


class PrefillFit:
    """A :class:`dynamo.router.load.prefill_load.PrefillModel` of one pool of equal workers.

    Keeps the last 128 intervals; fits again after 8 more, at most once a second (about a
    millisecond). ``terms`` are a, b and c; None until there are enough samples.
    """

    def __init__(self) -> None:
        self.terms: Row | None = None
        self._samples: deque[BusyInterval] = deque(maxlen=_WINDOW)
        self._new = 0
        self._fitted_s = -math.inf

    def __len__(self) -> int:
        return len(self._samples)

    def predict(self, tokens: int, cached_tokens: int) -> float | None:
        """Return the seconds for one prompt, or None. O(1)."""
        if self.terms is None:
            return None
        a, b, c = self.terms
        return a + b * tokens + c * tokens * (cached_tokens + tokens / 2)

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
        """Add a sample."""
        self._samples.append(interval)
        self._new += 1

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
