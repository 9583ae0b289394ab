"""What the attached server offers, and the small requests that find it out."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import orjson

from dynamo.attach.profiles import PROFILES, Profile, offered_routes
from dynamo.errors import ConfigError, name_problem
from dynamo.http.client import HttpClient, ResponseError, Target
from dynamo.observability.metrics_page import samples

log = logging.getLogger(__name__)
_MAX_MODELS = 256
_MAX_ROOT = 4096
_LOADING = (502, 503, 504)
_ANSWER_BYTES = 16 << 20


class ServerUnreachable(Exception):
    """The server refused the connection, broke it off, or did not answer in time.

    ``slow``: it did not answer in time, so it may be busy and not dead.
    """

    def __init__(self, reason: str, slow: bool = False) -> None:
        super().__init__(reason)
        self.slow = slow


class ServerProbe:
    """Asks ``target`` over one kept connection. Use one call at a time."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        self.target = target
        self._timeout_s = timeout_s
        self._tls = ssl.create_default_context() if target.tls else None
        self._client: HttpClient | None = None

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body of a GET. Raises ServerUnreachable."""
        return await self._ask(self.target.head("GET", path, 0))

    async def json(self, path: str, body: Any = None) -> Any:
        """Return the JSON of a GET, or of a POST of ``body``; None for a status but 200 or no JSON.

        Raises ServerUnreachable.
        """
        if body is None:
            status, answer = await self.get(path)
        else:
            content = orjson.dumps(body)
            head = self.target.head("POST", path, len(content))
            status, answer = await self._ask(head + content)
        try:
            return orjson.loads(answer) if status == 200 else None
        except orjson.JSONDecodeError:
            return None

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()

    async def _ask(self, message: bytes) -> tuple[int, bytes]:
        reused = self._client is not None and self._client.usable
        try:
            async with asyncio.timeout(self._timeout_s):
                try:
                    return await self._send(message)
                except ResponseError:
                    if not reused:
                        raise
                    # The server closes an idle connection when it likes, also at this moment.
                    return await self._send(message)
        except TimeoutError:
            self.close()
            seconds = f"{self._timeout_s:g} s"
            raise ServerUnreachable(f"no answer within {seconds}", slow=True) from None
        except (OSError, UnicodeError, ResponseError) as error:
            self.close()
            raise ServerUnreachable(str(error) or type(error).__name__) from None

    async def _send(self, message: bytes) -> tuple[int, bytes]:
        client = self._client
        if client is None or not client.usable:
            client = self._client = HttpClient(_ANSWER_BYTES)
            await client.connect(self.target.host, self.target.port, self._tls)
        await client.request(message)
        return client.status, bytes(client.body)


class ServerLoading(ServerUnreachable):
    """The server answers, and is not ready yet."""


@dataclass(frozen=True)
class ServedModel:
    """A model in the server's own list; ``context_length`` is None if the server does not say.

    ``is_adapter``: a LoRA adapter of another model of the server. ``root`` is what the server
    loaded, None if it does not say.
    """

    name: str
    context_length: int | None = None
    routes: tuple[str, ...] = ()
    is_adapter: bool = False
    root: str | None = None


@dataclass(frozen=True)
class ServerCapacity:
    """The sizes that the server reports, of one rank; None is unknown."""

    block_size: int | None = None
    total_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None


@dataclass(frozen=True)
class ServerDescription:
    """What the server offers. Every model has at least one route."""

    profile: Profile
    models: tuple[ServedModel, ...]
    capacity: ServerCapacity = ServerCapacity()

    @property
    def routes(self) -> frozenset[str]:
        """The routes of all models."""
        return frozenset(route for model in self.models for route in model.routes)


async def describe(probe: ServerProbe, profile_name: str = "auto") -> ServerDescription:
    """Ask the server. Raises ServerUnreachable, ServerLoading; ConfigError: it never will do."""
    rows = await _list_models(probe)
    profile = await _detect(probe, rows) if profile_name == "auto" else PROFILES[profile_name]
    status, _ = await probe.get(profile.health_path)
    if status in _LOADING:
        raise ServerLoading(f"{profile.health_path} answers {status}")
    routes = offered_routes(await probe.json("/openapi.json")) or profile.routes
    models = tuple(
        ServedModel(
            row["id"],
            _number(row.get("max_model_len")),
            routes,
            bool(row.get("parent")),
            _root(row.get("root")),
        )
        for row in rows
    )
    description = ServerDescription(profile, models)
    return await _DETAILS.get(profile.name, _no_details)(probe, description)


async def _list_models(probe: ServerProbe) -> list[dict[str, Any]]:
    status, _ = await probe.get("/v1/models")
    url = probe.target.url
    if status in (401, 403):
        raise ConfigError(f"{url}/v1/models answers {status}: give the server's --api-key")
    if status == 404:
        raise ConfigError(
            f"{url}/v1/models answers 404: this is no OpenAI-compatible server; correct --url"
        )
    page = await probe.json("/v1/models") if status == 200 else None
    rows = page.get("data") if isinstance(page, dict) else None
    if not isinstance(rows, list):
        raise ServerLoading(f"/v1/models answers {status}")
    named = [row for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)]
    problems = {row["id"]: why for row in named if (why := name_problem(row["id"]))}
    if problems:
        name, why = next(iter(problems.items()))
        log.warning("left out a model of %s: its name %a %s", url, name[:128], why)
    named = [row for row in named if row["id"] not in problems]
    if not named:
        raise ServerLoading("/v1/models lists no model")
    return named[:_MAX_MODELS]


async def _detect(probe: ServerProbe, rows: list[dict[str, Any]]) -> Profile:
    """Return the profile by the owner of the first model, else by a path that only it has."""
    owner = rows[0].get("owned_by")
    for profile in PROFILES.values():
        if profile.owner and owner == profile.owner:
            return profile
    if _has(await probe.json("/get_server_info"), "max_total_num_tokens"):
        return PROFILES["sglang"]
    if _has(await probe.json("/props"), "total_slots"):
        return PROFILES["llama.cpp"]
    if _has(await probe.json("/api/version"), "version"):
        return PROFILES["ollama"]
    # vLLM and TensorRT-LLM both have this path: the form of their metrics differs.
    if _has(await probe.json("/version"), "version"):
        status, page = await probe.get("/metrics")
        if status == 200 and b"\nvllm:" in page:
            return PROFILES["vllm"]
        if status == 200 and page.lstrip().startswith(b"["):
            return PROFILES["trtllm"]
    return PROFILES["openai"]


async def _vllm(probe: ServerProbe, description: ServerDescription) -> ServerDescription:
    status, page = await probe.get("/metrics")
    labels: dict[str, str] = {}
    if status == 200:
        labels = next((row[1] for row in samples(page, "vllm:cache_config_info")), {})
    capacity = ServerCapacity(
        _number(labels.get("block_size")), _number(labels.get("num_gpu_blocks"))
    )
    return replace(description, capacity=capacity)


async def _sglang(probe: ServerProbe, description: ServerDescription) -> ServerDescription:
    info = await probe.json("/get_server_info") or await probe.json("/server_info")
    info = info if isinstance(info, dict) else {}
    page_size, tokens = _number(info.get("page_size")), _number(info.get("max_total_num_tokens"))
    capacity = ServerCapacity(
        page_size,
        tokens // page_size if tokens and page_size else None,
        _number(info.get("max_running_requests")),
        _number(info.get("max_prefill_tokens")),
    )
    return _with_length(
        replace(description, capacity=capacity), _number(info.get("context_length"))
    )


async def _trtllm(probe: ServerProbe, description: ServerDescription) -> ServerDescription:
    page = await probe.json("/metrics")
    newest = page[-1] if isinstance(page, list) and page else {}
    cache = newest.get("kvCacheStats") if isinstance(newest, dict) else None
    cache = cache if isinstance(cache, dict) else {}
    capacity = ServerCapacity(
        _number(cache.get("tokensPerBlock")), _number(cache.get("maxNumBlocks"))
    )
    return replace(description, capacity=capacity)


async def _llama_cpp(probe: ServerProbe, description: ServerDescription) -> ServerDescription:
    props = await probe.json("/props")
    props = props if isinstance(props, dict) else {}
    settings = props.get("default_generation_settings")
    length = _number(settings.get("n_ctx")) if isinstance(settings, dict) else None
    capacity = ServerCapacity(max_num_seqs=_number(props.get("total_slots")))
    return _with_length(replace(description, capacity=capacity), length)


async def _ollama(probe: ServerProbe, description: ServerDescription) -> ServerDescription:
    """Ask for each model: an embedding model has no chat, and each has its own length."""
    models = []
    for model in description.models:
        details = await probe.json("/api/show", {"model": model.name})
        details = details if isinstance(details, dict) else {}
        info = details.get("model_info")
        fields = info.items() if isinstance(info, dict) else ()
        context_length = next(
            (_number(value) for key, value in fields if key.endswith(".context_length")), None
        )
        capabilities = details.get("capabilities")
        routes = model.routes
        if isinstance(capabilities, list) and "completion" not in capabilities:
            routes = tuple(route for route in routes if route == "/v1/embeddings") or routes
        elif isinstance(capabilities, list):
            routes = tuple(route for route in routes if route != "/v1/embeddings") or routes
        models.append(replace(model, context_length=context_length, routes=routes))
    return replace(description, models=tuple(models))


async def _no_details(probe: ServerProbe, description: ServerDescription) -> ServerDescription:
    return description


_DETAILS: dict[str, Callable[[ServerProbe, ServerDescription], Awaitable[ServerDescription]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
    "llama.cpp": _llama_cpp,
    "ollama": _ollama,
}


def _with_length(description: ServerDescription, length: int | None) -> ServerDescription:
    models = (
        replace(model, context_length=model.context_length or length)
        for model in description.models
    )
    return replace(description, models=tuple(models))


def _has(page: Any, field: str) -> bool:
    return isinstance(page, dict) and field in page


def _root(value: Any) -> str | None:
    """Return ``value``, a path or an id; None for anything else, or more than a path may have."""
    return value if isinstance(value, str) and 0 < len(value) <= _MAX_ROOT else None


def _number(value: Any) -> int | None:
    """``value``, a positive integer or the text of one; None for anything else."""
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    # In Python True is an int.
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
