"""The rows of lists of models: what workers loaded, and the parents of adapters."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from dynamo.frontend.models.model import ModelEntry
from dynamo.protocols.control import ROOT_KEY

if TYPE_CHECKING:
    from dynamo.frontend.models.on_demand import OnDemandModels


class ListedModel(NamedTuple):
    """A name in the lists of models; ``created_s`` is Unix time, ``context_length`` in tokens.

    ``root`` is what the workers loaded, a directory or an id; None before the first one.
    ``parent`` is the model of an adapter.
    """

    name: str
    created_s: int
    context_length: int | None
    root: str | None = None
    parent: str | None = None


class AdapterParents:
    """The model of each adapter among ``entries``: the first that its worker serves, too.

    ``on_demand`` has those of adapters without a worker. O(workers), if there is an adapter.
    """

    def __init__(self, entries: Collection[ModelEntry], on_demand: OnDemandModels) -> None:
        self._on_demand = on_demand
        self._bases: dict[int, str] = {}
        if any(entry.card.lora_name is not None for entry in entries):
            for entry in entries:
                if entry.card.lora_name is None:
                    for card in entry.workers.values():
                        self._bases.setdefault(card.instance_id, entry.name)

    def parent(self, entry: ModelEntry) -> str | None:
        """Return the model of an adapter; None for other models, and if it is unknown."""
        if entry.card.lora_name is None:
            return None
        for card in entry.workers.values():
            if card.instance_id in self._bases:
                return self._bases[card.instance_id]
        record = self._on_demand.record(entry.name)
        return None if record is None or record.model == entry.name else record.model


def listed_model(name: str, entry: ModelEntry, adapters: AdapterParents) -> ListedModel:
    """Return the row of ``entry`` under ``name``, the model's own or an alias."""
    card = next(iter(entry.workers.values()), entry.card)  # an adapter's directory may change
    root = card.runtime_config.runtime_data.get(ROOT_KEY)
    if not isinstance(root, str):
        root = card.source_path or None
    parent = adapters.parent(entry)
    return ListedModel(name, entry.created_s, card.context_length, root, parent)
