"""POST /tokenize and POST /detokenize, as on vLLM's server: prompts to token ids, and back.

The frontend has the tokenizer, so no worker is asked: a model answers also while its workers sleep.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from dynamo.errors import DynamoError, InvalidArgument, ModelNotFound, NoInstances, shorten
from dynamo.frontend.apis.tokenize.answer import (
    detokenized,
    parse_detokenize,
    parse_tokenize,
    tokenized,
)
from dynamo.frontend.models.model import LoadedModel
from dynamo.frontend.models.registry import Models
from dynamo.frontend.prompt.preprocessor import Preprocessor
from dynamo.frontend.requests.errors import error_response, explained, with_retry
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.http import Exchange
from dynamo.http.routes import Routes, in_task
from dynamo.runtime.process.tasks import Tasks

_INLINE_BYTES = 4 << 10
"""Also `tokenizers`, the slower library, takes little time for so much."""


class _Conversion(NamedTuple):
    """The difference between the routes."""

    parse: Callable[[bytes], Any]
    convert: Callable[[Preprocessor, Any], bytes]


_TOKENIZE = _Conversion(parse_tokenize, tokenized)
_DETOKENIZE = _Conversion(parse_detokenize, detokenized)


class TokenizeRoutes:
    """Converts small bodies at once, large ones in a thread."""

    def __init__(self, registry: RequestRegistry, models: Models, tasks: Tasks) -> None:
        self._registry = registry
        self._models = models
        self._tasks = tasks

    def install(self, routes: Routes) -> None:
        """Add the routes to the table."""
        routes.post("/tokenize", in_task(self._tasks, partial(self._answer, _TOKENIZE)))
        routes.post("/detokenize", in_task(self._tasks, partial(self._answer, _DETOKENIZE)))

    async def _answer(self, conversion: _Conversion, exchange: Exchange) -> None:
        registry, model = self._registry, "unknown"
        registry.enter()
        try:
            registry.check()
            with registry.off_loop.hold(len(exchange.body)):
                asked = await self._run(exchange, conversion.parse, exchange.body)
                loaded = await self._loaded(asked.model)
                model = loaded.name
                found = await self._run(exchange, conversion.convert, loaded.preprocessor, asked)
            exchange.respond(200, found)
        except DynamoError as error:
            shown = explained(error, model)
            status, body = error_response(shown, registry.overload_status)
            exchange.respond(status, body, headers=with_retry(shown, ()))
        finally:
            registry.leave()

    async def _run(self, exchange: Exchange, function: Callable[..., Any], *args: Any) -> Any:
        if len(exchange.body) > _INLINE_BYTES:
            return await self._registry.off_loop.run(function, *args)
        return function(*args)

    async def _loaded(self, name: str | None) -> LoadedModel:
        """The model with a tokenizer called ``name``, by default the only one.

        Raises InvalidArgument, ModelNotFound, and NoInstances for one that has not been loaded.
        """
        models = self._models
        if name is None:
            name = self._only_name()
        if models.is_loading(name):
            await models.loaded()
        entry = models.named(name)
        if entry is None and models.on_demand.record(name) is not None:
            raise NoInstances
        if entry is None or entry.relayed:
            raise ModelNotFound(f"Model not found: {shorten(name)}")
        if entry.loaded is None:
            raise NoInstances
        return entry.loaded

    def _only_name(self) -> str:
        entries = self._models.entries()
        names = [entry.name for entry in entries if not entry.relayed]
        if len(names) == 1:
            return names[0]
        names = sorted(entry.name for entry in entries)
        if not names:
            raise NoInstances
        raise InvalidArgument(
            f"Validation: several models are served; name one in 'model': "
            f"{shorten(', '.join(names), 256)}"
        )
