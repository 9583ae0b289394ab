"""How long prefills take: fitted to observed ones, from AIConfigurator, or a caller's function.

The fit is a robust regression:

    seconds = a * prefills + b * tokens + c * (tokens * (cached prefix + tokens / 2))

``a`` is the fixed cost of a prompt, ``b`` the work of a token, ``c`` its attention to all tokens
before it: a prompt's n tokens attend to the cached prefix and, on average, to n / 2 of their own.
No coefficient is negative. Outliers in either direction get little weight. Pure.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from statistics import median
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from dynamo.config.router import RouterSettings
from dynamo.errors import ConfigError

PrefillPredictor = Callable[[int, int], float | None]
"""(tokens to compute, cached prefix tokens) to seconds; None: unknown."""
MIN_SAMPLES = 8
"""With fewer samples there is no prediction."""
_WINDOW = 128
_REFIT_SAMPLES = 8
_REFIT_S = 1.0
_ROUNDS = 6
_DESCENT = 60
_LEAST_SPREAD = 0.02
_LEAST_S = 1e-6
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

    def __init__(self, predictor: PrefillPredictor) -> None:
        self._predictor = predictor

    def predict(self, tokens: int, cached_tokens: int) -> float | None:
        """Return the predictor's result."""
        return self._predictor(tokens, cached_tokens)

    def observe(self, interval: BusyInterval, now_s: float) -> None:
        """Ignore the observation."""


class PrefillSpeed(msgspec.Struct, kw_only=True, frozen=True):
    """What a cost in seconds expects of a worker of slowness 1, for a prompt of t tokens behind c
    cached ones: ``fixed_s + t * token_s + t * (c + t / 2) * attention_s``.

    ``samples`` intervals were measured; with none of the workers' yet, the terms are a guess.
    """

    fixed_s: Annotated[float, Meta(ge=0, le=3600)]
    token_s: Annotated[float, Meta(ge=0, le=60)]
    attention_s: Annotated[float, Meta(ge=0, le=1)]
    samples: int


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

    def restore(self, speed: PrefillSpeed) -> None:
        """Take what an earlier router learned as the first guess, unless it takes no time."""
        # Not zeros: the samples scale the prior by what it expects, and would divide by 0.
        if speed.fixed_s + speed.token_s > _LEAST_S / 1000:
            self._prior = speed.fixed_s, speed.token_s, speed.attention_s

    @property
    def estimate(self) -> Row:
        """The terms, or the prior as long as there are none; 0 without one."""
        return self.terms or self._prior or (0.0, 0.0, 0.0)

    @property
    def hurries(self) -> bool:
        """Whether even rough measurements improve the model: its prior is not of this GPU."""
        return self._prior is not None and self.terms is None

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
                sample.seconds / (sample.prefills * a + sample.tokens * b + sample.attention * c)
                for sample in self._samples
            )
            # A few samples show the speed as a whole, but not which term it comes from.
            self._prior = a * factor, b * factor, c * factor

    def fit(self) -> None:
        """Fit to the samples, of which there must be at least one."""
        self._new = 0
        self.terms = _fit(self._samples)


def _fit(samples: Sequence[BusyInterval]) -> Row:
    """Fit by iteratively reweighted least squares, starting from the median rate."""
    features = [
        (float(sample.prefills), float(sample.tokens), sample.attention) for sample in samples
    ]
    seconds = [max(sample.seconds, _LEAST_S) for sample in samples]
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
        # No diagonal is 0: each sample has a prompt, a token and its attention to itself.
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
    check_prefill_model(settings)
    if settings.prefill_load_predictor is not None:
        model: PrefillModel = StaticModel(settings.prefill_load_predictor)
    elif settings.prefill_load_model == "none":
        return PrefillFit(_PRIOR) if settings.in_seconds else None
    elif settings.prefill_load_model == "fitted":
        return PrefillFit(_PRIOR if settings.in_seconds else None)
    else:
        model = _of_aiconfigurator(settings)
    return PrefillFit(_prior_of(model)) if settings.in_seconds else model


def check_prefill_model(settings: RouterSettings) -> None:
    """Raise ConfigError for settings that contradict each other, before any estimate."""
    if settings.mode != "kv":
        return
    model, tracks = settings.prefill_load_model, settings.track_prefill_tokens
    if settings.in_seconds and not tracks:
        raise ConfigError("--router-cost=seconds needs --router-track-prefill-tokens")
    if settings.prefill_load_predictor is not None or model == "none":
        return
    if not tracks:
        raise ConfigError(f"{_FLAG}={model} needs --router-track-prefill-tokens")
    named = {
        "--ais-backend": settings.ais_backend,
        "--ais-system": settings.ais_system,
        "--ais-model-path": settings.ais_model_path,
    }
    missing = [flag for flag, value in named.items() if value is None]
    if missing and model != "fitted":
        raise ConfigError(f"{_FLAG}={model} needs {', '.join(missing)}")


def _prior_of(model: PrefillModel) -> Row:
    """The terms that come closest to what ``model`` predicts; :data:`_PRIOR` if it does not."""
    samples = []
    for tokens, cached in product(_TOKENS, _CACHED):
        seconds = model.predict(tokens, cached)
        if seconds is not None and 0 < seconds < math.inf:
            samples.append(BusyInterval(1, tokens, tokens * (cached + tokens / 2), seconds))
    return _fit(samples) if samples else _PRIOR


def _of_aiconfigurator(settings: RouterSettings) -> PrefillModel:
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
            answer = estimate(
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
        fit.remember(BusyInterval(1, tokens, attention, answer.ttft / 1e3))
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
