"""The graph file: its contents, and errors that name file, line and key."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import ConfigError
from dynamo.serve.graph.graph import Graph, parse_graph
from dynamo.serve.graph.overrides import merge, parse_value, split_overrides
from dynamo.serve.graph.service import Service

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = json.loads((ROOT / "dynamo/serve/graph.schema.json").read_text())

GRAPH = """\
namespace: test
Common:
  model: tiny
  block-size: 16
Frontend:
  run: dynamo.frontend
  http-port: 8000
Worker:
  run: dynamo.mocker
  common-configs: [model, block-size]
  block-size: 32
  fast: true
  slow: false
  stop: [a, "b c"]
  extra: {a: 1}
  nothing:
  offset: -1
  ServiceArgs:
    workers: 2
    graceful_timeout: 5
    resources: {gpu: "1", cpu: 4, memory: 8Gi}
    envs: {TOKEN: secret, COUNT: 3}
"""


def graph(text: str = GRAPH, *overrides: str) -> Graph:
    return parse_graph(text, "g.yaml", split_overrides(overrides)[1])


def worker(*overrides: str) -> Service:
    (found,) = (s for s in graph(GRAPH, *overrides).services if s.name == "Worker")
    return found


def test_parse_a_graph() -> None:
    made = graph()
    assert made.namespace == "test"
    assert [service.name for service in made.services] == ["Frontend", "Worker"]
    assert made.services[0].is_frontend and made.services[0].workers == 1
    service = worker()
    assert (service.module, service.command) == ("dynamo.mocker", ())
    assert (service.workers, service.gpu, service.cpu, service.memory) == (2, 1.0, "4", "8Gi")
    assert service.envs == {"TOKEN": "secret", "COUNT": "3"}
    assert service.graceful_timeout_s == 5.0
    assert service.origin == "g.yaml:8:1"


def test_flags() -> None:
    """Common keys first; true, false, lists, mappings, null, and values that look like flags."""
    assert worker().flags == (
        *("--model", "tiny", "--block-size", "32", "--fast", "--no-slow"),
        *("--stop", "a", "--stop", "b c", "--extra", '{"a": 1}', "--offset=-1"),
    )


def test_the_public_config_has_no_environment() -> None:
    text = json.dumps(graph().config)
    assert "secret" not in text and "TOKEN" not in text
    assert graph().config["Worker"]["ServiceArgs"]["workers"] == 2
    assert graph().config["Common"] == {"model": "tiny", "block-size": 16}


@pytest.mark.parametrize(
    ("run", "module", "command"),
    [
        ("dynamo.frontend", "dynamo.frontend", ()),
        ("python -m dynamo.mocker", "dynamo.mocker", ()),
        ("my-engine --flag 'a b'", None, ("my-engine", "--flag", "a b")),
        ("[sleep, 10]", None, ("sleep", "10")),
        ("[python, serve.py, $(circus.wid)]", None, ("python", "serve.py", "$(circus.wid)")),
    ],
)
def test_run(run: str, module: str | None, command: tuple[str, ...]) -> None:
    (service,) = graph(f"A:\n  run: {run}\n").services
    assert (service.module, service.command) == (module, command)


BAD = [
    ("", "g.yaml: the file is empty"),
    ("- a\n", "g.yaml: expected a mapping of services"),
    ("namespace: x\n", "has no service"),
    (
        "namspace: x\nA:\n  run: m\n",
        "namspace must be a mapping, got 'x' (did you mean namespace?)",
    ),
    ("serviceArgs: {workers: 2}\n", "serviceArgs is no service: it has no run (did you mean Serv"),
    ("A:\n  run: m\n  service-args: {}\n", "A.service-args is unknown (did you mean ServiceArgs?)"),
    ("A: [\n", "g.yaml:2:1: "),
    ("A:\n  run: m\nA:\n  run: m\n", "g.yaml:3:1: A is already set in line 1"),
    ("A:\n  run: m\n  b: 1\n  b: 2\n", "g.yaml:4:3: A.b is already set in line 3"),
    ("A:\n  run: m\n  off: 1\n", "g.yaml:3:3: a key must be text; quote it"),
    ("A: &a\n  run: m\n  b: *a\n", "an alias that contains itself"),
    ("A: 3\n", "g.yaml:1:1: A must be a mapping, got 3"),
    ("A:\n", "g.yaml:1:1: A must be a mapping"),
    ("A:\n  x: 1\n", "g.yaml:1:1: A.run is missing"),
    ("A:\n  run: []\n", "g.yaml:2:3: A.run must be a module"),
    ("A:\n  run: [a, [b]]\n", "g.yaml:2:3: A.run must be a module"),
    ("A:\n  run: 'a ''b'\n", "g.yaml:2:3: A.run is not a command: No closing quotation"),
    ("a-b:\n  run: m\n", "g.yaml:1:1: a-b is not a service name"),
    ("A:\n  run: m\na:\n  run: m\n", "g.yaml:3:1: a differs from A only in case"),
    ("namespace: a/b\nA:\n  run: m\n", "g.yaml:1:1: namespace must be letters"),
    ("namespace: a.b\nA:\n  run: m\n", "g.yaml:1:1: namespace must be letters"),
    ("namespace: 3\nA:\n  run: m\n", "g.yaml:1:1: namespace must be letters"),
    ("Common: 1\nA:\n  run: m\n", "g.yaml:1:1: Common must be a mapping"),
    ("A:\n  run: m\n  common-configs: [x]\n", "g.yaml:3:3: A.common-configs names 'x'"),
    ("A:\n  run: m\n  common-configs: x\n", "g.yaml:3:3: A.common-configs must be a list"),
    ("A:\n  run: m\n  when: 2024-01-01\n", "g.yaml:3:3: A.when must be a word"),
    ("A:\n  run: m\n  _x: 1\n", "g.yaml:3:3: A._x is not a flag"),
    ("A:\n  run: m\n  x: .nan\n", "g.yaml:3:3: A.x must be a word"),
    ("A:\n  run: m\n  ServiceArgs: {worker: 1}\n", "g.yaml:3:17: A.ServiceArgs.worker is unknown"),
    ("A:\n  run: m\n  ServiceArgs: {worker: 1}\n", "did you mean workers?"),
    ("A:\n  run: m\n  ServiceArgs: {workers: 1.5}\n", "must be an integer between 0 and 1024"),
    ("A:\n  run: m\n  ServiceArgs: {workers: true}\n", "must be an integer between 0 and 1024"),
    ("A:\n  run: m\n  ServiceArgs: {workers: -1}\n", "must be an integer between 0 and 1024"),
    ("A:\n  run: m\n  ServiceArgs: {resources: {gpus: 1}}\n", "(did you mean gpu?)"),
    (
        "A:\n  run: m\n  ServiceArgs: {resources: {gpu: 1.5}}\n",
        "a whole number of GPUs or a fraction",
    ),
    (
        "A:\n  run: m\n  ServiceArgs: {resources: {gpu: -1}}\n",
        "a whole number of GPUs or a fraction",
    ),
    (
        "A:\n  run: m\n  ServiceArgs: {resources: {gpu: .nan}}\n",
        "a whole number of GPUs or a fraction",
    ),
    (
        "A:\n  run: m\n  ServiceArgs: {resources: {gpu: all}}\n",
        "a whole number of GPUs or a fraction",
    ),
    (
        "A:\n  run: m\n  ServiceArgs: {envs: {a-b: 1}}\n",
        "A.ServiceArgs.envs.a-b is not a variable name",
    ),
    ("A:\n  run: m\n  ServiceArgs: {envs: {A: [1]}}\n", "A.ServiceArgs.envs.A must be text"),
    ("A:\n  run: m\n  ServiceArgs: {envs: {A: }}\n", "A.ServiceArgs.envs.A must be text"),
    ("A:\n  run: m\n  ServiceArgs: {graceful_timeout: soon}\n", "must be a number of seconds"),
    ("A: !!python/object:os.system {}\n", "could not determine a constructor"),
    ("a: 1\n---\nb: 2\n", "expected a single document"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_errors_name_file_line_and_key(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        graph(text)
    assert message in caught.value.message
    assert caught.value.message.startswith("g.yaml")


@given(st.text(alphabet="AB:-[]{}&*!|>#'\"\n ,xrun0.~", max_size=60))
def test_any_text_gives_a_graph_or_a_config_error(text: str) -> None:
    try:
        graph(text)
    except ConfigError as error:
        assert error.message.startswith("g.yaml")


def _doubling(merge: str) -> str:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{i}: &a{i} " + merge.format(f"*a{i - 1}") for i in range(1, 41)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (_doubling("[{0}, {0}]"), r"g.yaml:\d+:\d+: with all aliases expanded"),
        (_doubling("{{<<: [{0}, {0}], y: 1}}"), "with all aliases expanded"),
        (f"a: &a {'x' * 100_000}\nb: [{'*a,' * 1000}]", "with all aliases expanded"),
        ("A: {run: m, x: &x {<<: *x}}", "an alias that contains itself"),
        (f"A: {{run: {'m' * 300_000}}}", "at most 262,144 bytes"),
        ("A: " + "[" * 100_000, "nested too deeply"),
    ],
)
def test_a_small_text_cannot_become_a_large_graph(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_graph(text, "g.yaml")


def test_the_largest_graphs_fit() -> None:
    entry = "{run: [sleep, '1'], ServiceArgs: {workers: 1, resources: {gpu: 1}}, a: *c}"
    text = "Common: &c {x: 1, y: 2}\n" + "".join(f"W{i}: {entry}\n" for i in range(1024))
    assert len(parse_graph(text, "g.yaml").services) == 1024


def test_overrides_are_merged_deeply() -> None:
    """An overridden key keeps its siblings; Dynamo loses the GPU request here."""
    service = worker("--Worker.ServiceArgs.workers=4", "--Worker.extra.b", "2")
    assert (service.workers, service.gpu) == (4, 1.0)
    assert service.envs["TOKEN"] == "secret"
    assert '{"a": 1, "b": 2}' in service.flags


def test_override_of_an_environment_stays_text() -> None:
    assert worker("--Worker.ServiceArgs.envs.COUNT=007").envs["COUNT"] == "007"
    assert worker("--Worker.ServiceArgs.envs.COUNT=true").envs["COUNT"] == "true"


@pytest.mark.parametrize(
    ("run", "program"),
    [
        ("[python, -m, my.module, x]", "my.module"),
        ("[python, -m]", None),
        ("[python, my.py]", None),
        ("[torchrun, -m, my.module]", None),
        ("my.module", "my.module"),
    ],
)
def test_the_module_of_a_command_is_that_of_python(run: str, program: str | None) -> None:
    (service,) = graph(f"A: {{run: {run}}}").services
    assert service.program == program


def test_override_of_common_reaches_the_subscribed() -> None:
    assert worker("--Common.model=large").flags[:2] == ("--model", "large")


def test_override_errors_name_the_override() -> None:
    with pytest.raises(ConfigError, match=r"no service 'Wroker'.*Frontend.*did you mean Worker"):
        graph(GRAPH, "--Wroker.x=1")
    with pytest.raises(ConfigError, match=r"^--Worker.ServiceArgs.workers=two: Worker.Serv"):
        graph(GRAPH, "--Worker.ServiceArgs.workers=two")


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        *(("4", 4), ("-4", -4), ("007", 7), ("1.5", 1.5), ("1e3", 1000.0), ("true", True)),
        *(("False", False), ("null", None), ('"4"', "4"), ("[1, 2]", [1, 2]), ("abc", "abc")),
        *(('{"a": 1}', {"a": 1}), ("", ""), ("NaN", "NaN"), ("inf", "inf"), ("1_0", "1_0")),
        *(("8Gi", "8Gi"), ("a=b", "a=b")),
    ],
)
def test_values_are_typed(raw: str, value: object) -> None:
    found = parse_value(raw)
    assert found == value and type(found) is type(value)


def test_override_forms() -> None:
    rest, found = split_overrides(
        ["g.yaml", "--A.x=1", "--A.y", "2", "--gpus", "3", "--A.z", "=", "a b", "--A.n=-1.5"]
    )
    assert rest == ["g.yaml", "--gpus", "3"]
    assert [(o.path, o.value) for o in found] == [
        *((("A", "x"), 1), (("A", "y"), 2), (("A", "z"), "a b"), (("A", "n"), -1.5)),
    ]


@pytest.mark.parametrize("words", [["--A.x"], ["--A.x", "--B.y=1"], ["--A.x=--y"], ["--A.x", "="]])
def test_an_override_needs_a_value(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="needs a value"):
        split_overrides(words)


def test_a_bare_dotted_word_is_not_an_override() -> None:
    """Dynamo's parser loops forever on it."""
    assert split_overrides(["a.b", "graph.yaml"]) == (["a.b", "graph.yaml"], [])


