"""Read what a deployment has: frontends, processes, sockets, registered workers, their events."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from dynamo.config import environ
from dynamo.config.check import check_options
from dynamo.config.frontend import FrontendSettings
from dynamo.config.programs import MODEL_PROGRAMS, memory_share
from dynamo.config.router import RouterSettings
from dynamo.doctor.facts import FrontendFacts, ListenerFacts, RouterFacts, WorkerFacts
from dynamo.errors import ConfigError, StatefileError
from dynamo.http.client import ResponseError
from dynamo.observability.metrics_page import samples
from dynamo.protocols.control import EventChannelRecord, ModelCard, decode_card, record_decoder
from dynamo.protocols.kv import KV_EVENTS
from dynamo.serve.graph.engine_gpus import engine_flags
from dynamo.serve.graph.facts import FrontendAddress
from dynamo.serve.graph.service import Service
from dynamo.serve.readiness import ask, check_free, free_port
from dynamo.serve.state.document import Document
from dynamo.serve.state.process_table import ProcessStat, runs_here, snapshot
from dynamo.serve.state.registered import stored_records
from dynamo.serve.state.statefile import Statefile

_ANSWER_S = 1.0
_PAGE_BYTES = 64 << 20
_SILENT = "dynamo_component_router_kv_event_source_mismatch_workers"
_ERROR_S = "dynamo_router_ttft_error_seconds"
_TTFT_S = "dynamo_component_router_time_to_first_token_seconds"
_ENOUGH_ESTIMATES = 50
_CONNECT_S = 0.3
_HUB_ID = re.compile(r"(hf://)?[\w.-]+/[\w.-]+(/.+\.gguf)?")
_MODELS = ("model", "model-path")
_NAMES = ("served-model-name", "model-name")
_decode_channel = record_decoder(EventChannelRecord)


@dataclass(frozen=True)
class GraphNeeds:
    """What a graph needs of the machine. ``shards`` are GPUs over which a model is split.

    ``cpu_share`` is the part of the machine's memory that its workers reserve without a GPU.
    """

    processes: int = 0
    files: int = 4096 + 256
    shards: int = 1
    transfers_blocks: bool = False
    downloads: bool = True
    cpu_share: float = 0.0


def graph_needs(
    services: Sequence[Service], frontends: Sequence[FrontendGraph], directory: Path
) -> GraphNeeds:
    """Return what the services need, which run in ``directory``."""
    sized = [service for service in services if memory_share(service.program)]
    shards, cpu_share = 1, 0.0
    for service in sized:
        with contextlib.suppress(ConfigError):  # reported by `prepare`
            flags = engine_flags(service.all_words, directory)
            shards = max(shards, flags.shards)
            cpu_share += service.workers * flags.memory_share(service.program)
    return GraphNeeds(
        processes=sum(service.workers for service in services),
        files=max((f.settings.max_connections for f in frontends), default=4096) + 256,
        shards=shards,
        transfers_blocks=any(
            service.options.get("disaggregation-mode", "agg") not in ("agg", "aggregated")
            for service in sized
        ),
        downloads=any(_downloads(service, directory) for service in services),
        cpu_share=cpu_share,
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
        entry.lease: name for name, entry in document.components.items() if entry.lease is not None
    }
    channels: dict[int, str] = {}
    for stored in stored_records(store / "v1/event_channels"):
        with contextlib.suppress(ValueError):
            channel = _decode_channel(stored.value)
            if channel.topic == KV_EVENTS:
                channels[stored.lease_id] = channel.transport.get("endpoint", "")
    workers = []
    for stored in stored_records(store / "v1/mdc"):
        with contextlib.suppress(ValueError):
            card = decode_card(stored.value)
            # The card of a process that was killed stays until its lease is swept.
            if card.lora_name is None and (store / "leases" / f"{stored.lease_id:x}").exists():
                workers.append(_worker(card, stored.lease_id, components, channels))
    return sorted(workers, key=lambda worker: worker.name)


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
    kind, _, address = endpoint.partition("://")
    try:
        if kind == "ipc":
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(_CONNECT_S)
                probe.connect(address)
        elif kind == "tcp":
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, ValueError) as error:
        return f"{endpoint}: {getattr(error, 'strerror', None) or error}"
    return ""


@dataclass(frozen=True)
class Deployed:
    """The running deployments of a state directory.

    ``document`` is the statefile of the one that is asked for, None if it does not run. ``owners``
    has the component of each process of every deployment.
    """

    document: Document | None
    owners: Mapping[int, str]


@dataclass(frozen=True)
class FrontendGraph:
    """A frontend of a graph with its options, which are valid."""

    service: str
    settings: FrontendSettings
    router: RouterSettings

    @property
    def address(self) -> FrontendAddress:
        """Where it listens."""
        tls = self.settings.tls_cert_path is not None
        return FrontendAddress(self.settings.http_host, self.settings.http_port, tls)


def find_running(directory: Path, namespace: str) -> Deployed:
    """Return what runs under the state directory: the processes of each component, and theirs."""
    wanted: Document | None = None
    roots: dict[int, str] = {}
    for path in sorted(directory.glob("[!.]*.json")):
        with contextlib.suppress(StatefileError):
            document = Statefile(directory, path.stem).read()
            if document is not None and runs_here(document.arbiter):
                wanted = document if path.stem == namespace else wanted
                roots |= _roots(document)
    processes = {process.pid: process for process in snapshot()} if roots else {}
    owners = {pid: _owner(pid, processes, roots) for pid in processes}
    return Deployed(wanted, {pid: owner for pid, owner in owners.items() if owner})


def _roots(document: Document) -> dict[int, str]:
    roots = {pid: name for name, entry in document.components.items() for pid in entry.pids}
    arbiter = document.arbiter
    return {arbiter.guard_pid: "dynamo serve", arbiter.pid: "dynamo serve", **roots}


def _owner(pid: int, processes: Mapping[int, ProcessStat], roots: Mapping[int, str]) -> str:
    """Return the component whose session, or whose descendant, the process ``pid`` is."""
    while pid in processes:
        process = processes[pid]
        if pid in roots or process.session in roots:
            return roots.get(pid) or roots[process.session]
        if process.parent == pid:
            break
        pid = process.parent
    return ""


def frontends_of(services: Sequence[Service]) -> list[FrontendGraph]:
    """Return the frontends of a graph; one with invalid options is reported by `prepare`."""
    frontends = []
    for service in services:
        if service.is_frontend:
            groups = (FrontendSettings, RouterSettings)
            checked = check_options(groups, service.words, {**environ(), **service.envs})
            if checked.settings is not None:
                frontends.append(FrontendGraph(service.name, *checked.settings))
    return frontends


def read_frontends(
    graph: Sequence[FrontendGraph], deployed: Deployed
) -> tuple[list[FrontendFacts], tuple[tuple[str, int], ...]]:
    """Return each frontend, and the workers of each model whose KV events are missing.

    Blocking, for a second if a frontend hangs.
    """
    facts: list[FrontendFacts] = []
    silent: dict[str, int] = {}
    for frontend in graph:
        address = frontend.address
        problem = _problem(address)
        holder = _listener(address.port) if problem else None
        ours = holder is not None and holder.pid in deployed.owners
        page = asyncio.run(_metrics(address)) if ours else None
        for _, labels, count in samples(page or b"", _SILENT):
            model = labels.get("model", "")
            silent[model] = max(silent.get(model, 0), int(count))
        settings = frontend.settings
        facts.append(
            FrontendFacts(
                service=frontend.service,
                url=address.url,
                port=address.port,
                is_loopback=_is_loopback(address.host),
                has_keys=bool(settings.api_key_file or settings.tls_client_ca_cert_path),
                has_tls=address.tls,
                is_ours=ours,
                answers=page is not None,
                problem="" if ours else problem,
                holder=_shown(holder) if holder is not None and not ours else "",
                free_port=free_port(address) if problem and not ours else 0,
                ttft_error=_ttft_error(page or b""),
            )
        )
    return facts, tuple(silent.items())


def _ttft_error(page: bytes) -> float | None:
    """Return the sum of the errors of expected first tokens over the time that they took."""
    names = [f"{name}_{kind}" for name in (_ERROR_S, _TTFT_S) for kind in ("sum", "count")]
    values = {(name, *labels.items()): value for name, labels, value in samples(page, *names)}
    error_s = took_s = 0.0
    for (name, *labels), value in values.items():
        if name == f"{_ERROR_S}_count" and value >= _ENOUGH_ESTIMATES:
            error_s += values.get((f"{_ERROR_S}_sum", *labels), 0.0)
            took_s += values.get((f"{_TTFT_S}_sum", *labels), 0.0)
    return error_s / took_s if took_s else None


def _problem(address: FrontendAddress) -> str:
    try:
        check_free(address)
    except ConfigError as error:
        return error.message
    return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Listening(NamedTuple):
    """A TCP socket that listens; ``pid`` is 0 if it is another user's."""

    pid: int
    address: str
    port: int


