"""The checks of `dynamo serve` before anything starts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamo.cli import main as cli
from dynamo.cli import run
from dynamo.config.option import fields_of
from dynamo.config.parser import option_of
from dynamo.config.programs import EXTRAS, PROGRAMS, settings_groups
from dynamo.config.system import TracingSettings
from dynamo.errors import ConfigError
from dynamo.serve.graph.graph import parse_graph
from dynamo.setup import service_checks
from dynamo.setup.new_graph import InstalledEngine
from dynamo.setup.service_checks import check_engine_flags, check_engines, check_services
from dynamo.vllm import known_flags

MODEL = Path(__file__).resolve().parents[3] / "examples/model"


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


def problems(tmp_path: Path, text: str) -> str:
    """Return the problems of a graph; "" if there is none."""
    try:
        check_services(parse_graph(text.replace("MODEL", str(MODEL)), "g.yaml"), tmp_path, {})
    except ConfigError as error:
        return error.message
    return ""


def test_the_problems_of_all_services_come_at_once(tmp_path: Path) -> None:
    text = """
Frontend: {run: dynamo.frontend, http-port: 80000}
Worker:
  run: dynamo.mocker
  model-pth: x
Other: {run: [python, -m, dynamo.mocker, --model-path, MODEL, --fo, "1"]}
Router: {run: dynamo.router}
"""
    assert problems(tmp_path, text) == (
        "4 problems in g.yaml:\n"
        "  g.yaml:2:34: Frontend.http-port must be between 0 and 65535, got 80000\n"
        "  g.yaml:5:3: Worker.model-pth is not an option of dynamo.mocker "
        "(did you mean model-path?)\n"
        "  g.yaml:6:1: Other.run: --fo is not an option of dynamo.mocker\n"
        "  g.yaml:7:1: Router: endpoint is missing; give that of the workers: "
        "dynamo.backend.generate"
    )


@pytest.mark.parametrize(
    ("service", "words"),
    [
        ("{run: dynamo.mocker}", "W: model-path is missing; give a directory or an id"),
        ("{run: dynamo.mocker, model-path: nowhere}", "W: model-path: no such directory: the mo"),
        (
            "{run: dynamo.frontend, api-key-file: none}",
            "W: --api-key-file none: No such file or directory",
        ),
        ("{run: dynamo.frontend, tls-cert-path: c}", "W: --tls-key-path is missing"),
        (
            "{run: dynamo.frontend, tls-cert-path: c, tls-key-path: k}",
            "W: --tls-cert-path c: No such file",
        ),
        ("{run: dynamo.mocker, model-path: .}", "has no config.json and no tokenizer.json"),
        (
            "{run: dynamo.mocker, model-path: MODEL, max-num-seqs: 9, max-num-batched-tokens: 2}",
            "W: --max-num-batched-tokens 2 is less than --max-num-seqs 9",
        ),
        ("{run: dynamo.mocker, model-path: MODEL, endpoint: a.b}", "Invalid endpoint path 'a.b'"),
        (
            "{run: dynamo.mocker, model-path: MODEL, custom-jinja-template: t.jinja}",
            "W: custom-jinja-template t.jinja: no such file in ",
        ),
        (
            "{run: dynamo.mocker, model-path: MODEL, ServiceArgs: {envs: {DYN_EVENT_PLANE: x}}}",
            "W: DYN_EVENT_PLANE must be one of zmq, nats, got 'x'",
        ),
        (
            "{run: dynamo.mocker, model-path: MODEL,"
            " ServiceArgs: {envs: {DYN_HEALTH_CHECK_ENABLED: ture}}}",
            "W: DYN_HEALTH_CHECK_ENABLED must be true, 1, yes or on, or false, 0, no or off, "
            "got 'ture'",
        ),
        (
            "{run: dynamo.mocker, model-path: MODEL, ServiceArgs: {envs: {DYN_LOG: debgu}}}",
            "W: DYN_LOG='debgu': 'debgu' is no level; give one of 0, 1, 2, 3, 4, 5, off, error, "
            "warn, info, debug, trace, warning, or module=LEVEL for a module",
        ),
        (
            "{run: dynamo.frontend, router-mode: kv, router-prefill-load-model: fitted, "
            "router-track-prefill-tokens: false}",
            "W: --router-prefill-load-model=fitted needs --router-track-prefill-tokens",
        ),
        (
            "{run: dynamo.frontend, router-mode: kv, router-cost: seconds, "
            "router-track-prefill-tokens: false}",
            "W: --router-cost=seconds needs --router-track-prefill-tokens",
        ),
        (
            "{run: dynamo.frontend, router-mode: kv, router-prefill-load-model: ais, "
            "ais-system: h200_sxm, ServiceArgs: {envs: {PYTHONPATH: x}}}",
            "W: --router-prefill-load-model=ais needs --ais-backend, --ais-model-path",
        ),
        (
            "{run: dynamo.mocker, model-path: MODEL, endpoint-types: chat;completions}",
            "W: --endpoint-types must name chat, completions or both, got 'chat;completions'",
        ),
        ("{run: dynamo.attach, profile: sglang}", "W: --url and --exec are missing"),
        ("{run: dynamo.attach, exec: my-server}", "has no {port}: write {port} where the server"),
        ("{run: dynamo.attach, url: 'http://h:1', model: x}", "W: model-path: no such directory"),
        ("{run: dynamo.router, endpoint: a.b}", "W: Invalid endpoint path 'a.b'"),
        ("{run: dynamo.mockr}", "W.run: no Python module dynamo.mockr"),
        ("{run: [no-such-program]}", "W.run: no program no-such-program"),
    ],
)
def test_a_service_that_would_end_at_once_is_refused(
    tmp_path: Path, service: str, words: str
) -> None:
    assert words in problems(tmp_path, f"W: {service}\n")


def test_paths_are_relative_to_the_directory_of_the_graph(tmp_path: Path) -> None:
    (tmp_path / "m").symlink_to(MODEL)
    assert problems(tmp_path, "W: {run: dynamo.mocker, model-path: m}\n") == ""


def test_a_model_of_the_hub_must_be_cached_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = "W: {run: dynamo.mocker, model-path: acme/tiny}\n"
    assert problems(tmp_path, graph) == ""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "not (complete) in the Hugging Face cache: the model 'acme/tiny'" in problems(
        tmp_path, graph
    )


def test_other_programs_are_not_checked(tmp_path: Path) -> None:
    assert problems(tmp_path, "A: {run: my.engine, any: 1}\nB: {run: [sleep, '1'], x: 2}\n") == ""


def test_an_engine_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    program = replace(PROGRAMS["dynamo.mocker"], package="no_such_package", install="pip x")
    monkeypatch.setitem(PROGRAMS, "dynamo.mocker", program)
    with pytest.raises(ConfigError, match=r"W\.run: dynamo\.mocker needs no_such_package.*pip x"):
        check_engines(parse_graph("W: {run: dynamo.mocker}\n", "g.yaml"))
    text = "W: {run: dynamo.attach, exec: 'no-such-server --port {port}'}\n"
    with pytest.raises(ConfigError, match=r"W\.exec: no program no-such-server: install it"):
        check_engines(parse_graph(text, "g.yaml"))


@pytest.mark.parametrize(
    ("service", "env", "extra"),
    [
        ("dynamo.mocker, model-path: m, discovery-backend: etcd", {}, "etcd"),
        ("dynamo.mocker, model-path: m", {"DYN_DISCOVERY_BACKEND": "etcd"}, "etcd"),
        ("dynamo.vllm, model: m, enforce-eager: true, event-plane: nats", {}, "nats"),
        ("dynamo.attach, url: 'http://h'", {"DYN_EVENT_PLANE": "nats"}, "nats"),
        ("my.worker, flag: 1", {"DYN_DISCOVERY_BACKEND": "etcd"}, "etcd"),
        ("[python, worker.py, --x]", {"DYN_DISCOVERY_BACKEND": "etcd"}, "etcd"),
        ("dynamo.frontend", {"OTEL_EXPORT_ENABLED": "1"}, "otel"),
        ("dynamo.frontend, router-prefill-load-model: aic", {}, "aic"),
        ("dynamo.planner, environment: kubernetes, graph-deployment: g", {}, "kubernetes"),
    ],
)
def test_an_extra_that_is_not_installed_is_named(
    service: str, env: dict[str, str], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = {one.package for one in EXTRAS if one.name == extra}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    graph = parse_graph(f"W: {{run: {service}}}\n", "g.yaml")
    monkeypatch.setattr(service_checks, "_exists", lambda module: True)
    check_engines(graph)
    monkeypatch.setattr(service_checks, "_exists", lambda module: module not in packages)
    with pytest.raises(
        ConfigError, match=rf"W: .* needs .*: pip install 'dynamo-app.*\[{extra}\]'"
    ):
        check_engines(graph)
    own = parse_graph(f"W: {{run: {service}, ServiceArgs: {{envs: {{PYTHONPATH: x}}}}}}\n", "g")
    check_engines(own)  # which may have the package
    monkeypatch.setattr(service_checks, "_exists", lambda module: False)
    check_engines(parse_graph("W: {run: [sleep, '9']}\n", "g.yaml"))  # needs none


def test_the_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((MODEL.parents[1] / "pyproject.toml").read_text())["project"]
    fields = {
        f"{group.__name__}.{field.name}"
        for program in PROGRAMS.values()
        for group in (*program.checked_groups(), TracingSettings)
        for field in fields_of(group)
    }
    for extra in EXTRAS:
        assert extra.name in project["optional-dependencies"] and extra.option in fields


@pytest.mark.parametrize(
    ("status", "output", "words"),
    [
        (0, 'a log line\n{"W": "unrecognized arguments: --x"}\n', "W: vLLM: unrecognized"),
        (0, "{}", None),
        (1, "", "vLLM cannot be imported, so no worker of it can start: ImportError: libcuda"),
    ],
)
def test_flags_of_vllm_are_read_by_its_own_parser(
    status: int, output: str, words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        calls.append((command[1:], options["input"], options["cwd"]))
        return subprocess.CompletedProcess(command, status, output, "…\nImportError: libcuda\n")

    monkeypatch.setattr(service_checks, "_exists", lambda module: True)
    monkeypatch.setattr(subprocess, "run", run)
    graph = parse_graph("W: {run: dynamo.vllm, model: m, tp: 2}\nF: {run: m}\n", "g.yaml")
    if words is None:
        check_engine_flags(graph, tmp_path)
    else:
        with pytest.raises(ConfigError, match=words):
            check_engine_flags(graph, tmp_path)
    given = '{"W": ["--model", "m", "--tp", "2"]}'
    assert calls == [(["-m", "dynamo.vllm.check"], given, tmp_path)]


def test_different_models_of_one_name(tmp_path: Path) -> None:
    other = shutil.copytree(MODEL, tmp_path / "other")
    text = """
