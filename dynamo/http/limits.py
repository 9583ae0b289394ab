"""The bounds of the HTTP server on bytes, counts and seconds."""

from __future__ import annotations

import resource
from dataclasses import dataclass

__all__ = ["HttpLimits", "allow_open_files"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpLimits:
    """The bounds of the HTTP server. Comments name the reaction to a request above a bound.

    Seconds are checked by one coarse sweep a server, so they hold to about ``sweep_s``.
    """

    request_line_bytes: int = 8 * 1024  # 414
    header_bytes: int = 32 * 1024  # 431
    header_count: int = 100  # 431
    body_bytes: int = 45 * 1024 * 1024  # 413
    bodies_bytes: int = 256 * 1024 * 1024  # 503; unfinished bodies beyond 64 KiB each, together
    connections: int = 4096  # 503 and close
    header_timeout_s: float = 15.0  # 408; counted from the first byte of a head
    body_timeout_s: float = 120.0  # 408; counted from the end of the head
    response_timeout_s: float = 60.0  # 504; until the first worker has the request
    idle_timeout_s: float = 75.0  # closed without a response
    stall_timeout_s: float = 60.0  # aborted: the client does not read its response
    linger_s: float = 2.0  # how long input of a refused client is discarded before the abort
    sweep_s: float = 1.0
    backlog: int = 2048


def allow_open_files(count: int) -> int:
    """Raise the soft limit on open files, as far as the hard one allows; return up to ``count``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
