"""Registration and configuration with the calls of Dynamo's workers."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import zlib
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from dynamo import _core, llm
from dynamo.llm import (
    KvEventPublisher,
    KvRouter,
    KvRouterConfig,
    LoadThresholdConfig,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    RouterConfig,
    RouterMode,
    WorkerType,
    lora_name_to_id,
    register_model,
    update_model_taints,
)
from dynamo.llm.exceptions import InvalidArgument
from dynamo.protocols.control import ModelCard, decode_card
from dynamo.runtime import DistributedRuntime, Endpoint

MakeRuntime = Callable[[], DistributedRuntime]
MODEL_DIR = Path(__file__).parents[2] / "examples" / "model"
PATH = "ns.backend.generate"
KEY = "worker_group"


async def register(runtime: DistributedRuntime, group: Any = "a", **options: Any) -> Endpoint:
    """Register an instance without a handler, and a model without files, as a node of a group."""
    endpoint = runtime.endpoint(PATH)
    await endpoint.register_endpoint_instance()
    config = ModelRuntimeConfig()
    config.set_engine_specific(KEY, json.dumps(group))
    given = {"runtime_config": config, "worker_type": WorkerType.Aggregated, **options}
    await register_model(ModelInput.Tensor, ModelType.TensorBased, endpoint, "tensor", **given)
    return endpoint


async def card_of(endpoint: Endpoint, suffix: str = "") -> ModelCard:
    """The stored card of this process's model at ``endpoint``."""
    key = f"v1/mdc/ns/backend/generate/{endpoint.connection_id():x}{suffix}"
    return decode_card((await endpoint.runtime.discovery.list(key))[key])


async def test_an_instance_is_found_by_its_runtime_data(make_runtime: MakeRuntime) -> None:
    client = await make_runtime().endpoint(PATH).client()
    early = asyncio.ensure_future(client.wait_for_instance_by_runtime_data(KEY, "a", 5.0))
    leader = await register(make_runtime())
    async with asyncio.timeout(20):
        assert await early == leader.connection_id()
        found = await client.wait_for_instance_by_runtime_data(KEY, "a", timeout_s=5.0)
    assert found == leader.connection_id()


async def test_groups_are_told_apart(make_runtime: MakeRuntime) -> None:
    client = await make_runtime().endpoint(PATH).client()
    waits = [
        asyncio.ensure_future(client.wait_for_instance_by_runtime_data(KEY, group, timeout_s=5.0))
        for group in ("a", "b")
    ]
    leaders = [await register(make_runtime(), group) for group in ("a", "b")]
    assert await asyncio.gather(*waits) == [leader.connection_id() for leader in leaders]


@pytest.mark.parametrize(
    ("groups", "wanted", "count"), [([], "a", 0), (["a", "a"], "a", 2), ([123], "123", 0)]
)
async def test_the_search_ends_unless_one_instance_has_the_text(
    make_runtime: MakeRuntime, groups: list[Any], wanted: str, count: int
) -> None:
    for group in groups:
        await register(make_runtime(), group)
    client = await make_runtime().endpoint(PATH).client()
    with pytest.raises(TimeoutError, match=f"last_match_count={count}, matching_ids="):
        await client.wait_for_instance_by_runtime_data(KEY, wanted, timeout_s=0.1)


async def test_several_instances_are_awaited(make_runtime: MakeRuntime) -> None:
    client = await make_runtime().endpoint(PATH).client()
    wait = asyncio.ensure_future(client.wait_for_instances_by_runtime_data(KEY, "a", 2, 5.0))
    ids = sorted([(await register(make_runtime())).connection_id() for _ in range(2)])
    assert await wait == ids


