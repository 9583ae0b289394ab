"""Asks the frontends of a deployment for their figures: ``GET /v1/status``."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec

from dynamo.box.sighting import FrontendSighting
from dynamo.box.workers import FRONTEND, program_of
from dynamo.config import environ
from dynamo.errors import ConfigError
from dynamo.protocols.status import FrontendStatus
from dynamo.serve.entries import Entry, argv_flags, read_entries
from dynamo.serve.frontend_address import FrontendAddress, frontend_address
from dynamo.serve.processes import environment
from dynamo.serve.statefile import Document

__all__ = ["ask_frontends"]

_TIMEOUT_S = 1.0
_LIMIT_BYTES = 16 << 20
_decode = msgspec.json.Decoder(FrontendStatus).decode


def ask_frontends(document: Document, api_key: str | None) -> Iterator[FrontendSighting]:
    """Yield what each frontend answers; each has a second to do so."""
    for entry in read_entries(document):
        if program_of(entry) == FRONTEND:
            yield _ask(entry, api_key)


def _ask(entry: Entry, api_key: str | None) -> FrontendSighting:
    env = {**environ(), **(environment(entry.pids[0]) if entry.pids else {})}
    flags = argv_flags(entry.argv)
    try:
        address = frontend_address(flags, env)
    except ConfigError as error:
        return FrontendSighting(name=entry.name, url="", state="down", problem=error.message)
    try:
        status, body = _get(address, "/v1/status", api_key)
    except (OSError, ValueError) as error:
        text = f"{address.url} does not answer: {error}"
        return FrontendSighting(name=entry.name, url=address.url, state="down", problem=text)
    return _seen(entry.name, address, status, body)


def _seen(name: str, address: FrontendAddress, status: int, body: bytes) -> FrontendSighting:
    if status in (401, 403):
        problem = "its figures need an operator's API key: set DYN_API_KEY or --api-key"
        return FrontendSighting(name=name, url=address.url, state="ready", problem=problem)
    if status != 200:
        problem = f"{address.url}/v1/status answered {status}"
        return FrontendSighting(name=name, url=address.url, state="ready", problem=problem)
    try:
        found = _decode(body)
    except msgspec.MsgspecError as error:
        problem = f"{address.url}/v1/status: {error}"
        return FrontendSighting(name=name, url=address.url, state="ready", problem=problem)
    state = "draining" if found.draining else "ready"
    return FrontendSighting(name=name, url=address.url, state=state, status=found)


def _get(address: FrontendAddress, path: str, api_key: str | None) -> tuple[int, bytes]:
    """GET ``path``; return status and body. Raises OSError, ValueError."""
    lines = [f"GET {path} HTTP/1.1", f"host: {address.authority}", "connection: close"]
    if api_key:
        lines.append(f"authorization: Bearer {api_key}")
    where = (address.reachable, address.port)
    with socket.create_connection(where, timeout=_TIMEOUT_S) as connection:
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
