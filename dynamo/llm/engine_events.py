"""KV events that engines (vLLM, SGLang) publish over ZMQ: their decoder and their relay.

A message is MessagePack ``[timestamp, [event, …], dp_rank]``, or a map of these names; the last may
be missing. An event is a map with ``type``, or an array of the type and the fields in the order
below. A hash is an integer, signed or not, or bytes, of which the last eight count (big-endian).
``medium`` is the storage of the blocks; on a medium below the device, events may name blocks by
their hashes alone, without tokens.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import zmq
import zmq.asyncio

from dynamo.llm.prefix_index import short_hash
from dynamo.protocols.kv import STORAGE_TIERS

_U32 = 0xFFFF_FFFF
_U64 = 0xFFFF_FFFF_FFFF_FFFF
_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
_BATCH_FIELDS = ("ts", "events", "data_parallel_rank")
_FULL_ATTENTION = ("full_attention", "mla_attention", "sink_full_attention")
_DEVICE = STORAGE_TIERS[0]
_MEDIA = (
    ("GPU",),
    ("CPU", "CPU_PINNED", "CPU_TIER1"),
    ("CPU_TIER2", "NVME", "STORAGE"),
    ("NETWORK", "REMOTE", "SHARED"),
)
"""The engines' names of each of the ``STORAGE_TIERS``."""
_TIER_OF = {
    name: tier
    for tier, media in zip(STORAGE_TIERS, _MEDIA, strict=True)
    for name in (*media, tier.upper())
}
_decode = msgspec.msgpack.Decoder().decode
HIGH_WATER_MESSAGES = 100_000
REPLAY_TIMEOUT_S = 5.0
REPLAY_PAUSE_S = 60.0
REPLAY_BYTES = 64 << 20
_FRAMES = 3  # topic, number, payload
_SEQUENCE = struct.Struct(">Q")
_END_OF_REPLAY = _SEQUENCE.pack(_U64)
log = logging.getLogger(__name__)


