"""Asks the frontends of a deployment for their figures: ``GET /v1/status``."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from dynamo.config import environ
from dynamo.errors import ConfigError
from dynamo.protocols.status import FrontendStatus
from dynamo.serve.graph.frontend_address import FrontendAddress, frontend_address
from dynamo.serve.programs import FRONTEND
from dynamo.serve.state.entries import Entry, argv_flags, read_entries
from dynamo.serve.state.process_table import environment
from dynamo.serve.state.statefile import Document
from dynamo.status.sighting import FrontendSighting
from dynamo.status.workers import program_of

__all__ = ["ask_frontends"]

_TIMEOUT_S = 1.0
_LIMIT_BYTES = 16 << 20
_LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp (proc(5))."""

_decode = msgspec.json.Decoder(FrontendStatus).decode


def ask_frontends(
    document: Document, api_key: str | None, own: FrontendStatus | None = None
) -> Iterator[FrontendSighting]:
    """Yield what each frontend answers; each has a second to do so.

    ``own`` is the answer of this process, if it is one of them.
    """
    for entry in read_entries(document):
        if program_of(entry) == FRONTEND:
            yield _ask(entry, api_key, own if os.getpid() in entry.pids else None)


def _ask(entry: Entry, api_key: str | None, own: FrontendStatus | None) -> FrontendSighting:
    pid = entry.pids[0] if entry.pids else 0
    env = {**environ(), **environment(pid)}
    flags = argv_flags(entry.argv)
    try:
        address = frontend_address(flags, env)
    except ConfigError as error:
        return FrontendSighting(name=entry.name, url="", state="down", problem=error.message)
    if not entry.pids:
        text = "its process does not run"
        return FrontendSighting(name=entry.name, url=address.url, state="down", problem=text)
    if own is not None:
        return _seen(entry.name, address.url, own)
    cert = flags.get("tls-cert-path") or env.get("DYN_TLS_CERT_PATH") or ""
    tls = _trusting(Path(f"/proc/{pid}/cwd") / cert) if address.tls else None
    try:
        status, body = _get(address, tls, api_key)
    except (OSError, ValueError) as error:
        text = f"{address.url} does not answer: {error}"
        return FrontendSighting(name=entry.name, url=address.url, state="down", problem=text)
    return _answered(entry.name, address.url, status, body, api_key)


def _answered(
    name: str, url: str, status: int, body: bytes, api_key: str | None
) -> FrontendSighting:
    problem, found = "", None
    if status == 200:
        try:
            found = _decode(body)
        except msgspec.MsgspecError as error:
            problem = f"its answer to /v1/status is not understood: {error}"
    elif status in (401, 403):
        key = "another one" if api_key else "one"
        problem = f"figures are missing: they need an operator's API key; give {key} with --api-key"
    else:
        off = " (DYN_DISABLE_FRONTEND_ADMIN_API?)" if status == 404 else ""
        problem = f"figures are missing: {url}/v1/status answered {status}{off}"
    return _seen(name, url, found, problem)


def _seen(name: str, url: str, found: FrontendStatus | None, problem: str = "") -> FrontendSighting:
    state = "draining" if found is not None and found.draining else "ready"
    return FrontendSighting(name=name, url=url, state=state, status=found, problem=problem)


def _get(
    address: FrontendAddress, tls: Callable[[socket.socket], socket.socket] | None, key: str | None
) -> tuple[int, bytes]:
    """GET /v1/status; return status and body. Raises OSError, ValueError."""
    lines = ["GET /v1/status HTTP/1.1", f"host: {address.authority}", "connection: close"]
    if key and tls is None and not _is_mine(address.port):
        raise ValueError("another user listens there, so it gets no API key")
    if key:
        lines.append(f"authorization: Bearer {key}")
    plain = socket.create_connection((address.reachable, address.port), timeout=_TIMEOUT_S)
    with plain, tls(plain) if tls is not None else plain as connection:
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        data = bytearray()
        while piece := connection.recv(1 << 16):
            data += piece
            if len(data) > _LIMIT_BYTES:
                raise ValueError("the answer is too large")
    head, _, body = bytes(data).partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise ValueError("not HTTP")
    return int(words[1]), body


def _trusting(cert: Path) -> Callable[[socket.socket], socket.socket]:
    """Return what begins TLS with the owner of the certificate ``cert``, and no other server."""

    def begin(plain: socket.socket) -> socket.socket:
        import ssl  # only for frontends with TLS

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # it is for the name that clients use
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # no authority needs to be known
        context.load_verify_locations(cert)
        return context.wrap_socket(plain)

    return begin


def _is_mine(port: int) -> bool:
    """Whether a process of this user listens on ``port``."""
    for table in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            words = row.split()
            listens = words[3] == _LISTEN and int(words[1].rpartition(":")[2], 16) == port
            if listens and int(words[7]) == os.geteuid():
                return True
    return False
