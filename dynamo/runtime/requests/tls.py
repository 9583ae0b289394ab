"""TLS of the request plane over TCP: the certificates of both ends, checked at start."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError


@dataclass(frozen=True)
class RequestTls:
    """What both ends of a connection need; None for plain TCP.

    ``server_name`` is expected in the certificate of every worker, instead of its address.
    """

    server: ssl.SSLContext | None = None
    client: ssl.SSLContext | None = None
    server_name: str | None = None


def request_tls(settings: RuntimeSettings) -> RequestTls:
    """Read the certificates in ``settings``. Raises ConfigError.

    UNIX sockets have none: they are for processes of one user on one box.
    """
    if settings.request_plane != "tcp":
        return RequestTls()
    server = client = None
    if settings.tcp_tls_cert_path is not None:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _load_chain(server, "--tcp-tls", settings.tcp_tls_cert_path, settings.tcp_tls_key_path)
        if settings.tcp_tls_client_ca_cert_path is not None:
            server.verify_mode = ssl.CERT_REQUIRED
            _trust(server, "--tcp-tls-client-ca-cert-path", settings.tcp_tls_client_ca_cert_path)
    if settings.tcp_tls_ca_cert_path is not None or settings.tcp_tls_insecure:
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if settings.tcp_tls_ca_cert_path is not None:
            _trust(client, "--tcp-tls-ca-cert-path", settings.tcp_tls_ca_cert_path)
        if settings.tcp_tls_insecure:
            client.check_hostname = False
            client.verify_mode = ssl.CERT_NONE
        if settings.tcp_tls_client_cert_path is not None:
            _load_chain(
                client,
                "--tcp-tls-client",
                settings.tcp_tls_client_cert_path,
                settings.tcp_tls_client_key_path,
            )
    for context in (server, client):
        if context is not None:
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.options |= ssl.OP_NO_RENEGOTIATION
    return RequestTls(server, client, settings.tcp_tls_server_name)


def _load_chain(context: ssl.SSLContext, flag: str, cert: str, key: str | None) -> None:
    try:
        context.load_cert_chain(cert, key, password=_no_passphrase)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{flag}-cert-path {cert}, {flag}-key-path {key}: can't be used: {error}; give PEM "
            "files of a certificate and its key, without a passphrase"
        ) from None


def _trust(context: ssl.SSLContext, flag: str, path: str) -> None:
    try:
        context.load_verify_locations(cafile=path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{flag} {path}: no PEM certificate in it: {error}") from None


def _no_passphrase() -> str:
    return ""
