"""The GPUs of the machine and the processes that hold their memory, from the NVIDIA driver."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dynamo.protocols.status import GpuHolder, GpuStatus
from dynamo.serve.gpus.gpus import Gpu, names_gpu

_T = TypeVar("_T")


def read_gpus(
    assigned: Mapping[str, tuple[str, ...]], leaders: Mapping[int, str]
) -> tuple[GpuStatus, ...]:
    """Return every GPU of the machine; without a driver, those of the statefile without figures.

    ``assigned`` has the workers of each GPU id of the statefile, free ones too. ``leaders`` has the
    worker of each process that the arbiter started; it leads the session of all processes of that
    worker.
    """
    nvml = _nvml()
    if nvml is None:
        return tuple(GpuStatus(gpu=gpu, workers=names) for gpu, names in assigned.items())
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError:
        return ()
    return tuple(_Device(nvml, index).status(assigned, leaders) for index in range(count))


def devices_of(gpus: Sequence[GpuStatus]) -> list[Gpu]:
    """Return ``gpus``, which are in the driver's order, as devices; their memory if it is known."""
    return [
        Gpu(
            index=index,
            uuid=gpu.gpu if gpu.gpu.startswith("GPU-") else "",
            memory_bytes=gpu.total_bytes or 0,
            used_bytes=gpu.used_bytes or 0,
        )
        for index, gpu in enumerate(gpus)
    ]


def vram_by_worker(gpus: tuple[GpuStatus, ...]) -> dict[str, int]:
    """Return the GPU memory that the processes of each worker hold."""
    vram: dict[str, int] = {}
    for gpu in gpus:
        for holder in gpu.holders:
            if holder.worker:
                vram[holder.worker] = vram.get(holder.worker, 0) + holder.used_bytes
    return vram


@functools.cache
def _nvml() -> Any:
    """Return the opened driver's library, None without one. It stays open: opening is slow."""
    import pynvml  # only where GPUs are read

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


class _Device:
    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml = nvml
        self._index = index
        self._handle = self._read(nvml.nvmlDeviceGetHandleByIndex, index)

    def status(
        self, assigned: Mapping[str, tuple[str, ...]], leaders: Mapping[int, str]
    ) -> GpuStatus:
        """Return what the driver says; None for what it does not."""
        nvml, gpu = self._nvml, self._handle
        if gpu is None:
            return GpuStatus(gpu=str(self._index))
        memory = self._read(nvml.nvmlDeviceGetMemoryInfo, gpu)
        rates = self._read(nvml.nvmlDeviceGetUtilizationRates, gpu)
        milliwatts = self._read(nvml.nvmlDeviceGetPowerUsage, gpu)
        limit = self._read(nvml.nvmlDeviceGetEnforcedPowerLimit, gpu)
        uuid = str(self._read(nvml.nvmlDeviceGetUUID, gpu) or "")
        gpu_id = next(
            (candidate for candidate in assigned if names_gpu(candidate, self._index, uuid)),
            str(self._index),
        )
        return GpuStatus(
            gpu=gpu_id,
            name=str(self._read(nvml.nvmlDeviceGetName, gpu) or ""),
            utilization=None if rates is None else rates.gpu / 100,
            used_bytes=None if memory is None else int(memory.used),
            total_bytes=None if memory is None else int(memory.total),
            watts=None if milliwatts is None else milliwatts / 1e3,
            limit_watts=None if limit is None else limit / 1e3,
            celsius=self._read(nvml.nvmlDeviceGetTemperature, gpu, nvml.NVML_TEMPERATURE_GPU),
            workers=assigned.get(gpu_id, ()),
            holders=self._holders(leaders),
        )

    def _holders(self, leaders: Mapping[int, str]) -> tuple[GpuHolder, ...]:
        nvml, used_by_pid = self._nvml, dict[int, int]()
        for listing in (
            nvml.nvmlDeviceGetComputeRunningProcesses,
            nvml.nvmlDeviceGetGraphicsRunningProcesses,
        ):
            for row in self._read(listing, self._handle) or ():
                # A process may be in both lists: its memory counts once.
                used_by_pid[row.pid] = int(row.usedGpuMemory or 0)
        return tuple(
            GpuHolder(pid=pid, used_bytes=used, name=_name(pid), worker=_worker(pid, leaders))
            for pid, used in sorted(used_by_pid.items())
        )

    def _read(self, call: Callable[..., _T], *args: Any) -> _T | None:
        try:
            return call(*args)
        except self._nvml.NVMLError:  # not permitted, or not supported
            return None


def _worker(pid: int, leaders: Mapping[int, str]) -> str:
    with contextlib.suppress(OSError):  # it has ended, or is of another container
        return leaders.get(os.getsid(pid), "")
    return ""


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
