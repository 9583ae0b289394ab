"""Options of the runtime: discovery, request plane, event plane."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from dynamo.config.absent import RUNTIME, AbsentFlag
from dynamo.config.option import option, variable
from dynamo.errors import ConfigError

EVENT_PLANES = ("zmq", "nats")
NAMESPACE_RULE = "must be letters, digits, '_' or '-', at most 128"
_NAMESPACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,127}")
MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class RequestPlaneSettings:
    """request plane: sizes and timeouts between frontend and workers"""

    max_message_size_bytes: int = variable(
        32 * MIB,
        "DYN_TCP_MAX_MESSAGE_SIZE",
        minimum=1024,
        maximum=1024 * MIB,
        help="largest request or response item in bytes; a larger one fails alone",
    )
    silence_timeout_s: float = variable(
        2.0,
        "DYN_REQUEST_PLANE_SILENCE_TIMEOUT",
        minimum=0.02,
        help="seconds a worker with requests may send nothing, not even the answer to a ping, "
        "before its requests go to other workers",
    )
    request_timeout_s: float = variable(
        10.0,
        "DYN_TCP_REQUEST_TIMEOUT",
        minimum=0.01,
        help="seconds after which a silent worker's connection is lost, with the requests that no "
        "other worker can take",
    )
    connect_timeout_s: float = variable(
        3.0, "DYN_TCP_CONNECT_TIMEOUT", minimum=0.01, help="seconds a connection may take"
    )
    # Shorter than request_timeout_s: bytes that the kernel of a peer leaves unacknowledged mean a
    # cut link, whatever its process is doing.
    tcp_user_timeout_s: float = variable(
        6.0,
        "DYN_TCP_USER_TIMEOUT",
        minimum=0.1,
        help="seconds that sent bytes may go unacknowledged before a TCP connection counts as lost",
    )
    high_water_bytes: int = variable(
        256 * 1024,
        "DYN_REQUEST_PLANE_HIGH_WATER",
        minimum=4096,
        help="unsent bytes of one connection above which senders are asked to wait",
    )
    hard_cap_bytes: int = variable(
        64 * MIB,
        "DYN_REQUEST_PLANE_HARD_CAP",
        minimum=64 * 1024,
        help="unsent bytes of one connection above which requests are rejected",
    )
    max_streams: int = variable(
        50_000,
        "DYN_REQUEST_PLANE_MAX_STREAMS",
        minimum=1,
        help="requests one process serves at once; further ones are rejected as overloaded",
    )


@dataclass(frozen=True, kw_only=True)
class NatsSettings:
    """nats: servers, credentials, TLS"""

    servers: str = variable(
        "nats://localhost:4222",
        "NATS_SERVER",
        help="servers of the NATS cluster, separated by commas: nats:// or tls://",
    )
    username: str | None = variable(None, "NATS_AUTH_USERNAME", help="user of NATS")
    password: str | None = variable(None, "NATS_AUTH_PASSWORD", help="password of that user")
    token: str | None = variable(None, "NATS_AUTH_TOKEN", help="token instead of a user")
    nkey: str | None = variable(None, "NATS_AUTH_NKEY", help="seed of an nkey")
    credentials_file: str | None = variable(
        None, "NATS_AUTH_CREDENTIALS_FILE", help="file with a JWT and the seed of its nkey"
    )
    ca: str | None = variable(
        None, "NATS_TLS_CA_CERT_PATH", help="PEM file of the authority of the servers"
    )
    client_cert: str | None = variable(
        None, "NATS_TLS_CLIENT_CERT_PATH", help="PEM file of our own certificate"
    )
    client_key: str | None = variable(None, "NATS_TLS_CLIENT_KEY_PATH", help="PEM file of its key")
    insecure: bool = variable(
        False, "NATS_TLS_INSECURE", help="do not verify the servers' certificates"
    )
    start_timeout_s: float = variable(
        5.0,
        "DYN_NATS_START_TIMEOUT",
        minimum=0.1,
        help="seconds a starting process keeps trying to reach NATS",
    )


@dataclass(frozen=True, kw_only=True)
class EtcdSettings:
    """etcd: endpoints, credentials, TLS"""

    endpoints: str = variable(
        "http://localhost:2379",
        "ETCD_ENDPOINTS",
        help="members of the etcd cluster, separated by commas: host:port, http:// or https://",
    )
    username: str | None = variable(
        None, "ETCD_AUTH_USERNAME", help="user of etcd, with ETCD_AUTH_PASSWORD"
    )
    password: str | None = variable(None, "ETCD_AUTH_PASSWORD", help="password of that user")
    ca: str | None = variable(
        None, "ETCD_AUTH_CA", help="PEM file of the authority that signed etcd's certificate"
    )
    client_cert: str | None = variable(
        None, "ETCD_AUTH_CLIENT_CERT", help="PEM file of our own certificate"
    )
    client_key: str | None = variable(None, "ETCD_AUTH_CLIENT_KEY", help="PEM file of its key")
    start_timeout_s: float = variable(
        5.0,
        "DYN_ETCD_START_TIMEOUT",
        minimum=0.1,
        help="seconds a starting process keeps trying to reach etcd",
    )


@dataclass(frozen=True, kw_only=True)
class RuntimeSettings:
    """runtime: namespace, discovery, request plane, event plane"""

    absent: ClassVar[tuple[AbsentFlag, ...]] = RUNTIME
    namespace: str = option("dynamo", help="namespace of this deployment")
    discovery_backend: str = option(
        "file",
        choices=("file", "mem", "etcd"),
        help="where instances are registered; etcd for more than one box (ETCD_ENDPOINTS)",
    )
    file_kv: str | None = variable(
        None, help="directory of file discovery; default: store/ in the run directory"
    )
    state_dir: str | None = variable(
        None,
        "DYN_LOCAL_STATE_DIR",
        help="root of statefiles and run directories; default ~/.dynamo/state",
    )
    request_plane: str = option(
        "uds",
        choices=("uds", "tcp"),
        help="transport between frontend and workers: UNIX socket or TCP",
    )
    tcp_rpc_host: str = variable(
        "127.0.0.1",
        help="address a worker listens on with tcp; 0.0.0.0 advertises the outgoing one",
    )
    tcp_rpc_port: int = variable(
        0,
        minimum=0,
        maximum=65535,
        help="port a worker listens on with tcp; 0 lets the system choose",
    )
    event_plane: str = option(
        "zmq",
        choices=EVENT_PLANES,
        help="KV event transport: between the processes, or over a NATS server (NATS_SERVER)",
    )
    event_plane_host: str | None = variable(
        None, help="address zmq publishers listen on with tcp; default: DYN_TCP_RPC_HOST"
    )
    device_type: str | None = option(
        None,
        choices=("cpu", "cuda", "xpu", "tpu"),
        help="where the models of this worker run, for --router-mode device-aware-weighted; "
        "default: what the engine reports, else cuda if CUDA_VISIBLE_DEVICES names a GPU, else cpu",
    )
    lease_ttl_s: float = variable(
        10.0,
        "ETCD_LEASE_TTL",
        minimum=0.5,
        help="seconds without a renewal after which the lease of a hung process expires",
    )
    dump_config_to: str | None = option(
        None,
        metavar="FILE",
        help="write all settings of this process to FILE, as JSON, when it starts",
    )
    tcp_tls_cert_path: str | None = option(
        None,
        heading="request plane tcp, event plane nats: TLS",
        help="PEM file of the certificate with which this process serves requests over TCP",
    )
    tcp_tls_key_path: str | None = option(None, help="PEM file of that certificate's key")
    tcp_tls_ca_cert_path: str | None = option(
        None,
        help="PEM file of the authority of the workers' certificates; requests are sent over TLS",
    )
    tcp_tls_client_cert_path: str | None = option(
        None, help="PEM file of the certificate that this process shows to workers"
    )
    tcp_tls_client_key_path: str | None = option(None, help="PEM file of that certificate's key")
    tcp_tls_client_ca_cert_path: str | None = option(
        None, help="PEM file of the authority whose certificates clients of this process need"
    )
    tcp_tls_server_name: str | None = option(
        None, help="name in the workers' certificates; default: their address"
    )
    tcp_tls_insecure: bool = option(
        False, help="send requests over TLS without verifying the workers' certificates"
    )
    nats_tls_ca_cert_path: str | None = option(
        None, env="NATS_TLS_CA_CERT_PATH", help="PEM file of the authority of the NATS servers"
    )
    nats_tls_insecure: bool = option(
        False, env="NATS_TLS_INSECURE", help="do not verify the NATS servers' certificates"
    )
    nats_tls_client_cert_path: str | None = option(
        None, env="NATS_TLS_CLIENT_CERT_PATH", help="PEM file of our own certificate for NATS"
    )
    nats_tls_client_key_path: str | None = option(
        None, env="NATS_TLS_CLIENT_KEY_PATH", help="PEM file of its key"
    )

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        self._check_tls()

    @property
    def nats_tls(self) -> dict[str, Any]:
        """The fields of :class:`NatsSettings` that are given here."""
        fields = {
            "ca": self.nats_tls_ca_cert_path,
            "client_cert": self.nats_tls_client_cert_path,
            "client_key": self.nats_tls_client_key_path,
            "insecure": self.nats_tls_insecure,
        }
        return {name: value for name, value in fields.items() if value}

    def _check_tls(self) -> None:
        for flag, cert, key in (
            ("--tcp-tls", self.tcp_tls_cert_path, self.tcp_tls_key_path),
            ("--tcp-tls-client", self.tcp_tls_client_cert_path, self.tcp_tls_client_key_path),
        ):
            if (cert is None) != (key is None):
                missing = f"{flag}-{'cert' if cert is None else 'key'}-path"
                raise ConfigError(f"{missing} is missing: TLS needs a certificate and its key")
        if self.tcp_tls_client_ca_cert_path is not None and self.tcp_tls_cert_path is None:
            raise ConfigError(
                "--tcp-tls-client-ca-cert-path needs --tcp-tls-cert-path and --tcp-tls-key-path: "
                "clients send certificates over TLS alone"
            )
        sends = self.tcp_tls_ca_cert_path is not None or self.tcp_tls_insecure
        if self.tcp_tls_client_cert_path is not None and not sends:
            raise ConfigError(
                "--tcp-tls-client-cert-path needs --tcp-tls-ca-cert-path: without it, requests are "
                "sent in plain text"
            )


def check_namespace(name: str) -> None:
    """Raise ConfigError if ``name`` is no namespace."""
    if not is_namespace(name):
        raise ConfigError(f"namespace {name!r} {NAMESPACE_RULE}")


def is_namespace(name: object) -> bool:
    """Whether ``name`` can be a part of file names, and of endpoint paths, which have dots."""
    return isinstance(name, str) and _NAMESPACE.fullmatch(name) is not None
