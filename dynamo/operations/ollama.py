"""A running Ollama: where it answers, and what it is asked to do with its models."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from dynamo.config import environ
from dynamo.errors import DynamoError

_ADDRESS = "127.0.0.1:11434"
_CONNECT_S = 0.5
_ANSWER_S = 60.0


def running_ollama() -> str | None:
    """Return the URL of an Ollama that answers here; None without one."""
    given = environ().get("OLLAMA_HOST") or _ADDRESS
    parts = urlsplit(given if "://" in given else f"//{given}")
    host = parts.hostname or "127.0.0.1"
    host = "127.0.0.1" if host == "0.0.0.0" else host
    with contextlib.suppress(OSError, ValueError):
        port = parts.port or 11434
        with socket.create_connection((host, port), _CONNECT_S):
            shown = f"[{host}]" if ":" in host else host
            return f"{parts.scheme or 'http'}://{shown}:{port}"
    return None


def ask_ollama(method: str, path: str, model: str) -> Iterator[dict[str, Any]]:
    """Yield the lines that a running Ollama answers. Raises DynamoError and OSError."""
    url = running_ollama()
    if url is None:
        raise DynamoError(
            "no Ollama answers here, which keeps its models itself; try: ollama serve"
        )
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=_ANSWER_S)
    try:
        connection.request(method, path, json.dumps({"model": model}).encode())
        answer = connection.getresponse()
        for line in answer:
            reply = json.loads(line) if line.strip() else {}
            if "error" in reply:
                raise DynamoError(f"Ollama at {url}: {reply['error']}")
            yield reply
        if answer.status >= http.client.BAD_REQUEST:
            raise DynamoError(f"Ollama at {url} answered {answer.status} {answer.reason}")
    except (http.client.HTTPException, ValueError) as error:
        raise DynamoError(f"Ollama at {url}: {error}") from error
    finally:
        connection.close()
