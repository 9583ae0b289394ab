"""Which GPUs each process of a graph gets, and what the user should know before the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dynamo.config import environ
from dynamo.config.serve import ServeSettings
from dynamo.errors import ConfigError
from dynamo.serve.gpus.engine_gpus import EngineFlags, engine_flags
from dynamo.serve.gpus.gpus import NO_DRIVER, Gpu, Inventory, inventory_of
from dynamo.serve.gpus.memory import EngineMemory, memory_warnings
from dynamo.serve.graph.graph import Graph
from dynamo.serve.graph.service import Service
from dynamo.serve.graph.watchers import WatcherSpec, place

__all__ = ["Placement", "place_workers"]

_SHARE = 0.9
"""vLLM's default for --gpu-memory-utilization; newer versions use 0.92."""

_SMALLER = ("quantization", "cpu-offload-gb", "cpu-offload-bytes")
_MODEL_FLAGS = ("model", "model-path")


@dataclass(frozen=True)
class Placement:
    """The watchers with their GPUs, all GPUs that can be assigned, and warnings."""

    specs: list[WatcherSpec]
    gpu_ids: tuple[str, ...]
    warnings: tuple[str, ...]


def place_workers(graph: Graph, specs: list[WatcherSpec], settings: ServeSettings) -> Placement:
    """Assign GPUs to ``specs`` of ``graph``. Raises ConfigError on shortage.

    Without an NVIDIA driver, a number of GPUs that only follows from the engine's flags is ignored:
    the engine may be built for another device.
    """
    devices, inventory = _inventory(specs, settings)
    warnings: list[str] = []
    if settings.disable_gpu_allocation:
        return Placement(specs, inventory.ids, ())
    if inventory.source == NO_DRIVER:
        derived = {service.name for service in graph.services if service.gpu_is_derived}
        unplaced = dict.fromkeys(spec.service for spec in specs if spec.service in derived)
        warnings += [
            f"{name}: {NO_DRIVER}; it is started without an assigned GPU" for name in unplaced
        ]
        specs = [replace(spec, gpu=0.0) if spec.service in derived else spec for spec in specs]
    specs = place(specs, inventory)
    if devices:
        warnings += memory_warnings(specs, devices, _needs(graph, specs))
    return Placement(specs, inventory.ids, tuple(warnings))


def _inventory(
    specs: Sequence[WatcherSpec], settings: ServeSettings
) -> tuple[Sequence[Gpu], Inventory]:
    if settings.gpus is not None:
        ids = tuple(str(index) for index in range(settings.gpus))
        return (), Inventory(ids=ids, source=f"--gpus {settings.gpus}")
    if not any(spec.gpu for spec in specs):
        return (), Inventory(ids=(), source="no service asks for a GPU")
    from dynamo.serve.gpus.nvml import (
        probe,  # loads the driver's library: only for graphs that need it
    )

    devices = probe()
    return devices or (), inventory_of(devices, environ().get("CUDA_VISIBLE_DEVICES"))


def _needs(graph: Graph, specs: Sequence[WatcherSpec]) -> Mapping[str, EngineMemory]:
    directories = {spec.service: Path(spec.working_dir) for spec in specs if spec.gpus}
    return {
        service.name: _memory(service, directories[service.name])
        for service in graph.services
        if service.program == "dynamo.vllm" and service.name in directories
    }


def _memory(service: Service, directory: Path) -> EngineMemory:
    flags = engine_flags(service.all_words, directory)
    given = flags.values.get("gpu-memory-utilization", _SHARE)
    try:
        share = float(given)
    except (TypeError, ValueError):
        share = 0.0  # the engine reports it
    if "kv-cache-memory-bytes" in flags.values:  # replaces the share
        share = 0.0
    return EngineMemory(_weights_bytes(flags, directory) // flags.shards, share)


def _weights_bytes(flags: EngineFlags, directory: Path) -> int:
    """Return the size of the weights on disk; 0 if unknown, or if they get smaller in memory."""
    values = flags.values
    source = next((str(values[name]) for name in _MODEL_FLAGS if name in values), "")
    if not source or values.get("load-format") == "dummy" or any(n in values for n in _SMALLER):
        return 0
    path = directory / Path(source).expanduser()
    if not path.exists():
        from dynamo.llm.model_source import resolve_model  # takes 0.3 s: only for a cached model

        try:
            path = resolve_model(source, download=False).path
        except ConfigError:
            return 0
    if path.is_file():
        return path.stat().st_size
    for pattern in ("*.safetensors", "*.bin"):
        if sizes := [file.stat().st_size for file in path.glob(pattern)]:
            return sum(sizes)
    return 0
