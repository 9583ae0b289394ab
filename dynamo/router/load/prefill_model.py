"""The sources of expected prefill times: fitted, from AIConfigurator, or a caller's function."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

from dynamo.config.router import RouterSettings
from dynamo.errors import ConfigError
from dynamo.router.load.prefill_load import BusyInterval, PrefillFit, PrefillModel, StaticModel

_FLAG = "--router-prefill-load-model"
_TOKENS = (256, 2048, 8192, 32768)
_CACHED = (0, 16384)

log = logging.getLogger(__name__)


def prefill_model(settings: RouterSettings) -> PrefillModel | None:
    """Return the model of ``settings``, a new one for each pool; None: prompts count in full.

    Raises ConfigError when the model is unavailable. AIConfigurator is called once per process, at
    the first call, which takes seconds.
    """
    if settings.mode != "kv":
        return None
    if settings.prefill_load_predictor is not None:
        return StaticModel(settings.prefill_load_predictor)
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
