"""Addresses of the request plane: ``uds:/path`` and ``tcp:host:port``."""

from __future__ import annotations

from typing import NamedTuple

from dynamo.errors import InvalidArgument

__all__ = ["Address", "parse"]


class Address(NamedTuple):
    """``path`` is set for a UNIX socket; otherwise ``host`` and ``port``."""

    path: str | None
    host: str
    port: int

    def __str__(self) -> str:
        if self.path is not None:
            return f"uds:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp:{host}:{self.port}"


def parse(text: str) -> Address:
    """Raises InvalidArgument, naming the text."""
    kind, _, rest = text.partition(":")
    if kind == "uds" and rest:
        return Address(rest, "", 0)
    host, _, port = rest.rpartition(":")
    if kind == "tcp" and host and port.isdecimal() and int(port) <= 0xFFFF:
        return Address(None, host.strip("[]"), int(port))
    raise InvalidArgument(f"request plane address {text!r} is neither uds:/path nor tcp:host:port")
