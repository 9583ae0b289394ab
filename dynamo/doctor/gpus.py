"""Checks of the driver, the GPUs and the engines. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dynamo.doctor.facts import EngineFacts, Finding, GpuFacts
from dynamo.serve.gpus.gpus import Gpu, GpuProcess

_GIB = 1 << 30
_HELD_BYTES = 256 << 20
_UNATTRIBUTED_BYTES = 1 << 30


def check_gpus(facts: GpuFacts) -> Iterator[Finding]:
    """Check the driver, and that other programs leave the GPUs' memory alone."""
    if facts.devices is None:
        yield _without_driver(facts)
        return
    count = len(facts.devices)
    cuda = f", CUDA {_version(facts.cuda)}" if facts.cuda else ""
    names = ", ".join(dict.fromkeys(gpu.name for gpu in facts.devices))
    yield Finding(
        check="gpu",
        severity="ok",
        summary=f"{count} GPU{'' if count == 1 else 's'} ({names}), driver {facts.driver}{cuda}",
    )
    if count < facts.boards:
        yield Finding(
            check="gpu",
            severity="warning",
            summary=f"the driver offers {count} of the {facts.boards} GPUs on the PCI bus",
            cause="a GPU has failed, or belongs to another driver or container",
            remedy="sudo dmesg | grep -i -e NVRM -e Xid",
        )
    for gpu in facts.devices:
        yield from _check_holders(gpu, facts.own_pids)


def _without_driver(facts: GpuFacts) -> Finding:
    if not facts.boards:
        return Finding(check="gpu", severity="ok", summary="no NVIDIA GPU: engines use the CPU")
    if "mismatch" in facts.reason.lower():
        return Finding(
            check="gpu",
            severity="error",
            summary=f"the NVIDIA driver does not work: {facts.reason}",
            cause="its library was updated while the old kernel module is loaded",
            remedy="sudo reboot",
        )
    return Finding(
        check="gpu",
        severity="error",
        summary=f"{facts.boards} NVIDIA GPUs, but no working driver: {facts.reason}",
        cause="the kernel module is not loaded, or this container has no access to the GPUs",
        remedy="sudo modprobe nvidia && nvidia-smi  # in a container: --gpus all",
    )


def _check_holders(gpu: Gpu, own_pids: frozenset[int]) -> Iterator[Finding]:
    where = f"GPU {gpu.index} ({gpu.name})"
    foreign = [one for one in gpu.processes if one.pid not in own_pids]
    for process in sorted(foreign, key=lambda one: -one.memory_bytes):
        if process.memory_bytes >= _HELD_BYTES or not process.memory_bytes:
            yield _held(where, process)
    known = sum(process.memory_bytes for process in gpu.processes)
    hidden = gpu.used_bytes - known
    if hidden >= _UNATTRIBUTED_BYTES and all(one.memory_bytes for one in gpu.processes):
        yield Finding(
            check="vram",
            severity="warning",
            summary=f"{where}: {_gib(hidden)} in use by processes that are not visible here",
            cause="another container or user holds memory, or a process died and left it",
            remedy="sudo fuser -v /dev/nvidia*",
        )


def _held(where: str, process: GpuProcess) -> Finding:
    size = _gib(process.memory_bytes) if process.memory_bytes else "memory of unknown size"
    return Finding(
        check="vram",
        severity="warning",
        summary=f"{where}: {process.name} (pid {process.pid}) holds {size}",
        cause="an engine reserves 90 % of a GPU's memory when it starts, and ends if less is free",
        remedy=f"kill {process.pid}  # or lower gpu-memory-utilization in the graph",
    )


def check_engines(engines: Sequence[EngineFacts], gpus: GpuFacts) -> Iterator[Finding]:
    """Check the versions of the installed engines against those tested, and against the driver."""
    if not engines:
        yield Finding(
            check="engines",
            severity="warning",
            summary="no engine is installed",
            cause="only mock engines can be served",
            remedy="pip install 'dynamo-appliance[vllm]'  # or put llama-server into the PATH",
        )
    for engine in engines:
        yield _check_version(engine)
        yield from _check_build(engine, gpus)


def _check_version(engine: EngineFacts) -> Finding:
    shown = f"{engine.name} {engine.version}"
    minor = ".".join(engine.version.split(".")[:2])
    if not engine.tested or minor in engine.tested:
        tested = ", a tested version" if engine.tested else ""
        return Finding(check="engines", severity="ok", summary=shown + tested)
    return Finding(
        check="engines",
        severity="warning",
        summary=f"{shown} is not tested; tested: {', '.join(engine.tested)}",
        cause="an untested version runs through its slower public interface, with fewer features",
        remedy=f"pip install '{engine.name}=={engine.tested[-1]}.*'",
    )


def _check_build(engine: EngineFacts, gpus: GpuFacts) -> Iterator[Finding]:
    if engine.is_cpu_build and gpus.devices:
        yield Finding(
            check="engines",
            severity="warning",
            summary=f"{engine.name} {engine.version} is built for the CPU, but there are GPUs",
            cause="the GPUs stay unused",
            remedy=f"pip install --force-reinstall {engine.name}",
        )
    if engine.cuda is None or gpus.cuda is None or engine.cuda[0] <= gpus.cuda[0]:
        return
    yield Finding(
        check="engines",
        severity="error",
        summary=f"{engine.name} is built for CUDA {_version(engine.cuda)}, the driver "
        f"{gpus.driver} supports {_version(gpus.cuda)}",
        cause="the engine cannot use the GPUs",
        remedy="update the NVIDIA driver, then: sudo reboot",
    )


def _version(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.1f} GiB"
