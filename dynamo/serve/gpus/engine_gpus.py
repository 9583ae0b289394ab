"""The number of GPUs that an engine of ours uses, from its parallel sizes.

``resources.gpu`` of the graph may repeat the number, but not contradict it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from dynamo.errors import ConfigError
from dynamo.serve.graph.service import Service

_ENGINES = ("dynamo.vllm",)
_SHORT = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-dpl": "data-parallel-size-local",
    "-dpn": "data-parallel-rank",
    "-pcp": "prefill-context-parallel-size",
}
_SHARDS = ("tensor-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size")


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

    def formula(self) -> str:
        """Return the sizes that are set, for errors: ``tensor-parallel-size 2``."""
        names = (*_SHARDS, "data-parallel-size", "data-parallel-size-local", "data-parallel-rank")
        given = [f"{name} {self.values[name]}" for name in names if name in self.values]
        return ", ".join(given) or "no parallel sizes given"

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
    values: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("-") and not word.removeprefix("-")[:1].isdigit():
            flag, joined, value = word.partition("=")
            name = _SHORT.get(flag) or flag.lstrip("-").replace("_", "-")
            values[name] = value if joined else True
        elif name:
            values[name] = word
    if "config" in values:
        values = {**_read(directory / str(values["config"])), **values}
    return EngineFlags(values)


def with_engine_gpus(services: Sequence[Service], directory: Path) -> tuple[Service, ...]:
    """Return ``services`` with ``gpu`` filled in where the engine's sizes decide it.

    Raises ConfigError for a service whose ``resources.gpu`` contradicts them. ``gpu: 0`` is always
    possible: the GPUs are then not assigned here.
    """
    return tuple(_with_gpus(service, directory) for service in services)


def _with_gpus(service: Service, directory: Path) -> Service:
    if service.program not in _ENGINES:
        return service
    try:
        flags = engine_flags(
            (word for words in service.words.values() for word in words), directory
        )
        needed = flags.gpus
    except ConfigError as error:
        raise ConfigError(f"{service.origin}: {service.name}: {error.message}") from None
    given = service.gpu
    if given is None:
        return replace(service, gpu=float(needed), gpu_is_derived=True)
    if given == 0 or given == needed or (given < 1 and needed == 1):
        return service
    raise ConfigError(
        f"{service.origin}: {service.name}.ServiceArgs.resources.gpu is {given:g}, but the engine "
        f"uses {needed} per worker ({flags.formula()}); remove resources.gpu, or set "
        f"tensor-parallel-size to match"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"config: {path} cannot be read as YAML: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"config: {path} must hold a mapping of options")
    return {str(key).replace("_", "-"): value for key, value in document.items()}