@given(
    st.recursive(st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner)),
    st.lists(st.sampled_from("abc"), min_size=1, max_size=4),
)
def test_merge_changes_only_its_path(start: object, path: list[str]) -> None:
    values = start if isinstance(start, dict) else {}
    before = json.dumps(values)
    merged = merge(values, path, 99)
    assert json.dumps(values) == before
    found: object = merged
    for key in path:
        found = found[key]  # type: ignore[index]
    assert found == 99
    assert {k: v for k, v in merged.items() if k != path[0]} == {
        k: v for k, v in values.items() if k != path[0]
    }


def test_namespace_precedence() -> None:
    text = "A:\n  run: m\n"
    assert parse_graph(text, "g", default_namespace="env").namespace == "env"
    assert parse_graph("namespace: file\n" + text, "g", default_namespace="env").namespace == "file"
    assert parse_graph("namespace: file\n" + text, "g", namespace="flag").namespace == "flag"


EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_valid_by_code_and_by_schema(path: Path) -> None:
    text = path.read_text()
    jsonschema.validate(yaml.safe_load(text), SCHEMA)
    assert parse_graph(text, path.name).services


def test_schema_and_code_agree() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(yaml.safe_load(GRAPH), SCHEMA)
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for text in (
        "A: {}",
        "A: {run: m, ServiceArgs: {worker: 1}}",
        "A: {run: m, ServiceArgs: {workers: -1}}",
        "A: {run: m, ServiceArgs: {envs: {a-b: x}}}",
        "A: {run: []}",
        "a-b: {run: m}",
        "namespace: a/b",
        "namespace: a.b",
        "A: {run: m, x: [[1]]}",
    ):
        assert not validator.is_valid(yaml.safe_load(text)), text


