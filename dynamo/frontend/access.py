"""Access to the frontend: open paths, routes of operators, warnings at the start."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable

from dynamo.config.frontend import FrontendSettings, checked_origins
from dynamo.frontend.apis.operator.adapters import LOAD_PATH, UNLOAD_PATH
from dynamo.frontend.requests.metrics import FrontendMetrics
from dynamo.frontend.ui.route import OPEN_UI_PATHS, OPERATOR_UI_ROUTES
from dynamo.http.access import Access, OperatorGuard
from dynamo.http.api_keys import ApiKeys
from dynamo.http.cors import Cors
from dynamo.http.routes import Routes
from dynamo.http.tls import ServerTls
from dynamo.observability.metrics import counter
from dynamo.protocols.control import CLEAR_KV_BLOCKS

log = logging.getLogger(__name__)
_OPEN_PATHS = frozenset(("/health", "/live", "/load", "/metrics", "/ping"))
_OPEN_WITH_UI = _OPEN_PATHS | OPEN_UI_PATHS
_OPERATOR_ROUTES = {
    "/v1/route": ("GET", "HEAD", "POST"),
    "/v1/record": ("GET", "HEAD"),
    "/v1/status": ("GET", "HEAD"),
    "/v1/requests": ("GET", "HEAD"),
    "/v1/requests/": ("GET", "HEAD"),
    "/busy_threshold": ("POST",),
    f"/{CLEAR_KV_BLOCKS}": ("POST",),
    LOAD_PATH: ("POST",),
    UNLOAD_PATH: ("POST",),
}
_SHARED_ROUTES = {"/v1/planner": ("GET", "HEAD", "POST")}
"""Routes of operators that the web page calls, too."""

_RESERVED_PATHS = (
    _OPEN_WITH_UI | _OPERATOR_ROUTES.keys() | _SHARED_ROUTES.keys() | OPERATOR_UI_ROUTES.keys()
)
_KEY_REQUESTS = counter(
    "dynamo_frontend_api_key_requests_total",
    "Requests with a valid API key, by its name, that its role may make",
    "key",
)


def frontend_access(
    settings: FrontendSettings,
    local: str | None = None,
    on_keys: Callable[[str], None] = lambda text: None,
) -> Access | None:
    """Return what the frontend demands of clients; None for nothing. Raises ConfigError.

    ``local`` is the key of its deployment; ``on_keys`` is called when the key file has changed.
    """
    path = settings.api_key_file
    keys = None if path is None else ApiKeys(path, local, on_keys)
    tls = None
    if settings.tls_cert_path is not None and settings.tls_key_path is not None:
        ca_path = settings.tls_client_ca_cert_path
        tls = ServerTls(settings.tls_cert_path, settings.tls_key_path, ca_path)
    if keys is None and tls is None:
        return None
    is_open = (_OPEN_WITH_UI if settings.serves_ui else _OPEN_PATHS).__contains__
    return Access(keys=keys, tls=tls, is_open=is_open)


def frontend_cors(settings: FrontendSettings) -> Cors | None:
    """Return which origins' pages may use the API, without routes of operators and the web page."""
    origins = checked_origins(settings.cors_origins)

    def closed(path: str) -> bool:
        return path.startswith("/ui") or (is_reserved(path) and path not in _OPEN_PATHS)

    return Cors(origins, closed) if origins else None


def is_reserved(path: str) -> bool:
    """Return whether requests for ``path`` are served above the connection limit."""
    return path in _RESERVED_PATHS or path.startswith(
        ("/v1/requests/", "/ui/requests/", "/ui/content/")
    )


def operator_guard(settings: FrontendSettings, own_pages: bool = False) -> OperatorGuard:
    """Return the check for operators; with ``own_pages`` it admits pages of this frontend."""
    names = (settings.http_host, *settings.allowed_hosts)
    return OperatorGuard(settings.api_key_file is not None, names, own_pages=own_pages)


def guard_operator_routes(routes: Routes, guard: OperatorGuard, page_guard: OperatorGuard) -> None:
    """Admit only operators to the routes that change or explain what the deployment does.

    ``page_guard`` is for those of them that the web page calls.
    """
    for path, methods in _OPERATOR_ROUTES.items():
        routes.wrap(path, methods, guard.before)
    for path, methods in _SHARED_ROUTES.items():
        routes.wrap(path, methods, page_guard.before)


def guard_ui_routes(routes: Routes, guard: OperatorGuard) -> None:
    """Admit only operators, and pages of this frontend, to what the web page shows and does."""
    for path, methods in OPERATOR_UI_ROUTES.items():
        routes.wrap(path, methods, guard.before)


def show_key_requests(metrics: FrontendMetrics, keys: ApiKeys) -> None:
    """Bring the count of each key up to date at a scrape; the file bounds the names."""
    family = metrics.family(_KEY_REQUESTS)

    def count() -> None:
        counts = {(key.name,): key.requests for key in keys.entries.values()}
        for removed in family.keys() - counts.keys():
            family.remove(*removed)
        for labels, requests in counts.items():
            family[labels].value = requests

    metrics.registry.before_render.append(count)


def warn_if_exposed(settings: FrontendSettings, host: str) -> None:
    """Log what everyone who reaches ``host``, the bound address, can do or read."""
    if ipaddress.ip_address(host).is_loopback:
        return
    # Client certificates keep others out, too.
    if settings.api_key_file is None and settings.tls_client_ca_cert_path is None:
        log.warning(
            "OPEN TO THE NETWORK WITHOUT API KEYS: everyone who reaches %s can use the models; "
            "set --api-key-file ('dynamo key add NAME' makes one) or --http-host 127.0.0.1",
            host,
        )
    if settings.api_key_file is not None and settings.tls_cert_path is None:
        log.warning(
            "API keys are sent in plain text to %s: set --tls-cert-path and --tls-key-path, or "
            "listen on 127.0.0.1 behind a proxy with TLS",
            host,
        )
