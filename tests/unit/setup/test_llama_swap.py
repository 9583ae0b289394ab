"""A configuration of llama-swap becomes a graph, and what it has not is listed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo.cli import main as cli
from dynamo.errors import ConfigError
from dynamo.serve.graph.graph import Graph, parse_graph
from dynamo.serve.graph.service import Service
from dynamo.setup.llama_swap import convert
from dynamo.setup.service_checks import check_services

PLACE = {"namespace": "dynamo", "http-host": "127.0.0.1", "http-port": 8000}
ONE = {"a": {"cmd": "llama-server --port ${PORT} -m a.gguf"}}


def graph_of(values: dict[str, Any], **env: str) -> tuple[Graph, list[str]]:
    made = convert(yaml.safe_dump(values, sort_keys=False), "swap.yaml", env, PLACE)
    graph = parse_graph(made.text, "graph.yaml")
    check_services(graph, Path.cwd(), {})
    return graph, list(made.left_out)


def services(values: dict[str, Any], **env: str) -> dict[str, Service]:
    """The services by the names of their models."""
    found = graph_of(values, **env)[0].services[2:]
    return {str(one.options["served-model-name"]).partition("=")[0]: one for one in found}


def test_the_smallest_configuration() -> None:
    graph, left_out = graph_of({"models": ONE})
    assert not left_out and [one.name for one in graph.services] == ["Frontend", "Planner", "A"]
    model = graph.services[2]
    assert model.options["exec"] == "llama-server --port {port} -m a.gguf"
    assert model.options["profile"] == "llama.cpp" and model.options["served-model-name"] == "a"
    assert model.workers == 0 and model.model_args.idle_timeout == float("inf")
    assert graph.services[0].workers == 1


def test_macros_and_commands_of_several_lines() -> None:
    values = {
        "macros": {"ctx": 4096, "server": "srv --port ${PORT} -c ${ctx}", "dir": "${env.MODELS}"},
        "models": {
            "big": {
                "macros": {"ctx": 8192, "temp": 0.5},
                "cmd": "# comment\n${server} \\\n  -m '${dir}/a b.gguf' --alias ${MODEL_ID}\n",
                "filters": {"setParams": {"temperature": "${temp}"}},
            }
        },
    }
    model = services(values, MODELS="/m")["big"]
    assert model.options["exec"] == "srv --port {port} -c 8192 -m '/m/a b.gguf' --alias big"
    assert model.model_args.defaults == {"temperature": 0.5}
    assert model.model_args.forbid == ("temperature",)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"services": {}}, "it has no models; is it a file of llama-swap"),
        ({"models": {"a": {"cmd": "x ${nowhere}"}}}, "a.cmd: no macro nowhere"),
        ({"models": {"a": {"cmd": "x ${env.NOWHERE}"}}}, "no variable NOWHERE is set"),
        ({"models": {"a": {"cmd": "x ${y}"}}, "macros": {"y": "${y}"}}, "contains itself"),
        ({"models": {"a": {"cmd": "x 'y ${PORT}"}}}, "No closing quotation"),
        ({"models": {"a": {"cmd": "x"}}}, "no model can be converted: a: its cmd has no"),
        ({"models": [1]}, "models must be a mapping"),
    ],
)
def test_what_cannot_be_converted(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        graph_of(values)
    assert text in error.value.message


def test_the_keys_of_a_model() -> None:
    given = {
        "cmd": "vllm serve org/m --port 8999",
        "proxy": "http://127.0.0.1:8999/",
        "useModelName": "org/m",
        "ttl": 60,
        "filters": {"stripParams": "top_k, model,min_p"},
        "aliases": ["gpt", {"id": "mini", "unlisted": True}],
        "env": ["CUDA_VISIBLE_DEVICES=0"],
        "concurrencyLimit": 4,
        "timeouts": {"connect": 7, "responseHeader": 60},
        "sendLoadingState": True,
    }
    model = services({"models": {"m": given, "n": {**ONE["a"], "unlisted": True}}})["m"]
    assert model.options["url"] == "http://127.0.0.1:8999"
    assert model.options["served-model-name"] == "m=org/m"
    assert model.options["engine-request-limit"] == 4
    args = model.model_args
    assert (args.idle_timeout, args.forbid, args.hidden) == (60, ("top_k", "min_p"), "aliases")
    assert args.aliases == ("gpt", "mini") and args.show_loading
    assert model.envs == {"CUDA_VISIBLE_DEVICES": "0"}


def group_sets(values: dict[str, Any]) -> dict[str, set[str]]:
    """The models that may not be awake beside each model."""
    found = services(values)
    return {
        name: {
            other
            for other, two in found.items()
            if other != name and set(one.model_args.group) & set(two.model_args.group)
        }
        for name, one in found.items()
    }


def models(names: str) -> dict[str, Any]:
    return {name: {"cmd": f"s --port ${{PORT}} {name}"} for name in names}


def test_groups() -> None:
    everything = group_sets({"models": models("abc")})
    assert everything == {"a": {"b", "c"}, "b": {"a", "c"}, "c": {"a", "b"}}
    beside = {"swap": False, "exclusive": False, "persistent": True, "members": ["a", "b"]}
    found = group_sets({"models": models("abcd"), "groups": {"small": beside}})
    assert found == {"a": set(), "b": set(), "c": {"d"}, "d": {"c"}}
    together = {"swap": False, "members": ["a", "b"]}
    found = group_sets({"models": models("abcd"), "groups": {"pair": together}})
    assert found == {"a": {"c", "d"}, "b": {"c", "d"}, "c": {"a", "b", "d"}, "d": {"a", "b", "c"}}


def test_preload() -> None:
    values = {"models": models("ab"), "hooks": {"on_startup": {"preload": ["a", "b", "c"]}}}
    graph, left_out = graph_of(values)
    assert [one.workers for one in graph.services[2:]] == [1, 0]
    assert left_out == [
        "hooks.on_startup.preload: no model c",
        "hooks.on_startup.preload: b takes turns with a model before it",
    ]


def test_what_is_left_out_has_a_reason() -> None:
    values = {
        "logLevel": "debug",
        "apiKeys": ["k"],
        "odd": 1,
        "models": {"a": {**ONE["a"], "cmdStop": "docker stop a", "new": 2}, "b,c": ONE["a"]},
        "groups": {"g": {"exclusive": False, "members": ["a", "x"]}},
    }
    assert [one.partition(":")[0] for one in graph_of(values)[1]] == [
        "logLevel",
        "apiKeys",
        "odd",
        "a.cmdStop",
        "a.new",
        "b,c",
        "groups.g.members",
    ]


def test_names_of_services_differ() -> None:
    graph, _ = graph_of({"models": dict.fromkeys(("frontend", "a.b", "A-B", "1"), ONE["a"])})
    names = [one.name for one in graph.services[2:]]
    assert names == ["Frontend_2", "AB", "AB_2", "Model1"]


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    values = {"models": ONE, "apiKeys": ["sk-secret"]}
    Path("swap.yaml").write_text(yaml.safe_dump(values))
    assert cli.main(["init", "--from", "swap.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "left out: apiKeys: keys are in a file" in shown
    assert "wrote graph.yaml: 1 model" in shown and "dynamo serve graph.yaml" in shown
    text = Path("graph.yaml").read_text()
    assert "# left out: apiKeys: keys" in text and "sk-secret" not in text + shown
    assert parse_graph(text, "graph.yaml").services[2].name == "A"
    assert cli.main(["init", "--from", "nowhere.yaml", "--write", "b.yaml"]) == 2
    assert cli.main(["init", "--from", "swap.yaml", "--write", "b.yaml", "--engine", "vllm"]) == 2
    assert cli.main(["init", "--from", "swap.yaml", "--yes"]) == 2  # it is kept
    assert "graph.yaml is kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    "values",
    [
        {"models": {"a": {**ONE["a"], "env": "X=1"}}},
        {"models": {"a": {**ONE["a"], "aliases": 5}}},
        {"models": ONE, "groups": {"g": {"members": True}}},
        {"models": ONE, "hooks": {"on_startup": {"preload": "a"}}},
    ],
)
def test_a_list_that_is_none(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"swap\.yaml: \w+ must be a list, got"):
        graph_of(values)


@pytest.mark.parametrize("word", ["""a'${PORT}""", """{"port": ${PORT}}""", "http://h:${PORT}/;x"])
def test_words_with_a_port_and_quotes_stay_one_word(word: str) -> None:
    command = shlex.join(["srv", word, "--port", "${PORT}"])
    found = str(services({"models": {"a": {"cmd": command}}})["a"].options["exec"])
    assert shlex.split(found) == ["srv", word.replace("${PORT}", "{port}"), "--port", "{port}"]