async def test_the_positional_order_is_dynamos(make_runtime: MakeRuntime) -> None:
    endpoint = make_runtime().endpoint(PATH)
    config = ModelRuntimeConfig()
    config.total_kv_blocks = 9
    mode = RouterConfig(RouterMode.KV, KvRouterConfig(router_temperature=0.5))
    args = (ModelInput.Tokens, ModelType.Chat, endpoint, str(MODEL_DIR), "m", 32, mode, config)
    await register_model(*args, {"a": 1}, None, None, None, None, None, WorkerType.Decode)
    card = await card_of(endpoint)
    assert (card.display_name, card.kv_cache_block_size, card.worker_type) == ("m", 32, "Decode")
    assert (card.user_data, card.runtime_config.total_kv_blocks) == ({"a": 1}, 9)
    assert card.router_config == {"mode": "kv", "temperature": 0.5}


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_model_config": {"name": "t"}},
        {"max_gpu_lora_count": 4},
        {"skip_model_assets": True},
        {"media_fetcher": llm.MediaFetcher(), "media_decoder": llm.MediaDecoder()},
        {"self_host_metadata": True, "ignore_weights": False},
    ],
)
async def test_options_without_an_effect_are_accepted(
    make_runtime: MakeRuntime, options: dict[str, Any]
) -> None:
    card = await card_of(await register(make_runtime(), **options))
    assert (card.display_name, card.model_input) == ("tensor", "Tensor")


async def test_a_prefill_worker_has_no_api(make_runtime: MakeRuntime) -> None:
    endpoint = make_runtime().endpoint(PATH)
    prefill: dict[str, Any] = {"worker_type": WorkerType.Prefill}
    for kind, needs, match in (
        (ModelType.Chat, [[WorkerType.Decode]], "surface"),
        (ModelType.Prefill, [], "needs"),
        (ModelType.Empty, [], "needs"),
    ):
        with pytest.raises(ValueError, match=match):
            await register_model(ModelInput.Tokens, kind, endpoint, "m", needs=needs, **prefill)
    with pytest.raises(ValueError, match="ModelInput"):
        await register_model(ModelInput.Text, ModelType.Prefill, endpoint, "m", **prefill)
    with pytest.raises(ValueError, match="together"):
        await register_model(ModelInput.Tokens, ModelType.Chat, endpoint, "m", lora_name="x")
    with pytest.raises(TypeError, match="colour"):
        await register_model(ModelInput.Tokens, ModelType.Chat, endpoint, "m", colour="red")


async def test_an_adapter_has_a_card_of_its_own(make_runtime: MakeRuntime) -> None:
    endpoint = await register(make_runtime())
    await register(endpoint.runtime, lora_name="adapterA", base_model_path="tensor")
    # Names with one slug, such as adapterA and adaptera, have a card each.
    slug = f"/adaptera-{zlib.crc32(b'adapterA'):08x}"
    base, adapter = await card_of(endpoint), await card_of(endpoint, slug)
    assert (base.display_name, base.lora_name) == ("tensor", None)
    assert (adapter.display_name, adapter.lora_name) == ("adapterA", "adapterA")
    assert adapter.source_path == base.source_path == "tensor"


async def test_taints_are_replaced(make_runtime: MakeRuntime) -> None:
    config: Any = ModelRuntimeConfig()
    config.taints = {"pool=fast"}  # a set, as in Dynamo
    endpoint = await register(make_runtime(), runtime_config=config)
    assert (await card_of(endpoint)).runtime_config.taints == ["pool=fast"]
    await update_model_taints(endpoint, {"zone=b", "pool=slow"})
    assert (await card_of(endpoint)).runtime_config.taints == ["pool=slow", "zone=b"]
    with pytest.raises(InvalidArgument, match="has no model yet"):
        await update_model_taints(make_runtime().endpoint(PATH), set())


def test_runtime_config_fields() -> None:
    config = ModelRuntimeConfig()
    config.topology_domains = {"zone": "a"}
    config.kv_transfer_domain, config.kv_transfer_enforcement = "zone", "preferred"
    config.kv_transfer_preferred_weight = 0.85
    assert config.exclude_tools_when_tool_choice_none is True and config.structural_tag is None
    for name, value in (
        ("kv_transfer_enforcement", "fallback"),
        ("kv_transfer_preferred_weight", 1.1),
        ("tokenizer_backend", "mine"),
    ):
        with pytest.raises(ValueError, match=name):
            setattr(config, name, value)
    config.kv_transfer_enforcement = config.kv_transfer_preferred_weight = None
    config.set_structural_tag({"scope": "auto"})
    assert config.structural_tag == {"scope": "auto"}
    config.set_engine_specific("group", '"a"')
    assert config.get_engine_specific("group") == "a"


