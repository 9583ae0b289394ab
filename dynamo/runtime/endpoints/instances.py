"""The instances of an endpoint as Python callers see them, and the search for one by its card."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from typing import Any

from dynamo.protocols.card import decode_card
from dynamo.protocols.control import MODEL_CARDS, EndpointRecord
from dynamo.runtime.discovery import Discovery, KeyEvent

__all__ = ["Instance", "RuntimeDataWatch", "TransportType"]


class TransportType:
    """How to reach an instance: ``kind`` is tcp or uds, ``address`` a host and port or a path."""

    __slots__ = ("address", "kind")

    def __init__(self, kind: str, address: str) -> None:
        self.kind = kind
        self.address = address

    def __repr__(self) -> str:
        return f"TransportType({self.kind}, {self.address})"


class Instance:
    """One live instance of an endpoint."""

    __slots__ = ("component", "device_type", "endpoint", "instance_id", "namespace", "transport")

    def __init__(self, record: EndpointRecord, address: str, path: str) -> None:
        kind, _, where = address.partition(":")
        suffix = f"/{record.instance_id:x}/{path}" if kind == "tcp" else ""
        self.instance_id: int = record.instance_id
        self.namespace = record.namespace
        self.component = record.component
        self.endpoint = record.endpoint
        self.device_type: str | None = record.device_type
        self.transport = TransportType(kind, where + suffix)

    def __repr__(self) -> str:
        path = f"{self.namespace}/{self.component}/{self.endpoint}"
        return f"Instance({path}/{self.instance_id})"


class RuntimeDataWatch:
    """The ``runtime_data`` in the model cards of an endpoint; use it in ``async with``.

    ``live`` holds the ids of the instances that discovery reports; call :meth:`on_instances` when
    it changes. Cards of LoRA adapters repeat their worker's data and count once.
    """

    def __init__(self, discovery: Discovery, path: str, live: Container[int]) -> None:
        self._discovery = discovery
        self._prefix = f"{MODEL_CARDS}{path}/"
        self._live = live
        self._cards: dict[str, tuple[int, dict[str, Any]]] = {}
        self._changed = asyncio.Event()

    async def __aenter__(self) -> RuntimeDataWatch:
        self._watch = self._discovery.watch(self._prefix, self._on_key)
        await self._watch.ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watch.close()

    async def wait(
        self, key: str, value: str, min_count: int | None, timeout_s: float | None
    ) -> list[int]:
        """Return the sorted ids of the live instances whose data has the text ``value`` at ``key``.

        Waits for ``min_count`` of them, with None for exactly one. Raises TimeoutError.
        """
        found: list[int] = []
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._changed.clear()
                    found = self._matching(key, value)
                    if len(found) == 1 if min_count is None else len(found) >= min_count:
                        return found
                    await self._changed.wait()
        except TimeoutError:
            wanted = (
                "one endpoint instance" if min_count is None else f"{min_count} endpoint instances"
            )
            raise TimeoutError(
                f'Timed out waiting for {wanted} with runtime_data["{key}"] == "{value}"; '
                f"last_match_count={len(found)}, matching_ids={found}"
            ) from None

    def _matching(self, key: str, value: str) -> list[int]:
        return sorted(
            {
                instance_id
                for instance_id, data in self._cards.values()
                if instance_id in self._live and data.get(key) == value
            }
        )

    def on_instances(self, *_: object) -> None:
        """Check again: an instance may join discovery after its card."""
        self._changed.set()

    def _on_key(self, event: KeyEvent) -> None:
        self._cards.pop(event.key, None)
        if event.value is not None:
            try:
                card = decode_card(event.value)
            except ValueError:
                return
            self._cards[event.key] = (card.instance_id, card.runtime_config.runtime_data)
        self._changed.set()
