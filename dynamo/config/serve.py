"""Options of ``dynamo serve``: the graph, GPUs, the arbiter, restarts, logs."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import argument, flag, option, variable


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """serve: the graph and how its processes are kept running"""

    graph: str = argument("", help="YAML file with the services")
    namespace: str | None = flag(
        None, help="namespace of this deployment; overrides the one in the graph"
    )
    dry_run: bool = flag(False, help="print what would run (commands, environment, GPUs) and exit")
    json: bool = flag(False, help="with --dry-run: print it as JSON")
    detach: bool = flag(
        False, "-d", "--detach", help="go on in the background; return when the API is ready"
    )
    gpus: int | None = flag(
        None, minimum=0, maximum=1024, help="assume that this machine has N GPUs"
    )
    disable_gpu_allocation: bool = variable(
        False,
        "DYN_DISABLE_AUTO_GPU_ALLOCATION",
        "DYNAMO_DISABLE_GPU_ALLOCATION",
        help="assign no GPUs: workers see the GPUs that this process sees",
    )
    circus_endpoint: str | None = option(
        None,
        help="control endpoint; default: a UNIX socket in the run directory. A TCP port, e.g. "
        "tcp://127.0.0.1:5555, lets everyone who reaches it run commands as you",
    )
    graceful_timeout_s: float = option(
        30.0,
        "--graceful-timeout",
        env="DYN_SERVE_GRACEFUL_TIMEOUT_S",
        minimum=0.0,
        help="seconds a process may take to finish its work before it is killed",
    )
    migration_limit: int = variable(
        3, minimum=0, help="--migration-limit of the graph's frontends that do not set it"
    )
    restart_burst: int = variable(
        5,
        "DYN_SERVE_RESTART_BURST",
        minimum=1,
        help="exits of one worker within the window after which it is not restarted",
    )
    restart_window_s: float = variable(
        60.0, "DYN_SERVE_RESTART_WINDOW_S", minimum=1.0, help="the window, in seconds"
    )
    log_size_mb: float = variable(
        16.0,
        "DYN_SERVE_LOG_SIZE_MB",
        minimum=0.01,
        help="size at which a process's log file is rotated; one older file is kept",
    )
    quiet: bool = flag(
        False, help="show only messages of dynamo serve, not the output of the services"
    )
    jsonl: bool = variable(
        False, "DYN_LOGGING_JSONL", help="one JSON object per line instead of prefixed text"
    )
    deployment_config: str | None = variable(
        None, help="YAML text that is used instead of the graph file"
    )
    deployment_source: str = "DYN_DEPLOYMENT_CONFIG"
    """Where ``deployment_config`` comes from, for errors: ``dynamo run`` makes one."""
    port_flag: str = ""
    """The flag of the command for the frontend's port, for errors; "": that of the graph."""
    beside_hint: str = ""
    """What to do where the namespace is served already, for errors; "": ``dynamo reload``."""
    unreachable_starts: int = 0
    """After so many failed downloads a model that was never served is given up; 0: never."""


@dataclass(frozen=True, kw_only=True)
class ReloadSettings:
    """reload: the changed graph and its deployment"""

    graph: str = argument("", help="YAML file; default: that of the start or last reload")
    namespace: str | None = flag(
        None, help="namespace of the deployment; default: the one in the graph"
    )
    dry_run: bool = flag(False, help="show what would change and exit")
