"""The file of --config: options of the planner by our names, or those of Dynamo 1.6's planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from dynamo.config.option import fields_of
from dynamo.config.planner import PlannerSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError

_FLAG = "--config"
_MODES = {"sla": "sla", "load": "load", "throughput": "load+sla", "latency": "load+sla"}
RENAMED_KEYS = {
    "namespace": "namespace",
    "environment": "environment",
    "model_name": "served-model-name",
    "log_dir": "log-dir",
    "ttft_ms": "ttft",
    "itl_ms": "itl",
    "ttft": "ttft",
    "itl": "itl",
    "throughput_adjustment_interval_seconds": "adjustment-interval",
    "throughput_adjustment_interval": "adjustment-interval",
    "load_adjustment_interval_seconds": "adjustment-interval",
    "load_adjustment_interval": "adjustment-interval",
    "max_gpu_budget": "max-gpu-budget",
    "min_endpoint": "min-endpoint",
    "prefill_engine_num_gpu": "prefill-engine-num-gpu",
    "decode_engine_num_gpu": "decode-engine-num-gpu",
    "decode_scale_up_kv_rate": "decode-kv-scale-up-threshold",
    "decode_scale_down_kv_rate": "decode-kv-scale-down-threshold",
    "profile_results_dir": "profile-results-dir",
    "load_predictor": "load-predictor",
    "prophet_window_size": "load-prediction-window-size",
    "advisory": "no-operation",
}
"""Key of Dynamo's file → option. Of two keys for one option, the later in this table wins."""
IDLE_KEYS = {
    "backend": "workers say what they are",
    "mode": "the workers of a model say whether it has prefill workers",
    "enable_load_scaling": "optimization_target chooses",
    "enable_throughput_scaling": "optimization_target chooses",
}
"""Keys of Dynamo's file that ask for nothing here."""


def with_config_file(argv: Sequence[str]) -> list[str]:
    """Return ``argv`` with the options of its --config file before it, so that flags win.

    Raises ConfigError.
    """
    words = list(argv)
    paths = [word.partition("=")[2] for word in words if word.startswith(f"{_FLAG}=")]
    paths += [after for word, after in pairwise(words) if word == _FLAG]
    if not paths:
        return words
    return [*_words(_read(paths[-1]), f"{_FLAG} {paths[-1]}"), *words]


def _read(path: str) -> Mapping[str, Any]:
    import yaml  # takes 20 ms; JSON is YAML, too

    where = f"{_FLAG} {path}"
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{where}: can't be read as JSON or YAML: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: must be a mapping of options, like 'ttft_ms: 200'")
    return {str(key): value for key, value in found.items()}


def _words(given: Mapping[str, Any], where: str) -> list[str]:
    """Return the options in ``given`` as words of a command line."""
    words = []
    for name, value in _options(given, where).items():
        if isinstance(value, list | dict):
            raise ConfigError(f"{where}: {name} must be a number, text, true or false")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            words.append(f"--{name}={value}")
    return words


def _options(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the values in ``given`` by our options. Raises ConfigError for unknown keys."""
    flags = {
        flag.removeprefix("--")
        for group in (PlannerSettings, RuntimeSettings)
        for field in fields_of(group)
        for flag in field.metadata["option"].flags
    } - {"config"}
    options: dict[str, Any] = {}
    unknown = []
    for key, value in given.items():
        if key == "optimization_target":
            options["mode"] = _mode(value, where)
        elif key in IDLE_KEYS and value not in _own_modes():
            continue
        elif key.replace("_", "-") in flags:
            options[key.replace("_", "-")] = value
        elif key not in RENAMED_KEYS:
            unknown.append(key)
    if unknown:
        raise ConfigError(
            f"{where}: {', '.join(sorted(unknown))} is not supported: this planner has no such "
            "option; remove it (`dynamo planner --help` lists the options)"
        )
    return options | {name: given[key] for key, name in RENAMED_KEYS.items() if key in given}


def _own_modes() -> tuple[str, ...]:
    (field,) = (field for field in fields_of(PlannerSettings) if field.name == "mode")
    choices: tuple[str, ...] = field.metadata["option"].choices
    return choices


def _mode(target: Any, where: str) -> str:
    if not isinstance(target, str) or target not in _MODES:
        raise ConfigError(
            f"{where}: optimization_target must be one of {', '.join(_MODES)}, got {target!r}"
        )
    return _MODES[target]
