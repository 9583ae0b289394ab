"""``dynamo web``: print the address of the web page of a deployment, and open it."""

from __future__ import annotations

import asyncio
import sys
import webbrowser
from collections.abc import Sequence

from dynamo.cli.frontend_client import call
from dynamo.cli.options import WebSettings
from dynamo.config import environ, load
from dynamo.errors import ConfigError, DynamoError, Unavailable
from dynamo.http.client import ResponseError, cause, parse_url
from dynamo.http.tls import unverified_context
from dynamo.protocols.status import BoxStatus
from dynamo.status.deployment import chosen_runtime
from dynamo.status.reading import BoxCollector

DESCRIPTION = "Print the address of the web page of a running deployment, and open it."
EPILOG = """Exit status: 0 the page is served, 1 it is not, and why, 2 a bad flag."""

_TIMEOUT_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status."""
    (settings,) = load("dynamo web", DESCRIPTION, [WebSettings], argv, epilog=EPILOG)
    try:
        url = page_url(BoxCollector(chosen_runtime(settings.namespace)).collect())
    except DynamoError as error:
        print(f"dynamo web: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print(url)
    if settings.open and _has_display():
        webbrowser.open(url)
    return 0


def page_url(box: BoxStatus) -> str:
    """Return the address of the page, after a look whether it is served. Raises Unavailable."""
    if box.state != "running":
        raise Unavailable(
            f"no deployment runs in namespace {box.namespace!r}; start one: dynamo serve GRAPH"
        )
    if box.frontend == "none":
        raise Unavailable("the deployment has no frontend; add one to its graph: dynamo reload")
    if box.frontend in ("down", "loading"):
        suspect = min(box.others, key=lambda one: one.state == "ready", default=None)
        remedy = f"dynamo logs {suspect.name}" if suspect else "dynamo ps"
        where = box.url or "its address"
        raise Unavailable(f"the frontend does not answer at {where}; see why: {remedy}")
    _check_served(box.url)
    return f"{box.url}/ui"


def _check_served(base: str) -> None:
    target = parse_url(base)
    url = f"{base}/ui"
    try:
        status = asyncio.run(
            call(target, "GET", "/ui", b"", _TIMEOUT_S, unverified_context())
        ).status
    except (OSError, UnicodeError, ResponseError) as error:
        raise Unavailable(f"can't reach {url}: {cause(error)}; see: dynamo ps") from None
    if status == 404:
        raise Unavailable(
            f"{url} is off: give the frontend --ui (DYN_HTTP_UI=1); by default it is served on "
            "a loopback address alone, and never with DYN_DISABLE_FRONTEND_ADMIN_API"
        )
    if status != 200:
        raise Unavailable(f"{url} answered {status}; see: dynamo ps")


def _has_display() -> bool:
    variables = environ()
    return bool(variables.get("DISPLAY") or variables.get("WAYLAND_DISPLAY"))
