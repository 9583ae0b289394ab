"""Options checked before a process is started: every problem, by the key it comes from."""

from __future__ import annotations

from dynamo.config.check import OptionProblem, check_options, did_you_mean
from dynamo.config.router import RouterSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.worker import WorkerSettings
from dynamo.mocker.settings import MockerSettings

GROUPS = (RuntimeSettings, WorkerSettings, MockerSettings)


def check(env: dict[str, str] | None = None, **words: list[str]) -> list[OptionProblem]:
    given = {key.replace("_", "-"): value for key, value in words.items()}
    return check_options(GROUPS, given, env or {}).problems


def test_valid_words_give_the_settings_of_every_group() -> None:
    words = {"model": ["--model", "x"], "taint": ["--taint", "a", "--taint", "b"]}
    found = check_options(GROUPS, words, {"DYN_NAMESPACE": "ns"})
    assert found.settings is not None and not found.problems and not found.unknown
    runtime, worker, mocker = found.settings
    assert (runtime.namespace, worker.model_path, mocker.taints) == ("ns", "x", ("a", "b"))


def test_every_problem_is_found_at_once() -> None:
    assert check(
        {"DYN_REQUEST_PLANE": "pigeon"},
        block_size=["--block-size", "0"],
        speedup_ratio=["--speedup-ratio", "fast"],
        reply=["--reply", "loud"],
        watermark=["--watermark"],
        enable_prefix_caching=["--enable-prefix-caching", "false"],
    ) == [
        OptionProblem("watermark", "expected one argument"),
        OptionProblem("enable-prefix-caching", "must be true or false, got 'false'"),
        OptionProblem("", "DYN_REQUEST_PLANE must be one of uds, tcp, got 'pigeon'"),
        OptionProblem("reply", "must be one of random, sequence, echo, script, got 'loud'"),
        OptionProblem("speedup-ratio", "must be a number, got 'fast'"),
        OptionProblem("block-size", "must be between 1 and 4096, got 0"),
    ]


def test_two_keys_of_one_option_contradict_each_other() -> None:
    assert check(model=["--model", "a"], model_path=["--model-path", "b"]) == [
        OptionProblem("model-path", "sets the same option as model; remove one of them")
    ]


def test_contradictions_within_a_group_are_found() -> None:
    words = {"run": ["--router-conditional-disagg-config", "{"]}
    (problem,) = check_options((RouterSettings,), words, {}).problems
    assert "--router-conditional-disagg-config" in problem.text


def test_words_of_no_option_are_named() -> None:
    words = {
        "model-pth": ["--model-pth", "x"],
        "run": ["--model-path", "m", "--x=1"],
        "help": ["--help"],
    }
    found = check_options(GROUPS, words, {})
    assert found.unknown == [("model-pth", "model-pth"), ("run", "x"), ("help", "help")]
    assert found.settings is not None and found.settings[1].model_path == "m"
    assert check(run=["stray"]) == [OptionProblem("run", "has the unexpected word 'stray'")]


def test_the_hint_is_the_most_similar_option() -> None:
    assert did_you_mean("model-pth", GROUPS) == " (did you mean model-path?)"
    assert did_you_mean("block_size", GROUPS) == " (did you mean block-size?)"
    assert did_you_mean("zzzzz", GROUPS) == ""
