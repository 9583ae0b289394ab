"""The model cards of the worker: one for each model that the server offers."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from dynamo.attach.describe import ServedModel, ServerCapacity, ServerDescription
from dynamo.attach.names import choose_models
from dynamo.attach.profiles import model_type_of
from dynamo.config.attach import AttachSettings
from dynamo.errors import ConfigError
from dynamo.llm import unregister_model
from dynamo.llm.model_directory import ModelDirectory
from dynamo.llm.register import slug_of
from dynamo.llm.register_server import register_server
from dynamo.protocols.card import DEFAULT_BLOCK_SIZE, RuntimeConfig
from dynamo.runtime import Endpoint

__all__ = ["ServerCards"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Card:
    """What one registered card says, to see whether it has changed."""

    name: str
    model: ServedModel
    capacity: ServerCapacity


class ServerCards:
    """Keeps the cards of ``endpoint`` equal to the server's models.

    Several models share the endpoint: each has a card, like adapters of one model.
    """

    def __init__(
        self, endpoint: Endpoint, settings: AttachSettings, model: ModelDirectory | None
    ) -> None:
        self.ranks = max(1, len(settings.kv_events_endpoint))
        self._endpoint = endpoint
        self._settings = settings
        self._model = model
        self._cards: dict[str | None, _Card] = {}

    def block_size(self, description: ServerDescription) -> int:
        """Return the tokens of a KV block. ConfigError: events, and neither side says."""
        size = self._settings.block_size or description.capacity.block_size
        if size is None and self._settings.kv_events_endpoint:
            raise ConfigError(
                "--kv-events-endpoint: the server does not report the size of its KV blocks; give "
                "--block-size"
            )
        return size or DEFAULT_BLOCK_SIZE

    async def apply(self, description: ServerDescription) -> dict[str, str]:
        """Register what is new or changed, delete what is gone; return {name: server's name}.

        Raises ConfigError for a name that the server does not have.
        """
        by_name = {model.name: model for model in description.models}
        chosen = choose_models(self._settings.model_name, list(by_name))
        self._check_one_tokenizer([by_name[server_name] for server_name in chosen.values()])
        wanted: dict[str | None, _Card] = {}
        for name, server_name in chosen.items():
            card_name = _card_name(name, wanted)
            wanted[card_name] = _Card(name, by_name[server_name], description.capacity)
        for card_name in self._cards.keys() - wanted.keys():
            log.info("model %s is gone", self._cards.pop(card_name).name)
            await unregister_model(self._endpoint, card_name)
        for card_name, card in wanted.items():
            if self._cards.get(card_name) != card:
                await self._register(card_name, card, description)
                self._cards[card_name] = card
        return chosen

    async def _register(
        self, card_name: str | None, card: _Card, description: ServerDescription
    ) -> None:
        model, capacity = card.model, card.capacity
        length = model.context_length or (self._model.context_length if self._model else None)
        log.info(
            "model %s: %s, context %s, routes %s",
            card.name,
            description.profile.name,
            length or "unknown",
            " ".join(model.routes),
        )
        await register_server(
            self._endpoint,
            card.name,
            model.routes,
            model_type_of(model.routes),
            model=self._model,
            card_name=card_name,
            context_length=length,
            kv_cache_block_size=self.block_size(description),
            lora_name=model.name if model.is_adapter else None,
            runtime_config=RuntimeConfig(
                total_kv_blocks=capacity.total_blocks,
                max_num_seqs=capacity.max_num_seqs,
                max_num_batched_tokens=capacity.max_num_batched_tokens,
                data_parallel_size=self.ranks,
                context_length=length,
                enable_local_indexer=bool(self._settings.kv_events_endpoint),
            ),
        )

    def _check_one_tokenizer(self, models: list[ServedModel]) -> None:
        bases = [model.name for model in models if not model.is_adapter]
        if self._model is not None and len(bases) > 1:
            raise ConfigError(
                f"--model-path is the tokenizer of one model, and the server has {len(bases)} "
                f"({', '.join(bases)}): choose one with --served-model-name"
            )


def _card_name(name: str, taken: dict[str | None, _Card]) -> str | None:
    """Return the part of the card's key: None for the first; names may share a slug."""
    if not taken:
        return None
    slugs = {slug_of(other) for other in taken if other is not None}
    candidate, number = name, 2
    while slug_of(candidate) in slugs:
        candidate, number = f"{name}-{number}", number + 1
    return candidate
