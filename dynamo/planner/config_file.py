"""The --config option: options of the planner by our names, or those of Dynamo 1.6's planner.

Source of Dynamo's keys: its public page "Planner Configuration (PlannerConfig)".
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo.config.option import fields_of
from dynamo.config.parser import option_of
from dynamo.config.planner import PlannerSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError

_FLAG = "--config"
_MODES = {"sla": "sla", "load": "load", "throughput": "load", "latency": "load"}
"""Mode of an optimization_target: all but sla compare load with thresholds, in Dynamo, too."""
_NONE = ("none", "None", "null")
_OFF = -1
"""Value of min_gpu_budget that switches it off."""
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
    "min_gpu_budget": "min-gpu-budget",
    "min_endpoint": "min-endpoint",
    "prefill_min_endpoint": "prefill-min-endpoint",
    "decode_min_endpoint": "decode-min-endpoint",
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
_DEFAULT_PROFILE = "profiling_results"
"""Dynamo's profile_results_dir; without such a directory it has no profile."""
_RATES = ("decode_scale_up_kv_rate", "decode_scale_down_kv_rate")
"""Keys of Dynamo's file in percent; here they are shares of 1."""


def _idle(reason: str, *keys: str) -> dict[str, str]:
    return dict.fromkeys(keys, reason)


IDLE_KEYS = {
    **_idle("workers say what they are", "backend"),
    **_idle("the workers of a model say whether it has prefill workers", "mode"),
    **_idle("optimization_target sla is a forecast of the traffic", "enable_throughput_scaling"),
    **_idle(
        "capacity is learned from the traffic, or read from profile_results_dir",
        "pre_deployment_sweeping_mode",
        "aic_interpolation",
        "aic_perf_model",
        "load_min_observations",
        "max_num_fpm_samples",
        "fpm_sample_bucket_size",
        "speculative_nextn",
    ),
    **_idle(
        "load_predictor has no other settings than its window",
        "load_predictor_log1p",
        "load_predictor_warmup_trace",
        "kalman_q_level",
        "kalman_q_trend",
        "kalman_r",
        "kalman_min_points",
    ),
    **_idle(
        "traffic is read from the frontends, without Prometheus",
        "throughput_metrics_source",
        "metric_pulling_prometheus_endpoint",
        "metric_pulling_prometheus_token",
        "metric_pulling_prometheus_token_file",
        "metric_pulling_prometheus_ssl_verify",
        "metric_pulling_prometheus_extra_query_params",
        "metric_pulling_prometheus_ca_bundle",
        "metric_pulling_prometheus_request_timeout_seconds",
    ),
    **_idle("DYN_SYSTEM_PORT is the port of its metrics", "metric_reporting_prometheus_port"),
    **_idle("metric-pulling-interval sets how often load is read", "load_metric_samples"),
    **_idle(
        "decode-kv-scale-down-threshold and prefill-queue-scale-down-threshold say when a worker "
        "goes",
        "load_scaling_down_sensitivity",
    ),
    **_idle(
        "prefill-queue-scale-up-threshold and -down- count queued prompts, not tokens",
        "prefill_scale_up_queue_tokens",
        "prefill_scale_down_queue_tokens",
    ),
    **_idle(
        "load changes a pool by one worker, auto at most doubles it",
        "max_throughput_scaling_replicas",
    ),
    **_idle(
        "decisions are in `dynamo planner explain`, tensorboard and /metrics",
        "report_interval_hours",
        "report_output_dir",
        "report_filename",
        "report_write_gzip_log",
        "live_dashboard_port",
    ),
    **_idle("`dynamo planner set` changes a running planner", "control_api_port"),
    **_idle("there is no planner of several deployments", "global_planner_namespace"),
    **_idle("its policies are built in, without plugins", "scheduling", "plugin_registration"),
    **_idle(
        "power is not limited; use nvidia-smi", "enable_power_awareness", "total_gpu_power_limit"
    ),
}
"""Keys of Dynamo's file that ask for nothing here, and why."""


def with_config_file(argv: Sequence[str]) -> tuple[list[str], str]:
    """Return ``argv`` with the options of its --config before it, so that flags win.

    Then one sentence about keys without an effect, "" if there are none. Raises ConfigError.
    """
    words = list(argv)
    values = [
        word.removeprefix(f"{_FLAG}=")
        for before, word in zip(["", *words], words, strict=False)
        if word.startswith(f"{_FLAG}=") or before == _FLAG
    ]
    if not values:
        return words, ""
    where, options = _read(values[-1])
    idle = sorted(key for key in options if _is_idle(key, options[key]))
    note = (
        f"{where}: no effect here: {', '.join(idle)}; docs/dynamo-flags.md has the reasons and "
        "what to use instead"
    )
    active = {key: value for key, value in options.items() if key not in idle}
    return [*_words(active, where), *words], note if idle else ""