def _listening() -> Iterator[_Listening]:
    for connection in psutil.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr:
            yield _Listening(connection.pid or 0, connection.laddr.ip, connection.laddr.port)


def _listener(port: int) -> _Listening | None:
    sockets = [listening for listening in _listening() if listening.port == port]
    # By the pid, which comes first: 0 stands for a process of another user.
    return max(sockets, default=None)


def _shown(holder: _Listening) -> str:
    return _program(holder.pid) + (f" (pid {holder.pid})" if holder.pid else "")


def _program(pid: int) -> str:
    try:
        return psutil.Process(pid).name() if pid else "a program of another user"
    except psutil.Error:
        return "a program"


async def _metrics(address: FrontendAddress) -> bytes | None:
    """Return the metrics page, which needs no key; None without an answer."""
    try:
        answer = await ask(address, "/metrics", _PAGE_BYTES, _ANSWER_S)
    except (OSError, TimeoutError, ResponseError):
        return None
    return bytes(answer.body) if answer.status == 200 else None


def read_listeners(
    deployed: Deployed, frontends: Sequence[FrontendFacts]
) -> Iterator[ListenerFacts]:
    """Return the sockets of our processes that are not on loopback, once each."""
    if not deployed.owners:
        return
    ports = {frontend.port for frontend in frontends}
    # By address and port: processes that share a socket are listed once.
    for listening in sorted({listening[1:]: listening for listening in _listening()}.values()):
        owner = deployed.owners.get(listening.pid)
        if owner is not None and not _is_loopback(listening.address):
            yield ListenerFacts(
                component=owner,
                program=_program(listening.pid),
                pid=listening.pid,
                address=f"[{listening.address}]" if ":" in listening.address else listening.address,
                port=listening.port,
                is_frontend=listening.port in ports,
            )
