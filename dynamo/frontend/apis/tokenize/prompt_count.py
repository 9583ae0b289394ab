"""Routes that count the tokens of a prompt as its generation would have them, and generate nothing.

The body is that of the generation API. The work is in threads: no such route is in a hurry.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dynamo.errors import DynamoError
from dynamo.frontend.answer.sse import json_bytes
from dynamo.frontend.apis.chat.generation import GenerationApi
from dynamo.frontend.models.registry import Models
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.http import Exchange
from dynamo.http.routes import Route, in_task
from dynamo.runtime.process.tasks import Tasks


class PromptCountRoutes:
    """Parse as the API does, render, tokenize, respond with the count."""

    def __init__(self, registry: RequestRegistry, models: Models, tasks: Tasks) -> None:
        self._registry = registry
        self._models = models
        self._tasks = tasks

    def route(self, api: GenerationApi, body: Callable[[int], dict[str, Any]]) -> Route:
        """The route for prompts of ``api``; ``body`` makes the response of a number of tokens.

        The ``endpoint`` of ``api`` is the label of failures.
        """
        if api.errors is not None:
            self._registry.error_shapes[api.endpoint] = api.errors
        return in_task(self._tasks, partial(self._serve, api, body))

    async def _serve(
        self, api: GenerationApi, body: Callable[[int], dict[str, Any]], exchange: Exchange
    ) -> None:
        registry, threads = self._registry, self._registry.off_loop
        lenient = registry.settings.ignore_unsupported_fields
        model = "unknown"
        try:
            registry.check()
            with threads.hold(len(exchange.body)):
                parsed = await threads.run(api.parse, exchange.body, ignore_unsupported=lenient)
                model = parsed.model
                loaded = await self._models.find_loaded(model, api.model_type)
                if api.complete is not None:
                    api.complete(parsed, exchange)
                prepared = await api.prepare_off_loop(loaded.preprocessor, parsed, threads)
        except DynamoError as error:
            registry.hold_or_refuse(exchange, api.endpoint, error, model)
            return
        exchange.respond(200, json_bytes(body(prepared.prompt_tokens)))
