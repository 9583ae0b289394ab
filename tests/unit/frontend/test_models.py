"""Models come and go with the cards in discovery; real runtimes, file discovery, one process."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from until import until as until_it_holds

from dynamo.config.frontend import FrontendSettings
from dynamo.config.router import RouterSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ModelNotFound, NoInstances, Unavailable
from dynamo.frontend.disagg.router import PrefillRouter
from dynamo.frontend.models.registry import Models
from dynamo.frontend.requests.metrics import FrontendMetrics
from dynamo.protocols.control import ModelCard, RuntimeConfig
from dynamo.router.modes.kv import KvPicker
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.events import EventPublisher
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.requests import ServerStream

MODEL_DIR = Path(__file__).parents[3] / "examples" / "model"


def serve(stream: ServerStream, payload: bytes) -> None:
    stream.end()


class Worker:
    """A process that serves ``ns.<component>.generate`` and announces a model."""

    def __init__(self, settings: RuntimeSettings, component: str) -> None:
        self.runtime = DistributedRuntime(None, settings)
        self.component = component
        self.tail = f"ns/{component}/generate/{self.runtime.instance_id:x}"

    async def start(self, **card: Any) -> None:
        serving = self.runtime.tasks
        endpoint = self.runtime.endpoint(f"ns.{self.component}.generate")
        serving.spawn(endpoint.serve_push(serve), name="serve")
        await self.announce(**card)

    async def announce(self, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "display_name": "tiny",
            "slug": "tiny",
            "source_path": str(MODEL_DIR),
            "namespace": "ns",
            "component": self.component,
            "endpoint": "generate",
            "instance_id": self.runtime.instance_id,
            "context_length": 2048,
            "checksum": "c1",
            "runtime_config": RuntimeConfig(total_kv_blocks=100),
        }
        lease = await self.runtime.granted()
        card = msgspec.json.encode(ModelCard(**{**fields, **changes}))
        await self.runtime.discovery.put(f"v1/mdc/{self.tail}", card, lease.id)

    @property
    def id(self) -> int:
        return self.runtime.instance_id


class Box:
    """A frontend's models, and workers, in one store."""

    def __init__(
        self,
        settings: RuntimeSettings,
        router: RouterSettings | None = None,
        frontend: FrontendSettings | None = None,
    ) -> None:
        self.settings = settings
        self.runtime = DistributedRuntime(None, settings)
        self.metrics = FrontendMetrics(self.runtime.metrics)
        self.tasks = Tasks("test")
        self.workers: list[Worker] = []
        self.models = Models(
            self.runtime,
            frontend or FrontendSettings(),
            router or RouterSettings(),
            self.metrics,
            self.tasks,
            again=lambda exchange: None,
            on_loaded=lambda: None,
            on_relayed=lambda: None,
        )

    async def worker(self, component: str = "backend", **card: Any) -> Worker:
        worker = Worker(self.settings, component)
        self.workers.append(worker)
        await worker.start(**card)
        return worker

    def rejected(self, model: str, reason: str) -> float:
        return self.metrics.cards_rejected.labels(model, reason).value

    def routable(self, name: str = "tiny") -> set[int]:
        entry = self.models.find(name, "Chat")
        return set(entry.picker.worker_pool.members)

    @property
    def names(self) -> list[str]:
        return [one[0] for one in self.models.listed()]


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    async with running(tmp_path, RouterSettings()) as made:
        yield made


@pytest.fixture
async def kv_box(tmp_path: Path) -> AsyncIterator[Box]:
    async with running(tmp_path, RouterSettings(mode="kv")) as made:
        yield made


