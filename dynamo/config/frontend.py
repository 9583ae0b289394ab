"""Options of the HTTP frontend."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from dynamo.config.absent import FRONTEND, AbsentFlag
from dynamo.config.option import option, variable
from dynamo.errors import ConfigError, shorten
from dynamo.prometheus_names import name_prefix

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]{0,30}://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?")
# A browser leaves the default port of the scheme out of Origin (RFC 6454, section 6.2).
_DEFAULT_PORT = re.compile(r"(?<=^http:)(//.+):80$|(?<=^https:)(//.+):443$")

REFUSE, IGNORE, PASS = "refuse", "ignore", "pass"
"""What to do with the unknown fields of a request."""


@dataclass(frozen=True, kw_only=True)
class FrontendSettings:
    """frontend: address, limits, API, metrics, logs"""

    absent: ClassVar[tuple[AbsentFlag, ...]] = FRONTEND
    http_host: str = option(
        "127.0.0.1", help="address to listen on; 0.0.0.0 opens it to the network"
    )
    http_port: int = option(
        8000, minimum=0, maximum=65535, help="port to listen on; 0 picks a free one"
    )
    allowed_hosts: tuple[str, ...] = variable(
        (),
        "DYN_HTTP_ALLOWED_HOSTS",
        repeat=True,
        help="names in the Host header to serve besides localhost, --http-host and IP addresses, "
        "separated by spaces; * serves any. Default: none on a loopback address, any elsewhere",
    )
    cors_origins: tuple[str, ...] = option(
        (),
        repeat=True,
        several=True,
        metavar="ORIGIN",
        help="origins whose web pages may use the API, such as https://chat.example.com; * allows "
        "all; default: none",
    )
    api_key_file: str | None = option(
        None,
        help="file with the digests of API keys ('dynamo key add NAME' makes one); without it, "
        "requests need no key",
    )
    tls_cert_path: str | None = option(
        None, help="PEM file of the server's certificate and its chain; serves https, not http"
    )
    tls_key_path: str | None = option(None, help="PEM file of the certificate's key")
    tls_client_ca_cert_path: str | None = option(
        None,
        help="PEM file of the authority whose client certificates are needed; default: none is",
    )
    namespace_prefix: str | None = option(
        None, help="serve only models of namespaces that start with this"
    )
    metrics_prefix: str = option(
        name_prefix.FRONTEND, help="first part of the names of the frontend's metrics"
    )
    body_limit_mb: int | None = variable(
        None,
        "DYN_HTTP_BODY_LIMIT_MB",
        minimum=1,
        help="largest request body in MiB; default: 4 and 32 bytes for each token of the longest "
        "context that is served, at most 45",
    )
    max_connections: int = variable(
        4096, "DYN_HTTP_MAX_CONNECTIONS", minimum=1, help="clients connected at once"
    )
    header_timeout_s: float = variable(
        15.0,
        "DYN_HTTP_HEADER_TIMEOUT_SECS",
        minimum=0,
        exclusive_minimum=True,
        help="seconds a client may take to send a request head",
    )
    body_timeout_s: float = variable(
        120.0,
        "DYN_HTTP_BODY_TIMEOUT_SECS",
        minimum=0,
        exclusive_minimum=True,
        help="seconds a client may take to send a request body",
    )
    idle_timeout_s: float = variable(
        75.0,
        "DYN_HTTP_IDLE_TIMEOUT_SECS",
        minimum=0,
        exclusive_minimum=True,
        help="seconds an idle connection is kept",
    )
    http_listen_fd: int | None = variable(
        None,
        minimum=3,
        help="inherited socket to listen on instead of --http-host and --http-port; dynamo serve "
        "sets it, so that connections wait while a frontend is restarted",
    )
    listen_backlog: int = variable(
        2048, "DYN_HTTP_LISTEN_BACKLOG", minimum=1, help="connections waiting to be accepted"
    )
    overload_status: int = variable(
        503,
        "DYN_HTTP_OVERLOAD_STATUS_CODE",
        minimum=200,
        maximum=999,
        help="HTTP status when every worker is busy",
    )
    graceful_shutdown_timeout_s: float = variable(
        5.0,
        "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS",
        minimum=0,
        help="seconds requests in flight may take to end after SIGTERM",
    )
    backend_stream_timeout_s: float | None = variable(
        None,
        "DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS",
        minimum=0,
        exclusive_minimum=True,
        help="seconds an engine may be silent in the middle of a request; default: no limit",
    )
    migration_limit: int = option(
        0,
        minimum=0,
        help="workers that may fail with a request before the request fails: it goes on with "
        "another one; dynamo serve sets 3",
    )
    migration_max_seq_len: int | None = option(
        None,
        minimum=1,
        help="tokens of prompt and answer above which a request does not go on with another "
        "worker; default: no limit",
    )
    cold_start_queue_limit: int = option(
        1000, minimum=0, help="requests of a model that may wait for its first worker; more get 503"
    )
    cold_start_timeout_s: float = option(
        600.0,
        "--cold-start-timeout",
        env="DYN_COLD_START_TIMEOUT_SECS",
        minimum=0,
        exclusive_minimum=True,
        metavar="SECONDS",
        help="longest wait of a request for the first worker of its model; then it gets 503",
    )
    sse_keep_alive_ms: float | None = variable(
        None,
        "DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS",
        minimum=0,
        exclusive_minimum=True,
        help="send a comment on streams that were silent for so many milliseconds; default: never",
    )
    slow_client_limit_mb: int = variable(
        8,
        "DYN_HTTP_SLOW_CLIENT_LIMIT_MB",
        minimum=1,
        help="MiB buffered for a client that reads too slowly; above, it is disconnected",
    )
    allowed_media_domains: tuple[str, ...] = option(
        (),
        repeat=True,
        several=True,
        metavar="HOST",
        help="hosts from which the images that clients name by URL are fetched; default: none",
    )
    route_extensions: tuple[str, ...] = option(
        (),
        "--frontend-route-extension",
        env="DYN_FRONTEND_ROUTE_EXTENSIONS",
        repeat=True,
        metavar="NAME",
        help="function that adds routes: an entry point of the group dynamo.frontend.routes, or "
        "MODULE:FUNCTION; may be repeated",
    )
    reasoning_field_name: str = option(
        "reasoning_content",
        choices=("reasoning_content", "reasoning"),
        help="field of chat answers that has the model's reasoning",
    )
    exclude_tools_when_tool_choice_none: bool = option(
        True, help="leave tools out of the prompts of chats with tool_choice none"
    )
    min_initial_workers: int = option(
        0,
        "--router-min-initial-workers",
        minimum=0,
        help="workers that a model needs before it is listed and served for the first time",
    )
    unknown_fields: str = option(
        REFUSE,
        choices=(REFUSE, IGNORE, PASS),
        help="what to do with request fields that are not known here: refuse the request, ignore "
        "them, or pass them on to the engine, which ignores those that it does not know",
    )
    ignore_unsupported_fields: bool = variable(
        False,
        "DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS",
        help="ignore unknown request fields where --unknown-fields says refuse",
    )
    trust_request_chat_template: bool = option(
        False, help="render chats with the template in their field chat_template"
    )
    trust_request_mm_kwargs: bool = option(
        False,
        help="pass mm_processor_kwargs and media_io_kwargs of chats on to the engine: with them an "
        "image may take far more memory and time",
    )
    responses_store_mb: int = option(
        64,
        minimum=0,
        help="memory for stored responses (previous_response_id of /v1/responses) in MiB; the "
        "least recently used are dropped; 0 stores none",
    )
    anthropic_api: bool = option(
        True, "--enable-anthropic-api", help="serve /v1/messages and /v1/messages/count_tokens"
    )
    strip_anthropic_preamble: bool = option(
        True,
        help="leave Claude Code's billing header, which differs in each request, out of prompts",
    )
    disable_nvext: bool = variable(
        False,
        "DYN_DISABLE_FRONTEND_NVEXT",
        help="ignore nvext in requests, and the headers for routing",
    )
    disable_admin_api: bool = variable(
        False,
        "DYN_DISABLE_FRONTEND_ADMIN_API",
        help="do not serve the operators' routes (/busy_threshold, /v1/requests, /v1/route, "
        "/v1/status, /ui)",
    )
    ui: bool | None = option(
        None, env="DYN_HTTP_UI", help="serve the web page at /ui; default: on a loopback address"
    )
    force_usage: bool = variable(
        False, "DYN_ENABLE_FORCE_INCLUDE_USAGE", help="send token counts at the end of every stream"
    )
    tokenizer: str = option(
        "default",
        choices=("default", "fastokens"),
        deprecated="the fastest tokenizer that gives a model's own ids is chosen for each model",
        heading="accepted, but without effect",
        help="accepted, no effect",
    )
    model_name: str | None = option(
        None,
        deprecated="models have the names that their workers register",
        help="accepted, no effect",
    )
    model_path: str | None = option(
        None,
        deprecated="models are read from the directories that their workers register",
        help="accepted, no effect",
    )

    @property
    def unknown_field_policy(self) -> str:
        """What to do with unknown fields, by both settings."""
        if self.unknown_fields == REFUSE and self.ignore_unsupported_fields:
            return IGNORE
        return self.unknown_fields

    @property
    def serves_ui(self) -> bool:
        """Whether /ui is served: it is for operators, so not without their routes."""
        if self.disable_admin_api:
            return False
        host = self.http_host
        local = host in ("localhost", "::1") or host.startswith("127.")
        return local if self.ui is None else self.ui

    def __post_init__(self) -> None:
        """Check TLS and origins. Raises ConfigError."""
        checked_origins(self.cors_origins)
        if (self.tls_cert_path is None) != (self.tls_key_path is None):
            missing = "--tls-cert-path" if self.tls_cert_path is None else "--tls-key-path"
            raise ConfigError(f"{missing} is missing: TLS needs a certificate and its key")
        if self.tls_client_ca_cert_path is not None and self.tls_cert_path is None:
            raise ConfigError(
                "--tls-client-ca-cert-path needs --tls-cert-path and --tls-key-path: clients send "
                "certificates over TLS alone"
            )


def checked_origins(origins: Iterable[str]) -> tuple[str, ...]:
    """Return the origins as browsers send them. Raises ConfigError naming a wrong one."""
    lower = tuple(origin.lower() for origin in origins)
    for origin in lower:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--cors-origins: {shorten(repr(origin))} is no origin; give scheme, host and port "
                "without a path, such as https://chat.example.com or http://localhost:3000, or *"
            )
    if "*" in lower and len(lower) > 1:
        raise ConfigError("--cors-origins: * allows every origin; leave the others out")
    return tuple(_DEFAULT_PORT.sub(r"\1\2", origin) for origin in lower)
