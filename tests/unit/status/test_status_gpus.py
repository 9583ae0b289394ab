"""GPUs with the processes that hold their memory, from a driver that knows only some figures."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.protocols.status import GpuStatus
from dynamo.status import gpus
from dynamo.status.gpus import read_gpus, vram_by_worker

GIB = 1 << 30


class Driver:
    """Two GPUs as ``pynvml`` shows them; the second one denies what ``denied`` names."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        """The driver's error."""

    def __init__(self, worker: int) -> None:
        foreign = os.getpid()
        self.processes = {0: {worker: 6 * GIB, foreign: 1 * GIB}, 1: {worker: 2 * GIB}}

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, gpu: int) -> str:
        return f"GPU-{gpu}abc"

    def nvmlDeviceGetName(self, gpu: int) -> str:
        return "H100"

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        return SimpleNamespace(total=80 * GIB, used=10 * GIB)

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> Any:
        return SimpleNamespace(gpu=55)

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        if gpu:
            raise self.NVMLError("not supported")
        return 300_500

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: int) -> int:
        return 700_000

    def nvmlDeviceGetTemperature(self, gpu: int, sensor: int) -> int:
        return 60

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: int) -> list[Any]:
        rows = self.processes[gpu].items()
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in rows]

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu: int) -> list[Any]:
        raise self.NVMLError("not permitted")


@pytest.fixture
def worker() -> Iterator[int]:
    """Yield the pid of a process that leads a session of its own, as each worker does."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, worker: int) -> Driver:
    made = Driver(worker)
    monkeypatch.setattr(gpus, "_nvml", lambda: made)
    return made


def test_memory_is_that_of_the_processes_of_a_worker(driver: Driver, worker: int) -> None:
    found = read_gpus({"0": ("d_W",), "GPU-1a": ("d_W",)}, {worker: "d_W"})
    assert [one.gpu for one in found] == ["0", "GPU-1a"]
    assert [one.workers for one in found] == [("d_W",), ("d_W",)]
    by_pid = {holder.pid: holder for holder in found[0].holders}
    assert by_pid[worker].worker == "d_W" and by_pid[os.getpid()].worker == ""
    assert by_pid[worker].name
    assert vram_by_worker(found) == {"d_W": 8 * GIB}


def test_a_figure_that_the_driver_denies_is_missing(driver: Driver) -> None:
    first, second = read_gpus({}, {})
    assert (first.watts, first.limit_watts, first.utilization) == (300.5, 700.0, 0.55)
    assert second.watts is None and second.celsius == 60 and second.gpu == "1"


def test_without_a_driver_there_are_the_gpus_of_the_statefile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpus, "_nvml", lambda: None)
    found = read_gpus({"0": ("d_W",), "1": ()}, {})
    assert found == (GpuStatus(gpu="0", workers=("d_W",)), GpuStatus(gpu="1"))
    assert read_gpus({}, {}) == ()