def test_what_the_planner_scales() -> None:
    text = (
        "A: {run: dynamo.mocker, ServiceArgs: {workers: 2, min: 1, max: 4, priority: -3}}\n"
        "B: {run: dynamo.mocker, ServiceArgs: {workers: 0, min: 0}}\n"
    )
    first, second = parse_graph(text, "g.yaml").services
    assert (first.workers, first.scaling.minimum, first.scaling.maximum) == (2, 1, 4)
    assert first.scaling.priority == -3
    assert (second.workers, second.scaling.minimum, second.scaling.maximum) == (0, 0, None)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("min: -1", "A.ServiceArgs.min must be an integer between 0 and 1024, got -1"),
        ("max: 0", "A.ServiceArgs.max must be an integer between 1 and 1024, got 0"),
        ("min: 1.5", "A.ServiceArgs.min must be an integer between 0 and 1024, got 1.5"),
        ("priority: high", "must be an integer between -1000 and 1000, got 'high'"),
        ("min: 3, max: 2, workers: 3", "A.ServiceArgs.min is 3, more than max, 2"),
        ("min: 2", "A.ServiceArgs.workers is 1, less than min, 2"),
        ("workers: 3, max: 2", "A.ServiceArgs.workers is 3, more than max, 2"),
    ],
)
def test_wrong_scaling(args: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_graph(f"A: {{run: dynamo.mocker, ServiceArgs: {{{args}}}}}\n", "g.yaml")
