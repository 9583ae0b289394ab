"""The files of the web page, with the headers that keep foreign content and pages out."""

from __future__ import annotations

import hashlib
from functools import partial
from importlib import resources
from pathlib import PurePath

from dynamo.http import Exchange
from dynamo.http.routes import Routes

__all__ = ["HEADERS", "PAGE", "file_paths", "install_files"]

PAGE = "/ui"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = (
    ("content-security-policy", _POLICY),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
)
"""Of every response under /ui: own scripts alone, no frames, no text parsed as HTML by a script."""


def file_paths() -> frozenset[str]:
    """The paths of the page's files, which need no key: they show nothing of the deployment."""
    return frozenset(_files())


def install_files(routes: Routes) -> None:
    """Serve the files. A browser asks each time whether its copy is current, and gets a 304."""
    for path, (name, body) in _files().items():
        etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        content_type = _TYPES[PurePath(name).suffix]
        routes.get(path, partial(_respond, body, content_type, etag))


def _files() -> dict[str, tuple[str, bytes]]:
    """Path → name and content."""
    found = {}
    for file in resources.files("dynamo.frontend.ui").joinpath("static").iterdir():
        path = PAGE if file.name == "index.html" else f"{PAGE}/{file.name}"
        found[path] = (file.name, file.read_bytes())
    return found


def _respond(body: bytes, content_type: str, etag: str, exchange: Exchange) -> None:
    headers = [*HEADERS, ("cache-control", "no-cache"), ("etag", etag)]
    known = exchange.headers.get("if-none-match", "")
    if etag in {one.strip().removeprefix("W/") for one in known.split(",")}:
        exchange.respond_unchanged(body, content_type, headers)
    else:
        exchange.respond(200, body, content_type, headers)
