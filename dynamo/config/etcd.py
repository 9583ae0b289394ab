"""Address and credentials of etcd; read from the environment only."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import option

__all__ = ["EtcdSettings"]


@dataclass(frozen=True, kw_only=True)
class EtcdSettings:
    """etcd: endpoints, credentials, TLS"""

    endpoints: str = option(
        "http://localhost:2379",
        env="ETCD_ENDPOINTS",
        help="members of the etcd cluster, separated by commas: host:port, http:// or https://",
    )
    username: str | None = option(
        None, env="ETCD_AUTH_USERNAME", help="user of etcd, with ETCD_AUTH_PASSWORD"
    )
    password: str | None = option(None, env="ETCD_AUTH_PASSWORD", help="password of that user")
    ca: str | None = option(
        None, env="ETCD_AUTH_CA", help="PEM file of the authority that signed etcd's certificate"
    )
    client_cert: str | None = option(
        None, env="ETCD_AUTH_CLIENT_CERT", help="PEM file of our own certificate"
    )
    client_key: str | None = option(None, env="ETCD_AUTH_CLIENT_KEY", help="PEM file of its key")
    start_timeout_s: float = option(
        5.0,
        env="DYN_ETCD_START_TIMEOUT",
        minimum=0.1,
        help="seconds a starting process keeps trying to reach etcd",
    )
