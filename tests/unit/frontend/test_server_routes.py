"""Routes of vLLM's server: /ping, /load, /version, /invocations, and the rows of /v1/models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from relayed_kit import RelaySite
from test_cold_start import Site, running
from test_request import turn
from until import until as until_it_holds

from dynamo import __version__
from dynamo.config.frontend import FrontendSettings
from dynamo.errors import InvalidArgument
from dynamo.frontend.access import frontend_access, is_reserved
from dynamo.frontend.apis.invocations import Invocation, InvocationRoutes, read_invocation
from dynamo.http.api_keys import key_line
from dynamo.protocols.control import ROOT_KEY, RuntimeConfig


class PoolingSite(RelaySite):
    embeds = True


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with running(tmp_path, planner=False) as running_site:
        yield running_site


async def rows(site: Site) -> dict[str, Any]:
    listed = (await site.client.get("/v1/models")).json()["data"]
    for row in listed:
        assert (await site.client.get(f"/v1/models/{row['id']}")).json() == row
    return {row["id"]: row for row in listed}


async def test_rows_have_length_root_and_parent(site: Site) -> None:
    root = RuntimeConfig(runtime_data={ROOT_KEY: "org/tiny"})
    lora = RuntimeConfig(runtime_data={ROOT_KEY: "/lora"})
    worker = await site.known_worker(runtime_config=root, model_aliases=["also"])
    await worker.card("/pirate", display_name="pirate", lora_name="pirate", runtime_config=lora)
    await until_it_holds(lambda: any(row.name == "pirate" for row in site.frontend.models.listed()))
    models = await rows(site)
    assert {name: (row["root"], row["parent"]) for name, row in models.items()} == {
        "tiny": ("org/tiny", None),
        "also": ("org/tiny", None),
        "pirate": ("/lora", "tiny"),
    }
    assert {row["max_model_len"] for row in models.values()} == {2048}
    missing = await site.client.get("/v1/models/none")
    assert missing.status_code == 404 and "none" in missing.text


async def test_an_adapter_keeps_its_parent_without_a_worker(tmp_path: Path) -> None:
    async with running(tmp_path) as site:
        worker = await site.known_worker()
        await worker.card("/pirate", display_name="pirate", lora_name="pirate")
        await until_it_holds(lambda: site.frontend.models.named("pirate") is not None)
        await worker.runtime.close()
        await until_it_holds(lambda: not site.frontend.models.instances())
        models = await rows(site)
        assert models["pirate"]["parent"] == "tiny" and models["small"]["root"] == "small"


async def test_ping_is_the_health_check(site: Site) -> None:
    for ask in (site.client.get, site.client.post):
        assert (await ask("/ping")).status_code == 503
    await site.known_worker()
    for ask in (site.client.get, site.client.post):
        answer = await ask("/ping")
        assert answer.status_code == 200 and answer.json()["status"] == "healthy"


async def test_version_and_load(site: Site) -> None:
    assert (await site.client.get("/version")).json() == {"version": __version__}
    worker = await site.known_worker()
    worker.answers = False
    assert (await site.client.get("/load")).json() == {"server_load": 0}
    waiting = asyncio.ensure_future(site.complete())
    await until_it_holds(lambda: bool(worker.order))
    assert (await site.client.get("/load")).json() == {"server_load": 1}
    waiting.cancel()
    await until_it_holds(lambda: not site.frontend._requests.admitted)
    assert (await site.client.get("/load")).json() == {"server_load": 0}


def test_probes_need_no_key_and_a_version_does(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(key_line("ci", "user", "k" * 32) + "\n")
    keys.chmod(0o600)
    access = frontend_access(FrontendSettings(api_key_file=str(keys)))
    assert access is not None
    paths = ("/ping", "/load", "/version", "/invocations", "/v1/chat/completions/batch")
    assert [path for path in paths if access.is_open(path)] == ["/ping", "/load"]
    assert [path for path in paths if is_reserved(path)] == ["/ping", "/load"]


@pytest.mark.parametrize(
    ("member", "path"),
    [
        ('"messages": []', "/v1/chat/completions"),
        ('"messages": null, "prompt": "a"', "/v1/completions"),
        ('"prompt": [1]', "/v1/completions"),
        ('"query": "a", "documents": []', "/v1/rerank"),
        ('"queries": "a", "documents": []', "/v1/score"),
        ('"text_1": "a", "text_2": "b"', "/v1/score"),
        ('"data_1": "a", "data_2": "b"', "/v1/score"),
        ('"input": "a"', "/v1/embeddings"),
    ],
)
def test_the_body_chooses_the_api(member: str, path: str) -> None:
    invocation = read_invocation(f'{{"model": "m", {member}}}'.encode())
    assert (invocation.model, invocation.paths[0]) == ("m", path)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"{}", "none of the members that choose an API; send one of `messages`"),
        (b'{"prompt": null}', "none of the members"),
        (b"[1]", "Expected `object`"),
        (b"{", "JSON"),
        (b'{"messages": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
    ],
)
def test_other_bodies_are_refused(body: bytes, text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        read_invocation(body)
    assert text in refused.value.message


@pytest.mark.parametrize(
    ("body", "paths", "path"),
    [
        ({"input": "a"}, {"/v1/embeddings", "/pooling"}, "/v1/embeddings"),
        ({"input": "a"}, {"/pooling", "/classify"}, "/classify"),
        ({"input": "a"}, {"/pooling"}, "/pooling"),
        ({"messages": MESSAGES}, {"/v1/chat/completions", "/pooling"}, "/v1/chat/completions"),
        ({"messages": MESSAGES}, {"/v1/embeddings"}, "/v1/embeddings"),
    ],
)
async def test_of_several_apis_the_model_chooses(body: Any, paths: set[str], path: str) -> None:
    site = PoolingSite()
    site.far.paths = frozenset(paths)
    site.post({"model": "far", **body}, "/invocations")
    (stream,) = site.relayed
    assert stream.request.path == path
    site.entry.types = frozenset(("Classify", "Pooling"))
    site.entry.paths = frozenset()
    routes = InvocationRoutes(site.active, site, site.tasks)  # type: ignore[arg-type]
    assert routes._path(Invocation("tiny", ("/v1/embeddings", "/classify"))) == "/classify"
    assert routes._path(Invocation("none", ("/v1/embeddings", "/classify"))) == "/v1/embeddings"
    # Without a name that of any model.
    site.far.paths = frozenset()
    for name in (None, "", 3):
        assert routes._path(Invocation(name, ("/v1/embeddings", "/classify"))) == "/classify"


async def test_invocations_are_requests_of_their_api() -> None:
    site = RelaySite()
    site.post({"model": "tiny", "messages": MESSAGES}, "/invocations", x_request_id="mine")
    (stream,) = site.streams
    stream.say([5], finish_reason="stop")
    stream.sink.on_end()
    await turn()
    assert site.answer["object"] == "chat.completion" and site.answer["id"] == "chatcmpl-mine"
    assert site.ended("") == 1
    site.settled()


async def test_a_large_invocation_takes_a_thread() -> None:
    site = RelaySite()
    site.post({"model": "tiny", "prompt": "hi", "user": "x" * 200_000}, "/invocations")
    await until_it_holds(lambda: bool(site.streams))
    site.bench.connection.connection_lost(None)
    assert site.streams[0].killed == 1
    site.settled()


async def test_a_client_that_leaves_while_its_body_is_read_is_counted() -> None:
    site = RelaySite()
    site.post({"model": "tiny", "prompt": "hi", "user": "x" * 200_000}, "/invocations")
    site.bench.connection.connection_lost(None)
    labels = {"endpoint": "invocations", "error_type": "cancelled", "model": "unknown_model"}
    await until_it_holds(lambda: site.sample("dynamo_frontend_requests_total", **labels) == 1)
    assert not site.streams and not site.active.admitted


async def test_an_invocation_without_an_api_is_refused_and_counted() -> None:
    site = RelaySite()
    site.post({"model": "tiny", "texts": ["a"]}, "/invocations")
    assert site.status == 400 and "choose an API" in json.dumps(site.answer)
    labels = {"endpoint": "invocations", "error_type": "validation", "model": "unknown_model"}
    assert site.sample("dynamo_frontend_requests_total", **labels) == 1
