"""What the workers of a model take: token ids, whole OpenAI bodies, or whole HTTP requests.

``model_input`` of the card decides it, and with it the paths that the model serves and how its
prompts are routed.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from dynamo.config.router import RouterSettings
from dynamo.errors import ConfigError, ModelNotFound, shorten
from dynamo.frontend.apis.relay.body import CHAT, COMPLETIONS, EMBEDDINGS
from dynamo.frontend.prompt.preprocessor import Preprocessor
from dynamo.http.routes import RoutePatterns
from dynamo.protocols.control import ModelCard
from dynamo.protocols.engine import HTTP_INPUT, ROUTES

TEXT_INPUT = "Text"
INPUTS = ("Tokens", TEXT_INPUT, HTTP_INPUT)
"""Values of ``model_input`` that this frontend serves."""

_TYPE_PATHS = {"Chat": CHAT, "Completions": COMPLETIONS, "Embedding": EMBEDDINGS}
_PATH = re.compile(r"/v1(/[A-Za-z0-9][A-Za-z0-9_.~-]*)+|/(de)?tokenize")
_MAX_PATHS = 128
log = logging.getLogger(__name__)


def missing_route(
    model: str, path: str, paths: Collection[str], types: Collection[str]
) -> ModelNotFound:
    """Return the error of a request for a route that ``model`` does not have.

    It has ``paths``, or as a model that takes tokens those of ``types``.
    """
    has = sorted(paths or {_TYPE_PATHS.get(one, one) for one in types})
    return ModelNotFound(
        f"Route not found: model `{model}` has no {shorten(_TYPE_PATHS.get(path, path))}, "
        f"it has {', '.join(has)}"
    )


def is_relayed(card: ModelCard) -> bool:
    """Whether workers get bodies whole, not token ids."""
    return card.model_input != "Tokens"


def paths_of(cards: Iterable[ModelCard]) -> frozenset[str]:
    """The paths to which all these workers of one relayed model take a POST that names it."""
    found = [_paths(card) for card in cards]
    return frozenset.intersection(*found) if found else frozenset()


def patterns_of(cards: Iterable[ModelCard]) -> RoutePatterns:
    """The other routes of all these workers: with another method, or parameters in the path."""
    found = [RoutePatterns(_listed(card)).routes for card in cards]
    return RoutePatterns(frozenset.intersection(*found) if found else ())


def router_settings(card: ModelCard, settings: RouterSettings) -> RouterSettings:
    """``settings`` for the workers of ``card``.

    Caches are predicted from decisions where no KV events can match: behind a server that publishes
    none (``enable_local_indexer`` is False), and in Text models, whose tokens only the worker has.
    """
    events = card.model_input == HTTP_INPUT and card.runtime_config.enable_local_indexer
    if not is_relayed(card) or events or not settings.kv_events:
        return settings
    return dataclasses.replace(settings, kv_events=False)


def load_preprocessor(card: ModelCard, settings: RouterSettings) -> Preprocessor | None:
    """Load what makes token ids of prompts; None for a relayed model whose router needs none, or
    whose card names no directory with a tokenizer. Blocks. Raises ConfigError."""
    if not is_relayed(card):
        return Preprocessor(card)
    if settings.mode != "kv" or card.model_input != HTTP_INPUT:
        return None
    if not card.source_path or not Path(card.source_path, "tokenizer.json").is_file():
        return None
    try:
        return Preprocessor(card)
    except ConfigError as error:
        log.warning("model %s is routed by its text: %s", card.display_name, error.message)
        return None


def _paths(card: ModelCard) -> frozenset[str]:
    if card.model_input == TEXT_INPUT:
        types = [one.strip() for one in card.model_type.split("|")]
        return frozenset(_TYPE_PATHS[one] for one in types if one in _TYPE_PATHS)
    return frozenset(one for one in _listed(card) if _PATH.fullmatch(one))


def _listed(card: ModelCard) -> list[str]:
    """The routes in a card of an HTTP server."""
    if card.model_input != HTTP_INPUT:
        return []
    given = (card.user_data or {}).get(ROUTES)
    listed = given[:_MAX_PATHS] if isinstance(given, list) else []
    return [one for one in listed if isinstance(one, str)]
