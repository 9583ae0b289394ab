"""What the page's picture of the routing has: pools, loads, and decisions once each."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from types import NoneType, SimpleNamespace
from typing import Any, cast

import pytest

from dynamo._fast.radix import RadixTree
from dynamo.config.router import RouterSettings
from dynamo.frontend.requests.recent import Prefilled, RequestFigures, RequestInfo
from dynamo.frontend.ui import routing
from dynamo.frontend.ui.routing import RoutedPool, RoutingFeed
from dynamo.protocols import codec
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.kv import KvMetrics
from dynamo.router.decision.decision import Decision
from dynamo.router.modes.factory import make_picker
from dynamo.router.modes.picker import Picker


class Runtime:
    """Load reports arrive by hand."""

    def __init__(self) -> None:
        self.open: dict[tuple[str, ...], Any] = {}

    def subscribe(self, namespace: str, component: str, topic: str, on_event: Any) -> Any:
        place = namespace, component
        self.open[place] = on_event
        return SimpleNamespace(close=lambda: self.open.pop(place))


class Site:
    """One model; it has decode workers 7 and 8, and prefill workers if ``prefill`` is given."""

    def __init__(self, picker: Picker, prefill: Picker | None = None) -> None:
        self.runtime = Runtime()
        self.decided: list[tuple[RequestFigures, Decision]] = []
        self.after_s = 0.0
        router: Any = None
        if prefill is not None:
            router = SimpleNamespace(queue=Queue(), workers=SimpleNamespace(picker=prefill))
        self.loaded = SimpleNamespace(
            name="tiny",
            router=SimpleNamespace(workers=("ns", "backend", "generate")),
            dispatch=SimpleNamespace(queue=["waiting"]),
            picker=picker,
            prefill=SimpleNamespace(
                router=router, endpoint=None if prefill is None else ("ns", "prefill", "generate")
            ),
        )
        models: Any = SimpleNamespace(loaded_models=lambda: [self.loaded])
        registry: Any = SimpleNamespace(
            in_flight_by_worker=lambda: Counter({7: 2}), decided_since=self._decided_since
        )
        self.feed = RoutingFeed(cast(Any, self.runtime), models, registry)

    def _decided_since(self, after_s: float) -> list[tuple[RequestFigures, Decision]]:
        self.after_s = after_s
        return self.decided


class Queue:
    """A prefill queue with one request at worker 9 and three that wait."""

    all_workers = (9,)

    def running_at(self, worker_id: int) -> list[str]:
        return ["x"]

    def __len__(self) -> int:
        return 3


def picker(workers: tuple[int, ...], **settings: Any) -> Picker:
    found = make_picker(RouterSettings(**settings), 4, index=RadixTree())
    for one in workers:
        found.add_worker(one, RuntimeConfig(total_kv_blocks=100))
    return found


def by_worker(pool: RoutedPool) -> dict[str, Any]:
    return {one.worker: one for one in pool.workers}


@pytest.mark.parametrize("cost", ["blocks", "seconds"])
async def test_a_kv_router_with_load_reports(cost: str) -> None:
    chooser = picker((7, 8), mode="kv", cost=cost)
    chooser.pick("r", array("I", range(40)))
    site = Site(chooser)
    try:
        (pool,) = (await site.feed.read(True)).pools
        assert (pool.mode, pool.unit, pool.waiting) == ("kv", cost, 1)
        assert (pool.phase, by_worker(pool)["7"].in_flight) == ("", 2)
        assert {type(one.prefill_s) for one in pool.workers} == (
            {float} if cost == "seconds" else {float, NoneType}
        )
        # With a cost in seconds, what the worker has probably computed counts no more.
        assert sum(one.prefill_tokens or 0 for one in pool.workers) <= 40
        assert {one.running for one in pool.workers} == {None}
        loads = [KvMetrics(7, 0, kv_used_blocks=50, num_requests_running=3, num_requests_waiting=1)]
        site.runtime.open["ns", "backend"](1, 1, codec.encode(loads))
        site.runtime.open["ns", "backend"](2, 1, b"not msgpack")
        (pool,) = (await site.feed.read(False)).pools
        seven = by_worker(pool)["7"]
        assert (seven.running, seven.waiting, seven.kv_use, seven.total_blocks) == (3, 1, 0.5, 100)
        assert seven.cached_blocks == 0 and by_worker(pool)["8"].running is None
    finally:
        site.feed.close()
    assert not site.runtime.open


async def test_prefill_workers_and_another_mode() -> None:
    site = Site(picker((7, 8), mode="kv"), prefill=picker((9,), mode="round-robin"))
    try:
        prefill, decode = (await site.feed.read(True)).pools
    finally:
        site.feed.close()
    assert (prefill.phase, prefill.mode, prefill.unit) == ("prefill", "round-robin", "")
    assert (prefill.waiting, prefill.workers[0].in_flight) == (3, 1)
    assert prefill.workers[0].cached_blocks is None and prefill.workers[0].prefill_s is None
    assert decode.phase == "decode"


async def test_decisions_of_the_last_minute_then_those_since() -> None:
    site = Site(picker((7,), mode="kv"))
    now_s = time.monotonic()
    for number in range(130):
        info = RequestInfo("chat_completions", f"r{number}", None)
        figures = RequestFigures(info, "tiny", now_s - 20, sent_s=now_s - 10 + number / 100)
        figures.overlap_blocks = 2
        site.decided.append((figures, Decision(7, 1, 2, 4, None)))
    figures.prefilled = Prefilled(9, 0, 3, 4, now_s, now_s)
    try:
        view = await site.feed.read(True)
        assert site.after_s <= now_s - 55
        assert (view.decisions.count, view.left_out) == (100, 30)
        found, texts = view.decisions.columns, view.decisions.texts
        assert found["request_id"][:2] == ["r129", "r128"]
        assert (texts["worker"], found["worker"][:2]) == (["7"], [0, 0])
        assert texts["prefill_worker"] == ["9", ""] and found["prefill_worker"][:2] == [0, 1]
        assert (found["overlap_blocks"][:2], found["dp_rank"][0]) == ([3, 2], 1)
        assert abs(float(str(found["at_s"][0])) - (view.at_s - 8.7)) < 30
        await site.feed.read(False)
        assert site.after_s >= now_s - 0.6
    finally:
        site.feed.close()


async def test_reports_of_workers_that_are_gone_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routing, "_REPORTS", 2)
    site = Site(picker((7, 8), mode="kv"))
    try:
        await site.feed.read(True)
        for publisher in (1, 2, 1, 3):  # 2 has been silent longest
            loads = [KvMetrics(6 + publisher, 0, num_requests_running=publisher)]
            site.runtime.open["ns", "backend"](publisher, 1, codec.encode(loads))
        (pool,) = (await site.feed.read(False)).pools
        assert (by_worker(pool)["7"].running, by_worker(pool)["8"].running) == (1, None)
    finally:
        site.feed.close()
