"""Address and credentials of NATS; read from the environment only."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import option

__all__ = ["NatsSettings"]


@dataclass(frozen=True, kw_only=True)
class NatsSettings:
    """nats: servers, credentials, TLS"""

    servers: str = option(
        "nats://localhost:4222",
        env="NATS_SERVER",
        help="servers of the NATS cluster, separated by commas: nats:// or tls://",
    )
    username: str | None = option(None, env="NATS_AUTH_USERNAME", help="user of NATS")
    password: str | None = option(None, env="NATS_AUTH_PASSWORD", help="password of that user")
    token: str | None = option(None, env="NATS_AUTH_TOKEN", help="token instead of a user")
    nkey: str | None = option(None, env="NATS_AUTH_NKEY", help="seed of an nkey")
    credentials_file: str | None = option(
        None, env="NATS_AUTH_CREDENTIALS_FILE", help="file with a JWT and the seed of its nkey"
    )
    ca: str | None = option(
        None, env="NATS_TLS_CA_CERT_PATH", help="PEM file of the authority of the servers"
    )
    client_cert: str | None = option(
        None, env="NATS_TLS_CLIENT_CERT_PATH", help="PEM file of our own certificate"
    )
    client_key: str | None = option(
        None, env="NATS_TLS_CLIENT_KEY_PATH", help="PEM file of its key"
    )
    insecure: bool = option(
        False, env="NATS_TLS_INSECURE", help="do not verify the servers' certificates"
    )
    start_timeout_s: float = option(
        5.0,
        env="DYN_NATS_START_TIMEOUT",
        minimum=0.1,
        help="seconds a starting process keeps trying to reach NATS",
    )
