"""Find the frontend that a command calls: the one that is named, or the running deployment's."""

from __future__ import annotations

from dynamo.box.deployments import chosen_runtime
from dynamo.config.client import ClientSettings
from dynamo.errors import ConfigError, StatefileError
from dynamo.http.target import Target, parse_url
from dynamo.planner.frontends import frontends_in
from dynamo.runtime.process.paths import state_path
from dynamo.serve.state.statefile import Statefile

__all__ = ["find_target", "find_url"]

_DEFAULT_URL = "http://127.0.0.1:8000"


def find_target(settings: ClientSettings) -> Target:
    """Return the frontend to call. Raises ConfigError if there are several to choose from.

    Without a deployment of ``dynamo serve`` it is the default address.
    """
    return parse_url(find_url(settings), settings.api_key, settings.tls_ca_cert_path)


def find_url(settings: ClientSettings) -> str:
    """As :func:`find_target`, the URL."""
    return settings.url or _running(settings.namespace) or _DEFAULT_URL


def _running(namespace: str | None) -> str | None:
    runtime = chosen_runtime(namespace)
    try:
        document = Statefile(state_path(runtime), runtime.namespace).read()
    except StatefileError as error:
        raise ConfigError(f"{error}. Or name the frontend with --url") from None
    urls = sorted({one.address.url for one in frontends_in(document or {})})
    if len(urls) > 1:
        raise ConfigError(f"several frontends are running; name one with --url: {', '.join(urls)}")
    if not urls and namespace is not None:
        raise ConfigError(f"no frontend runs in namespace {namespace!r}; name one with --url")
    return urls[0] if urls else None
