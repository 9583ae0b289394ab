"""The graph of one model: which engine serves it, and with which flags."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from dynamo.cli import main as cli
from dynamo.errors import ConfigError
from dynamo.llm.model_source import NamedModel, named_model
from dynamo.serve.graph.graph import Graph, parse_graph
from dynamo.setup.new_graph import (
    InstalledEngine,
    NewGraph,
    choose,
    choose_engine,
    cpu_share,
    flags_as_keys,
)

MODEL = Path(__file__).resolve().parents[3] / "examples/model"
VLLM = InstalledEngine("vllm", (), "this environment")
VLLM_PROGRAM = InstalledEngine("vllm", ("/opt/v/bin/vllm", "serve"), "/opt/v/bin/vllm")
SGLANG = InstalledEngine("sglang", ("/opt/s/bin/sglang", "serve"), "/opt/s/bin/sglang")
LLAMA = InstalledEngine("llama.cpp", ("/usr/bin/llama-server",), "/usr/bin/llama-server")
OLLAMA = InstalledEngine("ollama", ("/usr/bin/ollama", "serve"), "/usr/bin/ollama")
MOCKER = InstalledEngine("mocker", (), "dynamo")
ALL = (VLLM, SGLANG, LLAMA, OLLAMA, MOCKER)

DIRECTORY = NamedModel("directory", "/models/qwen", "qwen")
HUB = NamedModel("hub", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")
GGUF = NamedModel("gguf", "/models/my x.gguf", "my x", has_tokenizer=False)
REPOSITORY = NamedModel("gguf-repository", "org/Qwen-GGUF:Q4_K_M", "org/Qwen-GGUF")


def worker(graph: NewGraph) -> dict[str, object]:
    """The worker of the YAML, which is a valid graph."""
    parse_graph(graph.text(), "test")
    found: dict[str, object] = yaml.safe_load(graph.text())["Worker"]
    return found


def command(graph: NewGraph) -> list[str]:
    return shlex.split(str(worker(graph)["exec"]))


@pytest.mark.parametrize(
    ("model", "engine"),
    [(DIRECTORY, VLLM), (HUB, VLLM), (GGUF, LLAMA), (REPOSITORY, LLAMA)],
)
def test_each_kind_of_model_has_its_engine(model: NamedModel, engine: InstalledEngine) -> None:
    assert choose_engine(model, None, ALL) is engine


def test_the_next_engine_is_taken_if_the_best_is_missing() -> None:
    assert choose_engine(HUB, None, (MOCKER, LLAMA, SGLANG)) is SGLANG


def test_the_mocker_is_only_taken_when_asked_for() -> None:
    assert choose_engine(DIRECTORY, "mocker", (MOCKER,)) is MOCKER
    with pytest.raises(ConfigError, match=r"install one of these:\n  vLLM: pip install"):
        choose_engine(DIRECTORY, None, (MOCKER,))


def test_a_wanted_engine_that_is_missing_or_unsuitable_is_named() -> None:
    with pytest.raises(ConfigError, match=r"is installed; install it:\n  SGLang: pip install"):
        choose_engine(HUB, "sglang", (VLLM,))
    with pytest.raises(ConfigError, match=r"ollama cannot serve .* an id on Hugging Face; engines"):
        choose_engine(HUB, "ollama", ALL)


def test_vllm_serves_a_gguf_file_only_with_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match=r"copy the original model's tokenizer\.json"):
        choose_engine(GGUF, None, (VLLM,))
    assert choose_engine(dataclasses.replace(GGUF, has_tokenizer=True), None, (VLLM,)) is VLLM
    assert choose(GGUF, None, (VLLM,), ("--tokenizer", "org/name")) is VLLM


def test_models_are_recognized_by_what_is_on_disk(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text("{}")
    (tmp_path / "x.Q8_0.gguf").write_bytes(b"GGUF")
    found = named_model(str(tmp_path / "m"))
    assert (found.kind, found.source, found.name) == ("directory", str(tmp_path / "m"), "m")
    found = named_model(str(tmp_path / "x.Q8_0.gguf"))
    assert (found.kind, found.name, found.has_tokenizer) == ("gguf", "x.Q8_0", False)
    kinds = {
        "Qwen/Qwen3-0.6B": "hub",
        "hf://gpt2": "hub",
        "org/Qwen3-GGUF": "gguf-repository",
        "org/Qwen3:Q4_0": "gguf-repository",
        "org/name/x.gguf": "gguf",
        "qwen3:0.6b": "ollama",
    }
    assert {text: named_model(text).kind for text in kinds} == kinds


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("/no/such/model", "no model '/no/such/model'"),
        ("notes.txt", "is a file, but not a GGUF file"),
        ("ggufs", r"has GGUF files; name one of them, such as .*/ggufs/a\.gguf"),
        ("empty", r"has no config\.json"),
    ],
)
def test_what_is_no_model_is_explained(
    text: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs/a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=problem):
        named_model(text)


def test_a_name_without_a_directory_is_perhaps_a_typing_error() -> None:
    with pytest.raises(ConfigError, match=r"no directory or file 'modle' here.*\n  Ollama: https"):
        choose(named_model("modle"), None, (VLLM, MOCKER))


def test_flags_of_vllm_become_keys_of_the_graph() -> None:
    words = ("--max-model-len", "8192", "--enforce-eager", "-tp", "2", "--seed=-1")
    graph = NewGraph(model=HUB, engine=VLLM, flags=words, workers=2, name="chat")
    assert worker(graph) == {
        "run": "dynamo.vllm",
        "model": "Qwen/Qwen3-0.6B",
        "served-model-name": "chat",
        "max-model-len": 8192,
        "enforce-eager": True,
        "tensor-parallel-size": 2,
        "seed": -1,
        "ServiceArgs": {"workers": 2, "graceful_timeout": 120},
    }
    (service,) = [s for s in parse_graph(graph.text(), "t").services if s.name == "Worker"]
    assert service.all_words[4:] == (
        *("--max-model-len", "8192", "--enforce-eager"),
        *("--tensor-parallel-size", "2", "--seed=-1"),
    )


def test_flags_without_a_key_stay_words() -> None:
    words = ("--lora-modules", "a=/x", "b=/y", "--max-model-len", "8192")
    graph = NewGraph(model=HUB, engine=VLLM, flags=words)
    assert worker(graph)["run"] == ["python", "-m", "dynamo.vllm", *words]
    (service,) = [s for s in parse_graph(graph.text(), "t").services if s.name == "Worker"]
    assert service.program == "dynamo.vllm" and service.all_words[: len(words)] == words


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ((), {}),
        (("--no-enable-prefix-caching",), {"enable-prefix-caching": False}),
        (("--rope", '{"a": 1}'), {"rope": '{"a": 1}'}),
        (("--x", "0.90"), {"x": "0.90"}),
        (("--x", "0.9"), {"x": 0.9}),
        (("--x", "007"), {"x": "007"}),
        (("--x", "1", "--x", "2"), None),
        (("word",), None),
        (("-O3",), None),
    ],
)
def test_flags_as_keys(words: tuple[str, ...], keys: dict[str, object] | None) -> None:
    assert flags_as_keys(words) == keys


def test_a_flag_that_the_command_line_sets_already_is_refused() -> None:
    graph = NewGraph(model=HUB, engine=VLLM, flags=("--model", "other"))
    with pytest.raises(ConfigError, match="--model after -- is already set"):
        graph.text()


def test_the_server_of_an_engine_is_started_by_the_worker() -> None:
    llama = NewGraph(model=GGUF, engine=LLAMA, gpus=1, flags=("--ctx-size", "4096"))
    assert command(llama) == [
        *("/usr/bin/llama-server", "-m", "/models/my x.gguf", "--alias", "my x"),
        *(
            "--host",
            "127.0.0.1",
            "--port",
            "{port}",
            "--metrics",
            "-ngl",
            "99",
            "--ctx-size",
            "4096",
        ),
    ]
    assert worker(llama)["served-model-name"] == "my x"
    assert worker(llama)["ServiceArgs"]["resources"] == {"gpu": 1}  # type: ignore[index]
    vllm = command(NewGraph(model=HUB, engine=VLLM_PROGRAM, gpus=2, name="chat"))
    assert vllm[:3] == ["/opt/v/bin/vllm", "serve", "Qwen/Qwen3-0.6B"]
    assert vllm[-2:] == ["--tensor-parallel-size", "2"] and "chat" in vllm
    sglang = command(NewGraph(model=DIRECTORY, engine=SGLANG))
    assert sglang[2:4] == ["--model-path", "/models/qwen"] and "--enable-metrics" in sglang


def test_gguf_files_on_hugging_face_are_downloaded_by_llama_cpp() -> None:
    assert command(NewGraph(model=REPOSITORY, engine=LLAMA))[1:3] == ["-hf", "org/Qwen-GGUF:Q4_K_M"]
    file = NamedModel("gguf", "org/name/q/x.gguf", "x")
    words = command(NewGraph(model=file, engine=LLAMA))
    assert words[1:5] == ["--hf-repo", "org/name", "--hf-file", "q/x.gguf"]


def test_a_running_ollama_is_used_and_another_one_started() -> None:
    model = NamedModel("ollama", "qwen3:latest", "qwen3")
    running = NewGraph(model=model, engine=OLLAMA, engine_url="http://127.0.0.1:11434")
    found = worker(running)
    assert found["url"] == "http://127.0.0.1:11434" and "exec" not in found
    assert found["served-model-name"] == "qwen3=qwen3:latest"
    started = command(NewGraph(model=model, engine=OLLAMA))
    assert started == ["env", "OLLAMA_HOST=127.0.0.1:{port}", "/usr/bin/ollama", "serve"]
    with pytest.raises(ConfigError, match="already runs at"):
        dataclasses.replace(running, flags=("--x",)).text()


def test_exposure_is_written_into_the_graph() -> None:
    graph = NewGraph(model=HUB, engine=VLLM, host="0.0.0.0", port=9000, api_key_file="keys.txt")
    frontend = yaml.safe_load(graph.text())["Frontend"]
    assert frontend["http-host"] == "0.0.0.0" and frontend["api-key-file"] == "keys.txt"


def run_graph(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Graph:
    """The graph of ``dynamo run`` with these words; A and B are directories of a model."""
    for name in "AB":
        if not (tmp_path / name).exists():
            shutil.copytree(MODEL, tmp_path / name)
    made = words.replace("A", str(tmp_path / "A")).replace("B", str(tmp_path / "B"))
    assert cli.main(["run", *made.split(), "--engine", "mocker", "--dry-run"]) == 0
    return parse_graph(capsys.readouterr().out, "run")


def test_models_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = run_graph("A", tmp_path, capsys)
    assert [one.name for one in graph.services] == ["Frontend", "Worker"]
    graph = run_graph("A B --idle-timeout 15m", tmp_path, capsys)
    workers = {one.name: one for one in graph.services if one.name.startswith("Worker")}
    assert "Planner" in [one.name for one in graph.services]
    assert [one.model_args.idle_timeout for one in workers.values()] == [900, 900]
    assert [one.workers for one in workers.values()] == [1, 0]
    graph = run_graph("A B --idle-timeout never --keep B", tmp_path, capsys)
    workers = {one.name: one for one in graph.services if one.name.startswith("Worker")}
    assert [one.workers for one in workers.values()] == [0, 1]
    assert [one.scaling.minimum for one in workers.values()] == [0, 1]


def test_models_on_request_by_relative_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "AB":
        shutil.copytree(MODEL, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    words = ["./A", "./B", "--idle-timeout", "1h", "--keep", "./B", "--workers", "2"]
    assert cli.main(["run", *words, "--engine", "mocker", "--dry-run"]) == 0
    graph = parse_graph(capsys.readouterr().out, "run")
    workers = [one for one in graph.services if one.name.startswith("Worker")]
    assert [(one.workers, one.scaling.minimum) for one in workers] == [(0, 0), (2, 2)]
    assert [one.scaling.maximum for one in workers] == [2, 2]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--idle-timeout 15x", "--idle-timeout 15x: give a time such as 90s"),
        ("--idle-timeout 0", "--idle-timeout 0: give a time"),
        ("--keep m", "--keep needs --idle-timeout"),
        ("--keep m --idle-timeout 9", "--keep m: no such model; give one of"),
        ("--gpus-per-worker 2", "--gpus-per-worker 2: mocker uses no GPU; leave it out"),
        ("--lora a=/x", "--lora needs a vLLM worker of ours, and mocker of dynamo would serve"),
        ("other --lora a=/x", "--lora would be for each of 2 models"),
    ],
)
def test_wrong_flags_are_named_as_typed(
    words: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", str(MODEL), *words.split(), "--engine", "mocker", "--dry-run"]) == 2
    assert text in capsys.readouterr().err


def adapter(directory: Path, rank: object) -> str:
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"r": rank}))
    return str(directory)


def test_adapters_get_the_room_that_they_need(tmp_path: Path) -> None:
    loras = {f"a{number}": adapter(tmp_path / str(number), number) for number in (4, 33)}
    graph = NewGraph(model=HUB, engine=VLLM, loras=loras)
    expected = {"max-lora-rank": 64, "max-loras": 2, "max-cpu-loras": 2}
    assert worker(graph).items() >= expected.items()
    assert worker(graph)["lora-modules"] == [f"{name}={path}" for name, path in loras.items()]
    many = {f"a{number}": loras["a4"] for number in range(12)}
    keys = worker(dataclasses.replace(graph, loras=many))
    assert (keys["max-lora-rank"], keys["max-loras"], keys["max-cpu-loras"]) == (8, 8, 12)
    flagged = dataclasses.replace(graph, flags=("--max-loras", "16", "--max-lora-rank=128"))
    keys = worker(flagged)
    assert (keys["max-lora-rank"], keys["max-loras"]) == (128, 16) and "max-cpu-loras" not in keys
    assert "lora-modules" not in worker(NewGraph(model=HUB, engine=VLLM))
    with pytest.raises(ConfigError, match="already set by the command line"):
        dataclasses.replace(graph, flags=("--lora-modules", "x=y")).text()
    for rank in (0, 513, "8", None, True):
        bad = {"bad": adapter(tmp_path / f"bad{rank}", rank)}
        with pytest.raises(ConfigError, match="rank 'r' must be from 1 to 512"):
            dataclasses.replace(graph, loras=bad).text()
    (tmp_path / "4" / "adapter_config.json").write_text("[")
    with pytest.raises(ConfigError, match="has no rank 'r'"):
        graph.text()


def test_vllm_gets_a_share_of_the_memory_on_a_box_without_a_gpu() -> None:
    graph = NewGraph(model=HUB, engine=VLLM, cpu_share=0.2)
    assert worker(graph)["gpu-memory-utilization"] == 0.2
    assert "--gpu-memory-utilization 0.2" in shlex.join(
        command(dataclasses.replace(graph, engine=VLLM_PROGRAM))
    )
    for flags in (("--gpu_memory_utilization=0.3",), ("--kv-cache-memory-bytes", "1000")):
        flagged = dataclasses.replace(graph, flags=flags)
        assert worker(flagged).get("gpu-memory-utilization") in (None, "0.3", 0.3)
    assert "gpu-memory-utilization" not in worker(dataclasses.replace(graph, engine=MOCKER))
    assert 0.01 <= cpu_share(2) <= 0.25 and cpu_share(100) <= 0.01


@pytest.mark.parametrize(
    ("pasted", "source"),
    [
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("huggingface.co/Qwen/Qwen3-0.6B/", "Qwen/Qwen3-0.6B"),
        ("https://hf.co/Qwen/Qwen3-0.6B/tree/main?not-for-all=1#files", "Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/o/m-GGUF/blob/main/m.Q4.gguf", "o/m-GGUF/m.Q4.gguf"),
        ("https://huggingface.co/o/m/resolve/main/config.json?download=true", "o/m"),
    ],
)
def test_an_address_of_hugging_face_is_its_id(pasted: str, source: str) -> None:
    assert named_model(pasted).source == source
