"""Knobs of the standalone router, beside those of every router. Spec 4.2."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import option

__all__ = ["RouterProcessSettings"]


@dataclass(frozen=True, kw_only=True)
class RouterProcessSettings:
    """standalone router: whom it routes to"""

    endpoint: str | None = option(
        None,
        "--endpoint",
        env="DYN_ROUTER_ENDPOINT",
        metavar="NS.COMPONENT.ENDPOINT",
        help="the workers' endpoint",
    )
    block_size: int = option(
        128,
        "--router-block-size",
        "--block-size",
        env="DYN_ROUTER_BLOCK_SIZE",
        minimum=1,
        help="tokens in a KV block of the workers",
    )