A: {run: dynamo.mocker, model-path: MODEL, model-name: tiny}
B: {run: [python, -m, dynamo.mocker, --model, other, --served-model-name, tiny]}
"""
    assert problems(tmp_path, text) == ""  # the same files in two places
    (other / "chat_template.jinja").write_text("{{ messages }}")
    assert problems(tmp_path, text) == (
        "g.yaml:3:1: B and A have different models of one name, 'tiny': other and "
        f"{MODEL}; give one of them another served-model-name"
    )
    assert problems(tmp_path, text.replace("tiny]", "small]")) == ""
    template = text.replace("model-name: tiny", "model-name: tiny, custom-jinja-template: t")
    (tmp_path / "t").write_text("{{ messages }}")
    assert "different models" in problems(tmp_path, template.replace("other", "MODEL"))


@pytest.mark.parametrize("verb", ["run", "serve"])
def test_a_dry_run_reads_the_flags_of_vllm(
    verb: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert "enforce-eagr" in options["input"]
        return subprocess.CompletedProcess(command, 0, '{"Worker": "no flag --enforce-eagr"}', "")

    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(service_checks, "_exists", lambda module: True)
    monkeypatch.setattr(subprocess, "run", refuse)
    engine = InstalledEngine("vllm", (), "this environment")
    monkeypatch.setattr(run, "find_engines", lambda: (engine,))
    graph = tmp_path / "g.yaml"
    words = [str(MODEL), "--gpus-per-worker", "0"]
    flags = ["--", "--enforce-eagr"]
    assert cli.main(["run", *words, "--write", str(graph), *flags]) == 0
    own = [str(graph)] if verb == "serve" else [*words, *flags]
    assert cli.main([verb, "--dry-run", *own]) == 2
    assert "Worker: vLLM: no flag --enforce-eagr" in capsys.readouterr().err


@pytest.mark.parametrize("module", PROGRAMS)
def test_the_checked_options_are_those_of_the_program(module: str) -> None:
    """A program that gets another group of options must get it in settings_groups, too."""
    words = [sys.executable, "-m", module, "--help"]
    env = {**os.environ, "COLUMNS": "300"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True, env=env)
    # Two spaces separate a flag, and its value, from the help, which may name other flags.
    lines = [line[2:].split("  ")[0] for line in done.stdout.splitlines() if line[:3] == "  -"]
    shown = {flag for line in lines for flag in re.findall(r"--[a-z][\w-]*", line)}
    groups = settings_groups(module)
    assert groups
    options = [option_of(field) for group in groups for field in fields_of(group)]
    known = {flag for option in options for flag in option.flags if flag.startswith("--")}
    assert known | {"--help", "--version"} <= shown
    own = shown - {"--help", "--version"}
    assert all(flag in known for flag in own if not flag.startswith("--no-"))


def test_the_programs_are_in_the_docs() -> None:
    lines = ["| `run:` | what it is | scaled by the planner | needs |", "|---|---|---|---|"]
    for program in PROGRAMS.values():
        scaled = "yes" if program.registers_model else "no"
        needs = f"`{program.install}`" if program.install else "nothing"
        lines.append(f"| `{program.module}` | {program.text} | {scaled} | {needs} |")
    table = "\n".join(lines)
    page = (Path(__file__).parents[3] / "docs/serve.md").read_text()
    assert f"\n{table}\n" in page, f"docs/serve.md should say:\n{table}"


def test_one_planner_scales_a_graph(tmp_path: Path) -> None:
    planners = "A: {run: dynamo.planner}\nB: {run: [python, -m, dynamo.planner, --mode, sla]}\n"
    observer = "C: {run: dynamo.planner, no-operation: true, mode: sla}\n"
    assert problems(tmp_path, "A: {run: dynamo.planner}\n" + observer) == ""
    assert problems(tmp_path, planners + observer) == (
        "g.yaml:2:1: B and A would scale the same services; remove one, or set no-operation: true"
    )
    several = "A: {run: dynamo.planner, ServiceArgs: {workers: 2}}"
    assert "A: one process scales all; set workers: 1" in problems(tmp_path, several)


def mock(name: str, args: str, model: str = "") -> str:
    return (
        f"{name}: {{run: dynamo.mocker, model-path: MODEL, model-name: {model or name.lower()}, "
        f"ServiceArgs: {args}}}\n"
    )


@pytest.mark.parametrize(
    ("services", "words"),
    [
        (
            mock("A", "{aliases: [x, y]}") + mock("B", "{aliases: y}"),
            "g.yaml:2:1: B.ServiceArgs.aliases: 'y' is an alias of A already",
        ),
        (
            mock("A", "{aliases: [b]}") + mock("B", "{}"),
            "A.ServiceArgs.aliases: 'b' is another model, of B",
        ),
        (mock("A", "{aliases: a}"), "'a' is the model's own name"),
        (mock("A", "{defaults: {temprature: 1}}"), "A.ServiceArgs.defaults: temprature is not a"),
        (mock("A", "{forbid: [top-k]}"), "A.ServiceArgs.forbid: top-k is not a field"),
        (
            mock("A", "{group: g, min: 0}") + mock("B", "{group: g, idle_timeout: 5m}"),
            "B.ServiceArgs.workers: A is awake at the start, and of group 'g' one model is",
        ),
        (
            mock("A", "{group: g, min: 1}") + mock("B", "{group: g, workers: 0, min: 0}"),
            "A.ServiceArgs.min: is 1, so no other model of group 'g' would ever start",
        ),
        (
            mock("A", "{group: g}") + mock("B", "{group: g, workers: 0, min: 0}"),
            "A.ServiceArgs.group: models of 'g' take turns, so each needs idle_timeout, or min: 0",
        ),
        ("A: {run: dynamo.frontend, ServiceArgs: {hidden: true}}", "are for services that serve a"),
        ("A: {run: dynamo.planner, ServiceArgs: {max: 2}}", "serve a model, not dynamo.planner"),
        (
            mock("A", "{aliases: x}") + "B: {run: [python, b.py, --model-name, x], "
            "ServiceArgs: {priority: 1}}",
            "A.ServiceArgs.aliases: 'x' is another model, of B",
        ),
        (
            "A: {run: dynamo.attach, url: 'http://127.0.0.1:1', ServiceArgs: {aliases: x}}",
            "A.ServiceArgs.aliases needs served-model-name",
        ),
    ],
)
def test_what_a_graph_says_about_its_models(tmp_path: Path, services: str, words: str) -> None:
    assert words in problems(tmp_path, services)


def test_models_that_are_right(tmp_path: Path) -> None:
    one = mock("A", "{group: [g, h], idle_timeout: 90, defaults: {temperature: 0.6}}")
    two = mock("B", "{group: g, workers: 0, min: 0, aliases: [x], hidden: aliases}")
    other = "C: {run: dynamo.attach, url: 'http://127.0.0.1:1', ServiceArgs: {forbid: [odd]}}\n"
    own = "E: {run: [python, e.py, --model-name, e], ServiceArgs: {max: 2, forbid: [odd]}}\n"
    cold = mock("D", "{workers: 0, min: 0, aliases: x}", model="b")
    assert problems(tmp_path, one + two + other + own + cold) == ""


def test_a_graph_of_this_machine_has_no_planner_of_a_cluster(tmp_path: Path) -> None:
    keys = "environment: kubernetes, graph-deployment: my-graph"
    text = problems(tmp_path, f"A: {{run: dynamo.planner, {keys}}}")
    assert "A: environment: kubernetes scales a cluster, and this graph starts workers" in text
    assert "run the planner in the cluster" in text


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--max-model-len", "8", "--enforce_eager", "--no-enable-prefix-caching", "-tp", "2"), ""),
        (("--compilation-config.mode=3", "--config", "x.yaml", "-O3"), ""),
        (("--max-modellen=8",), "--max-modellen (did you mean --max-model-len?)"),
        (("--zzz",), "--zzz"),
    ],
)
def test_flags_of_vllm_are_found_without_importing_it(
    words: tuple[str, ...], found: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert known_flags.unknown_flag(words) == ""  # not installed
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.32.0")
    assert known_flags.unknown_flag(words) == found
    if found:
        key = words[0].lstrip("-").partition("=")[0]
        text = f"W: {{run: dynamo.vllm, model-path: org/m, {key}: 8}}"
        with pytest.raises(ConfigError, match=r"g:1.*: W\..* vllm has no flag") as refused:
            check_services(parse_graph(text, "g"), tmp_path, {})
        assert found in refused.value.message
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.0")
    assert known_flags.unknown_flag(words) == ""


def test_unknown_flags_of_verbs_have_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    for words, hint in (
        (["run", "m", "--enforce-eager"], "flags of the engine go to the end, after --"),
        (["run", "m", "--max-model-len", "8"], "flags of the engine go to the end, after --"),
        (["run", "m", "--worker", "2"], "(did you mean --workers?)"),
        (["ps", "--jsn"], "(did you mean --json?)"),
        (["key", "list", "--file", "x"], "(did you mean --api-key-file?)"),
        (["serve", "--dry-rn", "g.yaml"], "(did you mean dry-run?)"),
    ):
        try:
            status = cli.main(words)
        except SystemExit as ended:
            status = int(ended.code or 0)
        assert status == 2 and hint in capsys.readouterr().err, words
