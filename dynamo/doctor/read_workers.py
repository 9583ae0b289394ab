"""Reads the registered workers and their KV events, and what a graph says about both."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamo.doctor.facts import RouterFacts, WorkerFacts
from dynamo.doctor.read_deployment import FrontendGraph
from dynamo.errors import ConfigError
from dynamo.protocols.card import ModelCard, decode_card
from dynamo.protocols.control import EventChannelRecord, record_decoder
from dynamo.protocols.kv import KV_EVENTS
from dynamo.runtime.discovery.layout import BadRecord, StoredRecord, decode_stored, names, read_file
from dynamo.serve.gpus.engine_gpus import engine_flags
from dynamo.serve.graph.service import MODEL_PROGRAMS, Service
from dynamo.serve.state.statefile import Document

_CONNECT_S = 0.3
_HUB_ID = re.compile(r"(hf://)?[\w.-]+/[\w.-]+(/.+\.gguf)?")
_MODELS = ("model", "model-path")
_NAMES = ("served-model-name", "model-name")
_decode_channel = record_decoder(EventChannelRecord)


@dataclass(frozen=True)
class GraphNeeds:
    """What a graph needs of the machine. ``shards`` are GPUs over which a model is split."""

    processes: int = 0
    files: int = 4096 + 256
    shards: int = 1
    transfers_blocks: bool = False
    downloads: bool = True


def graph_needs(
    services: Sequence[Service], frontends: Sequence[FrontendGraph], directory: Path
) -> GraphNeeds:
    """Return what the services need, which run in ``directory``."""
    vllm = [service for service in services if service.program == "dynamo.vllm"]
    shards = 1
    for service in vllm:
        with contextlib.suppress(ConfigError):  # reported by `prepare`
            shards = max(shards, engine_flags(service.all_words, directory).shards)
    return GraphNeeds(
        processes=sum(service.workers for service in services),
        files=max((f.settings.max_connections for f in frontends), default=4096) + 256,
        shards=shards,
        transfers_blocks=any(
            service.options.get("disaggregation-mode", "agg") not in ("agg", "aggregated")
            for service in vllm
        ),
        downloads=any(_downloads(service, directory) for service in services),
    )


def _downloads(service: Service, directory: Path) -> bool:
    source = str(next((service.options[key] for key in _MODELS if key in service.options), ""))
    return bool(_HUB_ID.fullmatch(source)) and not (directory / source).exists()


def read_router(
    services: Sequence[Service],
    frontends: Sequence[FrontendGraph],
    silent: tuple[tuple[str, int], ...],
) -> RouterFacts:
    """Return what the graph says about block sizes and KV events."""
    routers = [frontend.router for frontend in frontends]
    sizes = (router.kv_cache_block_size for router in routers)
    return RouterFacts(
        follows_events=any(r.mode == "kv" and r.kv_events for r in routers),
        block_size=next((size for size in sizes if size is not None), None),
        block_sizes=tuple(_block_sizes(services)),
        silent=silent,
    )


def _block_sizes(services: Sequence[Service]) -> Iterator[tuple[str, str, int]]:
    for service in services:
        options = service.options
        size = options.get("block-size")
        if service.program in MODEL_PROGRAMS and isinstance(size, int):
            keys = [key for key in (*_NAMES, *_MODELS) if key in options]
            yield service.name, str(options[keys[0]]) if keys else service.name, size


def read_workers(store: Path, document: Document) -> list[WorkerFacts]:
    """Return the workers in file discovery, and whether their KV events can be subscribed to."""
    components = {
        entry["lease"]: name
        for name, entry in document["components"].items()
        if entry.get("lease") is not None
    }
    channels: dict[int, str] = {}
    for stored in _records(store / "v1/event_channels"):
        with contextlib.suppress(ValueError):
            channel = _decode_channel(stored.value)
            if channel.topic == KV_EVENTS:
                channels[stored.lease_id] = channel.transport.get("endpoint", "")
    found = []
    for stored in _records(store / "v1/mdc"):
        with contextlib.suppress(ValueError):
            card = decode_card(stored.value)
            if card.lora_name is None and (store / "leases" / f"{stored.lease_id:x}").exists():
                found.append(_worker(card, stored.lease_id, components, channels))
    return sorted(found, key=lambda worker: worker.name)


def _worker(
    card: ModelCard, lease: int, components: Mapping[int, str], channels: Mapping[int, str]
) -> WorkerFacts:
    return WorkerFacts(
        worker=f"{card.instance_id:x}",
        model=card.display_name,
        name=components.get(lease, ""),
        files=card.checksum,
        block_size=card.kv_cache_block_size,
        takes_tokens=card.model_input == "Tokens",
        publishes=lease in channels,
        event_problem=_unreachable(channels[lease]) if lease in channels else "",
    )


def _unreachable(endpoint: str) -> str:
    """Return why no subscriber can connect to ``endpoint``; "" if one can, or if it is unknown."""
    kind, _, place = endpoint.partition("://")
    try:
        if kind == "ipc":
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(_CONNECT_S)
                probe.connect(place)
        elif kind == "tcp":
            host, _, port = place.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, ValueError) as error:
        return f"{endpoint}: {getattr(error, 'strerror', None) or error}"
    return ""


def _records(directory: Path) -> Iterator[StoredRecord]:
    try:
        listed = names(directory)
    except OSError:
        return
    for name in listed:
        with contextlib.suppress(BadRecord, OSError, ValueError):
            data = read_file(directory / name)
            if data is not None:
                yield decode_stored(data)