def _read(value: str) -> tuple[str, Mapping[str, Any]]:
    """Return the name for errors and the options of ``value``, a path or the options themselves."""
    import yaml  # takes 20 ms; JSON is YAML, too

    where, text = f"{_FLAG} {value}", value
    try:
        if (value.lstrip().startswith("{") or ": " in value) and not _exists(value):
            where = f"{_FLAG} (inline)"
        else:
            text = Path(value).read_text(encoding="utf-8")
        options = yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{where}: can't be read as JSON or YAML: {error}") from None
    if not isinstance(options, dict):
        raise ConfigError(f"{where}: must be a mapping of options, like 'ttft_ms: 200'")
    return where, {str(key): None if v in _NONE else v for key, v in options.items()}


def _exists(value: str) -> bool:
    try:
        return Path(value).exists()
    except (OSError, ValueError):  # too long for a name: options
        return False


def _is_idle(key: str, value: Any) -> bool:
    """Return whether Dynamo's ``key`` has no effect here; ``mode: load`` is an option of ours."""
    return key in IDLE_KEYS and not (key == "mode" and value in _own_modes())


def _words(values: Mapping[str, Any], where: str) -> list[str]:
    """Return the options in ``values`` as words of a command line."""
    words = []
    for name, value in _options(values, where).items():
        if isinstance(value, list | dict):
            raise ConfigError(f"{where}: {name} must be a number, text, true or false")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            words.append(f"--{name}={value}")
    return words


def _options(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return ``values`` by our options. Raises ConfigError for unknown keys."""
    # Without --config: a file cannot name another one.
    flags = {
        flag.removeprefix("--")
        for group in (PlannerSettings, RuntimeSettings)
        for field in fields_of(group)
        for flag in option_of(field).flags
    } - {"config"}
    options: dict[str, Any] = {}
    unknown = []
    for key, value in values.items():
        if key == "optimization_target":
            options["mode"] = _mode(value, values, where)
        elif key.replace("_", "-") in flags and key not in RENAMED_KEYS:
            options[key.replace("_", "-")] = value
        elif key not in (*RENAMED_KEYS, "enable_load_scaling"):
            unknown.append(key)
    if unknown:
        raise ConfigError(
            f"{where}: {', '.join(sorted(unknown))} is not supported: this planner has no such "
            f"option{_did_you_mean(unknown, flags)}; remove it (`dynamo planner --help` lists the "
            "options)"
        )
    return options | {
        name: _value(key, values[key], where) for key, name in RENAMED_KEYS.items() if key in values
    }


def _did_you_mean(unknown: Sequence[str], flags: Collection[str]) -> str:
    names = {flag.replace("-", "_"): flag for flag in flags}
    names |= {key: key for key in (*RENAMED_KEYS, *IDLE_KEYS, "optimization_target")}
    matches = [difflib.get_close_matches(key.replace("-", "_"), names, n=1) for key in unknown]
    closest = [names[match[0]] for match in matches if match]
    return f" (did you mean {' and '.join(closest)}?)" if closest else ""


def _value(key: str, value: Any, where: str) -> Any:
    """Return the ``value`` of Dynamo's ``key`` as our option has it. Raises ConfigError."""
    if key == "min_gpu_budget" and value == _OFF:
        return None
    if key == "profile_results_dir" and value == _DEFAULT_PROFILE and not _exists(value):
        return None
    if key not in _RATES or value is None:
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 100:
        raise ConfigError(f"{where}: {key} must be a percentage between 0 and 100, got {value!r}")
    return value / 100


def _own_modes() -> tuple[str, ...]:
    (field,) = (field for field in fields_of(PlannerSettings) if field.name == "mode")
    choices: tuple[str, ...] = option_of(field).choices
    return choices


def _mode(target: Any, values: Mapping[str, Any], where: str) -> str:
    """Return the mode of an optimization_target; sla beside a reaction to load is load+sla."""
    if not isinstance(target, str) or target not in _MODES:
        raise ConfigError(
            f"{where}: optimization_target must be one of {', '.join(_MODES)}, got {target!r}"
        )
    mode = _MODES[target]
    return "load+sla" if mode == "sla" and values.get("enable_load_scaling") is True else mode
