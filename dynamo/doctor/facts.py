"""What `dynamo doctor` reads from the machine and the deployment, and what it reports."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from dynamo.serve.gpus.gpus import Gpu


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one check. ``severity`` is ok, warning or error.

    A finding that is not ok says why it matters (``cause``), and what to do: ``remedy`` is a
    command, or a key of the graph.
    """

    check: str
    severity: str
    summary: str
    cause: str = ""
    remedy: str = ""

    @classmethod
    def ok(cls, check: str, summary: str) -> Finding:
        """Return the finding of a check without a fault."""
        return cls(check=check, severity="ok", summary=summary)

    @classmethod
    def warning(cls, check: str, summary: str, *, cause: str, remedy: str) -> Finding:
        """Return the finding of a fault that disturbs."""
        return cls(check=check, severity="warning", summary=summary, cause=cause, remedy=remedy)

    @classmethod
    def error(cls, check: str, summary: str, *, cause: str, remedy: str) -> Finding:
        """Return the finding of a fault that stops a part."""
        return cls(check=check, severity="error", summary=summary, cause=cause, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """The GPUs. ``devices`` is None without a working driver, and ``reason`` says why.

    ``boards`` are NVIDIA GPUs on the PCI bus. ``own_pids`` are processes of our deployments.
    ``cuda`` is the newest version of CUDA that the driver supports.
    """

    devices: tuple[Gpu, ...] | None
    reason: str = ""
    boards: int = 0
    driver: str = ""
    cuda: tuple[int, int] | None = None
    own_pids: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """An installed engine. ``cuda`` is the version that it was built for.

    ``tested`` are the versions (major and minor) that this project tests; empty for any.
    """

    name: str
    version: str
    tested: tuple[str, ...] = ()
    cuda: tuple[int, int] | None = None
    is_cpu_build: bool = False


@dataclass(frozen=True, kw_only=True)
class LimitFacts:
    """Limits of this process, -1 for none; ``tasks_used`` are threads that count for ``tasks``.

    Those of inotify are of all processes of the user.
    """

    files_soft: int
    files_hard: int
    locked_bytes: int
    tasks: int
    tasks_used: int
    files_needed: int = 4096 + 256
    transfers_blocks: bool = False
    inotify_instances: int = -1
    inotify_instances_used: int = 0
    inotify_watches: int = -1
    inotify_watches_used: int = 0
    processes_needed: int = 0


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """Sizes in bytes. ``shm_bytes`` is None without /dev/shm. ``shards``: GPUs of one worker.

    ``ram_available_bytes`` is what programs can still get of ``ram_bytes``.
    """

    shm_bytes: int | None
    shm_free_bytes: int = 0
    huge_bytes: int = 0
    huge_free_bytes: int = 0
    ram_bytes: int = 0
    ram_available_bytes: int = 0
    shards: int = 1


@dataclass(frozen=True, kw_only=True)
class FileSystemFacts:
    """The file system that holds ``path``, or will hold it. ``read_only``: it is mounted so."""

    path: str
    kind: str
    free_bytes: int
    free_files: int = -1
    writable: bool = True
    read_only: bool = False


@dataclass(frozen=True, kw_only=True)
class DiskFacts:
    """Where state and logs, and downloaded models are. ``models`` is None if none is downloaded.

    ``log_bytes`` is what the logs of the graph may take.
    """

    state: FileSystemFacts
    models: FileSystemFacts | None = None
    log_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ClockFacts:
    """The clocks. ``synchronized`` is None if the kernel does not say.

    ``stepped_s`` is how far wall time moved against monotonic time while it was observed,
    ``paused_s`` the longest time that a short sleep took too long, ``suspended_s`` the time that
    the machine was suspended since it booted.
    """

    synchronized: bool | None
    stepped_s: float = 0.0
    paused_s: float = 0.0
    suspended_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FrontendFacts:
    """A frontend of the graph. ``is_ours``: it runs; ``answers`` is false if it does not answer.

    ``problem`` is why nothing can listen on its address, ``holder`` the program that does.
    ``free_port`` is one near by that is free. ``ttft_error`` is how far the first tokens that the
    router expected were off, as a share of the time that they took; None if it expects none.
    """

    service: str
    url: str
    port: int
    is_loopback: bool = True
    has_keys: bool = False
    has_tls: bool = False
    is_ours: bool = False
    answers: bool = True
    problem: str = ""
    holder: str = ""
    free_port: int = 0
    ttft_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class ListenerFacts:
    """A socket of our deployment that other machines can reach."""

    component: str
    program: str
    pid: int
    address: str
    port: int
    is_frontend: bool = False


@dataclass(frozen=True, kw_only=True)
class WorkerFacts:
    """A registered worker. ``worker`` is its id in hexadecimal, ``name`` its component, if known.

    ``publishes`` is false without a channel of KV events. ``event_problem`` is why its channel
    cannot be subscribed to. ``takes_tokens``: it is routed by token blocks. ``files`` is the
    checksum of what makes its prompts.
    """

    worker: str
    model: str
    name: str = ""
    files: str = ""
    block_size: int = 0
    takes_tokens: bool = True
    publishes: bool = True
    event_problem: str = ""


@dataclass(frozen=True, kw_only=True)
class RouterFacts:
    """What the graph and the running frontends say about KV events.

    ``block_size`` is that of the frontends' option, None without. ``block_sizes`` are those that
    services of the graph give, by service: (model, tokens). ``silent`` counts the workers of each
    model that served prompts and published no usable event.
    """

    follows_events: bool = True
    block_size: int | None = None
    block_sizes: tuple[tuple[str, str, int], ...] = ()
    silent: tuple[tuple[str, int], ...] = ()
