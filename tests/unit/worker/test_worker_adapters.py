"""The adapters of a worker: steps of an operation, requests that run on, a record that changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from until import until

from dynamo.config import from_env
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import InvalidArgument, ModelNotFound, Unavailable
from dynamo.worker import adapters as module
from dynamo.worker.adapter_record import AdapterRecord, adapter_files, adapters_in
from dynamo.worker.adapters import Adapters


class Engine:
    """Weights by their number, and the requests that run."""

    def __init__(self) -> None:
        self.loaded: dict[object, tuple[str, str]] = {}
        self.used: dict[str, object] = {}
        self.running: dict[str, str] = {}
        self.asleep = False
        self.numbers = iter(range(1, 1_000_000))

    async def load_lora(self, name: str, path: str, version: str) -> object:
        if "bad" in path:
            raise InvalidArgument("wrong rank")
        weights = next(self.numbers)
        self.loaded[weights] = name, path
        return weights

    def use_lora(self, name: str, weights: object | None) -> frozenset[str]:
        if weights is None:
            del self.used[name]
        else:
            self.used[name] = weights
        return frozenset(number for number, of in self.running.items() if of == name)

    def any_running(self, requests: frozenset[str]) -> bool:
        return bool(requests & self.running.keys())

    async def remove_lora(self, weights: object) -> None:
        del self.loaded[weights]

    async def is_sleeping(self) -> bool:
        return self.asleep


class Site:
    """A worker's adapters over an engine; ``cards`` are those in discovery."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.engine: Any = Engine()
        self.cards: dict[str, str] = {}
        self.broken = False
        self.directory = tmp_path / "watched"
        self.directory.mkdir()
        settings = from_env(RuntimeSettings, state_dir=str(tmp_path / "state"))
        self.record = AdapterRecord(settings, "m")
        self.fixed = {"fixed": self.write("fixed")}
        self.adapters = Adapters(
            cast(Any, self.engine),
            "m",
            self.fixed,
            self.record,
            self.directory,
            self.publish,
            self.withdraw,
        )

    def write(self, name: str, text: str = "{}") -> str:
        path = self.tmp_path / name
        path.mkdir(exist_ok=True)
        (path / "adapter_config.json").write_text(text)
        return str(path)

    async def publish(self, name: str, path: str) -> None:
        if self.broken:
            raise Unavailable("no space left")
        self.cards[name] = path

    async def withdraw(self, name: str) -> None:
        if self.broken:
            raise Unavailable("no space left")
        del self.cards[name]

    async def call(self, route: str, name: str, path: str = "", **more: Any) -> None:
        await self.adapters.routes[route]({"lora_name": name, "lora_path": path, **more})


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    for name in ("_FOLLOW_S", "_LEAVE_S", "_ENDED_S"):
        monkeypatch.setattr(module, name, 0.01)
    site = Site(tmp_path)
    await site.adapters.start()
    assert not site.cards, "the model itself is registered first"
    await site.adapters.publish()
    running = asyncio.ensure_future(site.adapters.run())
    yield site
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_no_request_names_an_adapter_before_its_commit(site: Site) -> None:
    path = site.write("a")
    await site.call("prepare_lora", "a", path, operation="1")
    assert "a" not in site.engine.used and not site.record.read() and len(site.engine.loaded) == 2
    with pytest.raises(InvalidArgument, match="by another request"):
        await site.call("prepare_lora", "a", path, operation="2")
    await site.call("discard_lora", "a", operation="2")
    with pytest.raises(Unavailable, match="load it again"):
        await site.call("commit_lora", "a", path, operation="2")
    await site.call("commit_lora", "a", path, operation="1")
    assert site.cards["a"] == path and site.record.read() == {"a": path}
    await site.call("commit_lora", "a", path, operation="1")  # its answer was lost


async def test_a_name_has_a_bound(site: Site) -> None:
    with pytest.raises(InvalidArgument, match="lora_name"):
        await site.adapters.load({"lora_name": "n" * 257, "lora_path": site.write("a")})


async def test_what_is_never_committed_is_freed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.call("prepare_lora", "a", site.write("a"), operation="1")
    await site.call("discard_lora", "a", operation="1")
    assert len(site.engine.loaded) == 1
    monkeypatch.setattr(module, "_PREPARED_S", 0.0)
    await site.call("prepare_lora", "a", site.write("a"), operation="1")
    await until(lambda: len(site.engine.loaded) == 1)


async def test_weights_stay_until_their_last_request_has_ended(site: Site) -> None:
    await site.call("load_lora", "a", site.write("a"))
    site.engine.running["r1"] = "a"
    await site.call("unload_lora", "a")
    assert "a" not in site.cards
    await until(lambda: "a" not in site.engine.used)
    await asyncio.sleep(0.1)
    assert len(site.engine.loaded) == 2, "r1 uses them"
    # The same name again, while a request of the old weights runs.
    await site.call("load_lora", "a", site.write("b"))
    assert len(site.engine.loaded) == 3
    site.engine.running["r2"] = "a"
    del site.engine.running["r1"]
    await until(lambda: len(site.engine.loaded) == 2)
    assert site.engine.loaded[site.engine.used["a"]] == ("a", str(site.tmp_path / "b"))
    await site.call("load_lora", "a", site.write("c"), load_inplace=True)
    await asyncio.sleep(0.1)
    assert len(site.engine.loaded) == 3
    del site.engine.running["r2"]
    await until(lambda: len(site.engine.loaded) == 2)


