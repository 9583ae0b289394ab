"""Random histories of two stores on one directory, with real deaths, against a plain model."""

import asyncio
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from dynamo.errors import WorkerUnavailable
from dynamo.protocols.control import LeaseRecord
from dynamo.runtime.discovery import FileDiscovery, KeyEvent, Lease, layout
from dynamo.runtime.process import paths
from dynamo.runtime.process.os_process import host_id, start_ticks

KEYS = [f"v1/{bucket}/ns/c/e/1" for bucket in layout.BUCKETS]
stores = st.integers(0, 1)
keys = st.sampled_from(KEYS)


class Follower:
    """Folds the events of one watch; refuses a repeated put and a delete of nothing."""

    def __init__(self, store: FileDiscovery) -> None:
        self.state: dict[str, bytes | None] = {}
        self.kinds: Counter[str] = Counter()
        self.faults: list[KeyEvent] = []
        store.watch("v1/", self._on_event)

    def _on_event(self, event: KeyEvent) -> None:
        self.kinds[event.kind] += 1
        if self.state.get(event.key) == event.value:
            self.faults.append(event)
        if event.value is None:
            self.state.pop(event.key, None)
        else:
            self.state[event.key] = event.value


class Histories(RuleBasedStateMachine):
    """``expected`` maps each live key to its value and lease."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = tempfile.TemporaryDirectory()
        self.root = Path(self.directory.name) / "store"
        self.expected: dict[str, tuple[bytes, int]] = {}
        self.live: set[int] = set()
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self.next_id = 1
        self.run(self._open())

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    async def _open(self) -> None:
        self.stores = [FileDiscovery(self.root) for _ in range(2)]
        self.followers = [Follower(store) for store in self.stores]

    @rule(target=leases, store=stores)
    def grant(self, store: int) -> int:
        lease: Lease = self.run(self.stores[store].grant(1000, self._new_id()))
        self.live.add(lease.id)
        return lease.id

    @rule(target=leases)
    def grant_in_another_process(self) -> int:
        lease_id = self._new_id()
        child = subprocess.Popen(["sleep", "600"])
        ticks = start_ticks(child.pid)
        assert ticks is not None
        record = LeaseRecord(lease_id, child.pid, ticks, 1000, host_id())
        paths.write_atomic(layout.lease_path(self.root, lease_id), msgspec.json.encode(record))
        self.children[lease_id] = child
        self.live.add(lease_id)
        return lease_id

    @rule(store=stores, key=keys, value=st.binary(max_size=3), lease=leases)
    def put(self, store: int, key: str, value: bytes, lease: int) -> None:
        try:
            self.run(self.stores[store].put(key, value, lease))
        except WorkerUnavailable:
            assert lease not in self.live
        else:
            assert lease in self.live
            self.expected[key] = (value, lease)

    @rule(store=stores, key=keys)
    def delete(self, store: int, key: str) -> None:
        self.run(self.stores[store].delete(key))
        self.expected.pop(key, None)

    @rule(store=stores, lease=consumes(leases))
    def revoke(self, store: int, lease: int) -> None:
        self.run(self.stores[store].revoke(lease))
        self._over(lease)

    @rule(lease=consumes(leases))
    def unlink(self, lease: int) -> None:
        layout.lease_path(self.root, lease).unlink(missing_ok=True)
        self._over(lease)

    @rule(lease=consumes(leases))
    def crash(self, lease: int) -> None:
        child = self.children.pop(lease, None)
        if child is not None:
            child.kill()
            child.wait()
            self._over(lease)

    @rule(store=stores)
    def lose_events(self, store: int) -> None:
        self.stores[store]._overflowed()

    @rule(key=keys, data=st.binary(max_size=20))
    def scribble(self, key: str, data: bytes) -> None:
        path = layout.key_path(self.root, key)
        path.write_bytes(b"torn " + data)
        self.expected.pop(key, None)

    @invariant()
    def all_agree(self) -> None:
        self.run(self._agree())
        for follower in self.followers:
            assert not follower.faults

    def teardown(self) -> None:
        try:
            self.run(self._finish())
        finally:
            self.runner.close()
            for child in self.children.values():
                child.kill()
                child.wait()
            self.directory.cleanup()

    async def _agree(self) -> None:
        wanted = {key: value for key, (value, _) in self.expected.items()}
        seen: list[Any] = []
        try:
            async with asyncio.timeout(20):
                while seen != [wanted] * 4:
                    await asyncio.sleep(0)
                    seen = [await store.list("v1/") for store in self.stores]
                    seen += [follower.state for follower in self.followers]
        except TimeoutError:
            assert seen == [wanted] * 4

    async def _finish(self) -> None:
        late = FileDiscovery(self.root)
        wanted = {key: value for key, (value, _) in self.expected.items()}
        assert await late.list("v1/") == wanted
        await late.close()
        for store in self.stores:
            await store.close()

    def _over(self, lease: int) -> None:
        self.live.discard(lease)
        child = self.children.pop(lease, None)
        if child is not None:
            child.kill()
            child.wait()
        self.expected = {k: v for k, v in self.expected.items() if v[1] != lease}

    def _new_id(self) -> int:
        self.next_id += 1
        return self.next_id


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
