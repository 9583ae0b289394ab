"""TLS of the request plane over TCP: the certificates of both ends, checked and reloaded."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError
from dynamo.http.tls import FileWatch

CHECK_S = 5.0
"""The time between two looks at the files: a new certificate is used after the second."""


class RequestTls:
    """What both ends of a connection need: contexts, None for plain TCP. Raises ConfigError.

    A reload makes new contexts, so it never affects an existing connection. UNIX sockets have
    none: they are for processes of one user on one box.

    ``server_name`` is expected in the certificate of every worker, instead of its address.
    """

    def __init__(self, settings: RuntimeSettings | None = None) -> None:
        self.server: ssl.SSLContext | None = None
        self.client: ssl.SSLContext | None = None
        self.server_name: str | None = None
        self.watch: FileWatch | None = None
        if settings is None or settings.request_plane != "tcp":
            return
        self._settings = settings
        self.server_name = settings.tcp_tls_server_name
        files = (
            settings.tcp_tls_cert_path,
            settings.tcp_tls_key_path,
            settings.tcp_tls_client_ca_cert_path,
            settings.tcp_tls_ca_cert_path,
            settings.tcp_tls_client_cert_path,
            settings.tcp_tls_client_key_path,
        )
        paths = [path for path in files if path is not None]
        if paths:
            self.watch = FileWatch(paths, self._load)
        self._load()

    async def follow(self, on_reload: Callable[[], None]) -> None:
        """Use renewed files for new connections, and call ``on_reload`` then, until cancelled."""
        while self.watch is not None:
            await asyncio.sleep(CHECK_S)
            if self.watch.check():
                on_reload()

    def _load(self) -> None:
        server, client = _server(self._settings), _client(self._settings)
        for context in (server, client):
            if context is not None:
                context.minimum_version = ssl.TLSVersion.TLSv1_2
                context.options |= ssl.OP_NO_RENEGOTIATION
        self.server, self.client = server, client


def _server(settings: RuntimeSettings) -> ssl.SSLContext | None:
    if settings.tcp_tls_cert_path is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_chain(context, "--tcp-tls", settings.tcp_tls_cert_path, settings.tcp_tls_key_path)
    if settings.tcp_tls_client_ca_cert_path is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _trust(context, "--tcp-tls-client-ca-cert-path", settings.tcp_tls_client_ca_cert_path)
    return context


def _client(settings: RuntimeSettings) -> ssl.SSLContext | None:
    if settings.tcp_tls_ca_cert_path is None and not settings.tcp_tls_insecure:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if settings.tcp_tls_ca_cert_path is not None:
        _trust(context, "--tcp-tls-ca-cert-path", settings.tcp_tls_ca_cert_path)
    if settings.tcp_tls_insecure:
        # In this order: Python refuses CERT_NONE while host names are checked.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if settings.tcp_tls_client_cert_path is not None:
        _load_chain(
            context,
            "--tcp-tls-client",
            settings.tcp_tls_client_cert_path,
            settings.tcp_tls_client_key_path,
        )
    return context


def _load_chain(context: ssl.SSLContext, flag: str, cert: str, key: str | None) -> None:
    try:
        # Without a callback OpenSSL asks for a passphrase on the terminal, and waits.
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