async def test_a_name_that_is_loaded_again_at_once_stays(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LEAVE_S", 0.05)
    for _ in range(3):
        await site.call("load_lora", "a", site.write("a"))
        await site.call("unload_lora", "a")
    await site.call("load_lora", "a", site.write("a"))
    await asyncio.sleep(0.2)
    assert site.engine.used["a"] in site.engine.loaded and len(site.engine.loaded) == 2


async def test_the_record_is_followed(site: Site) -> None:
    site.record.change("a", site.write("a"))
    await until(lambda: "a" in site.cards)
    site.record.change("bad", site.write("bad"))
    site.record.change("a", site.write("b"))
    await until(lambda: site.cards["a"].endswith("/b"))
    assert "bad" not in site.cards
    site.record.change("a", None)
    await until(lambda: "a" not in site.cards)
    site.engine.asleep = True
    site.record.change("c", site.write("c"))
    await asyncio.sleep(0.1)
    assert "c" not in site.cards
    with pytest.raises(Unavailable, match="sleeps"):
        await site.call("load_lora", "d", site.write("d"))
    site.engine.asleep = False
    await until(lambda: "c" in site.cards)


async def test_a_commit_takes_what_was_prepared_before_the_record_named_it(site: Site) -> None:
    path = site.write("a")
    await site.call("prepare_lora", "a", path, operation="1")
    site.record.change("a", path)  # by the commit of another worker
    await until(lambda: "a" in site.cards)
    await site.call("commit_lora", "a", path, operation="1")
    assert len(site.engine.loaded) == 2, "loaded once"


async def test_a_card_that_cannot_be_stored_leaves_nothing(site: Site) -> None:
    site.broken = True
    with pytest.raises(Unavailable):
        await site.call("load_lora", "a", site.write("a"))
    assert "a" not in site.engine.used and not site.record.read()
    await until(lambda: len(site.engine.loaded) == 1)
    site.broken = False
    await site.call("load_lora", "a", site.write("a"))
    site.broken = True
    with pytest.raises(Unavailable):
        await site.call("unload_lora", "a")
    assert "a" in site.cards and "a" in site.engine.used and "a" in site.record.read()
    site.broken = False
    await site.call("unload_lora", "a")
    with pytest.raises(ModelNotFound):
        await site.call("unload_lora", "a")


async def test_each_source_keeps_its_own(site: Site) -> None:
    for name in ("fixed", "watched"):
        path = site.write(f"watched/{name}")
    await until(lambda: "watched" in site.cards)
    assert site.cards["fixed"] == site.fixed["fixed"]
    for name in ("fixed", "watched"):
        with pytest.raises(InvalidArgument, match="is one of --lora"):
            await site.call("unload_lora", name)
        with pytest.raises(InvalidArgument, match="is one of --lora"):
            await site.call("load_lora", name, path, load_inplace=True)
    site.record.change("fixed", path)
    site.record.change("other", path)
    await until(lambda: "other" in site.cards)
    assert site.cards["fixed"] == site.fixed["fixed"]
    before = site.engine.used["watched"]
    site.write("watched/watched", '{"r": 1}')
    await until(lambda: site.engine.used["watched"] != before)
    (site.directory / "watched" / "adapter_config.json").unlink()
    await until(lambda: "watched" not in site.cards)


def test_what_a_directory_has(tmp_path: Path) -> None:
    for name in ("a", ".hidden", "no\nname", "empty"):
        (tmp_path / name).mkdir()
        if name != "empty":
            (tmp_path / name / "adapter_config.json").write_text("{}")
    (tmp_path / "file").write_text("")
    assert list(adapters_in(tmp_path)) == ["a"]
    assert adapters_in(tmp_path / "none") == {}
    before = adapter_files(str(tmp_path / "a"))
    (tmp_path / "a" / "weights").write_text("")
    assert adapter_files(str(tmp_path / "a")) != before


def test_a_record_has_a_bound(tmp_path: Path) -> None:
    record = AdapterRecord(from_env(RuntimeSettings, state_dir=str(tmp_path)), "m")
    record.change("a", "/a")
    with pytest.raises(InvalidArgument, match="larger than 1 MiB"):
        record.change("b", "/" + "x" * (1 << 20))
    assert record.read() == {"a": "/a"}
    written = json.loads(record.path.read_text())
    record.path.write_text(
        json.dumps({**written, "models": {**written["models"], "o": {"x": "/x"}}})
    )
    record.change("a", None)
    assert json.loads(record.path.read_text())["models"] == {"o": {"x": "/x"}}