@contextlib.asynccontextmanager
async def running(
    tmp_path: Path, router: RouterSettings, frontend: FrontendSettings | None = None
) -> AsyncIterator[Box]:
    settings = RuntimeSettings(namespace="ns", state_dir=str(tmp_path), lease_ttl_s=30)
    made = Box(settings, router, frontend)
    await made.runtime.start()
    await made.models.start()
    try:
        yield made
    finally:
        await made.tasks.close()
        await made.models.close()
        await made.runtime.close()
        for worker in made.workers:
            await worker.runtime.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; until then its model or workers may be missing."""
    await until_it_holds(lambda: _holds(condition))


def _holds(condition: Callable[[], bool]) -> bool:
    try:
        return condition()
    except (ModelNotFound, NoInstances):
        return False


async def test_a_models_own_router_config_replaces_the_frontends(box: Box) -> None:
    await box.worker(router_config={"mode": "kv", "temperature": 0.5, "of_a_later_version": 1})
    await box.worker("other", display_name="plain")
    await until(lambda: sorted(box.names) == ["plain", "tiny"])
    kinds = {name: type(box.models.find(name, "Chat").picker) for name in ("tiny", "plain")}
    assert kinds["tiny"] is KvPicker and kinds["plain"] is not KvPicker
    await box.worker("third", display_name="bad", router_config={"temperature": -1.0})
    await until(lambda: box.rejected("bad", "load") == 1)
    assert "bad" not in box.names


async def test_a_model_waits_for_its_first_workers_once(tmp_path: Path) -> None:
    frontend = FrontendSettings(min_initial_workers=2)
    async with running(tmp_path, RouterSettings(), frontend) as box:
        first = await box.worker()
        await until(lambda: box.models.named("tiny") is not None)
        await box.models.loaded()
        assert box.names == []
        second = await box.worker()
        await until(lambda: box.names == ["tiny"])
        await first.runtime.close()
        await until(lambda: box.routable() == {second.id})
        assert box.names == ["tiny"]


async def test_the_first_card_adds_a_model_and_the_last_worker_takes_it_off(box: Box) -> None:
    with pytest.raises(NoInstances):  # after a restart it may be the model of the next worker
        box.models.find("nope", "Chat")
    first = await box.worker()
    await until(lambda: box.names == ["tiny"])
    with pytest.raises(ModelNotFound, match="nope"):
        box.models.find("nope", "Chat")
    second = await box.worker()
    await until(lambda: box.routable() == {first.id, second.id})
    assert box.models.listed()[0][2] == 2048
    assert len(box.models.instances()) == 2
    assert b'model_ready{model="tiny"} 1' in box.runtime.metrics.render()
    entry = box.models.find("tiny", "Completions")
    await first.runtime.close()
    await until(lambda: box.routable() == {second.id})
    await second.runtime.close()
    await until(lambda: box.names == [])
    with pytest.raises(NoInstances):
        box.models.find("tiny", "Chat")
    assert b'model_ready{model="tiny"} 0' in box.runtime.metrics.render()
    third = await box.worker()
    await until(lambda: box.routable() == {third.id})
    assert box.models.find("tiny", "Chat") is entry  # nothing was loaded again


async def test_a_worker_that_tokenizes_differently_gets_nothing(
    box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    good = await box.worker()
    await until(lambda: box.routable() == {good.id})
    with caplog.at_level(logging.ERROR):
        other = await box.worker(checksum="c2")
        await until(lambda: box.rejected("tiny", "checksum") == 1)
    assert "another checksum" in caplog.text
    assert box.models.rejections() == {
        f"{other.id:x}": "other workers of tiny have another checksum of tokenizer, template and "
        "config; another model needs another name"
    }
    await until(lambda: len(box.models.instances()) == 2)
    assert box.routable() == {good.id}
    await good.runtime.close()
    await until(lambda: box.routable() == {other.id})  # now it is the model
    assert not box.models.rejections()


async def test_counts_of_a_tokenizer_stay_when_its_model_goes(box: Box) -> None:
    """Counters do not fall: a model of that name, loaded again, has its own tokenizer."""

    def counts() -> list[float]:
        box.models.count()
        found = [
            next(iter(box.runtime.metrics._families[name].metrics())).samples[0].value
            for name in (
                "dynamo_frontend_tokenizer_cache_hits_total",
                "dynamo_frontend_tokenizer_cache_misses_total",
            )
        ]
        return found

    good = await box.worker()
    await until(lambda: box.routable() == {good.id})
    text = "<|im_start|>user hello<|im_end|>" * 20

    def encode() -> None:
        loaded = box.models.find("tiny", "Chat")
        loaded.preprocessor.tokenizer.encoder.encode(text, False)
        loaded.preprocessor.tokenizer.encoder.encode(text, False)

    encode()
    before = counts()
    assert before == counts() and sum(before) > 0
    encode()  # counted when the model goes, at the latest
    other = await box.worker(checksum="c2")
    await until(lambda: box.rejected("tiny", "checksum") == 1)
    await good.runtime.close()
    await until(lambda: box.routable() == {other.id})
    after = counts()
    assert after[0] > before[0] and after[1] >= before[1]
    encode()
    assert sum(counts()) > sum(after)


async def test_the_problem_of_a_card_goes_with_it(box: Box) -> None:
    good = await box.worker()
    await until(lambda: box.routable() == {good.id})
    other = await box.worker(checksum="c2")
    await until(lambda: list(box.models.rejections()) == [f"{other.id:x}"])
    await other.runtime.close()
    await until(lambda: not box.models.rejections())


async def test_requests_of_a_silent_worker_wait_for_it_beside_another_models(box: Box) -> None:
    """Workers of one endpoint may have different models: they cannot take its requests."""
    silent = await box.worker()
    await box.worker(display_name="other", slug="other")
    await until(lambda: sorted(box.names) == ["other", "tiny"])
    client = box.models.find("tiny", "Chat").client
    client.availability.begin(silent.id, "connection", "silent", "x")
    assert len(client.instance_ids()) == 2
    assert not client.can_move()
    second = await box.worker()
    await until(lambda: box.routable() == {silent.id, second.id})
    assert client.can_move()


async def test_one_name_at_two_endpoints(box: Box) -> None:
    good = await box.worker()
    await until(lambda: box.routable() == {good.id})
    await box.worker("elsewhere")
    await until(lambda: box.rejected("tiny", "endpoint") == 1)
    assert box.routable() == {good.id}


async def test_cards_that_can_not_be_used(box: Box, tmp_path: Path) -> None:
    await box.worker("text", display_name="text", model_input="Tensor")
    await box.worker("none", display_name="none", source_path=str(tmp_path / "missing"))
    await box.worker("pre", display_name="pre", worker_type="Prefill")
    torn = await box.worker("torn", display_name="torn")
    lease = await torn.runtime.granted()
    await torn.runtime.discovery.put(f"v1/mdc/{torn.tail}", b"{", lease.id)
    await until(lambda: box.rejected("text", "model_input") == 1)
    await until(lambda: box.rejected("none", "load") == 1)
    await until(lambda: box.rejected("unknown_model", "unreadable") == 1)
    for name in ("text", "pre"):
        with pytest.raises(ModelNotFound):
            box.models.find(name, "Chat")
    assert sorted(text.partition(" ")[0] for text in box.models.rejections().values()) == [
        "it",
        "the",
    ]
    with pytest.raises(NoInstances):
        box.models.find("none", "Chat")


async def test_a_model_that_could_not_be_loaded_is_tried_again(box: Box, tmp_path: Path) -> None:
    place = tmp_path / "model"
    await box.worker(source_path=str(place))
    await until(lambda: box.rejected("tiny", "load") == 1)
    shutil.copytree(MODEL_DIR, place)
    second = await box.worker(source_path=str(place))
    await until(lambda: second.id in box.routable() and len(box.routable()) == 2)
    assert not box.models.rejections()
    with pytest.raises(ModelNotFound, match="`tiny` has no /v1/embeddings, it has /v1/chat/com"):
        box.models.find("tiny", "Embedding")


async def test_a_model_is_served_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its router sends the others its load when there is room again."""
    async with running(tmp_path, RouterSettings(mode="kv", replica_sync=True)) as box:

        async def full(*args: str) -> EventPublisher:
            raise Unavailable("cannot register: No space left on device")

        monkeypatch.setattr(box.runtime, "publisher", full)
        worker = await box.worker()
        await until(lambda: bool(box.models.loaded_models()))
        await until(lambda: box.routable() == {worker.id})
        assert not box.rejected("tiny", "load") and not box.models.rejections()


