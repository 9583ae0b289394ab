"""The fields of model cards that a router uses: capacity, ranks, taints, block size."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from dynamo.protocols.card import DEFAULT_BLOCK_SIZE, BlockSize, RuntimeConfig
from dynamo.protocols.control import MODEL_CARDS, Id, record_decoder
from dynamo.runtime.discovery import Discovery, KeyEvent, Watch

__all__ = ["CardPart", "WorkerCards"]

log = logging.getLogger(__name__)


class CardPart(msgspec.Struct):
    """The fields that the router reads. The defaults are those of the model card."""

    instance_id: Id
    kv_cache_block_size: BlockSize = DEFAULT_BLOCK_SIZE
    worker_type: str = "Aggregated"
    runtime_config: RuntimeConfig = msgspec.field(default_factory=RuntimeConfig)


_decode = record_decoder(CardPart)


class WorkerCards:
    """The model cards of one endpoint, by worker.

    A worker may have several, one for each adapter: the last one received counts. ``on_change`` is
    called with the worker of each new or changed card.
    """

    def __init__(self, on_change: Callable[[int], None]) -> None:
        self._on_change = on_change
        self._cards: dict[int, CardPart] = {}
        self._prefix = MODEL_CARDS
        self._watch: Watch | None = None

    async def start(self, discovery: Discovery, path: tuple[str, str, str]) -> None:
        """Follow the cards; existing ones are known on return."""
        self._prefix = MODEL_CARDS + "/".join(path) + "/"
        self._watch = discovery.watch(self._prefix, self._on_key)
        await self._watch.ready()

    def close(self) -> None:
        """Stop following. Idempotent."""
        if self._watch is not None:
            self._watch.close()

    def get(self, worker_id: int) -> CardPart | None:
        """The worker's card; None without one."""
        return self._cards.get(worker_id)

    def _on_key(self, event: KeyEvent) -> None:
        try:
            worker_id = int(event.key.removeprefix(self._prefix).partition("/")[0], 16)
            if event.value is None:
                self._cards.pop(worker_id, None)
                return
            card = _decode(event.value)
            if card.instance_id != worker_id:
                raise ValueError(f"`instance_id` is that of worker {card.instance_id:x}")
        except ValueError as error:
            log.warning("skipping the model card %s: %s", event.key, error)
            return
        if self._cards.get(card.instance_id) != card:
            self._cards[card.instance_id] = card
            self._on_change(card.instance_id)
