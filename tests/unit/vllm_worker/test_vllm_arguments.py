"""The command line of python -m dynamo.vllm, with and without vLLM."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo.config import from_env
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.worker import WorkerSettings
from dynamo.errors import ConfigError
from dynamo.llm.types import ModelType
from dynamo.vllm.__main__ import main
from dynamo.vllm.arguments import VllmArguments, check, parse
from dynamo.vllm.engine import is_tested
from dynamo.vllm.settings import VllmSettings
from dynamo.vllm.worker import make_plan

MODEL = Path(__file__).resolve().parents[3] / "examples/model"
no_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is there")


def test_our_options_are_read_and_the_others_kept_in_order() -> None:
    found = parse(
        ["--model", "m", "--block-size", "32", "--dyn-tool-call-parser", "hermes",
         "--enforce-eager", "--disaggregation-mode=prefill", "-tp=2", "--taint", "slow"]
    )  # fmt: skip
    assert found.worker.model_path == "m"
    assert found.worker.tool_call_parser == "hermes"
    assert found.vllm.disaggregation_mode == "prefill"
    assert found.vllm.taints == ("slow",)
    assert found.engine_argv == ("--block-size", "32", "--enforce-eager", "-tp=2")


def test_the_parser_flags_of_vllm_serve_are_ours(caplog: pytest.LogCaptureFixture) -> None:
    auto = ["--model", "m", "--enable-auto-tool-choice"]
    found = parse([*auto, "--tool-call-parser", "qwen3_xml", "--reasoning-parser=openai_gptoss"])
    assert (found.worker.tool_call_parser, found.worker.reasoning_parser) == (
        "qwen3_coder",
        "gpt_oss",
    )
    assert found.engine_argv == ("--reasoning-parser=openai_gptoss",), "its grammars need it"
    ours = ["--dyn-tool-call-parser", "hermes", "--dyn-reasoning-parser", "basic"]
    found = parse([*auto, *ours, "--tool-call-parser", "openai", "--reasoning-parser", "qwen3"])
    assert (found.worker.tool_call_parser, found.worker.reasoning_parser) == ("hermes", "basic")
    assert parse(auto).worker.reasoning_parser is None and not caplog.messages
    found = parse([*auto, "--reasoning-parser", "hf"])
    assert found.worker.reasoning_parser == "none" and "--reasoning-parser hf" in caplog.text


def test_a_wrong_value_exits_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(["--model", "m", "--disaggregation-mode", "both"])
    assert exit_.value.code == 2
    assert "must be one of agg, prefill, decode, got 'both'" in capsys.readouterr().err


def test_the_model_and_both_addresses_are_required() -> None:
    with pytest.raises(ConfigError, match="--model is missing"):
        make_plan(parse([]), None)
    settings = from_env(VllmSettings, {"DYN_VLLM_CORE_ADDRESSES": "ipc://a"})
    given = VllmArguments(RuntimeSettings(), WorkerSettings(model_path="m"), settings, ())
    with pytest.raises(ConfigError, match="must be two addresses"):
        check(given)


def test_the_plan_of_a_worker() -> None:
    plan = make_plan(parse(["--model", str(MODEL), "--served-model-name", "x"]), "blue")
    assert (plan.model_name, plan.mode) == ("x", "agg")
    assert plan.endpoint == "dynamo-blue.backend.generate"
    assert (plan.tool_format, plan.reasoning_format) == ("hermes", None), "as its template says"
    assert plan.model_type == ModelType.Chat | ModelType.Completions


def test_flags_of_the_formats_win() -> None:
    flags = ["--tool-call-parser", "none", "--dyn-reasoning-parser", "step3p5"]
    plan = make_plan(parse(["--model", str(MODEL), *flags]), None)
    assert (plan.tool_format, plan.reasoning_format) == (None, "step3")


def test_a_prefill_worker_has_a_component_of_its_own() -> None:
    plan = make_plan(parse(["--model", str(MODEL), "--disaggregation-mode", "prefill"]), None)
    assert plan.endpoint == "dynamo.prefill.generate"
    assert plan.model_type is ModelType.Prefill


def test_a_missing_template_is_named(tmp_path: Path) -> None:
    given = parse(["--model", str(MODEL), "--custom-jinja-template", str(tmp_path / "none")])
    with pytest.raises(ConfigError, match="no such file"):
        make_plan(given, None)


@no_vllm
def test_without_vllm_one_line_says_how_to_install_it() -> None:
    command = [sys.executable, "-m", "dynamo.vllm", "--model", str(MODEL)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "vLLM is not installed; install it with: pip install" in done.stderr


@no_vllm
def test_help_works_without_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert "--dyn-reasoning-parser" in text
    assert "vLLM's engine arguments are not shown" in text


def test_versions() -> None:
    assert is_tested("0.32.0") and is_tested("0.32.1+cpu")
    assert not is_tested("0.33.0") and not is_tested("0.3.2") and not is_tested("1.32")
