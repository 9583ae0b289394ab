"""Whether a worker's model card and its KV events are about blocks of the same size."""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary

from dynamo.runtime import DistributedRuntime, Endpoint

__all__ = ["note_block_size"]

log = logging.getLogger(__name__)
_noted: WeakKeyDictionary[DistributedRuntime, dict[tuple[str, str], dict[str, int]]] = (
    WeakKeyDictionary()
)


def note_block_size(endpoint: Endpoint, source: str, block_size: int) -> None:
    """``source`` (the call that says so) gives ``block_size`` tokens for the blocks of this worker;
    an error is logged when another source has given another."""
    said = _noted.setdefault(endpoint.runtime, {}).setdefault(endpoint.path[:2], {})
    said[source] = block_size
    if len(set(said.values())) > 1:
        sizes = ", ".join(f"{name} {size}" for name, size in said.items())
        log.error(
            "the KV blocks of this worker have two sizes in tokens (%s): routers will not use its "
            "KV events. Give both the engine's own block size",
            sizes,
        )
