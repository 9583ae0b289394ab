"""Lists the GPUs of the NVIDIA driver. Imported only for graphs that need GPUs."""

from __future__ import annotations

import contextlib
from typing import Any

import psutil
import pynvml

from dynamo.serve.gpus.gpus import Gpu, GpuProcess


def probe() -> list[Gpu] | None:
    """Return the machine's GPUs in the driver's order, or None without a working driver.

    Takes some milliseconds with a driver; without one it returns at once.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return [_describe(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _describe(index: int) -> Gpu:
    device = pynvml.nvmlDeviceGetHandleByIndex(index)
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(device)
        memory_bytes, used_bytes = int(memory.total), int(memory.used)
    except pynvml.NVMLError:  # unified memory: the driver reports no size
        memory_bytes = used_bytes = 0
    return Gpu(
        index=index,
        uuid=str(pynvml.nvmlDeviceGetUUID(device)),
        name=str(pynvml.nvmlDeviceGetName(device)),
        memory_bytes=memory_bytes,
        used_bytes=used_bytes,
        processes=_processes(device),
    )


def _processes(device: Any) -> tuple[GpuProcess, ...]:
    processes: dict[int, GpuProcess] = {}
    for listing in (
        pynvml.nvmlDeviceGetComputeRunningProcesses,
        pynvml.nvmlDeviceGetGraphicsRunningProcesses,
    ):
        with contextlib.suppress(pynvml.NVMLError):  # not permitted, or not supported
            for row in listing(device):
                processes[row.pid] = GpuProcess(
                    row.pid, _name(row.pid), int(row.usedGpuMemory or 0)
                )
    return tuple(processes.values())


def _name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:  # of another container, or ended
        return "another process"