@pytest.mark.parametrize("value", [{1: "a"}, {"a": 1}, [("a", "b")], None, "a"])
def test_topology_domains_are_texts(value: Any) -> None:
    config = ModelRuntimeConfig()
    with pytest.raises(TypeError, match="topology_domains"):
        config.topology_domains = value
    assert config.topology_domains == {}


def test_names_of_the_core_module(tmp_path: Path) -> None:
    from dynamo._core import resolve_routing_image_token_id

    assert _core.__version__ == "1.6.1"
    assert issubclass(_core.SelectionServiceError, _core.DynamoException)
    # Dynamo's vLLM worker calls it for every model, if it publishes KV events.
    assert resolve_routing_image_token_id("Qwen/Qwen3-0.6B", str(tmp_path)) is None
    assert resolve_routing_image_token_id("no/model", "/no/such/directory") is None


def test_lora_ids() -> None:
    ids = {lora_name_to_id(f"lora_{number}") for number in range(100)}
    assert len(ids) == 100 and all(1 <= one <= 2**31 - 1 for one in ids)
    assert lora_name_to_id("lora_1") == lora_name_to_id("lora_1")


def test_model_types_say_what_they_support() -> None:
    both = ModelType.Chat | ModelType.Embedding
    assert both.supports_chat() and both.supports_embedding()
    assert not (both.supports_rerank() or both.supports_classify() or both.supports_pooling())


def test_router_configs() -> None:
    config = KvRouterConfig(decode_active_request_weight=1.0)
    other = config.with_overrides(decode_active_request_weight=64.0)
    assert (config.decode_active_request_weight, other.decode_active_request_weight) == (1.0, 64.0)
    assert config.with_overrides(2.0).overlap_score_weight == 2.0
    assert KvRouterConfig.from_json('{"router_temperature": 0.5}').copy().router_temperature == 0.5
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="decode_active_request_weight"):
            KvRouterConfig(decode_active_request_weight=bad)
    with pytest.raises(TypeError):
        KvRouterConfig(None, 0.75, 0.25, 0.0, True, False)  # type: ignore[call-arg]
    chosen = RouterConfig(RouterMode.KV, config)
    assert (chosen.router_mode, chosen.kv_router_config) == (RouterMode.KV, config)
    with pytest.raises(ValueError, match=r"between 0\.0 and 1\.0"):
        LoadThresholdConfig(active_decode_blocks_threshold=1.5)


def test_names_that_only_dynamo_has_say_so() -> None:
    from dynamo._core import HttpService, backend

    for absent in (HttpService, llm.KvDcRelay, llm.make_engine, backend.Worker):
        with pytest.raises(NotImplementedError, match=f"{absent.__name__} of NVIDIA Dynamo"):
            absent(1, port=2)
    assert backend.DisaggregationMode.Prefill
    with pytest.raises(ImportError):
        exec("from dynamo.llm import NoSuchName", {})


def order(function: Callable[..., Any]) -> list[str]:
    """The names of the positional parameters after ``self``."""
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD][1:]


def test_positional_orders() -> None:
    assert order(KvRouter.best_worker) == [
        *("token_ids", "router_config_override", "request_id", "update_indexer"),
        *("block_mm_infos", "lora_name", "routing_constraints", "strict_priority"),
        *("policy_class", "cache_namespace"),
    ]
    assert order(KvRouter.get_potential_loads)[1:] == [
        *("block_mm_infos", "lora_name", "cache_namespace")
    ]
    assert order(KvRouter.get_overlap_scores)[1:] == [
        *("router_config_override", "block_mm_infos", "lora_name", "include_shared"),
        "cache_namespace",
    ]
    assert order(KvEventPublisher.publish_stored) == [
        *("token_ids", "num_block_tokens", "block_hashes", "parent_hash", "block_mm_infos"),
        *("lora_name", "is_eagle", "cache_salt"),
    ]


STORED = {"token_ids": [1, 2, 3, 4], "num_block_tokens": [4], "block_hashes": [1]}


