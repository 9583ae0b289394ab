"""``dynamo route``: ask a running frontend which worker a prompt would go to, and why."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dynamo.bench.answers import error_message
from dynamo.config import load
from dynamo.config.route import RouteSettings
from dynamo.errors import ConfigError, DynamoError, Unavailable
from dynamo.http.tls import client_context
from dynamo.protocols.openai import ModelList
from dynamo.router.explain import Explanation, table

__all__ = ["main"]

DESCRIPTION = """Show which worker a prompt would go to. Nothing is sent to a worker."""
EPILOG = """examples:
  dynamo route --prompt-file prompt.txt --explain
  cat chat-request.json | dynamo route --prompt-file -
"""


_SHOWN = 500
_T = TypeVar("_T")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status: 1 when no worker can be chosen."""
    (settings,) = load("dynamo route", DESCRIPTION, [RouteSettings], argv, epilog=EPILOG)
    try:
        found = _ask(settings, _body(settings))
    except DynamoError as error:
        print(f"dynamo route: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    if settings.json:
        print(msgspec.json.encode(found).decode())
    elif settings.explain:
        print(table(found))
    else:
        print(_choice(found))
    return 1 if found.error else 0


def _choice(found: Explanation) -> str:
    if found.prefill is None:
        return _chosen(found)
    return f"prefill: {_chosen(found.prefill)}\ndecode: {_chosen(found)}"


def _chosen(found: Explanation) -> str:
    for row in found.candidates:
        if row.chosen:
            return (
                f"worker {row.worker_id:x} dp_rank {row.dp_rank}: holds {row.overlap_blocks} of "
                f"{found.prompt_blocks} blocks, cost {row.cost:.3f}"
            )
    return f"no worker: {found.error or 'none has a free slot'}"


def _body(settings: RouteSettings) -> dict[str, Any]:
    """Build the request: the JSON body in the file, or its text as a completion."""
    if settings.prompt_file is None:
        raise ConfigError("--prompt-file is needed")
    try:
        text = (
            sys.stdin.read()
            if settings.prompt_file == "-"
            else Path(settings.prompt_file).read_text()
        )
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {settings.prompt_file}: {error}") from None
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict) or not ({"messages", "prompt"} & set(body)):
        body = {"prompt": text}
    if settings.model is not None or "model" not in body:
        body["model"] = settings.model or _first_model(settings)
    return body


def _first_model(settings: RouteSettings) -> str:
    rows = _decoded(settings, _fetch(settings, "/v1/models", None), ModelList).data
    if not rows:
        raise Unavailable("the frontend has no model")
    return rows[0].id


def _ask(settings: RouteSettings, body: dict[str, Any]) -> Explanation:
    answer = _fetch(settings, "/v1/route", json.dumps(body).encode())
    return _decoded(settings, answer, Explanation)


def _decoded(settings: RouteSettings, answer: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise DynamoError(f"{settings.url} is not a Dynamo frontend") from None


def _fetch(settings: RouteSettings, path: str, body: bytes | None) -> bytes:
    url = settings.url.rstrip("/").removesuffix("/v1") + path
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must look like http://host:port, got {settings.url!r}")
    headers = {"content-type": "application/json"}
    if settings.api_key:
        headers["authorization"] = f"Bearer {settings.api_key}"
    request = urllib.request.Request(url, body, headers)
    tls = client_context(settings.tls_ca_cert_path) if url.startswith("https") else None
    try:
        with urllib.request.urlopen(request, timeout=settings.timeout_s, context=tls) as response:
            content: bytes = response.read()
            return content
    except urllib.error.HTTPError as error:
        with error:
            message = error_message(error.read(), _SHOWN)
        raise DynamoError(f"{url} answered {error.code}: {message}") from None
    except (OSError, ValueError, HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise Unavailable(f"can't reach {url}: {reason}; name a frontend with --url") from None