async def test_types_and_aliases(box: Box) -> None:
    await box.worker(model_type="Completions", model_aliases=["other"])
    await until(lambda: box.names == ["tiny", "other"])
    assert box.models.find("other", "Completions") is box.models.find("tiny", "Completions")
    with pytest.raises(ModelNotFound):
        box.models.find("tiny", "Chat")


async def test_a_card_withdrawn_and_given_again(box: Box) -> None:
    worker = await box.worker()
    other = await box.worker()
    await until(lambda: box.routable() == {worker.id, other.id})
    await worker.runtime.discovery.delete(f"v1/mdc/{worker.tail}")
    await until(lambda: box.routable() == {other.id})
    await worker.announce()
    await until(lambda: box.routable() == {worker.id, other.id})


async def test_prefill_workers_join_their_model_whoever_comes_first(box: Box) -> None:
    early = await box.worker("prefill", model_type="Prefill", worker_type="Prefill")
    decode = await box.worker()
    await until(lambda: "tiny" in box.names)
    entry = box.models.find("tiny", "Chat")
    await until(lambda: entry.dispatch.prefill is not None)
    router = entry.dispatch.prefill
    assert isinstance(router, PrefillRouter)
    await until(lambda: router.queue.workers == [early.id])
    assert set(entry.picker.worker_pool.members) == {decode.id}
    late = await box.worker("prefill", model_type="Prefill")
    await until(lambda: set(router.queue.workers) == {early.id, late.id})
    assert {one.instance_id for one in box.models.instances()} == {early.id, late.id, decode.id}
    for worker in (early, late):
        await worker.runtime.close()
    await until(lambda: not router.active and router.queue.all_workers == [])
    assert box.names == ["tiny"]
    again = await box.worker("elsewhere", model_type="Prefill")
    await until(lambda: router.queue.workers == [again.id])


