"""The certificate of a server: loading, checking, reloading. TLS 1.2 and 1.3, HTTP/1.1.

Reload files that have changed, without a restart.

Shared by keys and certificates. It compares metadata in the sweep of the server: this also works
for symbolic links that are exchanged, for network file systems and after any editor.
"""

from __future__ import annotations

import functools
import logging
import os
import ssl
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from dynamo.errors import ConfigError

log = logging.getLogger(__name__)
_MAX_FILE_BYTES = 1 << 20
_CERT = "--tls-cert-path"
_KEY = "--tls-key-path"
_CLIENT_CA = "--tls-client-ca-cert-path"
_UTC_TIME, _GENERALIZED_TIME, _VERSION = 0x17, 0x18, 0xA0
_Signature = tuple[tuple[int, ...] | None, ...]


class FileWatch:
    """Calls ``reload`` after a change of ``paths``; create it before their first load.

    A change counts when two checks in a row find the same files, so that a certificate and its key
    may be replaced one after the other. If ``reload`` raises ConfigError, the error is logged and
    the earlier content stays in force until the next change.
    """

    def __init__(self, paths: Sequence[str], reload: Callable[[], None]) -> None:
        self._paths = paths
        self._reload = reload
        self._loaded = self._latest = self._signature()

    def check(self) -> bool:
        """Reload if needed; return whether it did. O(paths), a few microseconds each."""
        before, self._latest = self._latest, self._signature()
        if self._latest == self._loaded or self._latest != before:
            return False
        self._loaded = self._latest
        try:
            self._reload()
        except ConfigError as error:
            log.error("%s; keeping what was loaded before", error.message)
            return False
        log.info("reloaded %s", ", ".join(self._paths))
        return True

    def _signature(self) -> _Signature:
        return tuple(_stat(path) for path in self._paths)


def _stat(path: str) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)  # noqa: PTH116 - a third of the cost of Path.stat
    except OSError:
        return None
    # The time of the inode's change also shows a corrected mode or owner.
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class ServerTls:
    """The ``context`` of new connections, reloaded by ``watch``. Raises ConfigError.

    A reload makes a new context, so it never affects an existing connection. With
    ``client_ca_path``, a certificate that a client sends must be signed by that authority; the
    server decides what clients without one may do.
    """

    def __init__(self, cert_path: str, key_path: str, client_ca_path: str | None = None) -> None:
        self._cert_path = cert_path
        self._key_path = key_path
        self._client_ca_path = client_ca_path
        self.wants_client = client_ca_path is not None
        paths = (cert_path, key_path, *([] if client_ca_path is None else [client_ca_path]))
        self.watch = FileWatch(paths, self._load)
        self.context: ssl.SSLContext
        self._load()

    def _load(self) -> None:
        chain = _read(_CERT, self._cert_path)
        key = _read(_KEY, self._key_path)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION  # a client could request it endlessly
        context.set_alpn_protocols(["http/1.1"])
        self._load_chain(context, chain, key)
        if self._client_ca_path is not None:
            context.verify_mode = ssl.CERT_OPTIONAL
            try:
                context.load_verify_locations(cadata=_read(_CLIENT_CA, self._client_ca_path))
            except ssl.SSLError:
                raise ConfigError(
                    f"{_CLIENT_CA} {self._client_ca_path}: no PEM certificate in it"
                ) from None
        _warn_of_dates(self._cert_path, chain)
        self.context = context

    def _load_chain(self, context: ssl.SSLContext, chain: str, key: str) -> None:
        if "-----BEGIN CERTIFICATE-----" not in chain:
            raise ConfigError(f"{_CERT} {self._cert_path}: no PEM certificate in it")
        if "PRIVATE KEY-----" not in key:
            raise ConfigError(f"{_KEY} {self._key_path}: no PEM private key in it")
        if "ENCRYPTED" in key:
            raise ConfigError(
                f"{_KEY} {self._key_path} is encrypted; write it without a passphrase: "
                f"openssl pkey -in {self._key_path} -out plain.pem"
            )
        try:
            context.load_cert_chain(self._cert_path, self._key_path, password=_no_passphrase)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ConfigError(
                    f"{_KEY} {self._key_path} is not the key of {_CERT} {self._cert_path}"
                ) from None
            raise ConfigError(
                f"{_CERT} {self._cert_path} with {_KEY} {self._key_path}: {error.reason or error}"
            ) from None
        except OSError as error:
            raise ConfigError(f"{_CERT} {self._cert_path}: {error.strerror}") from None


