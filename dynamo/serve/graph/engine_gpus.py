"""What an engine of ours needs: GPUs by its parallel sizes, and memory on them. Pure.

``resources.gpu`` of the graph may repeat the number, but not contradict it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo.config.programs import memory_share
from dynamo.errors import ConfigError
from dynamo.serve.gpus.gpus import Gpu
from dynamo.serve.graph.service import Service

if TYPE_CHECKING:
    from dynamo.serve.graph.watchers import WatcherSpec

_SHORT = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-dpl": "data-parallel-size-local",
    "-dpn": "data-parallel-rank",
    "-pcp": "prefill-context-parallel-size",
}
_SHARDS = ("tensor-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size")
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

    def bytes_on(self, gpu: Gpu) -> int:
        """Return the memory that must be free on ``gpu`` before the worker starts."""
        return max(self.weights_bytes, int(self.share * gpu.memory_bytes))


_UNKNOWN = EngineMemory(weights_bytes=0, share=0.0)


class MemoryRanks:
    """Ranks GPUs by their free memory for workers that are about to be placed.

    Last come those with less than a worker ``needs``, before them those that others use. ``ours``
    are used by the deployment itself: their memory is that of the processes to replace.
    """

    def __init__(
        self,
        devices: Sequence[Gpu],
        needs: Mapping[str, EngineMemory],
        ours: Collection[str] = (),
    ) -> None:
        self._devices = [
            gpu for gpu in devices if gpu.memory_bytes and not any(map(gpu.is_named, ours))
        ]
        self._needs = needs
        self._taken: Counter[int] = Counter()

    def of(self, service: str) -> dict[str, int]:
        """Return the rank of each GPU that is not the first choice, by index and by UUID."""
        need = self._needs.get(service, _UNKNOWN)
        ranks = {}
        for gpu in self._devices:
            free = gpu.memory_bytes - gpu.used_bytes - self._taken[gpu.index]
            rank = 0
            if need.bytes_on(gpu) > free:
                rank = 2
            elif gpu.used_bytes >= _UNATTRIBUTED_BYTES:
                rank = 1
            # CUDA_VISIBLE_DEVICES may name the GPU either way.
            ranks[str(gpu.index)] = ranks[gpu.uuid] = rank
        return ranks

    def take(self, service: str, gpus: Sequence[str]) -> None:
        """Count a worker of ``service`` on ``gpus``."""
        need = self._needs.get(service, _UNKNOWN)
        for gpu in self._devices:
            if any(map(gpu.is_named, gpus)):
                self._taken[gpu.index] += need.bytes_on(gpu)


def memory_warnings(
    specs: Sequence[WatcherSpec], devices: Sequence[Gpu], needs: Mapping[str, EngineMemory]
) -> list[str]:
    """Return a line for each GPU of ``specs`` that other processes use, then one per service."""
    used: dict[int, Gpu] = {}
    shortages: dict[str, str] = {}
    measured = [gpu for gpu in devices if gpu.memory_bytes]
    for spec in specs:
        gpus = [gpu for name in spec.gpus for gpu in measured if gpu.is_named(name)]
        used |= {gpu.index: gpu for gpu in gpus}
        need = needs.get(spec.service)
        if need is None or spec.service in shortages:
            continue
        if shortage := _shortage(spec, need, gpus):
            shortages[spec.service] = shortage
    return [*(line for gpu in used.values() for line in _held(gpu)), *shortages.values()]


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


def _shortage(spec: WatcherSpec, need: EngineMemory, gpus: Sequence[Gpu]) -> str:
    """Return the worst of what is wrong; "" if nothing is."""
    for gpu in gpus:
        free = gpu.memory_bytes - gpu.used_bytes
        if need.weights_bytes > free:
            return (
                f"{spec.service}: the weights take {_gib(need.weights_bytes)} on each GPU, but "
                f"GPU {gpu.index} has {_gib(free)} free: the model cannot load; use more GPUs "
                "(tensor-parallel-size), a quantized model, or end other processes"
            )
    for gpu in gpus:
        free = gpu.memory_bytes - gpu.used_bytes
        if need.share * gpu.memory_bytes > free:
            return (
                f"{spec.service}: the engine reserves {need.share:.0%} of GPU {gpu.index}, "
                f"but {free / gpu.memory_bytes:.0%} is free: set gpu-memory-utilization to "
                f"{int(free / gpu.memory_bytes * 100) / 100:g} or less, or end other processes"
            )
    if gpus and 0 < spec.gpu < 1 and need.share > spec.gpu:
        return (
            f"{spec.service}: a worker gets {spec.gpu:g} of a GPU, but reserves {need.share:.0%} "
            f"of its memory: set gpu-memory-utilization to less than {spec.gpu:g}"
        )
    return ""


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.1f} GiB"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.0f} MiB" if size_bytes else "unknown size"


@dataclass(frozen=True)
class EngineFlags:
    """The flags of an engine by their long names, without dashes; True for one without a value."""

    values: Mapping[str, Any]

    @property
    def shards(self) -> int:
        """GPUs over which one copy of the weights is split. Raises ConfigError."""
        shards = 1
        for name in _SHARDS:
            shards *= self._size(name)
        return shards

    @property
    def gpus(self) -> int:
        """GPUs of the process: one copy of the weights per data-parallel rank in it.

        Raises ConfigError for a size that is no positive integer.
        """
        if "data-parallel-size-local" in self.values:
            return self.shards * self._size("data-parallel-size-local")
        if "data-parallel-rank" in self.values:  # the other ranks are other processes
            return self.shards
        return self.shards * self._size("data-parallel-size")

    def memory_share(self, program: str | None) -> float:
        """Return the part of a GPU's memory that an engine of ``program`` reserves; 0: unknown."""
        share = memory_share(program)
        if not share or "kv-cache-memory-bytes" in self.values:  # replaces the share
            return 0.0
        try:
            return float(self.values.get("gpu-memory-utilization", share))
        except (TypeError, ValueError):
            return 0.0  # the engine reports it

    def formula(self) -> str:
        """Return the sizes that are set, for errors: ``tensor-parallel-size 2``."""
        names = (*_SHARDS, "data-parallel-size", "data-parallel-size-local", "data-parallel-rank")
        sizes = [f"{name} {self.values[name]}" for name in names if name in self.values]
        return ", ".join(sizes) or "no parallel sizes given"

    def _size(self, name: str) -> int:
        value = self.values.get(name, 1)
        try:
            size = int(str(value))
        except ValueError:
            size = 0
        if size < 1:
            raise ConfigError(f"{name} must be an integer >= 1, got {value!r}")
        return size


