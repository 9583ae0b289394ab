"""Options that every process has: where state lives, discovery, request plane, event plane."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dynamo.config.option import option
from dynamo.errors import ConfigError

__all__ = ["EVENT_PLANES", "NAMESPACE_RULE", "RuntimeSettings", "check_namespace", "is_namespace"]

EVENT_PLANES = ("zmq", "nats")
NAMESPACE_RULE = "must be letters, digits, '_' or '-', at most 128"
_NAMESPACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,127}")


@dataclass(frozen=True, kw_only=True)
class RuntimeSettings:
    """runtime: namespace, discovery, request plane, event plane"""

    namespace: str = option(
        "dynamo", "--namespace", env="DYN_NAMESPACE", help="namespace of this deployment"
    )
    discovery_backend: str = option(
        "file",
        "--discovery-backend",
        env="DYN_DISCOVERY_BACKEND",
        choices=("file", "mem", "etcd"),
        help="where instances are registered; etcd for more than one box (ETCD_ENDPOINTS)",
    )
    file_kv: str | None = option(
        None,
        env="DYN_FILE_KV",
        help="directory of file discovery; default: store/ in the run directory",
    )
    state_dir: str | None = option(
        None,
        env="DYN_LOCAL_STATE_DIR",
        help="root of statefiles and run directories; default ~/.dynamo/state",
    )
    request_plane: str = option(
        "uds",
        "--request-plane",
        env="DYN_REQUEST_PLANE",
        choices=("uds", "tcp"),
        help="transport between frontend and workers: UNIX socket or TCP",
    )
    tcp_rpc_host: str = option(
        "127.0.0.1",
        env="DYN_TCP_RPC_HOST",
        help="address a worker listens on with tcp; 0.0.0.0 advertises the outgoing one",
    )
    tcp_rpc_port: int = option(
        0,
        env="DYN_TCP_RPC_PORT",
        minimum=0,
        maximum=65535,
        help="port a worker listens on with tcp; 0 lets the system choose",
    )
    event_plane: str = option(
        "zmq",
        "--event-plane",
        env="DYN_EVENT_PLANE",
        choices=EVENT_PLANES,
        help="KV event transport: between the processes, or over a NATS server (NATS_SERVER)",
    )
    event_plane_host: str | None = option(
        None,
        env="DYN_EVENT_PLANE_HOST",
        help="address zmq publishers listen on with tcp; default: DYN_TCP_RPC_HOST",
    )
    device_type: str | None = option(
        None,
        "--device-type",
        env="DYN_DEVICE_TYPE",
        choices=("cpu", "cuda", "xpu", "tpu"),
        help="where the models of this worker run, for --router-mode device-aware-weighted; "
        "default: what the engine reports, else cuda if CUDA_VISIBLE_DEVICES names a GPU, else cpu",
    )
    lease_ttl_s: float = option(
        10.0,
        env="ETCD_LEASE_TTL",
        minimum=0.5,
        help="seconds without a renewal after which the lease of a hung process expires",
    )

    def __post_init__(self) -> None:
        check_namespace(self.namespace)


def check_namespace(name: str) -> None:
    """Raise ConfigError if ``name`` is no namespace."""
    if not is_namespace(name):
        raise ConfigError(f"namespace {name!r} {NAMESPACE_RULE}")


def is_namespace(name: object) -> bool:
    """Whether ``name`` can be a part of file names, and of endpoint paths, which have dots."""
    return isinstance(name, str) and _NAMESPACE.fullmatch(name) is not None
