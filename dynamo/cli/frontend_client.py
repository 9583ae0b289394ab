"""Find the frontend that a verb means, send it requests, open its web page (``dynamo web``).

They connect to the frontend itself: ``http_proxy`` and its like have no effect.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from dynamo.bench.client import refusal
from dynamo.cli.options import WebSettings
from dynamo.cli.text_table import printable
from dynamo.config import environ, from_env, load
from dynamo.config.client import ClientSettings, FrontendClientSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError, DynamoError, StatefileError, Unavailable
from dynamo.http.client import ResponseError, Target, call, cause, parse_url, remedy
from dynamo.http.tls import unverified_context
from dynamo.protocols.status import BoxStatus
from dynamo.runtime.process.os_process import listening_users
from dynamo.runtime.process.paths import state_path
from dynamo.serve.state.document import Document
from dynamo.serve.state.frontends import frontends_in, local_key
from dynamo.serve.state.statefile import Statefile
from dynamo.status.deployment import chosen_runtime, not_running
from dynamo.status.reading import BoxCollector, worker_names

Names = Mapping[str, str]
"""The names of workers by their ids; one that has ended since is shown by its id."""
_ERROR_CHARS = 500
BODY_BYTES = 64 << 20
_T = TypeVar("_T")
_DEFAULT_PORT = 8000
_DEFAULT_URL = f"http://127.0.0.1:{_DEFAULT_PORT}"
START = "start a deployment (dynamo run MODEL), or name an endpoint with --url"
"""What to do where nothing listens."""
_WEB = "Print the address of the web page of a running deployment, and open it."
_WEB_END = """Exit status: 0 the page is served, 1 it is not, and why, 2 a bad flag."""
_PAGE_S = 5.0


def find_target(settings: ClientSettings) -> Target:
    """Return the frontend to call. Raises ConfigError if there are several to choose from.

    Without a deployment of ``dynamo serve`` it is the default address. A frontend of this user that
    needs a key gets that of its deployment, unless the settings have one.
    """
    url, key = settings.url, settings.api_key
    if url is None:
        running = _running(settings.namespace)
        url, local = running or (_DEFAULT_URL, None)
        if running is None and (owner := listener_owner(_DEFAULT_PORT)):
            where = f"{state_path(from_env(RuntimeSettings))} has no running deployment"
            print(f"{where}; at {_DEFAULT_URL} answers a process of {owner}", file=sys.stderr)
        key = local if key is None else key
    return parse_url(url, key, settings.tls_ca_cert_path)


def listener_owner(port: int) -> str:
    """Return whose process listens on the TCP ``port`` of this machine; "" for none."""
    user = next(listening_users(port), None)
    if user is None:
        return ""
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        name = f"user {user}"
    return name + " (you, with another home or DYN_LOCAL_STATE_DIR)" * (user == os.getuid())


def _running(namespace: str | None) -> tuple[str, str | None] | None:
    """Return the URL of the only frontend, and the key of its deployment if it needs one."""
    runtime = chosen_runtime(namespace)
    try:
        document = Statefile(state_path(runtime), runtime.namespace).read()
    except StatefileError as error:
        raise ConfigError(f"{error}. Or name the frontend with --url") from None
    frontends = list(frontends_in(document or Document()))
    urls = sorted({address.url for frontend in frontends if (address := frontend.listens.address)})
    if len(urls) > 1:
        raise ConfigError(f"several frontends are running; name one with --url: {', '.join(urls)}")
    if not urls:
        if namespace is None:
            return None
        raise ConfigError(f"no frontend runs in namespace {namespace!r}; name one with --url")
    needs_key = any(frontend.listens.api_key_file for frontend in frontends)
    return urls[0], local_key(runtime) if needs_key else None


def known_names(settings: FrontendClientSettings) -> Names:
    """Return the names of the workers of the deployment that ``settings`` mean."""
    try:
        return worker_names(chosen_runtime(settings.namespace))
    except ConfigError:  # several deployments, and --url says which one
        return {}


def name_of(worker: str, names: Names) -> str:
    """Return what people call the worker with this id."""
    return printable(names.get(worker, worker))


def ask(settings: FrontendClientSettings, path: str, kind: type[_T], body: bytes = b"") -> _T:
    """GET ``path``, or POST ``body`` there; return the answer, which is a ``kind``.

    Raises ConfigError, Unavailable, DynamoError.
    """
    target = find_target(settings)
    url = target.url + path
    method = "POST" if body else "GET"
    try:
        answer = asyncio.run(call(target, method, path, BODY_BYTES, settings.timeout_s, body))
    except (OSError, UnicodeError, ResponseError) as error:
        raise Unavailable(f"can't reach {url}: {cause(error)}; {remedy(error, START)}") from None
    if answer.status != 200:
        text = refusal(answer.status, bytes(answer.body), _ERROR_CHARS)
        raise DynamoError(f"{url} answered {text}")
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise DynamoError(f"{target.url} is not a Dynamo frontend") from None


def web(argv: Sequence[str] | None = None) -> int:
    """Run ``dynamo web``; return the exit status."""
    (settings,) = load("dynamo web", _WEB, [WebSettings], argv, epilog=_WEB_END)
    url = page_url(BoxCollector(chosen_runtime(settings.namespace)).collect())
    print(url)
    variables = environ()
    if settings.open and (variables.get("DISPLAY") or variables.get("WAYLAND_DISPLAY")):
        webbrowser.open(url)
    return 0


def page_url(box: BoxStatus) -> str:
    """Return the address of the page, after a look whether it is served. Raises Unavailable."""
    if box.state != "running":
        raise Unavailable(not_running(box.namespace))
    if box.frontend == "none":
        raise Unavailable("the deployment has no frontend; add one to its graph: dynamo reload")
    if box.frontend in ("down", "loading"):
        # False is less than True: a process that is not ready comes first.
        suspect = min(box.others, key=lambda process: process.state == "ready", default=None)
        remedy = f"dynamo logs {suspect.name}" if suspect else "dynamo ps"
        where = box.url or "its address"
        raise Unavailable(f"the frontend does not answer at {where}; see why: {remedy}")
    _check_served(box.url)
    return f"{box.url}/ui"


def _check_served(base: str) -> None:
    target = parse_url(base)
    url = f"{base}/ui"
    try:
        # Only the status is read: the certificate need not be one that this user trusts.
        page = call(target, "GET", "/ui", BODY_BYTES, _PAGE_S, tls=unverified_context())
        status = asyncio.run(page).status
    except (OSError, UnicodeError, ResponseError) as error:
        raise Unavailable(f"can't reach {url}: {cause(error)}; see: dynamo ps") from None
    if status == 404:
        raise Unavailable(
            f"{url} is off: give the frontend --ui (DYN_HTTP_UI=1); by default it is served on "
            "a loopback address alone, and never with DYN_DISABLE_FRONTEND_ADMIN_API"
        )
    if status != 200:
        raise Unavailable(f"{url} answered {status}; see: dynamo ps")
