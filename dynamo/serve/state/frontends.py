"""The frontends of a statefile: where each listens, as its command and its variables say.

Those with API keys also admit the key of the deployment, which only its user can read: what reads
their figures has no key of an operator.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.config import environ
from dynamo.config.programs import FRONTEND
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError
from dynamo.observability.metrics import DEFAULT_FRONTEND_PREFIX
from dynamo.runtime.process.paths import state_path
from dynamo.serve.state.document import Document, Entry
from dynamo.serve.state.entries import argv_flags
from dynamo.serve.state.process_table import environment, same_process


@dataclass(frozen=True)
class FrontendAddress:
    """The address that a frontend listens on, and the one to reach it at."""

    host: str
    port: int
    tls: bool = False

    @property
    def reachable(self) -> str:
        """The host to connect to: loopback of the same family for a wildcard address."""
        if not self.host:
            return "127.0.0.1"
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return self.host  # a host name
        if not address.is_unspecified:
            return self.host
        return "127.0.0.1" if address.version == 4 else "::1"

    @property
    def authority(self) -> str:
        """``host:port`` as in a URL: an IPv6 address has brackets."""
        host = f"[{self.reachable}]" if ":" in self.reachable else self.reachable
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The base URL for a user on this machine."""
        return f"{'https' if self.tls else 'http'}://{self.authority}"


def frontend_address(options: Mapping[str, Any], env: Mapping[str, str]) -> FrontendAddress:
    """Return the frontend's address from its flags over its environment over its defaults.

    Raises ConfigError for a port that is not fixed in advance, such as 0.
    """
    host = _first(options, ("http-host", "http_host")) or env.get("DYN_HTTP_HOST") or "127.0.0.1"
    port = _first(options, ("http-port", "http_port"))
    number = str(env.get("DYN_HTTP_PORT") or 8000 if port is None else port)
    if not number.isdigit() or not 0 < int(number) < 65536:
        raise ConfigError(f"the frontend's http-port must be between 1 and 65535, got {number}")
    tls = _first(options, ("tls-cert-path", "tls_cert_path")) or env.get("DYN_TLS_CERT_PATH")
    return FrontendAddress(str(host), int(number), bool(tls))


def _first(options: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((options[name] for name in names if options.get(name) is not None), None)


LOCAL_KEY = "local.key"
"""File in the run directory of a deployment, for its user alone: the key of the deployment."""


@dataclass(frozen=True, kw_only=True)
class KnownFrontend:
    """Where a frontend listens, the prefix of its metrics, and the path of its certificate.

    It needs a key if it has a ``key_file``. Without an ``address``, ``problem`` says why. ``pid``
    is 0 and ``runs`` false without a process.
    """

    entry: Entry
    address: FrontendAddress | None
    problem: str
    prefix: str
    cert_path: str
    key_file: str
    pid: int
    runs: bool

    @property
    def has_keys(self) -> bool:
        """Whether it needs a key."""
        return bool(self.key_file)


def local_key(runtime: RuntimeSettings) -> str | None:
    """Return the key of the deployment of ``runtime``; None if none runs."""
    path: Path = state_path(runtime) / runtime.namespace / LOCAL_KEY
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None


def frontends_in(document: Document) -> Iterator[KnownFrontend]:
    """Yield the frontends of a statefile."""
    for entry in document.components.values():
        if entry.argv[1:3] == ("-m", FRONTEND):
            yield _known(entry)


def _known(entry: Entry) -> KnownFrontend:
    process = next(iter(entry.processes), None)
    # The variables of a service are not in the statefile.
    env = (environment(process.pid) if process is not None else {}) or environ()
    flags = argv_flags(entry.argv)
    address, problem = None, ""
    try:
        address = frontend_address(flags, env)
    except ConfigError as error:
        problem = error.message
    return KnownFrontend(
        entry=entry,
        address=address,
        problem=problem,
        prefix=flags.get("metrics-prefix")
        or env.get("DYN_METRICS_PREFIX")
        or DEFAULT_FRONTEND_PREFIX,
        cert_path=flags.get("tls-cert-path") or env.get("DYN_TLS_CERT_PATH") or "",
        key_file=flags.get("api-key-file") or env.get("DYN_API_KEY_FILE") or "",
        pid=process.pid if process is not None else 0,
        runs=process is not None and same_process(process.pid, process.start_ticks),
    )
