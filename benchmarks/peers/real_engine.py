"""Our frontend and vLLM worker beside vLLM's own API server, each over a real vLLM on the CPU.

The model is a tiny Llama with random weights and the tokenizer of the given directory.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from core_rounds import Effort
from core_systems import Setup
from load import Prompts, Stopwatch
from results import Figure
from rows import Row
from samples import Sampler, check_delivery
from systems import FRONTEND_METRICS, System, counted, file_discovery, process_cpu_s

_ENGINE = ("--load-format", "dummy", "--dtype", "float32", "--enforce-eager", "--block-size", "32")
_ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
_SIZE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
_VLLM_METRICS = {"tokens": "vllm:generation_tokens_total", "requests": "vllm:request_success_total"}


class _RealSystem(System):
    """Processes in front of EngineCore, which is a child and not counted."""

    _metrics: dict[str, str]

    def __init__(self, name: str, setup: Setup, model: Path, env: dict[str, str]) -> None:
        super().__init__(name, setup.directory / name, _ON_CPU | env)
        self._setup = setup
        self._model = model

    def parts_cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of each process."""
        return {name: process_cpu_s(process.pid) for name, process in self._processes.items()}

    def cpu_s(self) -> tuple[float, float]:
        """Return the CPU seconds of all processes but the engine's."""
        return sum(self.parts_cpu_s().values()), 0.0

    def metrics(self) -> dict[str, float]:
        """The counters of the server."""
        return counted(self.port, self._metrics)


class _Ours(_RealSystem):
    _metrics = FRONTEND_METRICS

    def start(self) -> None:
        """Start the worker with its engine, and the frontend."""
        python = str(self._setup.programs.engine_python)
        self.run("worker", [
            *(python, "-m", "dynamo.vllm", "--model", str(self._model)),
            *("--served-model-name", "m", *_ENGINE),
        ])  # fmt: skip
        self.run("frontend", [
            *(str(self._setup.ours.python), "-m", "dynamo.frontend", "--router-mode", "kv"),
            *("--http-host", "127.0.0.1", "--http-port", str(self.port)),
        ])  # fmt: skip


class _Vllm(_RealSystem):
    _metrics = _VLLM_METRICS

    def start(self) -> None:
        """Start vLLM's API server, which starts its engine; it logs no request."""
        self.run("vllm", [
            *(str(self._setup.programs.engine_python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self._model), "--served-model-name", "m", *_ENGINE),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--disable-uvicorn-access-log", "--no-enable-log-requests"),
        ])  # fmt: skip


def measure_real(rows: Sequence[Row], setup: Setup, effort: Effort) -> dict[str, list[Figure]]:
    """Return CPU, duration and TTFT of each row, beside vLLM's API server."""
    model = _model(setup)
    env = file_discovery(setup.directory / "ours") | setup.ours.env
    with contextlib.ExitStack() as stack:
        systems: list[System] = [
            stack.enter_context(_Ours("ours", setup, model, env)),
            stack.enter_context(_Vllm("vllm", setup, model, {})),
        ]
        sampler = Sampler(effort.wrk)
        return {row.key: _figures(row, systems, sampler, effort) for row in rows}


def _figures(row: Row, systems: Sequence[System], sampler: Sampler, effort: Effort) -> list[Figure]:
    load = row.load
    assert load is not None
    about = f"{load.words} words, {load.max_tokens} tokens, {load.connections} streams"
    beside = "beside vLLM's API server on the same engine"
    cpu = Figure(f"{row.key}-cpu", f"CPU outside EngineCore per token: {about}, {beside}",
                 "µs/token", [], [], row.bar)  # fmt: skip
    wall = Figure(f"{row.key}-wall", f"time for the same requests: {about}, {beside}",
                  "s", [], [], row.bar)  # fmt: skip
    total = sampler.calibrate(systems, load, effort.seconds)
    for number in range(effort.rounds):
        # In turn also within the round: the engine's speed drifts with the machine's other load.
        found = sampler.round(systems, load, total)
        for sample, name in zip(found, ("ours", "theirs"), strict=True):
            sample["round"] = number
            getattr(cpu, name).append(sample["cpu_us_per_token"])
            getattr(wall, name).append(sample["wall_s"])
        cpu.samples += found
        effort.say(f"{cpu.key} round {number + 1}: {cpu.ratios[-1]:.2f}")
    check_delivery(cpu, load)
    return [cpu, wall, _ttft(row, systems, effort)]


def _ttft(row: Row, systems: Sequence[System], effort: Effort) -> Figure:
    assert row.load is not None
    figure = Figure(
        f"{row.key}-ttft", f"TTFT p50: {row.load.words} words, 1 connection, beside vLLM's API "
        "server on the same engine", "ms", [], [], row.bar,
    )  # fmt: skip
    prompts = Prompts()
    with contextlib.ExitStack() as stack:
        watches = [
            stack.enter_context(contextlib.closing(Stopwatch(system.port, True)))
            for system in systems
        ]
        for _ in range(effort.rounds):
            times: list[list[float]] = [[], []]
            for _ in range(max(10, int(effort.seconds * 5))):
                prompt = prompts.next(row.load.words)
                for watch, seconds in zip(watches, times, strict=True):
                    seconds.append(watch.ask(prompt, 4).first_s)
            figure.ours.append(median(times[0]) * 1e3)
            figure.theirs.append(median(times[1]) * 1e3)
    return figure


def _model(setup: Setup) -> Path:
    """Make the directory of the model."""
    directory = setup.directory / "model"
    shutil.copytree(setup.model, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | _SIZE))
    return directory