class EngineEventRelay:
    """A SUB socket on the engine's ``endpoint``, and its replay socket, if it has one.

    Calls ``on_events(dp_rank or None, events)`` once per message, ``on_dropped(count)`` for lost
    messages, ``on_malformed(error)`` for each event that is dropped. Before the events that follow
    a restart of the engine, or a loss that the replay did not repair, it calls ``on_reset()``: a
    removal may be lost, so no earlier block counts.

    A restarted engine numbers its messages from 0. One whose number is above the last is found by
    the connection that was closed, and by the replay: it has another message under the last number.
    """

    def __init__(
        self,
        endpoint: str,
        topic: str,
        on_events: Callable[[int | None, list[EngineEvent]], None],
        on_dropped: Callable[[int], None],
        on_malformed: Callable[[Exception], None],
        on_reset: Callable[[], None],
        replay_endpoint: str | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.malformed = 0
        self._topic = topic
        self._on_events = on_events
        self._on_dropped = on_dropped
        self._on_malformed = on_malformed
        self._on_reset = on_reset
        self._replay_endpoint = replay_endpoint
        self._no_replay_until_s = 0.0
        self._disconnected = False  # since the last message
        self._newest: int | None = None  # the last number that the SUB socket delivered
        self._expected: int | None = None  # the next number to apply; a replay may be ahead
        self._last = b""  # the payload before it

    async def run(self) -> None:
        """Relay until cancelled; ZMQ reconnects when the engine restarts."""
        socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
            socket.setsockopt_string(zmq.SUBSCRIBE, self._topic)
            socket.connect(self.endpoint)
            while True:
                frames = await socket.recv_multipart()
                # ZMQ reports it before the first message of the next connection.
                while int(monitor.get(zmq.EVENTS)) & zmq.POLLIN:
                    await monitor.recv_multipart()
                    self._disconnected = True
                await self._on_message(frames)
                await asyncio.sleep(0)  # receiving does not suspend while messages wait
        finally:
            socket.disable_monitor()
            monitor.close()
            socket.close()

    async def _on_message(self, frames: list[bytes]) -> None:
        message = self._decoded(frames)
        if message is None:
            return  # the next message shows the gap
        if self._newest is not None and message.number <= self._newest:
            self._restart()
        self._newest = message.number
        # Later messages wait in the socket until the replay is complete.
        lost = message.number > (self._expected or 0)
        if (lost and self._replay_endpoint is not None) or self._disconnected:
            await self._repair()
        self._deliver(message)

    def _restart(self) -> None:
        if self._expected is not None:
            log.warning("%s: the engine restarted; cleared its blocks", self.endpoint)
            self._on_reset()
        self._expected, self._last = None, b""

    def _deliver(self, message: _Message) -> None:
        if self._expected is not None:
            lost = message.number - self._expected
            if lost < 0:  # already replayed
                return
            if lost:
                self._on_dropped(lost)
                log.warning(
                    "%s: messages %d to %d of the engine are lost; cleared its blocks",
                    self.endpoint,
                    self._expected,
                    message.number - 1,
                )
                self._on_reset()
        self._expected, self._last = message.number + 1, message.payload
        self._on_events(message.dp_rank, message.events)

    async def _repair(self) -> None:
        """Apply the replay. It begins with the last message, which proves that it continues it."""
        start = max((self._expected or 0) - 1, 0)
        replayed = await self._replay(start)
        if self._expected is not None:
            first = replayed[0] if replayed else [b"", b"", b""]
            continued = first[1:] == [_SEQUENCE.pack(start), self._last]
            newer = first[1] > _SEQUENCE.pack(self._expected)  # a gap: _deliver() clears
            if not continued and (self._disconnected or (replayed and not newer)):
                self._restart()
                replayed = await self._replay(0) if replayed and start else replayed
        self._disconnected = False
        for frames in replayed:
            message = self._decoded(frames)
            if message is not None:  # else the next one shows the gap
                self._deliver(message)
            await asyncio.sleep(0)

    async def _replay(self, start: int) -> list[list[bytes]]:
        """Return what the engine still has of its messages since ``start``, in frames.

        After a failure, nothing for :data:`REPLAY_PAUSE_S`: events wait for the answer.
        """
        now = asyncio.get_running_loop().time()
        if self._replay_endpoint is None or now < self._no_replay_until_s:
            return []
        replayed: list[list[bytes]] = []
        size = 0
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
            socket.setsockopt(zmq.MAXMSGSIZE, REPLAY_BYTES)
            socket.connect(self._replay_endpoint)
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                await socket.send_multipart([b"", _SEQUENCE.pack(start)])
                while size <= REPLAY_BYTES and len(replayed) < HIGH_WATER_MESSAGES:
                    frames = (await socket.recv_multipart())[1:]  # after the empty delimiter
                    if frames[1:2] == [_END_OF_REPLAY]:
                        return replayed
                    if len(frames) == _FRAMES:  # else the next one shows the gap
                        replayed.append(frames)
                        size += len(frames[-1])
                    await asyncio.sleep(0)
            problem = f"more than {HIGH_WATER_MESSAGES} messages, or {REPLAY_BYTES} bytes"
        except (TimeoutError, zmq.ZMQError) as error:
            problem = str(error) or f"no complete replay in {REPLAY_TIMEOUT_S:g} s"
        finally:
            socket.close()
        self._no_replay_until_s = now + REPLAY_PAUSE_S
        log.warning("%s: %s; not used for %g s", self._replay_endpoint, problem, REPLAY_PAUSE_S)
        return replayed

    def _decoded(self, frames: list[bytes]) -> _Message | None:
        try:
            _, number, payload = frames
            (sequence,) = _SEQUENCE.unpack(number)
            return _Message(sequence, payload, *decode_events(payload, self._on_malformed))
        except (ValueError, struct.error) as error:
            self.malformed += 1
            if self.malformed == 1:
                log.warning("%s: dropped a malformed message: %.200s", self.endpoint, error)
            return None


class EngineStored(NamedTuple):
    """Blocks of ``block_size`` tokens each, as a chain under ``parent_hash``.

    Without ``token_ids`` another tier has them. ``group`` is the group of layers that the blocks
    belong to, ``attention`` the kind of these layers; None for engines that do not say.
    ``mm_hashes`` are those of the images in each block, None without any; ``cache_salt`` is known
    only of a chain that begins at the root.
    """

    block_hashes: list[int]
    parent_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None
    storage_tier: str = _DEVICE
    group: int | None = None
    attention: str | None = None
    mm_hashes: list[list[int]] | None = None
    cache_salt: str | None = None


class EngineRemoved(NamedTuple):
    """These blocks of ``group`` were removed from the tier."""

    block_hashes: list[int]
    storage_tier: str = _DEVICE
    group: int | None = None


class EngineCleared(NamedTuple):
    """The engine removed all blocks; below the device, all blocks of that tier."""

    storage_tier: str = _DEVICE


EngineEvent = EngineStored | EngineRemoved | EngineCleared


class _Message(NamedTuple):
    """One message of the engine."""

    number: int
    payload: bytes
    dp_rank: int | None
    events: list[EngineEvent]


class AttentionGroup:
    """Selects the events of the groups of layers that decide which prompts are cached.

    A hybrid model stores each block in several groups, under the same hash, and a group with a
    sliding window drops its blocks early. Groups with full attention decide, whenever they appear;
    until then, the first group does.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._full: set[int | None] = set()

    def select(self, events: list[EngineEvent]) -> list[EngineEvent]:
        """Return the events of the deciding groups, and those without a group.

        The first event of full attention clears the blocks of a group that decided before it.
        """
        stored = [each for each in events if isinstance(each, EngineStored)]
        groups = [each.group for each in stored if each.group is not None]
        full: set[int | None] = {
            each.group
            for each in stored
            if each.group is not None and each.attention in _FULL_ATTENTION
        }
        replaced = bool(full) and not self._full and self._first is not None
        self._full |= full
        if self._first is None and not self._full and groups:
            self._first = groups[0]
        accepted = {None, *(self._full or {self._first})}
        selected: list[EngineEvent] = [
            event for event in events if isinstance(event, EngineCleared) or event.group in accepted
        ]
        return [EngineCleared(), *selected] if replaced else selected


class BlockCopies:
    """The blocks that one rank of an engine holds, with the number of copies of each.

    vLLM keeps several blocks of equal content and publishes the removal of each copy. Groups of
    layers count separately: a prompt is cached as far as all of them have it. The salt of a block
    is known as long as any tier has it.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, int | None], Counter[int]] = {}
        self._salts: dict[int, str] = {}

    def stored(self, event: EngineStored) -> str | None:
        """Count a copy of each block. Return the salt of their chain."""
        held = self._held.setdefault((event.storage_tier, event.group), Counter())
        held.update(event.block_hashes)
        salt = event.cache_salt
        if self._salts and salt is None:
            if event.parent_hash is not None:
                salt = self._salts.get(event.parent_hash)
            elif not event.token_ids:
                return None
        if salt is not None:
            self._salts |= dict.fromkeys(event.block_hashes, salt)
        return salt

    def removed(self, event: EngineRemoved) -> list[int]:
        """Discount a copy of each block. Return the blocks of which none is left."""
        held = self._held.get((event.storage_tier, event.group), Counter[int]())
        gone = []
        for block_hash in event.block_hashes:
            copies = held.pop(block_hash, 1) - 1
            if copies:
                held[block_hash] = copies
            else:
                gone.append(block_hash)
        self._forget_salts(gone)
        return gone

    def cleared(self, storage_tier: str = _DEVICE) -> None:
        """Forget the blocks of a tier; for the device, all."""
        for key in [key for key in self._held if storage_tier in (_DEVICE, key[0])]:
            del self._held[key]
        self._forget_salts(list(self._salts))

    def _forget_salts(self, block_hashes: list[int]) -> None:
        if self._salts:
            for block_hash in block_hashes:
                if not any(block_hash in held for held in self._held.values()):
                    self._salts.pop(block_hash, None)


