"""docs/dynamo-flags.md says of every flag of Dynamo 1.6.1 what the parsers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo.config import load
from dynamo.config.absent import ROUTER, AbsentFlag, sort_words
from dynamo.config.check import check_options
from dynamo.config.option import absent_of, fields_of
from dynamo.config.parser import Option, option_of
from dynamo.config.programs import settings_groups
from dynamo.config.router import RouterSettings
from dynamo.planner.config_file import IDLE_KEYS, RENAMED_KEYS

DOC = Path(__file__).parents[3] / "docs" / "dynamo-flags.md"
PROGRAMS = ("dynamo.frontend", "dynamo.router", "dynamo.mocker", "dynamo.planner")


def rows(program: str) -> dict[str, tuple[str, str]]:
    """Return the table of ``program``: what is here and the note, by flag."""
    return table(f"python -m {program}")


def table(heading: str) -> dict[str, tuple[str, str]]:
    section = DOC.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if "| `" in line]
    return {row[0].strip("`"): (row[1].strip(" |"), "".join(row[2:]).strip()) for row in cells}


def options(program: str) -> dict[str, Option]:
    found = {}
    for group in settings_groups(program):
        for field in fields_of(group):
            spec = option_of(field)
            found.update(dict.fromkeys(spec.flags, spec))
    return found


def absent(program: str) -> dict[str, AbsentFlag]:
    return {row.flag: row for group in settings_groups(program) for row in absent_of(group)}


def parse(program: str, *argv: str, **env: str) -> tuple[Any, ...]:
    return load(f"python -m {program}", "", settings_groups(program), argv, env)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_table_is_what_the_parser_does(program: str) -> None:
    known, refused = options(program), absent(program)
    listed = rows(program)
    listed.pop("--version", None)
    assert not known.keys() & refused.keys()
    assert {flag for flag, (state, _) in listed.items() if state == "out"} == refused.keys()
    for flag, (state, note) in listed.items():
        if state == "out":
            assert note == f"{refused[flag].reason}; {refused[flag].remedy}", flag
        else:
            assert flag in known, flag
            assert (state == "no effect") == bool(known[flag].deprecated), flag
            assert bool(note) == (state != "works"), flag


def test_the_keys_of_the_planners_file() -> None:
    listed = table("Keys of the planner's file")
    assert listed.pop("optimization_target")[1].startswith("`--mode`")
    assert listed.pop("enable_load_scaling")[0] == "differs"
    for key, option in RENAMED_KEYS.items():
        state, note = listed.pop(key)
        assert note.startswith(f"`--{option}`") and (state == "works") == note.endswith("`"), key
    assert listed == {key: ("no effect", why) for key, why in IDLE_KEYS.items()}
    assert {f"--{option}" for option in RENAMED_KEYS.values()} <= options("dynamo.planner").keys()


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_flag_that_is_out_is_refused_with_reason_and_remedy(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag, row in absent(program).items():
        asking = [flag] if row.default is not True else [flag.replace("--", "--no-", 1)]
        if not isinstance(row.default, bool):
            asking = [flag, "other"]
        with pytest.raises(SystemExit) as stop:
            parse(program, *asking)
        error = capsys.readouterr().err
        assert stop.value.code == 2
        assert f"{asking[0]} is not supported: {row.reason}; {row.remedy}" in error


@pytest.mark.parametrize("program", PROGRAMS)
def test_dynamos_default_of_a_flag_that_is_out_is_accepted(program: str) -> None:
    for flag, row in absent(program).items():
        if row.default is True:
            parse(program, flag)
        elif row.default is False:
            parse(program, flag.replace("--", "--no-", 1))
        elif row.default is not None:
            parse(program, flag, row.default)
            parse(program, f"{flag}={row.default}", **{row.variable: row.default})


def test_variables_of_flags_that_are_out(capsys: pytest.CaptureFixture[str]) -> None:
    parse("dynamo.frontend", DYN_SERVE_INDEXER="false", DYN_RESPONSE_PLANE="tcp")
    parse("dynamo.mocker", DYN_ROUTER_MODE="kv", DYN_ROUTER_TEMPERATURE="0.5")
    with pytest.raises(SystemExit):
        parse("dynamo.frontend", DYN_SERVE_INDEXER="1")
    assert "DYN_SERVE_INDEXER=1 is not supported: each router" in capsys.readouterr().err


def test_words_of_other_flags_stay_in_order() -> None:
    words = ["--x", "1", "--ais-mtp-seed", "42", "--y", "--use-remote-indexer", "z"]
    rest, asked = sort_words(words, ROUTER)
    assert (rest, asked and asked.flag) == (["--x", "1", "--y"], "--use-remote-indexer")
    assert sort_words(["--ais-nextn"], ROUTER)[1] is not None
    assert sort_words(["--aic-nextn", "2"], ROUTER)[1] is not None


def test_a_graph_names_the_key_that_is_out() -> None:
    checked = check_options(
        settings_groups("dynamo.frontend"), {"serve-indexer": ["--serve-indexer"]}, {}
    )
    (problem,) = checked.problems
    assert problem.key == "serve-indexer"
    assert problem.text.startswith("is not supported: each router follows")
    variables = {"DYN_INTERACTIVE": "1"}
    (problem,) = check_options(settings_groups("dynamo.frontend"), {}, variables).problems
    assert problem.key == "" and problem.text.startswith("DYN_INTERACTIVE=1 is not supported")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse("dynamo.mocker", "--version")
    assert stop.value.code == 0 and capsys.readouterr().out.startswith("dynamo.mocker 0.")


def test_settings_are_dumped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "settings.json"
    parse("dynamo.frontend", "--dump-config-to", str(path), "--http-port", "9")
    assert '"http_port": 9' in path.read_text() and list(tmp_path.iterdir()) == [path]
    variables = {"DYN_ATTACH_API_KEY": "sk-1", "DYN_DUMP_CONFIG_TO": str(path)}
    parse("dynamo.attach", **variables)
    assert "sk-1" not in path.read_text() and '"api_key": "(hidden)"' in path.read_text()
    with pytest.raises(SystemExit):
        parse("dynamo.frontend", "--dump-config-to", str(path / "below"))
    assert "below: can't be written" in capsys.readouterr().err


def test_load_aware_is_the_kv_mode_without_caches() -> None:
    settings = RouterSettings(load_aware=True, kv_events=True, overlap_score_credit=2.0)
    assert (settings.mode, settings.kv_events, settings.uses_index) == ("kv", False, False)
    assert settings.overridden({"prefill_load_scale": 2.0}).prefill_weight == 2.0


def test_older_names_of_the_mockers_modes(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("dynamo.mocker", "--is-prefill-worker")[2].disaggregation_mode == "prefill"
    assert parse("dynamo.mocker", "--is-decode-worker")[2].disaggregation_mode == "decode"
    with pytest.raises(SystemExit):
        parse("dynamo.mocker", "--is-decode-worker", "--disaggregation-mode", "prefill")
    assert "contradict each other" in capsys.readouterr().err