def engine_flags(words: Iterable[str], directory: Path) -> EngineFlags:
    """Return the flags in ``words``, over those in the YAML file of ``--config``, as vLLM does.

    Raises ConfigError for a file that cannot be read.
    """
    flags = flag_values(words)
    file = _read(directory / str(flags["config"])) if "config" in flags else {}
    return EngineFlags({**file, **flags})


def flag_values(words: Iterable[str]) -> dict[str, str | bool]:
    """Return the flags in ``words`` by long name without dashes: its value, True without one.

    Of several values (``--served-model-name a b``) the first counts.
    """
    values: dict[str, str | bool] = {}
    name = ""
    for word in words:
        # "-1" is a value.
        if word.startswith("-") and not word.removeprefix("-")[:1].isdigit():
            flag, joined, value = word.partition("=")
            name = _SHORT.get(flag) or flag.lstrip("-").replace("_", "-")
            values[name] = value if joined else True
        elif name and values[name] is True:
            values[name] = word
    return values


def with_engine_gpus(services: Sequence[Service], directory: Path) -> tuple[Service, ...]:
    """Return ``services`` with ``gpu`` filled in where the engine's sizes decide it.

    Raises ConfigError for a service whose ``resources.gpu`` contradicts them. ``gpu: 0`` is always
    possible: the GPUs are then not assigned here.
    """
    return tuple(_with_gpus(service, directory) for service in services)


def _with_gpus(service: Service, directory: Path) -> Service:
    if not memory_share(service.program):
        return service
    try:
        flags = engine_flags(
            (word for words in service.words.values() for word in words), directory
        )
        needed = flags.gpus
    except ConfigError as error:
        raise ConfigError(f"{service.origin}: {service.name}: {error.message}") from None
    stated = service.gpu
    if stated is None:
        return replace(service, gpu=float(needed), gpu_is_derived=True)
    if stated == 0 or stated == needed or (stated < 1 and needed == 1):
        return service
    raise ConfigError(
        f"{service.origin}: {service.name}.ServiceArgs.resources.gpu is {stated:g}, but the engine "
        f"uses {needed} per worker ({flags.formula()}); remove resources.gpu, or set "
        f"tensor-parallel-size to match"
    )


def _read(path: Path) -> dict[str, Any]:
    import yaml  # takes 20 ms

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"config: {path} cannot be read as YAML: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"config: {path} must hold a mapping of options")
    return {str(key).replace("_", "-"): value for key, value in document.items()}
