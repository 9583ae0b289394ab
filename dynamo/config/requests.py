"""Options of the request plane: sizes, timeouts and bounds of one connection."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import option

__all__ = ["RequestPlaneSettings"]

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class RequestPlaneSettings:
    """request plane: sizes and timeouts between frontend and workers"""

    max_message_size_bytes: int = option(
        32 * MIB,
        env="DYN_TCP_MAX_MESSAGE_SIZE",
        minimum=1024,
        maximum=1024 * MIB,
        help="largest request or response item in bytes; a larger one fails alone",
    )
    silence_timeout_s: float = option(
        2.0,
        env="DYN_REQUEST_PLANE_SILENCE_TIMEOUT",
        minimum=0.02,
        help="seconds a worker with requests may send nothing, not even the answer to a ping, "
        "before its requests go to other workers",
    )
    request_timeout_s: float = option(
        10.0,
        env="DYN_TCP_REQUEST_TIMEOUT",
        minimum=0.01,
        help="seconds after which a silent worker's connection is lost, with the requests that no "
        "other worker can take",
    )
    connect_timeout_s: float = option(
        3.0, env="DYN_TCP_CONNECT_TIMEOUT", minimum=0.01, help="seconds a connection may take"
    )
    tcp_user_timeout_s: float = option(
        6.0,
        env="DYN_TCP_USER_TIMEOUT",
        minimum=0.1,
        help="seconds that sent bytes may go unacknowledged before a TCP connection counts as lost",
    )
    high_water_bytes: int = option(
        256 * 1024,
        env="DYN_REQUEST_PLANE_HIGH_WATER",
        minimum=4096,
        help="unsent bytes of one connection above which senders are asked to wait",
    )
    hard_cap_bytes: int = option(
        64 * MIB,
        env="DYN_REQUEST_PLANE_HARD_CAP",
        minimum=64 * 1024,
        help="unsent bytes of one connection above which requests are rejected",
    )
    max_streams: int = option(
        50_000,
        env="DYN_REQUEST_PLANE_MAX_STREAMS",
        minimum=1,
        help="requests one process serves at once; further ones are rejected as overloaded",
    )
