"""Checks of limits, shared memory, disks and clocks, of the driver, GPUs and engines. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from shlex import quote

from dynamo.doctor.facts import (
    ClockFacts,
    DiskFacts,
    EngineFacts,
    FileSystemFacts,
    Finding,
    GpuFacts,
    LimitFacts,
    MemoryFacts,
)
from dynamo.observability.logs import counted
from dynamo.serve.gpus.gpus import Gpu, GpuProcess

GIB = 1 << 30
_MIB = 1 << 20
_FEW_FILES = 1024
_FEW_TASKS = 4096
_TOO_FEW_TASKS = 512
_FEW_PROCESSES = 8
_WATCHES_PER_PROCESS = 16
_ABOVE_ANY_USE = 1 << 30
_LOCKED_BYTES = 1 << 30
_SHM_BYTES = 1 << 30
_MODEL_BYTES = 20 << 30
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "glusterfs", "fuse.sshfs")
_STEP_S = 0.05
_PAUSE_S = 0.5
_SUSPEND_S = 1.0
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
    yield Finding.ok("gpu", f"{counted(count, 'GPU')} ({names}), driver {facts.driver}{cuda}")
    if count < facts.boards:
        yield Finding.warning(
            "gpu",
            f"the driver offers {count} of the {facts.boards} GPUs on the PCI bus",
            cause="a GPU has failed, or belongs to another driver or container",
            remedy="sudo dmesg | grep -i -e NVRM -e Xid",
        )
    for gpu in facts.devices:
        yield from _check_holders(gpu, facts.own_pids)


def _without_driver(facts: GpuFacts) -> Finding:
    if not facts.boards:
        return Finding.ok("gpu", "no NVIDIA GPU: engines use the CPU")
    if "mismatch" in facts.reason.lower():
        return Finding.error(
            "gpu",
            f"the NVIDIA driver does not work: {facts.reason}",
            cause="its library was updated while the old kernel module is loaded",
            remedy="sudo reboot",
        )
    return Finding.error(
        "gpu",
        f"{facts.boards} NVIDIA GPUs, but no working driver: {facts.reason}",
        cause="the kernel module is not loaded, or this container has no access to the GPUs",
        remedy="sudo modprobe nvidia && nvidia-smi  # in a container: --gpus all",
    )


def _check_holders(gpu: Gpu, own_pids: frozenset[int]) -> Iterator[Finding]:
    where = f"GPU {gpu.index} ({gpu.name})"
    foreign = [process for process in gpu.processes if process.pid not in own_pids]
    for process in sorted(foreign, key=lambda process: -process.memory_bytes):
        if process.memory_bytes >= _HELD_BYTES or not process.memory_bytes:
            yield _held(where, process)
    attributed = sum(process.memory_bytes for process in gpu.processes)
    hidden = gpu.used_bytes - attributed
    # Where a process has no size, its memory would count as hidden.
    if hidden >= _UNATTRIBUTED_BYTES and all(process.memory_bytes for process in gpu.processes):
        yield Finding.warning(
            "vram",
            f"{where}: {_gib(hidden)} in use by processes that are not visible here",
            cause="another container or user holds memory, or a process died and left it",
            remedy="sudo fuser -v /dev/nvidia*",
        )


def _held(where: str, process: GpuProcess) -> Finding:
    size = _gib(process.memory_bytes) if process.memory_bytes else "memory of unknown size"
    return Finding.warning(
        "vram",
        f"{where}: {process.name} (pid {process.pid}) holds {size}",
        cause="an engine reserves 90 % of a GPU's memory when it starts, and ends if less is free",
        remedy=f"kill {process.pid}  # or lower gpu-memory-utilization in the graph",
    )


def check_engines(engines: Sequence[EngineFacts], gpus: GpuFacts) -> Iterator[Finding]:
    """Check the versions of the installed engines against those tested, and against the driver."""
    if not engines:
        yield Finding.warning(
            "engines",
            "no engine is installed",
            cause="only mock engines can be served",
            remedy="pip install 'dynamo-appliance[vllm]'  # or put llama-server into the PATH",
        )
    for engine in engines:
        yield _check_version(engine)
        yield from _check_build(engine, gpus)


def _check_version(engine: EngineFacts) -> Finding:
    label = f"{engine.name} {engine.version}"
    minor = ".".join(engine.version.split(".")[:2])
    if not engine.tested or minor in engine.tested:
        tested = ", a tested version" if engine.tested else ""
        return Finding.ok("engines", label + tested)
    return Finding.warning(
        "engines",
        f"{label} is not tested; tested: {', '.join(engine.tested)}",
        cause="an untested version runs through its slower public interface, with fewer features",
        remedy=f"pip install '{engine.name}=={engine.tested[-1]}.*'",
    )


def _check_build(engine: EngineFacts, gpus: GpuFacts) -> Iterator[Finding]:
    if engine.is_cpu_build and gpus.devices:
        yield Finding.warning(
            "engines",
            f"{engine.name} {engine.version} is built for the CPU, but there are GPUs",
            cause="the GPUs stay unused",
            remedy=f"pip install --force-reinstall {engine.name}",
        )
    if engine.cuda is None or gpus.cuda is None or engine.cuda[0] <= gpus.cuda[0]:
        return
    yield Finding.error(
        "engines",
        f"{engine.name} is built for CUDA {_version(engine.cuda)}, the driver "
        f"{gpus.driver} supports {_version(gpus.cuda)}",
        cause="the engine cannot use the GPUs",
        remedy="update the NVIDIA driver, then: sudo reboot",
    )


def _version(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"


def check_limits(facts: LimitFacts) -> Iterator[Finding]:
    """Check the limits on open files, locked memory, inotify and threads."""
    yield _check_files(facts)
    yield _check_locked(facts)
    yield from _check_inotify(facts)
    left = _ABOVE_ANY_USE if facts.tasks < 0 else facts.tasks - facts.tasks_used
    used = "no limit" if facts.tasks < 0 else f"{facts.tasks_used} of {facts.tasks} used"
    if left >= _FEW_TASKS:
        yield Finding.ok("nproc", f"processes and threads: {used}")
        return
    yield Finding(
        check="nproc",
        severity="error" if left < _TOO_FEW_TASKS else "warning",
        summary=f"processes and threads: {used}",
        cause="an engine starts hundreds of threads; above the limit it ends with EAGAIN or "
        "'can't start new thread'",
        remedy="sudo prlimit --pid $$ --nproc=65536  # in a container: --pids-limit=-1",
    )


def _check_files(facts: LimitFacts) -> Finding:
    hard = facts.files_hard
    if hard < 0 or hard >= facts.files_needed:
        limit = "no limit" if hard < 0 else f"up to {hard}"
        return Finding.ok("nofile", f"open files: {limit}")
    return Finding(
        check="nofile",
        severity="error" if hard < _FEW_FILES else "warning",
        summary=f"open files: at most {hard}, the frontend may need {facts.files_needed}",
        cause="each client takes a descriptor; above the limit connections are refused",
        remedy="sudo prlimit --pid $$ --nofile=65536:65536  # dynamo install-service sets it",
    )


def _check_inotify(facts: LimitFacts) -> Iterator[Finding]:
    """Check that each process gets its instance and a few watches."""
    processes = max(facts.processes_needed, _FEW_PROCESSES)
    for what, limit, used, needed, raised in (
        ("instances", facts.inotify_instances, facts.inotify_instances_used, processes, 1024),
        ("watches", facts.inotify_watches, facts.inotify_watches_used,
         processes * _WATCHES_PER_PROCESS, 524_288),
    ):  # fmt: skip
        usage = "no limit" if limit < 0 else f"{used} of {limit} used"
        if limit < 0 or limit - used >= needed:
            yield Finding.ok("inotify", f"inotify {what}: {usage}")
            continue
        yield Finding.warning(
            "inotify",
            f"inotify {what}: {usage}, the deployment needs {needed}",
            cause="a process without them looks once a second which workers are alive",
            remedy=f"sudo sysctl fs.inotify.max_user_{what}={max(raised, 2 * limit)}",
        )


def _check_locked(facts: LimitFacts) -> Finding:
    limit = facts.locked_bytes
    size = "no limit" if limit < 0 else size_text(limit)
    if not facts.transfers_blocks or limit < 0 or limit >= _LOCKED_BYTES:
        return Finding.ok("memlock", f"locked memory: {size}")
    return Finding.warning(
        "memlock",
        f"locked memory: at most {size}",
        cause="prefill and decode workers register memory to transfer KV blocks, which fails above "
        "the limit",
        remedy="sudo prlimit --pid $$ --memlock=unlimited  # dynamo install-service sets it",
    )


def check_memory(facts: MemoryFacts) -> Iterator[Finding]:
    """Check /dev/shm and reserved huge pages."""
    yield _check_shm(facts)
    unused = facts.huge_free_bytes
    if facts.ram_bytes and unused > facts.ram_bytes // 20:
        yield Finding.warning(
            "hugepages",
            f"huge pages: {size_text(unused)} of RAM reserved and unused",
            cause="engines cannot use that memory for weights or pinned buffers",
            remedy="sudo sysctl vm.nr_hugepages=0",
        )
    else:
        reserved = (
            f"{size_text(facts.huge_bytes)} reserved" if facts.huge_bytes else "none reserved"
        )
        yield Finding.ok("hugepages", f"huge pages: {reserved}")


def check_cpu_memory(facts: MemoryFacts, share: float) -> Finding:
    """Check that engines on the CPU get the ``share`` of its memory that they reserve together."""
    available = facts.ram_available_bytes / max(1, facts.ram_bytes)
    summary = (
        f"memory for vLLM on the CPU: {available:.0%} of {size_text(facts.ram_bytes)} available"
    )
    if share <= available:
        return Finding.ok("cpu-memory", summary)
    return Finding.error(
        "cpu-memory",
        f"{summary}, its workers reserve {share:.0%}",
        cause="on the CPU, too, gpu-memory-utilization is the part of the memory that a worker "
        "reserves; vLLM does not start with less",
        # Four fifths of what is available, in two digits.
        remedy=f"gpu-memory-utilization: {int(80 * available) / 100:g}  # in the graph, for all "
        "workers together",
    )


def _check_shm(facts: MemoryFacts) -> Finding:
    remedy = "sudo mount -o remount,size=16G /dev/shm  # in a container: --shm-size=16g"
    if facts.shm_bytes is None:
        return Finding.error(
            "shm",
            "/dev/shm is missing",
            cause="engines exchange data between their processes there",
            remedy="sudo mkdir -p /dev/shm && sudo mount -t tmpfs -o size=16G tmpfs /dev/shm",
        )
    summary = f"/dev/shm: {size_text(facts.shm_free_bytes)} of {size_text(facts.shm_bytes)} free"
    if facts.shm_free_bytes >= _SHM_BYTES:
        return Finding.ok("shm", summary)
    if facts.shm_bytes >= _SHM_BYTES:
        remedy = "ls -lhS /dev/shm  # files of crashed programs may be removed"
    return Finding(
        check="shm",
        severity="error" if facts.shards > 1 else "warning",
        summary=summary,
        cause="an engine over several GPUs or processes needs about 1 GiB there, and ends with "
        "'Bus error' or an NCCL error without it",
        remedy=remedy,
    )


def check_disks(facts: DiskFacts) -> Iterator[Finding]:
    """Check the space for state, logs and models, and the file system of the state directory."""
    state = facts.state
    if state.read_only:
        yield Finding.error(
            "state",
            f"cannot write {state.path}: the file system is mounted read-only",
            cause="statefile, sockets and logs are written there",
            remedy="export DYN_LOCAL_STATE_DIR=/path/on/another/disk  # or: sudo mount -o "
            f'remount,rw "$(findmnt -n -o TARGET -T {quote(str(state.path))})"',
        )
    elif not state.writable:
        yield Finding.error(
            "state",
            f"cannot write {state.path}",
            cause="statefile, sockets and logs are written there",
            remedy=f'sudo install -d -o "$USER" {quote(str(state.path))}'
            "  # or: export DYN_LOCAL_STATE_DIR=…",
        )
    if state.kind in _NETWORK:
        yield Finding.error(
            "state",
            f"{state.path} is on a network file system ({state.kind})",
            cause="discovery needs inotify, UNIX sockets and locks, which work on a local disk",
            remedy="export DYN_LOCAL_STATE_DIR=/var/lib/dynamo",
        )
    needed = max(GIB, facts.log_bytes)
    yield _check_space("logs", "state and logs", state, needed, 64 * _MIB)
    if facts.models is not None:
        yield _check_space("models", "downloaded models", facts.models, _MODEL_BYTES, GIB)


def _check_space(
    check: str, what: str, disk: FileSystemFacts, wanted_bytes: int, least_bytes: int
) -> Finding:
    summary = f"{what}: {size_text(disk.free_bytes)} free in {disk.path}"
    if disk.free_bytes >= wanted_bytes and disk.free_files != 0:
        return Finding.ok(check, summary)
    move = "HF_HOME=/path/on/another/disk" if check == "models" else "DYN_LOCAL_STATE_DIR=…"
    if disk.free_files == 0:
        summary += ", but no inodes"
    return Finding(
        check=check,
        severity="error" if disk.free_bytes < least_bytes or not disk.free_files else "warning",
        summary=summary,
        cause=f"at least {size_text(wanted_bytes)} should be free; a full disk ends downloads and "
        "loses logs",
        remedy=f"du -xhd1 {quote(str(disk.path))} | sort -h  # or: export {move}",
    )


def check_clock(facts: ClockFacts) -> Iterator[Finding]:
    """Check that wall time is synchronized, and that no clock jumps."""
    if facts.synchronized is False:
        yield Finding.warning(
            "clock",
            "the clock is not synchronized",
            cause="TLS certificates, logs and traces of several machines disagree",
            remedy="sudo timedatectl set-ntp true",
        )
    if abs(facts.stepped_s) > _STEP_S:
        yield Finding.warning(
            "clock",
            f"the wall clock jumped by {facts.stepped_s:+.2f} s while it was observed",
            cause="a program sets the clock in steps: times in logs and records are wrong",
            remedy="timedatectl timesync-status  # or: chronyc tracking",
        )
    if facts.paused_s > _PAUSE_S:
        yield Finding.warning(
            "clock",
            f"this process was paused for {facts.paused_s:.1f} s",
            cause="a virtual machine without enough CPU time; leases expire after 10 s of silence",
            remedy="vmstat 1 5  # column st: time that the host took away",
        )
    if facts.suspended_s > _SUSPEND_S:
        yield Finding.warning(
            "clock",
            f"the machine was suspended for {facts.suspended_s:.0f} s since it booted",
            cause="a suspend ends leases, streams and often the GPU's memory",
            remedy="sudo systemctl mask sleep.target suspend.target hibernate.target",
        )
    if facts.synchronized is not False:
        how = "synchronized" if facts.synchronized else "not known whether it is synchronized"
        yield Finding.ok("clock", f"clock: {how}")


def size_text(count: int) -> str:
    """Return a number of bytes for people."""
    if count >= GIB:
        return f"{count / GIB:.1f} GiB"
    return f"{count / _MIB:.0f} MiB"