@functools.cache
def client_context(ca_path: str | None) -> ssl.SSLContext:
    """Return the context of a client that trusts ``ca_path``, or the system's authorities.

    Raises ConfigError naming --tls-ca-cert-path.
    """
    try:
        return ssl.create_default_context(cafile=ca_path)
    except ssl.SSLError:
        raise ConfigError(f"--tls-ca-cert-path {ca_path}: no PEM certificate in it") from None
    except OSError as error:
        raise ConfigError(f"--tls-ca-cert-path {ca_path}: {error.strerror}") from None


@functools.cache
def unverified_context() -> ssl.SSLContext:
    """Return the context of a client that trusts every certificate, for requests without a secret.

    A frontend's certificate is for the name that its clients use, not for its local address.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def validity(certificate: bytes) -> tuple[datetime, datetime]:
    """The first and last moment at which ``certificate`` (DER) is valid. RFC 5280 4.1.

    The ssl module shows these dates only of the certificates of peers. Raises ValueError.
    """
    _, outer, _ = _element(certificate, 0)
    _, position, _ = _element(certificate, outer)
    tag, _, end = _element(certificate, position)
    # A certificate of version 1 has no such field.
    if tag == _VERSION:
        position = end
    for _ in ("serial number", "signature", "issuer"):
        position = _element(certificate, position)[2]
    _, start, _ = _element(certificate, position)
    first, after = _time(certificate, start)
    return first, _time(certificate, after)[0]


def _element(data: bytes, position: int) -> tuple[int, int, int]:
    """Tag, start and end of the content of the DER element at ``position``."""
    try:
        tag, length = data[position], data[position + 1]
        start = position + 2
        # Long form: the other bits count the bytes of the length (X.690 8.1.3.5).
        if length & 0x80:
            digits = length & 0x7F
            length = int.from_bytes(data[start : start + digits], "big")
            start += digits
    except IndexError:
        raise ValueError("the certificate is cut off") from None
    return tag, start, start + length


def _time(data: bytes, position: int) -> tuple[datetime, int]:
    tag, start, end = _element(data, position)
    formats = {_UTC_TIME: "%y%m%d%H%M%SZ", _GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}
    if tag not in formats:
        raise ValueError("no time where the certificate has its validity")
    text = data[start:end].decode("ascii")
    return datetime.strptime(text, formats[tag]).replace(tzinfo=UTC), end


def _warn_of_dates(path: str, chain: str) -> None:
    """Log that clients will refuse the certificate, the first one in ``chain``."""
    try:
        head, mark, _ = chain.partition("-----END CERTIFICATE-----")
        pem = head[head.index("-----BEGIN CERTIFICATE-----") :] + mark
        first, last = validity(ssl.PEM_cert_to_DER_cert(pem))
    except ValueError as error:  # OpenSSL has accepted it: only the dates are unknown
        log.warning("%s %s: can't read its dates: %s", _CERT, path, error)
        return
    now = datetime.now(UTC)
    if now > last:
        log.warning("%s %s expired on %s; clients will refuse it: renew it", _CERT, path, last)
    elif now < first:
        log.warning("%s %s is valid from %s only; clients will refuse it", _CERT, path, first)


def _read(flag: str, path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            # One byte above the limit shows that the file is too large.
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"{flag} {path} exceeds {_MAX_FILE_BYTES} bytes")
    return content.decode("ascii", "replace")


def _no_passphrase() -> str:
    """Without this, OpenSSL would ask on the terminal."""
    return ""
