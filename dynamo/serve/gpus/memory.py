"""Warnings about GPU memory before a start: in use by others, or too little for a model. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dynamo.serve.gpus.gpus import Gpu
from dynamo.serve.graph.watchers import WatcherSpec

_GIB = 1 << 30
_UNATTRIBUTED_BYTES = 1 << 30
_SHOWN_PROCESSES = 4


@dataclass(frozen=True)
class EngineMemory:
    """What a worker of a service needs on each of its GPUs.

    ``weights_bytes`` is 0 if unknown. ``share`` is the part of a GPU's memory that the engine
    reserves when it starts; it ends with an error if less is free.
    """

    weights_bytes: int
    share: float


def memory_warnings(
    specs: Sequence[WatcherSpec], devices: Sequence[Gpu], needs: Mapping[str, EngineMemory]
) -> list[str]:
    """Return a line for each GPU of ``specs`` that other processes use, then one per service."""
    found: list[str] = []
    seen: set[int] = set()
    warned: set[str] = set()
    for spec in specs:
        gpus = [gpu for name in spec.gpus for gpu in _named(name, devices)]
        for gpu in gpus:
            if gpu.index not in seen and gpu.memory_bytes:
                seen.add(gpu.index)
                found += _held(gpu)
    for spec in specs:
        need = needs.get(spec.service)
        if need is None or spec.service in warned:
            continue
        gpus = [gpu for name in spec.gpus for gpu in _named(name, devices)]
        lines = _shortages(spec, need, [gpu for gpu in gpus if gpu.memory_bytes])
        if lines:
            warned.add(spec.service)
            found.append(lines[0])
    return found


def _named(name: str, devices: Sequence[Gpu]) -> list[Gpu]:
    if name.isdigit():
        return [gpu for gpu in devices if gpu.index == int(name)]
    return [gpu for gpu in devices if name.startswith("GPU-") and gpu.uuid.startswith(name)]


def _held(gpu: Gpu) -> Iterable[str]:
    by_size = sorted(gpu.processes, key=lambda process: -process.memory_bytes)
    if not by_size and gpu.used_bytes < _UNATTRIBUTED_BYTES:
        return
    names = [
        f"{process.name} (pid {process.pid}) {_mib(process.memory_bytes)}"
        for process in by_size[:_SHOWN_PROCESSES]
    ]
    if len(by_size) > _SHOWN_PROCESSES:
        names.append(f"{len(by_size) - _SHOWN_PROCESSES} more")
    yield (
        f"GPU {gpu.index} ({gpu.name}): {_gib(gpu.used_bytes)} of {_gib(gpu.memory_bytes)} in use "
        f"by {', '.join(names) or 'processes that are not visible here'}"
    )


def _shortages(spec: WatcherSpec, need: EngineMemory, gpus: Sequence[Gpu]) -> list[str]:
    """Return what is wrong, the worst first."""
    found = []
    for gpu in gpus:
        free = gpu.memory_bytes - gpu.used_bytes
        if need.weights_bytes > free:
            found.append(
                f"{spec.service}: the weights take {_gib(need.weights_bytes)} on each GPU, but "
                f"GPU {gpu.index} has {_gib(free)} free: the model cannot load; use more GPUs "
                "(tensor-parallel-size), a quantized model, or end other processes"
            )
    for gpu in gpus:
        free = gpu.memory_bytes - gpu.used_bytes
        if need.share * gpu.memory_bytes > free:
            found.append(
                f"{spec.service}: the engine reserves {need.share:.0%} of GPU {gpu.index}, "
                f"but {free / gpu.memory_bytes:.0%} is free: set gpu-memory-utilization to "
                f"{int(free / gpu.memory_bytes * 100) / 100:g} or less, or end other processes"
            )
    if gpus and 0 < spec.gpu < 1 and need.share > spec.gpu:
        found.append(
            f"{spec.service}: a worker gets {spec.gpu:g} of a GPU, but reserves {need.share:.0%} "
            f"of its memory: set gpu-memory-utilization to less than {spec.gpu:g}"
        )
    return found


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.1f} GiB"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.0f} MiB" if size_bytes else "unknown size"