def test_names_of_several_lines_stay_in_comments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, made = tmp_path / "swap.yaml", tmp_path / "graph.yaml"
    source.write_text(yaml.safe_dump({"models": ONE, "x\nrun: y": 1}))
    assert cli.main(["init", "--from", str(source), "--write", str(made)]) == 0
    assert "left out: x run: y: not known" in capsys.readouterr().out
    assert set(yaml.safe_load(made.read_text())) == {"namespace", "Frontend", "Planner", "A"}
    assert [path.name for path in tmp_path.glob(".*")] == []
    assert cli.main(["init", "--from", str(source), "--write", str(tmp_path / "none/g.yaml")]) == 1
    assert f"cannot write {tmp_path}/none/g.yaml: No such file" in capsys.readouterr().err


def test_variables_of_the_environment_stay_references() -> None:
    values = {"models": {"a": {"cmd": "srv --port ${PORT}", "env": ["HF_TOKEN=${env.HF_TOKEN}"]}}}
    made = convert(yaml.safe_dump(values), "swap.yaml", {"HF_TOKEN": "hf_secret"}, PLACE)
    assert "hf_secret" not in made.text and not made.has_secrets
    assert made.left_out == [
        "a.env: HF_TOKEN: taken from the environment of dynamo serve: set it there"
    ]