def tier_of(medium: str | None) -> str | None:
    """Return the storage tier of an engine's ``medium`` (None: the device); None if it is unknown.

    The names of the tiers are valid too, in upper or lower case.
    """
    return _DEVICE if medium is None else _TIER_OF.get(str(medium).upper())


def decode_events(
    payload: bytes, on_malformed: Callable[[Exception], None]
) -> tuple[int | None, list[EngineEvent]]:
    """Return (dp_rank or None, events) of a message. Raises ValueError for any other payload.

    Events of unknown types and media are skipped; malformed ones are reported to ``on_malformed``,
    and may have been removals, so they clear the rank, except stores. Token ids are not checked.
    """
    try:
        batch = _fields(_decode(payload), _BATCH_FIELDS)
        raw_events, dp_rank = list(batch["events"]), batch.get("data_parallel_rank")
    except (msgspec.MsgspecError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a KV event batch: {error!r}") from error
    if dp_rank is not None and not (isinstance(dp_rank, int) and 0 <= dp_rank <= _U32):
        raise ValueError(f"not a KV event batch: data_parallel_rank is {dp_rank!r:.40}")
    events: list[EngineEvent] = []
    for raw in raw_events:
        try:
            event = _event(raw)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            on_malformed(error)
            if _kind(raw) != "BlockStored":  # it may have been a removal
                events.append(EngineCleared())
        else:
            events += [event] if event is not None else []
    return dp_rank, events


def _kind(raw: Any) -> Any:
    """Return the type of an event; None for what is none."""
    if isinstance(raw, dict):
        return raw.get("type")
    return raw[0] if isinstance(raw, list) and raw else None


def _fields(raw: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return raw if isinstance(raw, dict) else dict(zip(names, raw, strict=False))


def _event(raw: Any) -> EngineEvent | None:
    kind = raw["type"] if isinstance(raw, dict) else raw[0]
    names = _FIELDS.get(kind)
    if names is None:
        return None
    event = _fields(raw if isinstance(raw, dict) else raw[1:], names)
    tier = tier_of(event.get("medium"))
    if tier is None:
        return None
    group = _require("group_idx", event.get("group_idx"), int | None)
    if kind == "BlockRemoved":
        return EngineRemoved([_hash(value) for value in event["block_hashes"]], tier, group)
    if kind == "AllBlocksCleared":
        return EngineCleared(tier)
    parent = event.get("parent_block_hash")
    lora_name = _require("lora_name", event.get("lora_name"), str | None)
    keys = _require("extra_keys", event.get("extra_keys"), list | tuple | None) or ()
    return EngineStored(
        [_hash(value) for value in event["block_hashes"]],
        None if parent is None else _hash(parent),
        _require("token_ids", event["token_ids"], list | None) or [],
        _require("block_size", event["block_size"], int),
        lora_name,
        tier,
        group,
        _require("kv_cache_spec_kind", event.get("kv_cache_spec_kind"), str | None),
        _mm_hashes(keys) if any(keys) else None,
        _salt(keys[0], lora_name) if parent is None and keys and keys[0] else None,
    )


def _mm_hashes(keys: Sequence[Any]) -> list[list[int]] | None:
    """Return the hashes of the images in each block; None without any.

    ``keys`` has for each block None, or what its hash depends on besides its tokens: the name of an
    adapter, a salt, and (identifier, offset) of each image.
    """
    found = [
        [short_hash(str(each[0])) for each in block or () if isinstance(each, list | tuple)]
        for block in keys
    ]
    return found if any(found) else None


def _salt(keys: Sequence[Any], lora_name: str | None) -> str | None:
    """Return the salt of a first block."""
    texts = [each for each in keys if isinstance(each, str)]
    if lora_name is not None and texts[:1] == [lora_name]:
        del texts[0]
    return texts[0] if texts else None


def _require(name: str, value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {type(value).__name__}")
    return value


def _hash(value: int | bytes) -> int:
    return (value if isinstance(value, int) else int.from_bytes(value, "big")) & _U64
