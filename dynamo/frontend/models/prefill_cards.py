"""The cards of prefill workers, and the model that each belongs to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from dynamo.frontend.models.model import ModelEntry, difference
from dynamo.protocols.control import ModelCard

log = logging.getLogger(__name__)


class PrefillCards:
    """Assigns the card of each prefill worker to the entry of its model in ``entries``.

    A card may arrive before its model. ``reject(model, reason, text)`` is called for a card that
    conflicts with the others; it is tried again when those are removed.
    """

    def __init__(
        self, entries: Mapping[str, ModelEntry], reject: Callable[[str, str, str], None]
    ) -> None:
        self._entries = entries
        self._reject = reject
        self._cards: dict[str, ModelCard] = {}
        self._owners: dict[str, ModelEntry] = {}
        self._refused: dict[str, str] = {}

    def problems(self) -> list[tuple[ModelCard, str]]:
        """Return the cards that conflict with others, and why."""
        return [(self._cards[key], text) for key, text in self._refused.items()]

    def add(self, key: str, card: ModelCard) -> None:
        """Add or replace the card at ``key``."""
        self._forget(key)
        self._cards[key] = card
        entry = self._entries.get(card.display_name)
        if entry is None:
            log.info("%s waits for a decode worker of %s", key, card.display_name)
        else:
            self._offer(entry, key, card)

    def remove(self, key: str) -> None:
        """Remove the card at ``key``, if it is that of a prefill worker."""
        entry = self._forget(key)
        if entry is not None:
            self.assign(entry)

    def assign(self, entry: ModelEntry) -> None:
        """Offer the unassigned cards to ``entry``, which is new or has lost a prefill worker."""
        for key, card in self._cards.items():
            if card.display_name == entry.name and self._owners.get(key) is not entry:
                self._offer(entry, key, card)

    def _forget(self, key: str) -> ModelEntry | None:
        self._cards.pop(key, None)
        self._refused.pop(key, None)
        entry = self._owners.pop(key, None)
        if entry is not None:
            card = entry.prefill.remove(key)
            log.info("model %s: prefill worker %x left", entry.name, card.instance_id)
        return entry

    def _offer(self, entry: ModelEntry, key: str, card: ModelCard) -> None:
        reason = entry.prefill_agrees_with(card)
        if reason:
            self._owners.pop(key, None)
            # Logged and counted once, however often it is offered.
            if key in self._refused:
                return
            text = f"the workers of {entry.name} have another {difference(reason)}"
            self._refused[key] = text
            self._reject(entry.name, reason, f"{key}: {text}; it gets no prompts")
            return
        self._refused.pop(key, None)
        entry.prefill.add(key, card)
        self._owners[key] = entry
        log.info("model %s: prefill worker %x joined", entry.name, card.instance_id)
