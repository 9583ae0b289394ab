"""Asks the arbiter of a deployment for its state; imports little. See ``status_socket``."""

from __future__ import annotations

import json
import socket

STATUS_SOCKET = "status.sock"
"""Name of the socket in the run directory."""


def ask(path: str, api_key: str | None, timeout_s: float) -> bytes:
    """Return the answer of the arbiter that listens on ``path``, "" if it has none. OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(path)
        connection.sendall(json.dumps(api_key).encode() + b"\n")
        answer = bytearray()
        while piece := connection.recv(1 << 16):
            answer += piece
        return bytes(answer)
