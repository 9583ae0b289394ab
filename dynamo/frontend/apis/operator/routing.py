"""/v1/route: which worker a chat or completion request would go to now, and why. Sends nothing.

POST takes the body of such a request; GET takes ``?prompt=…`` and ``model=…``, optional with a
single model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from functools import partial

import msgspec

from dynamo.config.frontend import IGNORE
from dynamo.errors import DynamoError, InvalidArgument, ModelNotFound, NoInstances
from dynamo.frontend.apis.chat.generation import adapt, is_chat, named_model, requested_model
from dynamo.frontend.apis.relay.body import name_only_model, peek, prompt_ids
from dynamo.frontend.disagg.prefill_request import DECODE_OVERRIDE, prefill_routing
from dynamo.frontend.disagg.router import PrefillRouter
from dynamo.frontend.models.model import LoadedModel
from dynamo.frontend.models.registry import Models
from dynamo.frontend.prompt.field_rules import rewritten
from dynamo.frontend.prompt.off_loop import OffLoop
from dynamo.frontend.prompt.validation import check_json, parse_chat, parse_completion
from dynamo.frontend.requests.errors import error_response, explained, id_headers, with_retry
from dynamo.frontend.requests.headers import routed
from dynamo.http import Exchange, query_fields
from dynamo.http.routes import Routes, in_task
from dynamo.protocols.engine import PreprocessedRequest, Routing
from dynamo.protocols.openai import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    ChatCompletionRequest,
    CompletionRequest,
)
from dynamo.router.decision.explanation import Explanation
from dynamo.router.eligibility.filters import NO_SLOT
from dynamo.router.modes.picker import Picker
from dynamo.runtime.process.tasks import Tasks


class ExplainRoutes:
    """For operators: takes the body and headers of a generation request. kv mode only."""

    def __init__(
        self,
        models: Models,
        tasks: Tasks,
        overload_status: int,
        threads: OffLoop,
        ignores_nvext: bool = False,
    ) -> None:
        self._models = models
        self._tasks = tasks
        self._overload_status = overload_status
        self._threads = threads
        self._ignores_nvext = ignores_nvext
        self._adapt = partial(adapt, models, ignores_nvext)

    def install(self, routes: Routes) -> None:
        """Add the route to the table."""
        route = in_task(self._tasks.spawn, self._answer)
        routes.post("/v1/route", route)
        routes.get("/v1/route", route)

    async def _answer(self, exchange: Exchange) -> None:
        body = exchange.body
        echoed = id_headers(None, exchange.headers.get("x-request-id"))
        try:
            if exchange.method != "POST":
                body = self._from_query(exchange.query)
            explanation = await self._explanation(body, exchange.headers)
        except DynamoError as error:
            named = await self._threads.run(named_model, body)
            model = "unknown" if named is None else named.model
            # This route starts no worker: the text says what does.
            if isinstance(error, NoInstances | ModelNotFound):
                error = self._models.on_demand.not_loaded(model) or error
            error = explained(error, model)
            status, text = error_response(error, self._overload_status)
            exchange.respond(status, text, headers=with_retry(error, echoed))
        else:
            exchange.respond(200, explanation, headers=echoed)

    def _from_query(self, query: str) -> bytes:
        """The completion request that the query describes. Raises InvalidArgument."""
        fields = query_fields(query)
        unknown = ", ".join(f"`{name}`" for name in sorted(fields.keys() - {"model", "prompt"}))
        if unknown or "prompt" not in fields:
            problem = f"not {unknown}" if unknown else "`prompt` is missing"
            raise InvalidArgument(f"The query takes `prompt` and `model`: {problem}")
        models = self._models
        names = [entry.name for entry in models.entries() if entry.served]
        names = names or sorted(models.on_demand.models())
        if not names:
            raise NoInstances
        if "model" not in fields and len(names) > 1:
            raise InvalidArgument(f"The query needs `model`, one of: {', '.join(names)}")
        return msgspec.json.encode({"model": names[0], **fields})

    async def _explanation(self, body: bytes, headers: Mapping[str, str]) -> bytes:
        threads = self._threads
        with threads.hold(len(body)):
            relayed = await self._relayed(body) if self._models.relays else None
            loaded, request = relayed or await self._tokenized(body)
        routing = routed(request.routing, headers, ignores_nvext=self._ignores_nvext)
        queued = loaded.dispatch.queue or ()
        return msgspec.json.encode(
            explain_request(loaded.picker, loaded.prefill.router, request, routing, queued)
        )

    async def _tokenized(self, body: bytes) -> tuple[LoadedModel, PreprocessedRequest]:
        threads = self._threads
        parsed = await threads.run(_parse, body)
        if isinstance(parsed, ChatCompletionRequest):
            loaded = self._models.find(requested_model(self._models, parsed, "Chat"), "Chat")
            self._adapt(parsed, loaded)
            prepared = await loaded.preprocessor.chat_off_loop(parsed, threads)
        else:
            name = requested_model(self._models, parsed, "Completions")
            loaded = self._models.find(name, "Completions")
            self._adapt(parsed, loaded)
            prepared = await loaded.preprocessor.completion_off_loop(parsed, threads)
        return loaded, prepared.requests[0]

    async def _relayed(self, body: bytes) -> tuple[LoadedModel, PreprocessedRequest] | None:
        """The same for a relayed model; None for others."""
        threads = self._threads
        fields = await threads.run(peek, body)
        path = CHAT_PATH if bytes(fields.messages) else COMPLETIONS_PATH
        name_only_model(fields, path, self._models.entries())
        entry = self._models.named(fields.model)
        if entry is None or not entry.relayed:
            return None
        loaded = entry.loaded
        if not entry.served or loaded is None:
            raise NoInstances
        most, rules = loaded.context_length, self._models.rules.get(loaded.name)
        if rules is not None:
            body = await threads.run(rewritten, path, body, loaded.name, rules)
            # Again: the rules may have set what the router reads.
            fields = await threads.run(peek, body)
        ids = await threads.run(prompt_ids, loaded.preprocessor, path, body, fields, most)
        routing, override = fields.constraints(loaded.card.lora_name, self._ignores_nvext)
        return loaded, PreprocessedRequest(
            fields.model, ids, routing=routing, router_config_override=override
        )


def _parse(body: bytes) -> ChatCompletionRequest | CompletionRequest:
    check_json(body)
    try:
        parse = parse_chat if is_chat(body) else parse_completion
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"Failed to deserialize the JSON body: {error}") from None
    return parse(body, unknown=IGNORE)


def explain_request(
    picker: Picker,
    prefill: PrefillRouter | None,
    request: PreprocessedRequest,
    routing: Routing | None,
    queued: Sized,
) -> Explanation:
    """The table of the decode workers. It contains the table of the prefill workers if the prompt
    would go to one first, else the reason why not. Raises InvalidArgument for a bad override."""
    override = request.router_config_override
    tokens = request.token_ids
    if prefill is None or not prefill.active:
        return picker.explain(tokens, routing, override, queued)
    if stays := prefill.local_reason(tokens, routing):
        explanation = picker.explain(tokens, routing, override, queued)
        explanation.stays = stays
        return explanation
    explanation = picker.explain(tokens, routing, {**(override or {}), **DECODE_OVERRIDE}, queued)
    chooser = prefill.workers.picker
    if chooser is not None:
        inner = chooser.explain(tokens, prefill_routing(routing), override, prefill.queue)
        explanation.prefill = _with_slots(inner, prefill)
    return explanation


def _with_slots(explanation: Explanation, prefill: PrefillRouter) -> Explanation:
    """Mark the candidates without a free slot: the prompt waits for the chosen one, or with no
    patience goes to the best of those with a slot."""
    free = prefill.queue.free_workers
    # Without a cost a row is excluded already, for another reason.
    able = [row for row in explanation.candidates if row.cost is not None]
    for row in able:
        if row.worker_id not in free:
            row.excluded = NO_SLOT
            row.chosen = row.chosen and prefill.patient
    ready = [row for row in able if not row.excluded]
    if ready and not any(row.chosen for row in able):
        ready[0].chosen = True  # candidates are in order of cost
    return explanation
