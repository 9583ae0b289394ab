"""The cards of prefill workers, whichever comes first: they or the model they belong to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from dynamo.frontend.models.model import ModelEntry
from dynamo.protocols.card import ModelCard

__all__ = ["PrefillCards"]

log = logging.getLogger(__name__)


class PrefillCards:
    """Gives each card to the entry of its name in ``entries``; a card makes no model of its own.

    ``reject(model, reason, text)`` is told of cards that do not fit; they get another chance when
    what they did not fit has gone.
    """

    def __init__(
        self, entries: Mapping[str, ModelEntry], reject: Callable[[str, str, str], None]
    ) -> None:
        self._entries = entries
        self._reject = reject
        self._cards: dict[str, ModelCard] = {}
        self._owners: dict[str, ModelEntry] = {}
        self._refused: set[str] = set()

    def add(self, key: str, card: ModelCard) -> None:
        """A prefill worker has come, or its card has changed."""
        self._forget(key)
        self._cards[key] = card
        entry = self._entries.get(card.display_name)
        if entry is None:
            log.info("%s waits for a decode worker of %s", key, card.display_name)
        else:
            self._offer(entry, key, card)

    def remove(self, key: str) -> None:
        """Its card is gone; harmless for cards that are not ours."""
        entry = self._forget(key)
        if entry is not None:
            self.joined(entry)

    def joined(self, entry: ModelEntry) -> None:
        """``entry`` is new, or has lost a prefill worker: whoever waits for that may come in."""
        for key, card in self._cards.items():
            if card.display_name == entry.name and self._owners.get(key) is not entry:
                self._offer(entry, key, card)

    def _forget(self, key: str) -> ModelEntry | None:
        self._cards.pop(key, None)
        self._refused.discard(key)
        entry = self._owners.pop(key, None)
        if entry is not None:
            card = entry.prefill.remove(key)
            log.info("model %s: prefill worker %x left", entry.name, card.instance_id)
        return entry

    def _offer(self, entry: ModelEntry, key: str, card: ModelCard) -> None:
        reason = entry.prefill_agrees_with(card)
        if reason:
            self._owners.pop(key, None)
            if key in self._refused:
                return
            self._refused.add(key)
            text = f"{key}: the workers of {entry.name} have another {reason}; it gets no prompts"
            self._reject(entry.name, reason, text)
            return
        self._refused.discard(key)
        entry.prefill.add(key, card)
        self._owners[key] = entry
        log.info("model %s: prefill worker %x joined", entry.name, card.instance_id)
