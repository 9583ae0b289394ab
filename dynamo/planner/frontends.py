"""The frontends of a deployment, and their pages of metrics."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo.config import environ
from dynamo.config.check import check_options
from dynamo.config.frontend import FrontendSettings
from dynamo.config.modules import settings_groups
from dynamo.errors import StatefileError
from dynamo.http.client import ResponseError, get
from dynamo.planner.live.traffic import FrontendPage, read_page
from dynamo.serve.graph.frontend_address import FrontendAddress
from dynamo.serve.state.process_table import environment, same_process
from dynamo.serve.state.statefile import Statefile

__all__ = ["FrontendPages", "KnownFrontend", "frontends_in"]

_MODULE = "dynamo.frontend"
_FRONTENDS = 64
_PAGE_BYTES = 16 << 20
_TIMEOUT_S = 2.0
_START_UP_S = 30.0
_REFUSED = "it does not listen"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownFrontend:
    """Where a frontend listens, and the prefix of its metrics; ``runs``: it has a process now."""

    address: FrontendAddress
    prefix: str
    runs: bool


class FrontendPages:
    """Reads the page of every frontend of ``statefile`` that runs; each has two seconds to answer.

    One that was stopped, removed or given up has no traffic.
    """

    def __init__(self, statefile: Statefile) -> None:
        self._statefile = statefile
        self._missing_since_s: dict[str, float] = {}
        self._reported: frozenset[str] = frozenset()
        self._answered: set[str] = set()

    async def read(self) -> tuple[dict[str, FrontendPage], frozenset[str]]:
        """Return the pages by address, and the addresses of those that did not answer."""
        try:
            document = await asyncio.to_thread(self._statefile.read)
        except StatefileError as error:
            log.warning("the frontends are unknown: %s", error)
            document = None
        known = frontends_in(document or {})
        frontends = {one.address.url: one for one in known if one.runs}
        async with asyncio.TaskGroup() as group:
            asked = {url: group.create_task(_page(one)) for url, one in frontends.items()}
        found = {url: task.result() for url, task in asked.items()}
        missing = frozenset(url for url, page in found.items() if isinstance(page, str))
        self._answered |= found.keys() - missing
        self._report(missing, found)
        return {url: page for url, page in found.items() if not isinstance(page, str)}, missing

    def _report(self, missing: frozenset[str], found: Mapping[str, object]) -> None:
        """Warn once per outage; one that never listened yet has some time to start."""
        now_s = time.monotonic()
        since_s = {url: self._missing_since_s.get(url, now_s) for url in missing}
        due = frozenset(
            url
            for url in missing
            if found[url] != _REFUSED or url in self._answered or now_s - since_s[url] > _START_UP_S
        )
        for url in due - self._reported:
            log.warning("frontend %s: no metrics: %s; its traffic is unknown", url, found[url])
        self._missing_since_s, self._reported = since_s, due


def frontends_in(document: Mapping[str, Any]) -> Iterator[KnownFrontend]:
    """Yield the frontends of a statefile, as their command lines and variables say."""
    entries = (one for one in document.get("components", {}).values() if _is_frontend(one))
    for entry in itertools.islice(entries, _FRONTENDS):
        process = next(iter(entry.get("processes") or ()), None)
        env = environment(process["pid"]) if process is not None else {}
        settings = _settings(entry["argv"][3:], env or environ())
        if settings is not None and settings.http_port:
            tls = settings.tls_cert_path is not None
            address = FrontendAddress(settings.http_host, settings.http_port, tls)
            runs = process is not None and same_process(process["pid"], process["start_ticks"])
            yield KnownFrontend(address, settings.metrics_prefix, runs)


def _is_frontend(entry: object) -> bool:
    argv = entry.get("argv") if isinstance(entry, dict) else None
    return isinstance(argv, list) and argv[1:3] == ["-m", _MODULE]


def _settings(words: list[str], env: Mapping[str, str]) -> FrontendSettings | None:
    found = check_options(settings_groups(_MODULE) or (), {"": words}, env)
    if found.settings is None:
        return None  # it does not start with these options, either
    return next(one for one in found.settings if isinstance(one, FrontendSettings))


async def _page(frontend: KnownFrontend) -> FrontendPage | str:
    """Return the page, or why there is none."""
    address = frontend.address
    tls = _unverified() if address.tls else None
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            found = await get(
                address.reachable, address.port, address.authority, "/metrics", _PAGE_BYTES, tls
            )
        if found.status != 200:
            return f"status {found.status}"
        return read_page(found.body.decode(), frontend.prefix)
    except TimeoutError:
        return f"no answer in {_TIMEOUT_S:g} s"
    except ConnectionRefusedError:
        return _REFUSED
    except (OSError, ResponseError, ValueError) as error:
        return str(error)


@functools.cache
def _unverified() -> ssl.SSLContext:
    """A context that trusts every certificate.

    The frontend's is for the name that its clients use, not for this address. The request holds no
    secret.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
