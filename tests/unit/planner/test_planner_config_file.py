"""Options of the planner from a file: our names, Dynamo's, and those that are not here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo.config import load
from dynamo.config.planner import PlannerSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError
from dynamo.planner.config_file import IDLE_KEYS, with_config_file
from dynamo.planner.live.control import changed
from dynamo.protocols.control import PlannerChange


def read(directory: Path, text: str, *argv: str) -> tuple[PlannerSettings, RuntimeSettings]:
    path = directory / "planner.yaml"
    path.write_text(text)
    words, _ = with_config_file(["--config", str(path), *argv])
    planner, runtime = load("planner", "", [PlannerSettings, RuntimeSettings], words, {})
    return planner, runtime


def test_names_of_dynamo_and_our_own(tmp_path: Path) -> None:
    text = """
    namespace: box
    backend: vllm
    mode: disagg
    optimization_target: sla
    model_name: tiny
    ttft_ms: 250.5
    itl: 40
    throughput_adjustment_interval_seconds: 180
    load_adjustment_interval_seconds: 5
    max_gpu_budget: 4
    min_endpoint: 2
    advisory: true
    prefill_engine_num_gpu: null
    idle-timeout: 30
    """
    planner, runtime = read(tmp_path, text)
    assert (runtime.namespace, planner.mode, planner.served_model_name) == ("box", "sla", "tiny")
    assert (planner.ttft_ms, planner.itl_ms) == (250.5, 40.0)
    assert (planner.adjustment_interval_s, planner.max_gpu_budget) == (5.0, 4)
    assert (planner.min_endpoint, planner.no_operation, planner.idle_timeout_s) == (2, True, 30.0)
    planner, _ = read(tmp_path, json.dumps({"mode": "load", "advisory": False}))
    assert (planner.mode, planner.no_operation) == ("load", False)


def test_flags_win(tmp_path: Path) -> None:
    planner, _ = read(tmp_path, "ttft_ms: 100\nadvisory: true", "--ttft=300", "--no-no-operation")
    assert (planner.ttft_ms, planner.no_operation) == (300.0, False)
    assert with_config_file(["--ttft", "3"]) == (["--ttft", "3"], "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "must be a mapping of options"),
        ("{", "can't be read as JSON or YAML"),
        ("zzz: 1\nyyy: 2", "yyy, zzz is not supported: this"),
        ("kalman_q_levle: 1", r"kalman_q_levle .*\(did you mean kalman_q_level\?\)"),
        ("min_gpu_budgt: 1", r"\(did you mean min_gpu_budget\?\)"),
        ("adjustment_intervall: 1", r"\(did you mean adjustment-interval\?\)"),
        ("decode_scale_up_kv_rate: 101", "decode_scale_up_kv_rate must be a percentage between 0"),
        ("decode_scale_down_kv_rate: x", "decode_scale_down_kv_rate must be a percentage"),
        ("decode_scale_down_kv_rate: ''", "decode_scale_down_kv_rate must be a percentage"),
        ("optimization_target: best", "optimization_target must be one of sla, load, throughput"),
        ("ttft_ms: [1]", "ttft must be a number, text, true or false"),
        ("config: other.yaml", "config is not supported"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--config {tmp_path}/planner.yaml: .*{message}"):
        read(tmp_path, text)
    with pytest.raises(ConfigError, match="--config /gone: can't be read"):
        with_config_file(["--config=/gone"])


def test_a_value_out_of_range_names_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[Any]
) -> None:
    with pytest.raises(SystemExit):
        read(tmp_path, "max_gpu_budget: -1")
    assert "--max-gpu-budget must be >= 0, got -1" in capsys.readouterr().err


def test_a_target_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="optimization_target must be one of sla, load"):
        read(tmp_path, "optimization_target: [sla]")


PUBLIC = (
    '{"environment": "kubernetes", "backend": "vllm", "optimization_target": "sla", '
    '"enable_throughput_scaling": true, "enable_load_scaling": true, '
    '"pre_deployment_sweeping_mode": "none", "throughput_adjustment_interval_seconds": 60, '
    '"load_adjustment_interval_seconds": 5}'
)
"""What Dynamo's disagg_planner.yaml gives to --config."""


