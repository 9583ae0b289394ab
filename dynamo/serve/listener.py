"""The listening socket of a frontend's watcher, which outlives the frontend's processes.

Clients that connect while a frontend is restarted, or after its death, wait for the next process
instead of being refused. The process itself starts to listen, so nothing waits at the first start.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping

from dynamo.serve.graph.frontend_address import FrontendAddress

__all__ = ["FrontendListener"]

_VARIABLE = "DYN_HTTP_LISTEN_FD"
log = logging.getLogger(__name__)


class FrontendListener:
    """Passes a socket bound to ``address`` to processes; none for None."""

    def __init__(self, address: FrontendAddress | None) -> None:
        self.address = address
        self._bound: tuple[FrontendAddress, socket.socket] | None = None

    @property
    def is_shared(self) -> bool:
        """Whether several processes can listen on the socket."""
        return self._bound is not None

    def inherited(self, env: Mapping[str, str]) -> tuple[dict[str, str], tuple[int, ...]]:
        """Return the environment and the descriptors for a process of ``env``.

        Binds at the first call, and again after :meth:`close` or at another address. If that fails,
        the process binds itself and reports the reason.
        """
        if self._bound is not None and self._bound[0] != self.address:
            self.close()  # a process that still listens there has its own copy
        if self.address is not None and self._bound is None:
            found = _bind(self.address)
            self._bound = None if found is None else (self.address, found)
        if self._bound is None:
            return dict(env), ()
        number = self._bound[1].fileno()
        return {**env, _VARIABLE: str(number)}, (number,)

    def close(self) -> None:
        """Refuse clients once the processes have closed their copies, too. Idempotent."""
        if self._bound is not None:
            self._bound[1].close()
            self._bound = None


def _bind(address: FrontendAddress) -> socket.socket | None:
    """Bind to ``address``; None if that fails, or if the name has several addresses."""
    try:
        found = socket.getaddrinfo(
            address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        if len(found) != 1:
            return None
        family, kind, protocol, _, where = found[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind(where)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        log.debug("%s: %s", address.url, error)
        return None
    bound.setblocking(False)
    return bound
