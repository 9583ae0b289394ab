"""Flags override variables, variables override defaults; errors name the option."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dynamo.config import environ, from_env, load, preset, to_env
from dynamo.config.option import option, variable
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import LogSettings, SystemSettings
from dynamo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Settings:
    """sample: one option of every kind"""  # noqa: D400, D415 - a heading of --help

    mode: str = option(
        "kv", choices=("kv", "round-robin"), aliases={"round_robin": "round-robin"}, help="how"
    )
    share: float = option(0.5, minimum=0, maximum=1, help="0..1")
    count: int | None = option(
        None, "--count", "-c", env=("DYN_COUNT", "DYN_OLD_COUNT"), minimum=1, help="how many"
    )
    events: bool = option(True, heading="second part", help="100% of events")
    tags: tuple[str, ...] = option((), "--tag", env="DYN_TAGS", repeat=True, help="tags")
    hidden: float = variable(1.0, minimum=0, exclusive_minimum=True, help="variable only")


def read(*argv: str, **env: str) -> Settings:
    (settings,) = load("prog", "what it does", [Settings], list(argv), env)
    assert isinstance(settings, Settings)
    return settings


def test_precedence() -> None:
    assert read() == Settings()
    assert read(DYN_SHARE="0.25").share == 0.25
    assert read("--share", "0.75", DYN_SHARE="0.25").share == 0.75
    assert read(DYN_OLD_COUNT="3").count == 3
    assert read(DYN_COUNT="4", DYN_OLD_COUNT="3").count == 4


@pytest.mark.parametrize("text", ["true", "1", "YES", "on"])
def test_true_words(text: str) -> None:
    assert read(DYN_EVENTS=text).events is True


@pytest.mark.parametrize("text", ["false", "0", "No", "off", "None", ""])
def test_false_words(text: str) -> None:
    assert read(DYN_EVENTS=text).events is False


def test_spellings_unset_and_lists() -> None:
    assert read("--mode", "round_robin").mode == "round-robin"
    assert read("--no-events").events is False
    assert read("-c", "7").count == 7
    assert read("--count", "None").count is None and read(DYN_COUNT="").count is None
    assert read("--tag", "a", "--tag", "b").tags == ("a", "b")
    assert read(DYN_TAGS="x y").tags == ("x", "y")


@pytest.mark.parametrize(
    ("argv", "env", "message"),
    [
        (["--share", "2"], {}, "--share must be between 0 and 1, got 2"),
        (["--share", "nan"], {}, "--share must be between 0 and 1, got nan"),
        ([], {"DYN_SHARE": "x"}, "DYN_SHARE must be a number, got 'x'"),
        (["--count", "1.5"], {}, "--count must be an integer, got '1.5'"),
        (["--count", "1" + "0" * 400], {}, "--count must be an integer, got '1000"),
        (["--count", "0"], {}, "--count must be >= 1, got 0"),
        (["--mode", "best"], {}, "--mode must be one of kv, round-robin, got 'best'"),
        ([], {"DYN_EVENTS": "ture"}, "DYN_EVENTS must be true, 1, yes or on, or false, 0"),
        ([], {"DYN_HIDDEN": "0"}, "DYN_HIDDEN must be a finite value > 0, got 0"),
        (["--unknown"], {}, "unrecognized arguments: --unknown"),
    ],
)
def test_bad_input_is_named_and_exits_2(
    argv: list[str], env: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        load("prog", "d", [Settings], argv, env)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_help_shows_flag_variable_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        read("--help")
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert "--share" in out and "DYN_SHARE" in out and "(0 to 1; default: 0.5)" in out
    assert "sample: one option of every kind" in out and "100% of events" in out
    assert out.index("--share") < out.index("\nsecond part:\n") < out.index("--events")
    assert "usage: prog [options]\n" in out and "DYN_HIDDEN\n        variable only (> 0;" in out


def test_variables_rebuild_the_settings() -> None:
    settings = read("--share", "0.1", "--no-events", "--mode", "round_robin")
    assert from_env(Settings, to_env(settings)) == settings
    runtime = RuntimeSettings(namespace="n", request_plane="tcp")
    assert from_env(RuntimeSettings, to_env(runtime)) == runtime


def test_from_env_raises_instead_of_exiting() -> None:
    with pytest.raises(ConfigError, match="DYN_SHARE"):
        from_env(Settings, {"DYN_SHARE": "7"})
    assert from_env(Settings, {}, share=0.9).share == 0.9


@pytest.mark.parametrize("name", ["a.b", "a/b", "", "-a", "é", "x" * 129])
def test_a_namespace_is_a_part_of_paths_and_file_names(name: str) -> None:
    with pytest.raises(ConfigError, match="must be letters, digits, '_' or '-', at most 128"):
        from_env(RuntimeSettings, {"DYN_NAMESPACE": name})
    if name:
        with pytest.raises(ConfigError, match="DYN_NAMESPACE_WORKER_SUFFIX must be letters"):
            from_env(SystemSettings, {"DYN_NAMESPACE_WORKER_SUFFIX": name.replace("-", ".")})


@pytest.mark.parametrize(
    "text",
    ["DEBUG", "", "5", "info,dynamo.router=debug", "dynamo_runtime", "h2::x", "a[s{f}]=warn"],
)
def test_log_levels_as_in_dynamo(text: str) -> None:
    assert from_env(LogSettings, {"DYN_LOG": text}).level == text


@pytest.mark.parametrize("text", ["debgu", "info,hyper=wran", "hyper="])
def test_an_unknown_log_level_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match=f"DYN_LOG='{text}': '.*' is no level; give one of 0, 1,"):
        from_env(LogSettings, {"DYN_LOG": text})


def test_a_preset_keeps_the_value_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_TEST_PRESET", "theirs")
    preset("DYN_TEST_PRESET", "ours")
    assert environ()["DYN_TEST_PRESET"] == "theirs"
    monkeypatch.delenv("DYN_TEST_PRESET")
    preset("DYN_TEST_PRESET", "ours")
    assert environ()["DYN_TEST_PRESET"] == "ours"
    monkeypatch.delenv("DYN_TEST_PRESET")
