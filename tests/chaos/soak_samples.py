"""Samples of every process of a deployment: memory, descriptors, threads, tasks, metric series."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
from aftermath import scrape

__all__ = ["Sample", "Sampler", "directory_size"]


class Sample(msgspec.Struct, omit_defaults=True):
    """One process at one time; None is what it does not have. Memory in KiB.

    ``anonymous`` is what the process itself has written. RSS, PSS and private memory change with
    others: a page of a library is private only while no other process has it mapped, and a fork
    gets copies of its parent's pages as it touches them.
    """

    at_s: float
    role: str
    pid: int
    age_s: float
    rss: int
    pss: int
    anonymous: int
    fds: int
    threads: int
    cpu_s: float
    tasks: int | None = None
    blocks: int | None = None
    series: int | None = None
    files: int | None = None
    bytes: int | None = None


class Sampler:
    """Takes samples; ``probe`` is the directory of tests/chaos/probe."""

    def __init__(self, probe: Path) -> None:
        self._probe = probe
        self.names: dict[str, set[str]] = {}

    async def sample(self, at_s: float, role: str, pid: int, page: bool = True) -> Sample | None:
        """Return what the process has now; None if it has gone."""
        try:
            process = psutil.Process(pid)
            memory = dict(_memory(pid))
            times = process.cpu_times()
            found = Sample(
                at_s=round(at_s, 2),
                role=role,
                pid=pid,
                age_s=round(_now_s() - _started_s(pid), 2),
                rss=memory["Rss"],
                pss=memory["Pss"],
                anonymous=memory["Anonymous"],
                fds=process.num_fds(),
                threads=process.num_threads(),
                cpu_s=times.user + times.system,
            )
            port = _listener(process) if page else 0
        except (OSError, psutil.Error, KeyError):
            return None
        with suppress(OSError, ValueError):
            tasks, blocks = (self._probe / f"{pid}").read_text().split()
            found.tasks, found.blocks = int(tasks), int(blocks)
        if port:
            samples = await scrape(port)
            found.series = len(samples) or None
            if samples:
                self.names[f"{role} {pid}"] = {f"{name}{{{labels}" for name, labels, _ in samples}
        return found


def directory_size(directory: Path) -> tuple[int, int]:
    """Return the files and bytes below ``directory``, without logs, which have a limit."""
    files = size = 0
    for root, children, names in os.walk(directory):
        if "logs" in children:
            children.remove("logs")
        for name in names:
            with suppress(OSError):
                size += (Path(root) / name).lstat().st_size
                files += 1
    return files, size


def _memory(pid: int) -> Iterator[tuple[str, int]]:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        yield name, int(rest.split()[0])


def _listener(process: psutil.Process) -> int:
    """The TCP port on which it listens, which has its page of metrics; 0 without one."""
    for connection in process.net_connections("inet"):
        if connection.status == psutil.CONN_LISTEN:
            return int(connection.laddr.port)
    return 0


def _now_s() -> float:
    return float(Path("/proc/uptime").read_text().split()[0])


def _started_s(pid: int) -> float:
    text = Path(f"/proc/{pid}/stat").read_text()
    return float(text[text.rindex(")") + 2 :].split()[19]) / os.sysconf("SC_CLK_TCK")
