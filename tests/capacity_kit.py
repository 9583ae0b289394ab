"""Mocker processes with metrics pages, and clients that hold requests open and drop them."""

from __future__ import annotations

import json
import socket
from typing import Any

from deployment import Deployment, free_port
from prometheus_client.parser import text_string_to_metric_families

CHAT = "/v1/chat/completions"


def chat(max_tokens: int, **more: Any) -> dict[str, Any]:
    """The body of a chat for the model of :class:`MockerPage`."""
    messages = [{"role": "user", "content": "hello"}]
    return {"model": "tiny", "messages": messages, "max_tokens": max_tokens, **more}


class MockerPage:
    """One mocker process and its metrics page."""

    def __init__(self, deployment: Deployment, *flags: str, **env: str) -> None:
        self._deployment = deployment
        self.port = free_port()
        port = str(self.port)
        self.process = deployment.mocker("--block-size", "16", *flags, DYN_SYSTEM_PORT=port, **env)

    def sample(self, name: str, **labels: str) -> float:
        """The sum of the samples ``name`` with these labels."""
        page = self._deployment.request("GET", "/metrics", port=self.port)[2].decode()
        return sum(
            one.value
            for family in text_string_to_metric_families(page)
            for one in family.samples
            if one.name == name and labels.items() <= one.labels.items()
        )

    def cancelled(self) -> float:
        """Requests to ``generate`` whose cancellation the worker has received."""
        return self.sample("dynamo_component_cancellation_total", dynamo_endpoint="generate")

    def inflight(self) -> float:
        """Requests to ``generate`` that the worker has."""
        return self.sample("dynamo_component_inflight_requests", dynamo_endpoint="generate")


class OpenRequest:
    """A request whose client waits, until it is dropped."""

    def __init__(self, deployment: Deployment, body: dict[str, Any], **headers: str) -> None:
        data = json.dumps(body).encode()
        extra = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._socket = socket.create_connection(("127.0.0.1", deployment.port), timeout=30)
        self._socket.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{extra}"
            f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )

    def read(self) -> bytes:
        """Wait for the first bytes of the response."""
        return self._socket.recv(4096)

    def send(self, data: bytes) -> None:
        """Send more bytes behind the request."""
        self._socket.sendall(data)

    def half_close(self) -> None:
        """Send nothing more; still read."""
        self._socket.shutdown(socket.SHUT_WR)

    def drop(self) -> None:
        """Close the connection."""
        self._socket.close()
