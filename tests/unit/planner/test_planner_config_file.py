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
from dynamo.planner.config_file import with_config_file


def read(directory: Path, text: str, *argv: str) -> tuple[PlannerSettings, RuntimeSettings]:
    path = directory / "planner.yaml"
    path.write_text(text)
    words = with_config_file(["--config", str(path), *argv])
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
    assert with_config_file(["--ttft", "3"]) == ["--ttft", "3"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "must be a mapping of options"),
        ("{", "can't be read as JSON or YAML"),
        ("zzz: 1\nlive_dashboard_port: 2", "live_dashboard_port, zzz is not supported: this"),
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