async def test_a_batch_of_events_is_checked_whole(
    make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = KvEventPublisher(
        make_runtime().endpoint(PATH),
        kv_block_size=4,
        image_token_id=7,
        kv_state_endpoint="ns.state.events",
        video_token_id=8,
    )
    sent: list[Any] = []

    def record(rank: int, changes: Iterable[Any], tier: str) -> None:
        sent.extend(changes)

    monkeypatch.setattr(publisher._sender, "record", record)
    good = [{"type": "stored", **STORED}, {"type": "removed", "block_hashes": [1]}]
    for bad in ({"type": "x"}, {}, 1, {"type": "stored"}, {"type": "removed", "medium": "GPU"}):
        with pytest.raises(ValueError, match="invalid KV event batch"):
            publisher.publish_batch([*good, bad])  # type: ignore[list-item]
    assert sent == []
    publisher.publish_batch(good)
    assert [type(change).__name__ for change in sent] == ["BlocksStored", "BlocksRemoved"]
    salted = {"type": "stored", **STORED, "cache_salt": "tenant"}
    eagle = {"type": "stored", **STORED, "token_ids": [1, 2, 3, 4, 5], "is_eagle": True}
    publisher.publish_batch([salted, eagle])
    plain, other, windowed = (change.tokens_hashes for change in (sent[0], *sent[2:]))
    assert len({plain, other, windowed}) == 3
    expected = llm.compute_block_hash_for_seq([1, 2, 3, 4], 4, cache_namespace="tenant")
    assert int.from_bytes(other, "little") == expected[0]


async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
    """A worker that answers two tokens and what it was asked."""
    if request["model"] == "fails":
        raise RuntimeError("intentional failure")
    yield {"token_ids": [4]}
    yield {"token_ids": [5], "finish_reason": "stop", "text": json.dumps(request)}


async def test_a_routed_request_has_every_key_and_so_have_its_items(
    make_runtime: MakeRuntime,
) -> None:
    worker, runtime = make_runtime(), make_runtime()
    served = asyncio.ensure_future(worker.endpoint(PATH).serve_endpoint(generate))
    endpoint = runtime.endpoint(PATH)
    client = await endpoint.client()
    async with asyncio.timeout(20):
        await client.wait_for_instances()
        thresholds = LoadThresholdConfig(active_decode_blocks_threshold=1.0)
        config = KvRouterConfig(use_kv_events=False)
        router = KvRouter(endpoint, 4, config, None, 60.0, load_threshold_config=thresholds)
        stream = await router.generate([1, 2, 3, 4, 5], "m", response_buffer_size=0)
        first, last = [item async for item in stream]
        assert await router.best_worker([1, 2], None, None, False, None, "lora")
        loads = await router.get_potential_loads([1, 2, 3], None, "lora", "tenant")
        scores = await router.get_overlap_scores([1, 2, 3], None, None, "lora", False, "tenant")
        with pytest.raises(ValueError, match="Internal: RuntimeError: intentional failure"):
            _ = [item async for item in await router.generate([1], "fails")]
        await router.close()
    assert first["tokens"] is first["finish_reason"] is first["top_logprobs"] is None
    assert first["routing_data"]["worker_id"]["decode_worker_id"] == worker.instance_id
    timing = last["routing_data"]["timing"]
    assert timing["router_queue_depth"] == 0 and timing["request_received_ms"] > 1e12
    assert timing["ttft_ms"] == pytest.approx(
        timing["prefill_wait_time_ms"] + timing["prefill_time_ms"]
    )
    request = json.loads(last["text"])
    assert request["sampling_options"]["temperature"] is None
    assert request["output_options"]["return_tokens_as_token_ids"] is None
    assert (request["annotations"], request["routing"]) == ([], {"dp_rank": 0})
    assert len(loads) == len(scores["workers"]) == 1
    served.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await served


def test_media_options_are_kept(tmp_path: Path) -> None:
    decoder, fetcher = llm.MediaDecoder(), llm.MediaFetcher()
    decoder.enable_image({"limits": {}})
    fetcher.timeout_ms(5)
    fetcher.allow_direct_ip(True)
    fetcher.allowed_media_domains(["a.example"])
    assert decoder.options == {"image": {"limits": {}}}
    assert fetcher.options["allowed_media_domains"] == ["a.example"]