@pytest.mark.parametrize(
    ("model", "secret"),
    [
        ({"cmd": "srv --port ${PORT} --api-key ${env.K}"}, True),
        ({"cmd": "srv --port ${PORT}", "env": ["X=${env.K}"]}, True),
        ({"cmd": "srv --port ${PORT}", "env": ["OPENAI_API_KEY=sk-1"]}, True),
        ({"cmd": "srv --port ${PORT} --api-key sk-1"}, True),
        ({"cmd": "srv --port ${PORT} --max-tokens 5", "env": ["X=1"]}, False),
    ],
)
def test_a_graph_with_literal_secrets_is_known(model: dict[str, Any], secret: bool) -> None:
    made = convert(yaml.safe_dump({"models": {"a": model}}), "swap.yaml", {"K": "v"}, PLACE)
    assert made.has_secrets is secret


def test_ports_in_variables_and_paths_of_proxies_are_said() -> None:
    model = {
        "cmd": "srv --port ${PORT}",
        "env": ["URL=http://localhost:${PORT}", "X=1"],
        "proxy": "http://localhost:${PORT}/api",
    }
    made = convert(yaml.safe_dump({"models": {"a": model}}), "swap.yaml", {}, PLACE)
    assert "URL" not in made.text and "X: '1'" in made.text
    assert [line.partition(":")[0] for line in made.left_out] == ["a.proxy", "a.env"]
    assert "/api" in made.left_out[0] and "URL=" in made.left_out[1]
