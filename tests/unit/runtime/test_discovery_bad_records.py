"""What may lie in the store instead of a record: reported once, skipped, nothing else is lost."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import InvalidArgument
from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, register_model
from dynamo.protocols.control import (
    EndpointRecord,
    EventChannelRecord,
    LeaseRecord,
    ModelCard,
    decode_card,
    record_decoder,
)
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.discovery import FileDiscovery, KeyEvent, MemoryDiscovery, layout
from dynamo.runtime.discovery.base import KeyCache
from dynamo.runtime.discovery.etcd.discovery import EtcdWatcher
from dynamo.runtime.discovery.etcd.link import Change, Listing, Step
from dynamo.runtime.process import paths
from dynamo.runtime.process.os_process import host_id

KEY = "v1/instances/ns/comp/ep/1f"
MODEL_DIR = Path(__file__).parents[3] / "examples" / "model"
NOT_REGULAR = "not a regular file"


def directory(path: Path) -> None:
    path.mkdir()


def fifo(path: Path) -> None:
    os.mkfifo(path)


def listener(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


def link(path: Path) -> None:
    target = path.parent.parent / "elsewhere"
    target.write_bytes(layout.encode_stored(1, b"x"))
    path.symlink_to(target)


def huge(path: Path) -> None:
    path.write_bytes(b"")
    os.truncate(path, 400 << 20)


def lease(**changes: object) -> Callable[[Path], None]:
    fields = {"lease_id": 0x1F, "pid": 1, "pid_start": 1, "ttl_s": 10, "host": host_id()}
    data = json.dumps({**fields, **changes}).encode()
    return lambda path: paths.write_atomic(path, data)


BAD = [
    ("v1/instances/foo", directory, NOT_REGULAR),
    ("v1/instances/foo", fifo, NOT_REGULAR),
    ("v1/instances/foo", listener, "cannot be read"),
    ("v1/instances/foo", link, "cannot be read"),
    ("v1/instances/foo", huge, "419430400 bytes are more"),
    ("v1/mdc/\udcff\udcfe", directory, "not a key"),
    ("v1/mdc/key", lambda path: path.write_bytes(b"f" * 40 + b" 1\na"), "no lease id"),
    ("v1/mdc/key", lambda path: path.write_bytes(b"-1 1\na"), "no lease id"),
    ("leases/1f", directory, NOT_REGULAR),
    ("leases/1f", fifo, NOT_REGULAR),
    ("leases/1f", huge, "419430400 bytes are more"),
    ("leases/\udcff", directory, NOT_REGULAR),
    ("leases/1f", lease(pid=2**31), "out of range|<= 2147483647"),
    ("leases/1f", lease(pid=0), ">= 1"),
    ("leases/1f", lease(pid=2**70), "2147483647"),
    ("leases/1f", lease(ttl_s=1e300), "<= 1"),
    ("leases/1f", lambda path: path.write_bytes(b"[" * 100_000), "not a lease"),
]


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(("name", "make", "problem"), BAD)
async def test_a_bad_file_is_reported_once_and_nothing_else_is_lost(
    store: FileDiscovery,
    root: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    make: Callable[[Path], None],
    problem: str,
) -> None:
    """Three ways to meet it: in a batch of file events, at the start, after lost events."""
    own = await store.grant(10)
    assert await store.list("v1/") == {}
    make(root / name)
    await store.put(KEY, b"good", own.id)
    assert await store.list("v1/") == {KEY: b"good"}
    store._overflowed()
    assert await store.list("v1/") == {KEY: b"good"}
    [report] = [one for one in reports(caplog) if "skipping" in one]
    assert any(part in report for part in problem.split("|"))
    assert report.isascii() and len(report) < 400
    late = FileDiscovery(root)
    assert await late.list("v1/") == {KEY: b"good"}
    await late.close()
    assert not [one for one in reports(caplog) if "failed" in one]


async def test_a_removed_bad_file_is_not_reported_again(
    store: FileDiscovery, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("v1/mdc/a b", "v1/mdc/ab", "leases/zz"):
        (root / name).mkdir()
    assert await store.list("v1/") == {}
    assert len(reports(caplog)) == 3
    for name in ("v1/mdc/a b", "v1/mdc/ab", "leases/zz"):
        (root / name).rmdir()
    assert await store.list("v1/") == {}
    assert len(reports(caplog)) == 3


async def test_another_spelling_of_a_lease_does_not_end_it(
    store: FileDiscovery, root: Path
) -> None:
    own = await store.grant(10, 0x10)
    await store.put(KEY, b"good", own.id)
    assert await store.list("v1/") == {KEY: b"good"}
    for name in ("1_0", "+10", "0x10"):
        (root / "leases" / name).write_bytes(b"")
        (root / "leases" / name).unlink()
    assert await store.list("v1/") == {KEY: b"good"}


@pytest.mark.parametrize("kind", ["file", "memory"])
async def test_a_value_that_no_store_holds_is_refused(root: Path, kind: str) -> None:
    one = FileDiscovery(root) if kind == "file" else MemoryDiscovery()
    await one.start()
    own = await one.grant(10)
    await one.put(KEY, bytes(layout.LARGEST_VALUE_BYTES), own.id)
    assert len((await one.list("v1/"))[KEY]) == layout.LARGEST_VALUE_BYTES
    with pytest.raises(InvalidArgument, match="1048577 bytes under the key"):
        await one.put(KEY, bytes(layout.LARGEST_VALUE_BYTES + 1), own.id)
    await one.close()


class FakeLink:
    """An etcd that holds ``listing`` and then reports ``changes``."""

    def __init__(self, listing: dict[str, bytes], changes: list[Change]) -> None:
        self._listing = listing
        self._changes = changes
        self.told = asyncio.Event()

    async def list(self, prefix: str) -> Listing:
        return Listing(1, self._listing)

    async def watch(self, key: str, prefix: bool, after: int = 0) -> AsyncIterator[Step]:
        yield Step(2, self._changes, (1, 1))
        self.told.set()
        await asyncio.Event().wait()


async def test_the_same_checks_for_etcd(caplog: pytest.LogCaptureFixture) -> None:
    big = bytes(layout.LARGEST_VALUE_BYTES + 1)
    link = FakeLink(
        {"v1/mdc/big": big, "v1/mdc/": b"x", KEY: b"good", "v1/mdc/other": b"1"},
        [Change("v1/mdc/big", big), Change("v1/mdc/other", big), Change("v1/mdc/new", b"2")],
    )
    views = KeyCache(opened=False)
    events: list[KeyEvent] = []
    views.watch("v1/", events.append)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        following = group.create_task(EtcdWatcher(link, views).follow())  # type: ignore[arg-type]
        await link.told.wait()
        following.cancel()
    assert views.list("v1/") == {KEY: b"good", "v1/mdc/new": b"2"}
    assert KeyEvent("delete", "v1/mdc/other", None) in events
    assert sorted(one.split(":")[0] for one in reports(caplog)) == [
        "skipping 'v1/mdc/'",
        "skipping 'v1/mdc/big'",
        "skipping 'v1/mdc/other'",
    ]


CARD = {
    "display_name": "m",
    "slug": "m",
    "source_path": "/m",
    "namespace": "n",
    "component": "c",
    "endpoint": "e",
    "instance_id": 1,
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("context_length", 2**70),
        ("context_length", -1),
        ("kv_cache_block_size", 0),
        ("kv_cache_block_size", 2**40),
        ("instance_id", 2**64),
        ("runtime_config.data_parallel_size", 10**9),
        ("runtime_config.data_parallel_start_rank", -1),
        ("runtime_config.total_kv_blocks", 2**80),
        ("runtime_config.context_length", 2**70),
        ("runtime_config.bootstrap_port", 65536),
    ],
)
def test_a_card_out_of_range_names_the_field(field: str, value: int) -> None:
    assert decode_card(msgspec.json.encode(CARD)).instance_id == 1
    name, _, inner = field.partition(".")
    raw = json.dumps({**CARD, name: {inner: value} if inner else value}).encode()
    with pytest.raises(ValueError, match=field.rpartition(".")[2]):
        decode_card(raw)


@pytest.mark.parametrize("kind", [ModelCard, EndpointRecord, LeaseRecord])
@pytest.mark.parametrize(
    "data", [b"", b"\xff", b'{"a":"\xff"}', b"[" * 100_000, b'{"user_data":' * 100_000]
)
def test_whatever_it_is_decoding_raises_value_error(kind: type, data: bytes) -> None:
    with pytest.raises(ValueError):
        record_decoder(kind)(data)


async def test_a_bad_event_channel_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = RuntimeSettings(discovery_backend="mem", state_dir=str(tmp_path))
    runtime = DistributedRuntime(None, settings)
    own = await runtime.granted()
    here: list[int] = []
    subscription = runtime.subscribe(
        "ns", "comp", "news", lambda *event: None, None, lambda one, came: here.append(one)
    )
    await subscription.ready()
    prefix = "v1/event_channels/namespace/ns/component/comp/topic/news/"
    for number, address in enumerate(
        ("inproc://x", "ipc://", "ipc:///" + "x" * 200, "tcp://a b:5", "tcp://*:5")
    ):
        record = EventChannelRecord(
            namespace="ns",
            component="comp",
            topic="news",
            instance_id=number,
            lease_id=own.id,
            transport={"kind": "Zmq", "endpoint": address},
        )
        raw = msgspec.json.encode(record)
        await runtime.discovery.put(f"{prefix}{number:x}", raw, own.id)
        await runtime.discovery.put(f"{prefix}{number + 100:x}", raw, own.id)
    await runtime.publisher("ns", "comp", "news")
    assert subscription.publishers() == here == [runtime.instance_id]
    assert caplog.text.count("skipping the event channel") == 10
    assert "Traceback" not in caplog.text
    await runtime.close()


async def test_a_worker_cannot_register_a_card_out_of_range(tmp_path: Path) -> None:
    settings = RuntimeSettings(discovery_backend="mem", state_dir=str(tmp_path))
    runtime = DistributedRuntime(None, settings)
    endpoint = runtime.endpoint("ns.comp.generate")
    config = ModelRuntimeConfig()
    config.data_parallel_size = 10**9
    given = ModelInput.Tokens, ModelType.Chat, endpoint, str(MODEL_DIR), "m"
    with pytest.raises(InvalidArgument, match=r"1024 - at `\$.runtime_config.data_parallel_size"):
        await register_model(*given, runtime_config=config)
    with pytest.raises(InvalidArgument, match=r"the model card of .* is wrong"):
        await register_model(*given, context_length=2**70)
    await register_model(*given)
    await runtime.close()
