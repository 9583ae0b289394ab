"""GPUs of an engine by its parallel sizes, and warnings about their memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.config.serve import ServeSettings
from dynamo.errors import ConfigError
from dynamo.serve.gpus import nvml
from dynamo.serve.gpus.gpus import Gpu, GpuProcess
from dynamo.serve.graph.engine_gpus import (
    EngineMemory,
    engine_flags,
    memory_warnings,
    with_engine_gpus,
)
from dynamo.serve.graph.graph import Graph, parse_graph
from dynamo.serve.graph.watchers import WatcherSpec, plan
from dynamo.setup import graph_plan as gpu_placement
from dynamo.setup.graph_plan import place_workers

GIB = 1 << 30


def graph(service: str, directory: Path) -> Graph:
    made = parse_graph(f"W: {service}\n", "g.yaml")
    services = with_engine_gpus(made.services, directory)
    return Graph(namespace="ns", services=services, config={}, source="g.yaml")


def specs(of: Graph, directory: Path) -> list[WatcherSpec]:
    return plan(of, python="py", working_dir=str(directory), env={}, graceful_timeout_s=1)


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        ("", 1),
        ("--tensor-parallel-size 2", 2),
        ("--tensor_parallel_size=2 -pp 3", 6),
        ("-tp 2 -dp 4", 8),
        ("-tp 2 -dp 4 -dpl 1", 2),
        ("-tp 2 --data-parallel-size 4 --data-parallel-rank 0", 2),
        ("--max-model-len -1 -tp 2 -pcp 2", 4),
    ],
)
def test_gpus_of_a_command_line(words: str, gpus: int, tmp_path: Path) -> None:
    assert engine_flags(words.split(), tmp_path).gpus == gpus


def test_the_config_file_of_the_engine_counts_below_the_flags(tmp_path: Path) -> None:
    (tmp_path / "v.yaml").write_text("tensor_parallel_size: 2\npipeline-parallel-size: 2\n")
    assert engine_flags(["--config", "v.yaml"], tmp_path).gpus == 4
    assert engine_flags(["--config", "v.yaml", "-tp", "1"], tmp_path).gpus == 2
    with pytest.raises(ConfigError, match=r"config: .*no\.yaml cannot be read"):
        engine_flags(["--config=no.yaml"], tmp_path)


@pytest.mark.parametrize(
    ("service", "gpu"),
    [
        ("{run: dynamo.vllm, tensor-parallel-size: 4}", 4.0),
        ("{run: [python, -m, dynamo.vllm, -tp, '2']}", 2.0),
        ("{run: dynamo.vllm, ServiceArgs: {resources: {gpu: 0.5}}}", 0.5),
        ("{run: dynamo.vllm, tensor-parallel-size: 2, ServiceArgs: {resources: {gpu: 0}}}", 0.0),
        ("{run: dynamo.attach, exec: vllm serve -tp 2}", None),
        ("{run: dynamo.mocker, data-parallel-size: 4}", None),
    ],
)
def test_gpus_of_a_service(service: str, gpu: float | None, tmp_path: Path) -> None:
    assert graph(service, tmp_path).services[0].gpu == gpu


@pytest.mark.parametrize("gpu", [1, 4, 0.5])
def test_resources_that_contradict_the_engine_are_refused(gpu: float, tmp_path: Path) -> None:
    args = f"ServiceArgs: {{resources: {{gpu: {gpu}}}}}"
    with pytest.raises(ConfigError) as caught:
        graph(f"{{run: dynamo.vllm, tensor-parallel-size: 2, {args}}}", tmp_path)
    assert caught.value.message.startswith(
        f"g.yaml:1:1: W.ServiceArgs.resources.gpu is {gpu:g}, but the engine uses 2 per worker "
        "(tensor-parallel-size 2); remove resources.gpu"
    )


def test_a_size_that_is_no_number_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="W: tensor-parallel-size must be an integer >= 1"):
        graph("{run: dynamo.vllm, tensor-parallel-size: two}", tmp_path)


def test_derived_gpus_need_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(nvml, "probe", lambda: None)
    of = graph("{run: dynamo.vllm}", tmp_path)
    found = place_workers(of, specs(of, tmp_path), ServeSettings())
    assert [spec.gpus for spec in found.specs] == [()]
    assert found.warnings == ("W: no NVIDIA driver found; it is started without an assigned GPU",)
    of = graph("{run: dynamo.vllm, ServiceArgs: {resources: {gpu: 1}}}", tmp_path)
    with pytest.raises(ConfigError, match="needs 1 GPU, 0 of 0 free"):
        place_workers(of, specs(of, tmp_path), ServeSettings())


def device(used_gib: float, *processes: GpuProcess) -> Gpu:
    return Gpu(
        index=0,
        uuid="GPU-00",
        name="H100",
        memory_bytes=80 * GIB,
        used_bytes=int(used_gib * GIB),
        processes=processes,
    )


def warnings(gpu: Gpu, need: EngineMemory | None, share: float = 1.0) -> list[str]:
    spec = WatcherSpec(
        name="ns_W", service="W", argv=(), env={}, working_dir="/", graceful_timeout_s=1,
        gpu=share, gpus=("0",),
    )  # fmt: skip
    return memory_warnings([spec, spec], [gpu], {"W": need} if need else {})


def test_an_empty_gpu_gives_no_warning() -> None:
    assert warnings(device(0.5), EngineMemory(15 * GIB, 0.9)) == []


def test_memory_of_others_is_shown_by_process() -> None:
    many = [GpuProcess(pid, f"p{pid}", pid << 20) for pid in range(1, 7)]
    assert warnings(device(20, *many), None) == [
        "GPU 0 (H100): 20.0 GiB of 80.0 GiB in use by p6 (pid 6) 6 MiB, p5 (pid 5) 5 MiB, "
        "p4 (pid 4) 4 MiB, p3 (pid 3) 3 MiB, 2 more"
    ]
    assert warnings(device(20), None) == [
        "GPU 0 (H100): 20.0 GiB of 80.0 GiB in use by processes that are not visible here"
    ]


def test_weights_that_cannot_fit_are_a_warning() -> None:
    held, line = warnings(device(70), EngineMemory(15 * GIB, 0.1))
    assert held.startswith("GPU 0") and line.startswith(
        "W: the weights take 15.0 GiB on each GPU, but GPU 0 has 10.0 GiB free: the model cannot"
    )


def test_a_share_that_is_not_free_is_a_warning() -> None:
    _, line = warnings(device(20), EngineMemory(GIB, 0.9))
    assert line == (
        "W: the engine reserves 90% of GPU 0, but 75% is free: set gpu-memory-utilization to "
        "0.75 or less, or end other processes"
    )
    (line,) = warnings(device(0), EngineMemory(GIB, 0.9), share=0.5)
    assert line.startswith("W: a worker gets 0.5 of a GPU, but reserves 90% of its memory")


def test_the_needs_of_a_model_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "m"
    model.mkdir()
    for name, size in (("a.safetensors", 30), ("b.safetensors", 10), ("x.bin", 99)):
        (model / name).write_bytes(b"x" * size)
    gpu = Gpu(index=0, name="H", memory_bytes=100, used_bytes=65)
    second = Gpu(index=1, name="H", memory_bytes=100, used_bytes=10)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(nvml, "probe", lambda: [gpu, second])
    text = "{run: dynamo.vllm, model: m, gpu-memory-utilization: 0.3%s}"
    needs: list[Any] = []

    def record(_specs: object, _devices: object, given: object) -> list[str]:
        needs.append(given)
        return []

    monkeypatch.setattr(gpu_placement, "memory_warnings", record)
    for extra in ("", ", tensor-parallel-size: 2", ", quantization: fp8", ", load-format: dummy"):
        of = graph(text % extra, tmp_path)
        place_workers(of, specs(of, tmp_path), ServeSettings())
    assert [need["W"] for need in needs] == [
        EngineMemory(40, 0.3), EngineMemory(20, 0.3), EngineMemory(0, 0.3), EngineMemory(0, 0.3)
    ]  # fmt: skip


class FakeNvml:
    """The calls of pynvml for one GPU with two processes."""

    NVMLError = RuntimeError

    def __getattr__(self, name: str) -> Any:
        rows = [SimpleNamespace(pid=1, usedGpuMemory=5 << 20)]
        gone = [SimpleNamespace(pid=(1 << 22) + 1, usedGpuMemory=None)]
        answers = {
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * GIB, used=2 * GIB),
            "nvmlDeviceGetComputeRunningProcesses": rows,
            "nvmlDeviceGetGraphicsRunningProcesses": gone,
        }
        return lambda *args: answers.get(name, "x")


def test_the_driver_s_processes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "pynvml", FakeNvml())
    (found,) = nvml.probe() or []
    assert (found.memory_bytes, found.used_bytes) == (80 * GIB, 2 * GIB)
    first, second = found.processes
    assert first.pid == 1 and first.memory_bytes == 5 << 20
    assert second == GpuProcess((1 << 22) + 1, "another process", 0)