def parse(value: str, *argv: str) -> tuple[PlannerSettings, str]:
    words, note = with_config_file(["--config", value, *argv])
    (settings,) = load("planner", "", [PlannerSettings], words, {})
    return settings, note


def test_the_public_file_with_one_note() -> None:
    settings, note = parse(PUBLIC, "--graph-deployment", "g")
    assert (settings.environment, settings.mode) == ("kubernetes", "load+sla")
    assert note.startswith(
        "--config (inline): no effect here: backend, enable_throughput_scaling, "
        "pre_deployment_sweeping_mode; "
    )


@pytest.mark.parametrize("key", IDLE_KEYS)
def test_each_key_without_an_effect_is_noted(key: str) -> None:
    for value in ("none", None, 0, 1.5, True, "text", [1], {"a": {"b": [1]}}):
        settings, note = parse(json.dumps({key: value, "max_gpu_budget": 3}))
        assert settings.max_gpu_budget == 3
        assert f": {key};" in note


@pytest.mark.parametrize("key", ["log_dir", "model_name", "decode_engine_num_gpu", "min_endpoint"])
def test_none_is_no_value(key: str) -> None:
    for value in ('"none"', "null", '"None"'):
        settings, note = parse(f'{{"{key}": {value}}}')
        assert settings.given == {"config_file"} and not note


def test_values_of_dynamo_in_our_units() -> None:
    text = "min_gpu_budget: -1\ndecode_scale_up_kv_rate: 80\ndecode_scale_down_kv_rate: 0.5"
    settings, note = parse(text)
    assert (settings.min_gpu_budget, settings.decode_kv_scale_up_threshold) == (1, 0.8)
    assert (settings.decode_kv_scale_down_threshold, note) == (0.005, "")
    assert parse("decode-kv-scale-up-threshold: 0.8")[0].decode_kv_scale_up_threshold == 0.8
    for target in ("throughput", "latency", "load"):
        given = {"optimization_target": target, "enable_load_scaling": True}
        assert parse(json.dumps(given))[0].mode == "load"


def test_the_default_profile_of_dynamo_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = '{"profile_results_dir": "profiling_results"}'
    assert parse(given)[0].profile_results_dir is None
    assert parse('{"profile_results_dir": "other"}')[0].profile_results_dir == "other"
    (tmp_path / "profiling_results").mkdir()
    assert parse(given)[0].profile_results_dir == "profiling_results"


def test_minima_of_one_pool() -> None:
    keys = {"prefill_min_endpoint": 2, "decode_min_endpoint": 3, "min_endpoint": 1}
    settings, _ = parse(json.dumps(keys))
    assert [settings.least_workers(8, pool) for pool in ("prefill", "decode")] == [2, 3]
    settings, _ = parse('{"prefill_min_endpoint": 2, "min_endpoint": 0}')
    assert [settings.least_workers(8, pool) for pool in ("prefill", "decode")] == [2, 0]
    assert changed(settings, PlannerChange(min_gpu_budget=1)).least_workers(1, "prefill") == 1


def test_text_that_is_no_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config \(inline\): can't be read as JSON or YAML"):
        parse('{"ttft_ms": ')
    with pytest.raises(ConfigError, match=r"^--config /gone\.yaml: can't be read"):
        parse("/gone.yaml")
    with pytest.raises(ConfigError, match="must be a mapping of options"):
        parse("- a: 1")
    path = tmp_path / "a: b"
    path.write_text("ttft_ms: 7")
    assert parse(str(path))[0].ttft_ms == 7.0  # a file wins
    with pytest.raises(ConfigError, match=r"--config \(inline\): zzz is not supported"):
        with_config_file(["--config", '{"zzz": 1}', "--config={}", "--config", '{"zzz": 1}'])
