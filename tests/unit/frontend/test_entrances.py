"""What the frontend promises about every request holds for each API, wherever the model runs."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from http_bench import Bench
from relayed_kit import PATHS, RelaySite
from text_kit import card

from dynamo.config.frontend import IGNORE, REFUSE
from dynamo.errors import Disconnected, ModelNotFound, NoInstances, Overloaded
from dynamo.frontend.apis.operator.routing import ExplainRoutes
from dynamo.frontend.prompt.field_rules import FieldRules
from dynamo.http import Exchange
from dynamo.http.api_keys import ApiKey, Grants
from dynamo.protocols.pooling import POOLING_KEY, POOLING_PATHS, POOLING_TYPES, PoolingFacts

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
MESSAGES = "/v1/messages"
GENERATION: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": {**CHAT, "messages": [CHAT["messages"]]},
    "/invocations": CHAT,
    "/v1/completions": {"prompt": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["ho"]},
    "/v2/rerank": {"query": "hi", "documents": ["ho"]},
    "/score": {"text_1": "hi", "text_2": ["ho"]},
    "/classify": {"input": "hi"},
    "/pooling": {"input": "hi"},
    "/v1/responses": {"input": "hi"},
    MESSAGES: CHAT,
}
COUNTS: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "hi"},
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/route": {"prompt": "hi"},
}
ENTRANCES = [(path, model) for path in GENERATION for model in ("tiny", "far")]
WITH_NVEXT = [entrance for entrance in ENTRANCES if entrance[0] != MESSAGES]
ALL_TYPES = frozenset(("Chat", "Completions", *POOLING_TYPES.values()))


class Entrances(RelaySite):
    """All APIs before a model of token workers, ``tiny``, and one of another server, ``far``."""

    embeds = True

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.entry.card = card(display_name="tiny")
        facts = PoolingFacts(scoring="bi-encoder")
        self.entry.card.runtime_config.runtime_data = {POOLING_KEY: msgspec.to_builtins(facts)}
        self.far.paths |= {*GENERATION, *COUNTS}
        explain = ExplainRoutes(self, self.tasks, 503, self.active.off_loop)  # type: ignore[arg-type]
        explain.install(self.routes)
        self.entry.served = True

    def find(self, name: str, model_type: str) -> Any:
        if name != "tiny":
            raise self.unregistered(name)
        return self.entry

    def unregistered(self, name: str) -> ModelNotFound:
        return ModelNotFound(f"Model not found: {name}")

    def explain(self, *_: Any) -> Any:
        return {}

    async def send(self, path: str, model: str, headers: Any = None, **more: Any) -> None:
        body = {**GENERATION, **COUNTS}[path]
        self.post({"model": model, **body, **more}, path, **(headers or {}))
        await self.tried()

    async def tried(self) -> None:
        """Wait until a worker has the request, or its client an answer."""
        async with asyncio.timeout(20):
            while not (self.streams or self.relayed or self.bench.transport.out):  # noqa: ASYNC110
                await asyncio.sleep(0)

    def leave(self) -> None:
        """The client goes, which ends its request wherever it is."""
        self.bench.connection.connection_lost(None)


@pytest.fixture
async def site() -> Entrances:
    return Entrances()


@pytest.mark.parametrize(("path", "model"), ENTRANCES)
async def test_headers_choose_the_worker(site: Entrances, path: str, model: str) -> None:
    headers = {"x_worker_instance_id": "9", "x_dynamo_session_id": "s", "x_dp_rank": "1"}
    await site.send(path, model, headers)
    (routing,) = site.routings
    assert (routing.backend_instance_id, routing.session_id, routing.dp_rank) == (9, "s", 1)
    site.leave()
    site.settled()


@pytest.mark.parametrize(("path", "model"), WITH_NVEXT)
async def test_nvext_chooses_the_worker(site: Entrances, path: str, model: str) -> None:
    taints = {"required_taints": ["a"], "preferred_taints": {"b": 2.0}}
    nvext = {
        "allowed_worker_ids": [9],
        "routing_constraints": taints,
        "agent_hints": {"strict_priority": 3, "latency_sensitivity": 2.0},
        "router_config_override": {"router_temperature": 0.5},
    }
    await site.send(path, model, nvext=nvext, cache_salt="s")
    (routing,) = site.routings
    assert (routing.allowed_worker_ids, routing.strict_priority) == ([9], 3)
    assert (routing.required_taints, routing.preferred_taints) == (["a"], {"b": 2.0})
    assert (routing.priority_jump, routing.cache_namespace) == (2.0, "s")
    assert site.overrides == [{"router_temperature": 0.5}]
    site.leave()
    site.settled()


@pytest.mark.parametrize(("path", "model"), WITH_NVEXT)
async def test_a_wrong_nvext_is_named(site: Entrances, path: str, model: str) -> None:
    await site.send(path, model, nvext={"dp_rank": -1})
    assert site.status == 400 and b"nvext.dp_rank" in site.body, site.body
    assert site.answer["error"]["type"] == "invalid_request_error" and not site.routings


@pytest.mark.parametrize(("path", "model"), WITH_NVEXT)
async def test_disable_nvext_holds(path: str, model: str) -> None:
    site = Entrances(disable_nvext=True)
    await site.send(path, model, {"x_dp_rank": "1"}, nvext={"allowed_worker_ids": [9]})
    (routing,) = site.routings
    assert routing is None or (routing.allowed_worker_ids, routing.dp_rank) == (None, None)
    site.leave()


@pytest.mark.parametrize(("path", "model"), WITH_NVEXT)
async def test_a_user_raises_no_priority(site: Entrances, path: str, model: str) -> None:
    def as_alice(exchange: Exchange) -> None:
        exchange.api_key = ApiKey("alice", "user", b"", Grants())
        site.routes(exchange)

    site.bench = Bench(handler=as_alice)
    await site.send(path, model, nvext={"agent_hints": {"strict_priority": 1}})
    assert site.status == 403 and b"strict_priority" in site.body and not site.routings


@pytest.mark.parametrize("path", sorted(POOLING_PATHS))
async def test_vllms_priority_and_session_choose_as_nvext_does(path: str) -> None:
    site = Entrances()
    body = next(body for name, body in GENERATION.items()
                if POOLING_PATHS.get(name) == POOLING_PATHS[path])  # fmt: skip
    site.post({**body, "model": "tiny", "priority": -3, "session_id": "s"}, path)
    (routing,) = site.routings
    assert (routing.priority, routing.session_id) == (3, "s")
    site.leave()

    def as_alice(exchange: Exchange) -> None:
        exchange.api_key = ApiKey("alice", "user", b"", Grants())
        site.routes(exchange)

    site.bench = Bench(handler=as_alice)
    site.post({**body, "model": "tiny", "priority": -3}, path)
    assert site.status == 403 and b"priority" in site.body and len(site.routings) == 1


@pytest.mark.parametrize(("path", "model"), ENTRANCES)
async def test_tenants_have_their_own_caches(site: Entrances, path: str, model: str) -> None:
    await site.send(path, model, {"x_tenant_id": "T"})
    if (path, model) == (MESSAGES, "far"):  # whose server takes no salt
        assert site.status == 400 and b"x-tenant-id" in site.body
        return
    (routing,) = site.routings
    assert "T" in routing.cache_namespace
    site.leave()


@pytest.mark.parametrize("member", ["cache_salt", "nvext"])
async def test_a_forbidden_field_has_no_effect(site: Entrances, member: str) -> None:
    site.rules["far"] = site.rules["tiny"] = FieldRules({}, [member])
    given = {"cache_salt": "s"} if member == "cache_salt" else {"nvext": {"dp_rank": 1}}
    for model in ("tiny", "far"):
        await site.send("/v1/chat/completions", model, **given)
    for routing in site.routings:
        assert routing is None or (routing.cache_namespace, routing.dp_rank) == (None, None)


@pytest.mark.parametrize(("path", "model"), ENTRANCES)
async def test_the_graphs_fields_count(site: Entrances, path: str, model: str) -> None:
    site.rules[model] = FieldRules({"cache_salt": "graph"}, ["cache_salt", "nvext"])
    if model == "tiny":
        more: dict[str, Any] = {} if path == MESSAGES else {"nvext": {"dp_rank": 1}}
        await site.send(path, model, **more)
        (routing,) = site.routings
        assert (routing.cache_namespace, routing.dp_rank) == ("graph", None)
    else:
        await site.send(path, model, cache_salt="client", odd=1)
        sent = json.loads(site.relayed[0].request.body)
        assert (sent["cache_salt"], sent["odd"]) == ("graph", 1)
    site.leave()


@pytest.mark.parametrize("unknown", [REFUSE, IGNORE])
@pytest.mark.parametrize("path", [*GENERATION, *COUNTS])
async def test_one_setting_decides_about_unknown_fields(path: str, unknown: str) -> None:
    site = Entrances(unknown_fields=unknown)
    await site.send(path, "tiny", odd_one=1)
    refused = bool(site.bench.transport.out) and site.status == 400
    assert refused == (unknown == REFUSE and path != "/v1/route"), site.bench.transport.out
    assert not refused or b"odd_one" in site.body
    site.leave()


@pytest.mark.parametrize("path", GENERATION)
async def test_a_model_that_loads_is_waited_for(
    site: Entrances, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def later(*_: str) -> Any:
        return site.entry

    monkeypatch.setattr(site, "is_loading", lambda name: name == "tiny")
    monkeypatch.setattr(site, "find", Mock(side_effect=NoInstances))
    monkeypatch.setattr(site, "find_loaded", later)
    await site.send(path, "tiny")
    assert len(site.streams) + len(site.relayed) == 1, site.bench.transport.out
    site.leave()
    site.settled()


async def test_every_route_is_among_those_above(site: Entrances) -> None:
    posts = {path for path, methods in site.routes.paths() if "POST" in methods}
    apis = {POOLING_PATHS.get(path, path) for path in (*GENERATION, *COUNTS)}
    others = {path for path in posts if POOLING_PATHS.get(path, path) not in apis}
    # The one takes ids instead of a prompt, the other the id of a response.
    assert others == {"/detokenize", "/v1/responses/"}


@pytest.mark.parametrize(("path", "model"), ENTRANCES)
async def test_the_id_comes_back_with_errors(site: Entrances, path: str, model: str) -> None:
    site.pick_error = Overloaded("full")
    await site.send(path, model, {"x_request_id": "mine"})
    assert site.status == 503 and "x-request-id: mine" in site.head
    assert site.answer["error"]["message"]
    refused = site.metrics.recent.records[-1]
    assert (refused.info.request_id, refused.info.echoed_id) == ("mine", "mine")
    labels = {"model": model, "status": "error", "error_type": "overload"}
    assert site.sample("dynamo_frontend_requests_total", **labels) == 1
    site.settled()


@pytest.mark.parametrize(("path", "model"), ENTRANCES)
async def test_a_draining_frontend_refuses(site: Entrances, path: str, model: str) -> None:
    site.active.refuses = True
    await site.send(path, model, {"x_request_id": "mine"})
    assert site.status == 503 and "x-request-id: mine" in site.head
    assert b"shutting down" in site.body


@pytest.mark.parametrize("path", [*GENERATION, *COUNTS])
async def test_an_unknown_model_is_named(site: Entrances, path: str) -> None:
    await site.send(path, "absent", {"x_request_id": "mine"})
    assert site.status == 404 and "x-request-id: mine" in site.head, site.head
    assert b"absent" in site.body and site.answer["error"]["message"]


@pytest.mark.parametrize("path", [*GENERATION, *COUNTS])
async def test_broken_json_is_the_clients_error(site: Entrances, path: str) -> None:
    site.post(b'{"model": "tiny", ', path, x_request_id="mine")
    await site.tried()
    assert site.status == 400 and "x-request-id: mine" in site.head, site.head
    assert site.answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", COUNTS)
async def test_counts_have_the_id(site: Entrances, path: str) -> None:
    await site.send(path, "tiny", {"x_request_id": "mine"})
    assert site.status == 200 and "x-request-id: mine" in site.head, site.body


@pytest.mark.parametrize(("path", "model"), ENTRANCES)
async def test_a_client_that_leaves_ends_the_engines_work(
    site: Entrances, path: str, model: str
) -> None:
    await site.send(path, model)
    site.leave()
    for stream in site.streams:
        assert stream.killed
    for relayed in site.relayed:
        assert relayed.calls == ["kill"]
    assert len(site.streams) + len(site.relayed) == 1
    site.settled()


@pytest.mark.parametrize("path", sorted(POOLING_PATHS))
async def test_another_worker_gets_the_inputs_of_a_lost_one(site: Entrances, path: str) -> None:
    bodies = {POOLING_PATHS[name]: body for name, body in GENERATION.items()
              if name in POOLING_PATHS}  # fmt: skip
    site.post({"model": "tiny", **bodies[POOLING_PATHS[path]]}, path)
    site.relayed[0].sink.on_error(Disconnected("killed"))
    first, second = site.relayed
    assert first.worker_id != second.worker_id and first.value["token_ids"]
    assert second.value["token_ids"] == first.value["token_ids"]
    second.sink.on_error(Disconnected("killed too"))
    assert site.status == 503
    labels = {"model": "tiny", "endpoint": POOLING_PATHS[path], "status": "error"}
    assert site.sample("dynamo_frontend_requests_total", **labels) == 1
    site.freed = sorted(set(site.freed))
    site.settled()


async def test_a_form_is_refused_where_a_tenant_cannot_be_kept_apart(site: Entrances) -> None:
    site.far.paths |= {"/v1/audio/transcriptions"}
    form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nfar\r\n--b--\r\n'
    head = "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: a\r\nX-Tenant-Id: T\r\n"
    head += "Content-Type: multipart/form-data; boundary=b\r\n"
    site.bench.feed(f"{head}Content-Length: {len(form)}\r\n\r\n".encode() + form)
    assert site.status == 400 and b"x-tenant-id" in site.body and not site.relayed


async def test_the_worker_of_another_server_gets_the_rank(site: Entrances) -> None:
    await site.send(PATHS[0], "far")
    assert site.relayed[0].headers["x-data-parallel-rank"] == "0"
    site.leave()


async def test_only_workers_of_tokens_say_where_a_prompt_would_go(site: Entrances) -> None:
    await site.send(PATHS[0], "far", nvext={"annotations": ["query_instance_id:"]})
    assert site.status == 400 and b"/v1/route" in site.body and not site.relayed


@pytest.mark.parametrize("path", [*GENERATION, *COUNTS])
@pytest.mark.parametrize("model", ["tiny", "far"])
async def test_the_only_model_need_not_be_named(site: Entrances, path: str, model: str) -> None:
    if model == "tiny":
        site.entry.types = ALL_TYPES
    entry = site.entry if model == "tiny" else site.far
    site.entries = lambda: [entry]  # type: ignore[method-assign]
    site.post({**GENERATION, **COUNTS}[path], path)
    await site.tried()
    if path in COUNTS and model == "tiny":
        assert site.status == 200, site.answer
        return
    assert site.streams or site.relayed or site.status == 200, site.answer
    site.leave()


@pytest.mark.parametrize("path", [*GENERATION, "/v1/messages/count_tokens", "/v1/route"])
async def test_of_several_models_one_has_to_be_named(site: Entrances, path: str) -> None:
    site.entry.types = site.far.types = ALL_TYPES
    site.post({**GENERATION, **COUNTS}[path], path)
    await site.tried()
    assert site.status == 400 and b"missing field `model`" in site.body, site.answer
