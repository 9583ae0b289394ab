"""What ``dynamo.attach`` learns from each kind of server: cards and load."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from attach_kit import CHAT, Cards, fetch, upstream
from deployment import MODEL, Deployment, free_port
from mocker_kit import caller

from dynamo.errors import HttpFailure
from dynamo.protocols.control import ROOT_KEY
from dynamo.protocols.kv import BlocksCleared, BlocksStored

AUDIO = ["/v1/audio/transcriptions", "/v1/audio/translations"]
OTHERS = [
    "/tokenize",
    "/v1/rerank",
    "DELETE /v1/responses/{id}",
    "GET /v1/responses/{id}",
    "GET /v1/server",
    "POST /v1/responses/{id}/cancel",
]
GENERATION = [CHAT, "/v1/completions", "/v1/embeddings"]


@pytest.mark.parametrize(
    ("profile", "routes", "sizes", "load"),
    [
        (
            "vllm",
            [CHAT, *OTHERS],
            (900, 32, 200, None),
            (50, 200 * 2, 7, 1),
        ),
        ("sglang", GENERATION, (700, 16, 100, 33), (50, 100, 5, 2)),
        ("trtllm", GENERATION[:2], (None, 32, 90, None), (7, 90, 2, 1)),
        ("llama.cpp", None, (512, 64, None, 4), (None, None, 2, 1)),
        ("ollama", GENERATION[:2], (4096, 64, None, None), (None, None, 0, 0)),
        ("openai", [*AUDIO, *GENERATION], (900, 64, None, None), (None, None, 0, 0)),
    ],
)
async def test_a_server_is_recognized(
    deployment: Deployment,
    profile: str,
    routes: list[str] | None,
    sizes: tuple[Any, ...],
    load: tuple[Any, ...],
) -> None:
    with upstream(deployment, profile) as server:
        deployment.start("dynamo.attach", "--url", server.url)
        async with asyncio.timeout(60), caller(deployment) as here:
            found = Cards(here)
            await here.until(lambda: bool(here.loads) and "m" in found.names)
            card, config = found["m"], found["m"].runtime_config
            assert (card.model_input, card.source_path) == ("Http", "")
            assert (card.context_length, card.kv_cache_block_size) == sizes[:2]
            assert (config.total_kv_blocks, config.max_num_seqs) == sizes[2:]
            assert config.runtime_data == {ROOT_KEY: "org/m"}
            assert card.user_data is not None
            if routes is not None:
                assert card.user_data["routes"] == sorted(routes)
            assert card.model_type.startswith("Chat")
            state = next(iter(here.loads.values()))
            assert load == (
                state.kv_used_blocks,
                state.kv_total_blocks,
                state.num_requests_running,
                state.num_requests_waiting,
            )


async def test_each_model_of_a_server_has_a_card(deployment: Deployment) -> None:
    with upstream(deployment, "ollama", ("a:7b", "a_7b", "embed")) as server:
        deployment.start("dynamo.attach", "--url", server.url, "--poll-interval-secs", "0.05")
        async with asyncio.timeout(60), caller(deployment) as here:
            found = Cards(here)
            await here.until(lambda: len(found.names) == 3)
            assert found.names == ["a:7b", "a_7b", "embed"]
            assert found["embed"].model_type == "Embedding"
            assert found["embed"].user_data == {"routes": ["/v1/embeddings"]}
            assert (await fetch(here, {"model": "embed"}, "/v1/embeddings"))[0].status == 200
            with pytest.raises(HttpFailure, match="does not offer"):
                await fetch(here, {"model": "embed"}, "/v1/rerank")


async def test_chosen_and_renamed_models(deployment: Deployment) -> None:
    with upstream(deployment, "openai", ("a", "b", "c")) as server:
        names = "a,fast=b"
        deployment.start("dynamo.attach", "--url", server.url, "--served-model-name", names)
        async with asyncio.timeout(60), caller(deployment) as here:
            found = Cards(here)
            await here.until(lambda: found.names == ["a", "fast"])
            for name in ("a", "fast"):
                await fetch(here, {"model": name})
            assert [one[2] for one in server.seen["requests"]] == [
                '{"model": "a"}',
                '{"model":"b"}',
            ]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ((), "--url and --exec are missing"),
        (("--url", "localhost:1"), "--url must look like"),
        (("--exec", "server"), "has no {port}"),
        (("--exec", "a 'b"), "No closing quotation"),
        (("--url", "http://h", "--model-path", "/nowhere"), "no such directory"),
        (("--url", "http://h", "--kv-events-endpoint", "tcp://h:1"), "needs --model-path"),
        (("--url", "http://h", "--kv-replay-endpoint", "tcp://h:2"), "given 1 times and"),
        (("--url", "http://h", "--profile", "x"), "--profile must be one of"),
    ],
)
def test_bad_settings(deployment: Deployment, flags: tuple[str, ...], reason: str) -> None:
    process = deployment.start("dynamo.attach", *flags)
    assert process.wait(20) == 2
    assert reason in deployment.tail()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--served-model-name", "x"), "the server has no model 'x', only a, b"),
        (("--model-path", str(MODEL)), "the server has 2 (a, b)"),
        (
            (
                *("--model-path", str(MODEL), "--served-model-name", "a"),
                *("--kv-events-endpoint", "tcp://127.0.0.1:1"),
            ),
            "give --block-size",
        ),
    ],
)
def test_settings_that_the_server_contradicts(
    deployment: Deployment, flags: tuple[str, ...], reason: str
) -> None:
    with upstream(deployment, "openai", ("a", "b")) as server:
        process = deployment.start("dynamo.attach", "--url", server.url, *flags)
        assert process.wait(20) == 1
        assert reason in deployment.tail()
        assert "Traceback" not in deployment.tail()


def test_what_is_no_openai_server(deployment: Deployment) -> None:
    with upstream(deployment, "openai") as server:
        process = deployment.start("dynamo.attach", "--url", f"{server.url}/prefix")
        assert process.wait(20) == 1
        assert "this is no OpenAI-compatible server" in deployment.tail()


async def test_kv_events_are_relayed_and_end_with_the_server(deployment: Deployment) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    publisher = zmq.asyncio.Context.instance().socket(zmq.PUB)
    publisher.bind(address)
    stored = ["BlockStored", [11, 12], None, list(range(64)), 32, None, "GPU"]
    events = ("--kv-events-endpoint", address, "--model-path", str(MODEL))
    try:
        with upstream(deployment, "vllm") as server:
            flags = ("--url", server.url, "--poll-interval-secs", "0.05")
            deployment.start("dynamo.attach", *flags, *events)
            async with asyncio.timeout(60), caller(deployment) as here:
                found = Cards(here)
                await here.until(lambda: "m" in found.names)
                assert found["m"].source_path == str(MODEL)
                assert found["m"].runtime_config.enable_local_indexer
                worker = here.client.instance_ids()[0]
                number = 0
                while (worker, 0) not in here.events:  # until the worker has subscribed
                    message = msgspec.msgpack.encode([0.0, [stored], 0])
                    await publisher.send_multipart([b"", number.to_bytes(8, "big"), message])
                    number += 1
                    await asyncio.sleep(0.05)
                assert isinstance(here.events[worker, 0][0].data, BlocksStored)
                server.set(health=503)
                await here.until(lambda: isinstance(here.events[worker, 0][-1].data, BlocksCleared))
    finally:
        publisher.close(linger=0)