async def test_a_prefill_card_makes_no_model_of_its_own(box: Box) -> None:
    await box.worker("prefill", model_type="Prefill")
    await until(lambda: bool(box.models._prefill._cards))
    with pytest.raises(NoInstances):
        box.models.find("tiny", "Chat")


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"checksum": "c2"}, "checksum"), ({"namespace": "other"}, "endpoint")],
)
async def test_prefill_cards_that_disagree_are_rejected(
    box: Box, change: dict[str, Any], reason: str
) -> None:
    await box.worker()
    await until(lambda: "tiny" in box.names)
    prefill = await box.worker("prefill", model_type="Prefill", **change)
    await until(lambda: box.rejected("tiny", reason) == 1)
    assert reason in box.models.rejections()[f"{prefill.id:x}"]
    router = box.models.find("tiny", "Chat").prefill.router
    assert router is not None and not router.active


async def test_a_second_prefill_endpoint_waits_until_the_first_is_gone(box: Box) -> None:
    await box.worker()
    first = await box.worker("prefill", model_type="Prefill")
    await until(lambda: "tiny" in box.names)
    router = box.models.find("tiny", "Chat").prefill.router
    assert router is not None
    await until(lambda: router.queue.workers == [first.id])
    second = await box.worker("prefill2", model_type="Prefill")
    await until(lambda: box.rejected("tiny", "endpoint") == 1)
    await first.runtime.close()
    await until(lambda: router.queue.workers == [second.id])
    assert box.models.rejections() == {}


# -- models whose workers take whole requests


def http_card(**more: Any) -> dict[str, Any]:
    """The card of an attached server without KV events or tokenizer."""
    return {
        "model_input": "Http",
        "source_path": "",
        "user_data": {"routes": ["/v1/chat/completions", "/v1/rerank"]},
        "runtime_config": RuntimeConfig(enable_local_indexer=False),
        **more,
    }


async def test_a_server_without_a_tokenizer_is_listed(box: Box) -> None:
    await box.worker(**http_card())
    await until(lambda: box.names == ["tiny"])
    entry = box.models.named("tiny")
    assert entry is not None and entry.relayed and box.models.relays
    assert entry.paths == {"/v1/chat/completions", "/v1/rerank"}
    assert entry.loaded is not None and entry.loaded.preprocessor is None
    assert entry.loaded.context_length == 2048
    box.models.count()
    with pytest.raises(ModelNotFound):  # it takes no tokens
        box.models.find("tiny", "Chat")


async def test_it_has_the_routes_that_all_its_workers_have(box: Box) -> None:
    await box.worker(**http_card())
    odd = ["/v1/rerank", "/v1/a b", "/health", 7, "/v1/../x"]
    other = await box.worker(**http_card(user_data={"routes": odd}))
    await until(lambda: box.names == ["tiny"])
    entry = box.models.named("tiny")
    await until(lambda: entry is not None and len(entry.workers) == 2)
    assert entry is not None and entry.paths == {"/v1/rerank"}
    await other.announce(**http_card(user_data=None))
    await until(lambda: entry.paths == frozenset())


async def test_tokens_and_whole_requests_do_not_mix(box: Box) -> None:
    await box.worker()
    await until(lambda: box.names == ["tiny"])
    await box.worker(**http_card(checksum="c1"))
    await until(lambda: box.rejected("tiny", "model_input") == 1)
    await until(lambda: len(box.routable()) == 1)


@pytest.mark.parametrize(
    ("changes", "predicts", "tokenizes"),
    [
        ({}, True, False),
        ({"source_path": str(MODEL_DIR)}, True, True),
        ({"source_path": str(MODEL_DIR), "runtime_config": RuntimeConfig()}, False, True),
        ({"model_input": "Text", "source_path": str(MODEL_DIR)}, True, False),
    ],
)
async def test_how_its_prompts_are_routed(
    kv_box: Box, changes: dict[str, Any], predicts: bool, tokenizes: bool
) -> None:
    await kv_box.worker(**http_card(**changes))
    await until(lambda: kv_box.names == ["tiny"])
    entry = kv_box.models.named("tiny")
    assert entry is not None and entry.loaded is not None
    assert (entry.loaded.preprocessor is not None) is tokenizes
    assert isinstance(entry.loaded.picker, KvPicker)
    assert (entry.loaded.picker.predicted is not None) is predicts
