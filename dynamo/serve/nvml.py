"""Lists the GPUs of the NVIDIA driver. Imported only for graphs that need GPUs."""

from __future__ import annotations

import pynvml

from dynamo.serve.gpus import Gpu

__all__ = ["probe"]


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
        memory_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(device).total)
    except pynvml.NVMLError:  # unified memory: the driver reports no size
        memory_bytes = 0
    return Gpu(
        index=index,
        uuid=str(pynvml.nvmlDeviceGetUUID(device)),
        name=str(pynvml.nvmlDeviceGetName(device)),
        memory_bytes=memory_bytes,
    )
