"""Read the state of a deployment: statefile, discovery, frontends (``/v1/status``), GPUs,
decisions.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import msgspec

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError, StatefileError
from dynamo.protocols.status import (
    BoxStatus,
    FrontendStatus,
    GpuStatus,
    PlannerReport,
    RequestRecord,
    WorkerStatus,
)
from dynamo.runtime.process.os_process import listening_users
from dynamo.runtime.process.paths import planned_socket_path, state_path, store_path
from dynamo.runtime.process.stop_order import STOP_STAGE
from dynamo.serve.graph.facts import FrontendAddress
from dynamo.serve.state.document import Document, Entry
from dynamo.serve.state.frontends import KnownFrontend, frontends_in, local_key
from dynamo.serve.state.process_table import ledger_of, runs_here, same_process
from dynamo.serve.state.registered import registered_workers
from dynamo.serve.state.room import load_effects
from dynamo.serve.state.statefile import Statefile
from dynamo.serve.state.view import DeploymentView
from dynamo.status.deployment import STATUS_SOCKET, ask, hang_of
from dynamo.status.gpus import devices_of, read_gpus
from dynamo.status.logs import last_line, planner_summary, read_planner
from dynamo.status.models import BoxView, FrontendView, largest, model_statuses
from dynamo.status.workers import OTHER_PROGRAMS, worker_statuses

_REQUESTS = 50
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_TIMEOUT_S = 1.0
_PING_S = 1.0
_LIMIT_BYTES = 16 << 20
_decode = msgspec.json.Decoder(FrontendStatus).decode
_decode_box = msgspec.json.Decoder(BoxStatus).decode


class UnreadableCertificate(ValueError):
    """The file with the certificate of a frontend was damaged or removed since it was loaded."""


class BoxCollector:
    """Asks the arbiter of the namespace of ``runtime``, and reads the state here if it is silent.

    ``api_key`` is an operator's, for frontends that need one. Blocks for about 2 ms, at most some
    seconds. Use it in one thread at a time.
    """

    def __init__(self, runtime: RuntimeSettings, api_key: str | None = None) -> None:
        self._api_key = api_key
        self._reader = BoxReader(runtime)
        self._runtime = runtime

    def collect(self, own: FrontendStatus | None = None) -> BoxStatus:
        """Return the state now. A part that cannot be read is missing, and a problem says so.

        A frontend that needs a key, which the arbiter has not, gives its ``own`` figures: then the
        state is read here.
        """
        if own is not None:
            return self._reader.read(self._api_key, own)
        try:
            path = planned_socket_path(self._runtime, STATUS_SOCKET)
            return _decode_box(ask(path, self._api_key))
        except (ConfigError, OSError, msgspec.MsgspecError):
            return self._reader.read(self._api_key)


def ask_frontends(
    document: Document, runtime: RuntimeSettings, api_key: str | None, own: FrontendStatus | None
) -> Iterator[FrontendView]:
    """Yield what each frontend answers; each has a second to do so.

    Without an ``api_key`` the key of the deployment is sent to those that need one. ``own`` is the
    answer of this process, if it is one of them.
    """
    for frontend in frontends_in(document):
        key = local_key(runtime) if frontend.listens.api_key_file and api_key is None else api_key
        yield _ask(frontend, key, own if os.getpid() in frontend.entry.pids else None)


def get(frontend: KnownFrontend, api_key: str | None, path: str) -> tuple[int, bytes]:
    """GET ``path`` of a frontend that runs; return status and body. Raises OSError, ValueError."""
    listens = frontend.listens
    address = listens.address
    if address is None or not frontend.pid:
        raise ValueError(listens.problem or "its process does not run")
    tls = trusting(Path(listens.tls_cert_path)) if listens.has_tls else None
    return _get(address, tls, api_key, path)


def _ask(frontend: KnownFrontend, api_key: str | None, own: FrontendStatus | None) -> FrontendView:
    name, address = frontend.entry.name, frontend.listens.address
    if address is None:
        return FrontendView(name=name, url="", state="down", problem=frontend.listens.problem)
    if not frontend.pid:
        text = "its process does not run"
        return FrontendView(name=name, url=address.url, state="down", problem=text)
    if own is not None:
        return _seen(name, address.url, own)
    try:
        status, body = get(frontend, api_key, "/v1/status")
    except UnreadableCertificate as error:  # it goes on with what it loaded
        return _seen(name, address.url, None, f"figures are missing: {error}")
    except (OSError, ValueError) as error:
        text = f"{address.url} does not answer: {error}"
        return FrontendView(name=name, url=address.url, state="down", problem=text)
    return _answered(name, address.url, status, body, api_key)


def _answered(name: str, url: str, status: int, body: bytes, api_key: str | None) -> FrontendView:
    problem, report = "", None
    if status == 200:
        try:
            report = _decode(body)
        except msgspec.MsgspecError as error:
            problem = f"its answer to /v1/status is not understood: {error}"
    elif status in (401, 403):
        key = "another one" if api_key else "one"
        problem = f"figures are missing: they need an operator's API key; give {key} with --api-key"
    else:
        off = " (DYN_DISABLE_FRONTEND_ADMIN_API?)" if status == 404 else ""
        problem = f"figures are missing: {url}/v1/status answered {status}{off}"
    return _seen(name, url, report, problem)


def _seen(name: str, url: str, report: FrontendStatus | None, problem: str = "") -> FrontendView:
    state = "draining" if report is not None and report.draining else "ready"
    return FrontendView(name=name, url=url, state=state, status=report, problem=problem)


def _get(
    address: FrontendAddress,
    tls: Callable[[socket.socket], socket.socket] | None,
    key: str | None,
    path: str,
) -> tuple[int, bytes]:
    """GET ``path``; return status and body. Raises OSError, ValueError."""
    lines = [f"GET {path} HTTP/1.1", f"host: {address.authority}", "connection: close"]
    # Without TLS nothing proves who listens: the key is not for a program of another user.
    if key and tls is None and os.geteuid() not in listening_users(address.port):
        raise ValueError("another user listens there, so it gets no API key")
    if key:
        lines.append(f"authorization: Bearer {key}")
    plain = socket.create_connection((address.reachable, address.port), timeout=_TIMEOUT_S)
    with plain, tls(plain) if tls is not None else plain as connection:
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        data = bytearray()
        while piece := connection.recv(1 << 16):
            data += piece
            if len(data) > _LIMIT_BYTES:
                raise ValueError("the answer is too large")
    head, _, body = bytes(data).partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise ValueError("not HTTP")
    return int(words[1]), body


def trusting(cert: Path) -> Callable[[socket.socket], socket.socket]:
    """Return what begins TLS with the owner of the certificate ``cert``, and no other server."""

    def begin(plain: socket.socket) -> socket.socket:
        import ssl  # only for frontends with TLS

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # it is for the name that clients use
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # no authority needs to be known
        try:
            context.load_verify_locations(cert)
        except OSError as error:  # ssl.SSLError is one
            damaged = isinstance(error, ssl.SSLError)
            reason = "no PEM certificate in it" if damaged else error.strerror
            raise UnreadableCertificate(f"its --tls-cert-path {cert}: {reason}") from None
        return context.wrap_socket(plain)

    return begin


def worker_names(runtime: RuntimeSettings) -> dict[str, str]:
    """Return the names of the registered workers of this box by their ids in hexadecimal.

    Names are those of the statefile; none without one that can be read.
    """
    try:
        document = Statefile(state_path(runtime), runtime.namespace).read()
    except StatefileError:
        document = None
    entries = document.components.values() if document is not None else ()
    names = {pid: entry.name for entry in entries for pid in entry.pids}
    return {
        f"{worker.worker_id:x}": names[pid]
        for pid, worker in (registered_workers(store_path(runtime)) if names else {}).items()
        if worker.worker_id is not None and pid in names
    }


class BoxReader:
    """Reads the deployment of the namespace of ``runtime``. Blocks for some milliseconds."""

    def __init__(self, runtime: RuntimeSettings) -> None:
        self._runtime = runtime
        self._statefile = Statefile(state_path(runtime), runtime.namespace)
        self._run_dir = state_path(runtime) / runtime.namespace

    def read(self, api_key: str | None, own: FrontendStatus | None = None) -> BoxStatus:
        """Return the state now. A part that cannot be read is missing, and a problem says so.

        ``own`` are the figures of this process, if it is a frontend.
        """
        namespace = self._runtime.namespace
        try:
            document = self._statefile.read()
        except StatefileError as error:
            return self._stopped(error.message)
        if document is None:
            return self._stopped("")
        if not runs_here(document.arbiter):
            return self._stopped(
                f"an earlier deployment of {namespace!r} ended without clean-up; "
                f"try: dynamo state repair --namespace {namespace}"
            )
        return self._running(document, api_key, own)

    def _running(
        self, document: Document, api_key: str | None, own: FrontendStatus | None
    ) -> BoxStatus:
        entries = document.components.values()
        planner = read_planner(self._run_dir)
        gpus, uptimes = _gpus(document, entries), process_uptimes(document)
        deployment = DeploymentView(
            document=document,
            registered=registered_workers(store_path(self._runtime)),
            changes=_is_changed,
            lives=lambda process: process.pid in uptimes,
        )
        seen = BoxView(
            deployment=deployment,
            at_s=time.time(),
            uptimes=uptimes,
            last_output=partial(self._last_output, document, uptimes),
            frontends=tuple(ask_frontends(document, self._runtime, api_key, own)),
            gpus=gpus,
            planner=planner,
            loads=load_effects(document, devices_of(gpus)),
            uses_files=self._runtime.discovery_backend == "file",
            stopping=(self._run_dir / STOP_STAGE).exists(),
        )
        processes = worker_statuses(seen)
        others = {entry.name for entry in entries if entry.program in OTHER_PROGRAMS}
        workers = tuple(process for process in processes if process.name not in others)
        answers = [frontend.status for frontend in seen.frontends if frontend.status is not None]
        # A frontend asks often, on behalf of its page: it only looks.
        hang = "" if seen.stopping else hang_of(document, _PING_S if own is None else 0)
        problems = problems_of(processes, seen.frontends, seen.stopping, planner)
        return BoxStatus(
            namespace=self._runtime.namespace,
            state="running",
            at_s=seen.at_s,
            frontend=_frontend_state(seen.frontends, processes),
            url=next((frontend.url for frontend in seen.frontends), ""),
            ttft_p50_s=largest(answer.ttft_p50_s for answer in answers),
            ttft_p99_s=largest(answer.ttft_p99_s for answer in answers),
            models=model_statuses(seen, workers),
            workers=workers,
            others=tuple(process for process in processes if process.name in others),
            gpus=seen.gpus,
            planner=None if planner is None else planner_summary(planner),
            requests=_requests(seen.frontends),
            problems=(hang, *problems) if hang else tuple(problems),
            hung=bool(hang),
            records_content=any(answer.records_content for answer in answers),
        )

    def _stopped(self, problem: str) -> BoxStatus:
        return BoxStatus(
            namespace=self._runtime.namespace,
            state="stopped",
            at_s=time.time(),
            frontend="none",
            gpus=read_gpus({}, {}),
            problems=(problem,) if problem else (),
        )

    def _last_output(self, document: Document, uptimes: Mapping[int, float], name: str) -> str:
        """Return the last line of a watcher; "" if it is of an earlier process than lives now."""
        ages = [uptimes[pid] for pid in document.components[name].pids if pid in uptimes]
        since_s = time.time() - max(ages) if ages else _started_at_s(document)
        return last_line(self._run_dir / "logs" / f"{name}.log", since_s)


def report(runtime: RuntimeSettings, api_key: str | None = None) -> bytes:
    """Return the state now as JSON, as the arbiter sends it."""
    return msgspec.json.encode(BoxReader(runtime).read(api_key))


def _is_changed(entry: Entry) -> bool:
    """Whether a living process changes it, this one too."""
    return entry.reserved_by is not None and runs_here(entry.reserved_by)


def _gpus(document: Document, entries: Iterable[Entry]) -> tuple[GpuStatus, ...]:
    ledger = ledger_of(document)
    assigned: dict[str, tuple[str, ...]] = dict.fromkeys(ledger.ids, ())
    for name, gpus in ledger.held.items():
        for gpu in gpus:
            assigned[gpu] = (*assigned.get(gpu, ()), name)
    return read_gpus(assigned, {pid: entry.name for entry in entries for pid in entry.pids})


def _started_at_s(document: Document) -> float:
    """Return when the arbiter started, Unix time."""
    since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - since_boot_s + document.arbiter.start_ticks / _TICKS_PER_S


def process_uptimes(document: Document) -> dict[int, float]:
    """Return the recorded processes that live, with their age in seconds."""
    # Start ticks count from boot and go on while the machine is suspended, as this clock does.
    since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    uptimes: dict[int, float] = {}
    for entry in document.components.values():
        for process in entry.processes:
            if process.pid and same_process(process.pid, process.start_ticks):
                age_s = since_boot_s - process.start_ticks / _TICKS_PER_S
                uptimes[process.pid] = max(0.0, age_s)
    return uptimes


def _frontend_state(
    frontends: tuple[FrontendView, ...], processes: tuple[WorkerStatus, ...]
) -> str:
    loading = {process.name for process in processes if process.state == "loading"}
    states = {
        "loading" if frontend.state == "down" and frontend.name in loading else frontend.state
        for frontend in frontends
    }
    return next(
        (state for state in ("ready", "draining", "loading", "down") if state in states), "none"
    )


def _requests(frontends: tuple[FrontendView, ...]) -> tuple[RequestRecord, ...]:
    records = [
        record for frontend in frontends if frontend.status for record in frontend.status.requests
    ]
    records.sort(key=lambda record: -(record.received_at_s + record.duration_s))
    return tuple(records[:_REQUESTS])


def problems_of(
    processes: tuple[WorkerStatus, ...],
    frontends: tuple[FrontendView, ...],
    stopping: bool,
    planner: PlannerReport | None = None,
) -> tuple[str, ...]:
    """Return what is wrong, each with its remedy; of a deployment that stops, only that."""
    if stopping:  # what has exited by now has no remedy
        return ("the deployment stops: requests in flight finish, new ones are refused",)
    problems = [
        f"{process.name} failed: {process.cause}. See: dynamo logs {process.name}; then: "
        f"{process.remedy}"
        for process in processes
        if process.state == "failed"
    ]
    starting = {process.name for process in processes if process.state in ("failed", "loading")}
    problems += [
        f"{frontend.name}: {frontend.problem}"
        for frontend in frontends
        if frontend.problem and frontend.name not in starting
    ]
    problems += [
        f"planner, model {model.model}: {model.problem}. See: dynamo planner explain"
        for model in (() if planner is None else planner.models)
        if model.problem
    ]
    return tuple(problems)
