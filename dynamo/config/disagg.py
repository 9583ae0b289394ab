"""Options of disaggregated serving: which prompts go to prefill workers, and the queue."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.config.option import option
from dynamo.errors import ConfigError

__all__ = ["Conditions", "DisaggSettings", "conditions_of"]

_FLAG = "--router-conditional-disagg-config"


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """When a prompt goes to a prefill worker; all must hold, all comparisons are strict.

    The *effective* length is what the decode worker would have to compute: prompt tokens minus
    those that it has cached. ``eff_isl_ratio_threshold`` is its share of the prompt.
    """

    eff_isl_threshold: int = 1000
    eff_isl_ratio_threshold: float | None = None
    max_prefill_queue_size: int | None = 2

    def local_reason(self, prompt_tokens: int, cached_tokens: int, queue_size: int) -> str:
        """Return why the decode worker computes the prompt: ``short``, ``cached`` or ``queue``.

        Empty for a prompt that goes to a prefill worker.
        """
        effective = max(prompt_tokens - cached_tokens, 0)
        if effective <= self.eff_isl_threshold:
            return "short"
        ratio = self.eff_isl_ratio_threshold
        if ratio is not None and effective <= ratio * prompt_tokens:
            return "cached"
        limit = self.max_prefill_queue_size
        return "queue" if limit is not None and queue_size >= limit else ""


def conditions_of(text: str | None) -> Conditions:
    """Read JSON text (starts with ``{``) or the file that ``text`` names. Raises ConfigError.

    ``max_local_prefill_length`` is another name of ``eff_isl_threshold``.
    """
    if text is None:
        return Conditions()
    given = _read(text)
    if _OLD_NAME in given and "eff_isl_threshold" in given:
        raise ConfigError(f"{_FLAG}: {_OLD_NAME} and eff_isl_threshold are the same; give one")
    unknown = sorted(given.keys() - _CHECKS.keys())
    if unknown:
        raise ConfigError(f"{_FLAG}: unknown {', '.join(unknown)}; known are {', '.join(_CHECKS)}")
    for name, value in given.items():
        _CHECKS[name](name, value)
    if _OLD_NAME in given:
        given["eff_isl_threshold"] = given.pop(_OLD_NAME)
    return Conditions(**given)


@dataclass(frozen=True, kw_only=True)
class DisaggSettings:
    """Part of the router's settings."""

    enforce_disagg: bool = option(
        False,
        "--enforce-disagg",
        env="DYN_ENFORCE_DISAGG",
        heading="disaggregation: prefill workers",
        help="reject requests (503) without a prefill worker, instead of serving them decode-only",
    )
    conditional_disagg: bool = option(
        False,
        "--router-conditional-disagg",
        env="DYN_ROUTER_CONDITIONAL_DISAGG",
        help="send only prompts with enough uncached tokens to prefill workers",
    )
    conditional_disagg_config: str | None = option(
        None,
        _FLAG,
        env="DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG",
        metavar="JSON|FILE",
        help="thresholds of --router-conditional-disagg: eff_isl_threshold 1000, "
        "eff_isl_ratio_threshold, max_prefill_queue_size 2",
    )
    prefill_slots: int | None = option(
        None,
        "--router-prefill-slots",
        env="DYN_ROUTER_PREFILL_SLOTS",
        minimum=1,
        help="requests that a rank of a prefill worker gets at once; default: until its prompt "
        "tokens fill max_num_batched_tokens",
    )
    prefill_queue_limit: int = option(
        4096,
        "--router-prefill-queue-limit",
        env="DYN_ROUTER_PREFILL_QUEUE_LIMIT",
        minimum=0,
        help="requests of a model that may wait for a prefill slot; further ones are rejected",
    )
    prefill_retries: int = option(
        3,
        env="DYN_ROUTER_PREFILL_RETRIES",
        minimum=0,
        help="prefill workers that may fail a request before it is served decode-only",
    )
    prefill_patience_s: float = option(
        3.0,
        env="DYN_ROUTER_PREFILL_PATIENCE_SECS",
        minimum=0,
        help="seconds a prompt waits for the prefill worker that is best for it (mode kv) while "
        "others have a free slot",
    )
    prefill_drain_timeout_s: float = option(
        30.0,
        env="DYN_PREFILL_DRAIN_TIMEOUT_S",
        minimum=0,
        help="seconds that a deregistered prefill worker may take to finish its requests; then "
        "they go to another",
    )

    def __post_init__(self) -> None:
        """Reject invalid thresholds at start-up."""
        conditions_of(self.conditional_disagg_config)

    @property
    def conditions(self) -> Conditions | None:
        """The thresholds, or None when every prompt goes to a prefill worker."""
        return conditions_of(self.conditional_disagg_config) if self.conditional_disagg else None


def _read(text: str) -> dict[str, Any]:
    try:
        raw = text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8")
        given = json.loads(raw)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_FLAG} {text!r}: can't be read as JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{_FLAG}: must be a JSON object, got {text!r}")
    return given


def _count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{_FLAG}: {name} must be an integer >= 0, got {value!r}")


def _nullable_count(name: str, value: Any) -> None:
    if value is not None:
        _count(name, value)


def _ratio(name: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and math.isfinite(value) and 0 <= value <= 1):
        raise ConfigError(f"{_FLAG}: {name} must be between 0 and 1 or null, got {value!r}")


_OLD_NAME = "max_local_prefill_length"
_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "eff_isl_threshold": _count,
    _OLD_NAME: _count,
    "eff_isl_ratio_threshold": _ratio,
    "max_prefill_queue_size": _nullable_count,
}
