"""The frontends of a deployment, and their pages of metrics."""

from __future__ import annotations

import asyncio
import functools
import logging
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo.config import environ
from dynamo.config.check import check_options
from dynamo.config.frontend import FrontendSettings
from dynamo.config.modules import settings_groups
from dynamo.errors import StatefileError
from dynamo.http.client import ResponseError, get
from dynamo.planner.traffic import FrontendPage, read_page
from dynamo.serve.frontend_address import FrontendAddress
from dynamo.serve.process_table import environment
from dynamo.serve.statefile import Statefile

__all__ = ["FrontendPages", "KnownFrontend", "frontends_in"]

_MODULE = "dynamo.frontend"
_FRONTENDS = 64
_PAGE_BYTES = 16 << 20
_TIMEOUT_S = 2.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownFrontend:
    """Where a frontend listens, and the prefix of its metrics."""

    address: FrontendAddress
    prefix: str


class FrontendPages:
    """Reads the page of every frontend in ``statefile``; each has two seconds to answer."""

    def __init__(self, statefile: Statefile) -> None:
        self._statefile = statefile
        self._missing: frozenset[str] = frozenset()

    async def read(self) -> tuple[dict[str, FrontendPage], frozenset[str]]:
        """Return the pages by address, and the addresses of those that did not answer."""
        try:
            document = await asyncio.to_thread(self._statefile.read)
        except StatefileError as error:
            log.warning("the frontends are unknown: %s", error)
            document = None
        frontends = {one.address.url: one for one in frontends_in(document or {})}
        async with asyncio.TaskGroup() as group:
            asked = {url: group.create_task(_page(one)) for url, one in frontends.items()}
        found = {url: task.result() for url, task in asked.items()}
        missing = frozenset(url for url, page in found.items() if isinstance(page, str))
        for url in missing - self._missing:  # once per outage
            log.warning("frontend %s: no metrics: %s; its traffic is unknown", url, found[url])
        self._missing = missing
        return {url: page for url, page in found.items() if not isinstance(page, str)}, missing


def frontends_in(document: Mapping[str, Any]) -> Iterator[KnownFrontend]:
    """Yield the running frontends of a statefile, as their command lines and variables say."""
    components = document.get("components", {})
    for entry in list(components.values())[:_FRONTENDS]:
        argv = entry.get("argv") if isinstance(entry, dict) else None
        if not isinstance(argv, list) or argv[1:3] != ["-m", _MODULE]:
            continue
        pid = next((process["pid"] for process in entry.get("processes") or ()), None)
        env = environment(pid) if pid is not None else {}
        settings = _settings(argv[3:], env or environ())
        if settings is not None and settings.http_port:
            tls = settings.tls_cert_path is not None
            address = FrontendAddress(settings.http_host, settings.http_port, tls)
            yield KnownFrontend(address, settings.metrics_prefix)


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
