"""What a worker accepts, serves and can hold: the types of the public API."""

from __future__ import annotations

import enum
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dynamo.errors import ConfigError
from dynamo.protocols.control import RuntimeConfig

_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")


class ModelInput(enum.Enum):
    """The input that the worker accepts: the text or the tokens of the prompt, or tensors."""

    Text = "Text"
    Tokens = "Tokens"
    Tensor = "Tensor"

    def __str__(self) -> str:
        """Return the value in the model card."""
        return self.value


class ModelType(enum.Flag):
    """The APIs that the model serves; combine with ``|``."""

    Empty = 0
    Chat = enum.auto()
    Completions = enum.auto()
    Embedding = enum.auto()
    TensorBased = enum.auto()
    Prefill = enum.auto()
    Images = enum.auto()
    Videos = enum.auto()
    Audios = enum.auto()
    Classify = enum.auto()
    Pooling = enum.auto()
    Rerank = enum.auto()
    Realtime = enum.auto()

    def supports_chat(self) -> bool:
        """Return whether it has chat completions."""
        return ModelType.Chat in self

    def supports_completions(self) -> bool:
        """Return whether it has completions."""
        return ModelType.Completions in self

    def supports_embedding(self) -> bool:
        """Return whether it has embeddings."""
        return ModelType.Embedding in self

    def supports_classify(self) -> bool:
        """Return whether it has classification."""
        return ModelType.Classify in self

    def supports_pooling(self) -> bool:
        """Return whether it has pooling."""
        return ModelType.Pooling in self

    def supports_rerank(self) -> bool:
        """Return whether it has reranking."""
        return ModelType.Rerank in self

    def __str__(self) -> str:
        """Return the value in the model card, e.g. ``Chat | Completions``."""
        return " | ".join(kind.name for kind in ModelType if kind in self and kind.name is not None)


class WorkerType(enum.Enum):
    """The part of a request that the worker computes."""

    Aggregated = "Aggregated"
    Prefill = "Prefill"
    Decode = "Decode"
    Encode = "Encode"

    def __str__(self) -> str:
        """Return the value in the model card."""
        return self.value


class ModelRuntimeConfig(RuntimeConfig, omit_defaults=True):
    """Capacity and features of a worker: set attributes, pass it to :func:`register_model`.

    The attributes defined here are stored in the card for other programs; frontends of this package
    do not read them. TypeError for ``topology_domains`` that do not map texts to texts. ValueError
    for a value of ``kv_transfer_enforcement``, ``kv_transfer_preferred_weight`` or
    ``tokenizer_backend`` that Dynamo does not have.
    """

    exclude_tools_when_tool_choice_none: bool = True
    kv_event_source_mode: str | None = None
    kv_state_endpoint: str | None = None
    kv_transfer_domain: str | None = None
    kv_transfer_enforcement: str | None = None
    kv_transfer_preferred_weight: float | None = None
    stable_routing_id: str | None = None
    structural_tag: dict[str, Any] | None = None
    tokenizer_backend: str | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        allowed = _ALLOWED.get(name)
        if allowed is not None and value is not None and value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        if name == "kv_transfer_preferred_weight" and value is not None and not 0 <= value <= 1:
            raise ValueError(f"{name} must be between 0 and 1, got {value}")
        if name == "topology_domains":
            _check_texts(name, value)
        super().__setattr__(name, value)

    def set_structural_tag(self, structural_tag: dict[str, Any] | None = None) -> None:
        """Set how tool calls are constrained; None removes it."""
        self.structural_tag = structural_tag

    def set_engine_specific(self, key: str, value: str) -> None:
        """Store the JSON text ``value``. ValueError if it is not JSON."""
        self.runtime_data[key] = json.loads(value)

    def get_engine_specific(self, key: str) -> str | None:
        """Return the text under ``key``, other values as JSON; None if it is not set."""
        value = self.runtime_data.get(key)
        return value if value is None or isinstance(value, str) else json.dumps(value)

    def set_disaggregated_endpoint(
        self, bootstrap_host: str | None = None, bootstrap_port: int | None = None
    ) -> None:
        """Set the address from which decode workers fetch KV blocks."""
        self.bootstrap_host = bootstrap_host
        self.bootstrap_port = bootstrap_port


_ALLOWED = {
    "kv_transfer_enforcement": ("required", "preferred"),
    "tokenizer_backend": ("default", "fastokens", "basetenkenizer"),
}


class MediaDecoder:
    """Options for decoding images. They are kept, but no frontend of this package decodes media."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def enable_image(self, decoder_options: dict[str, Any]) -> None:
        """Keep the options for images."""
        self.options["image"] = dict(decoder_options)


class MediaFetcher:
    """Options for fetching media by URL. They are kept, but no frontend here fetches media."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def user_agent(self, user_agent: str) -> None:
        """Keep the name sent to servers."""
        self.options["user_agent"] = user_agent

    def allow_direct_ip(self, allow: bool) -> None:
        """Keep whether a URL may have an IP address as its host."""
        self.options["allow_direct_ip"] = allow

    def allow_direct_port(self, allow: bool) -> None:
        """Keep whether a URL may have a port."""
        self.options["allow_direct_port"] = allow

    def allow_private_ips(self, allow: bool) -> None:
        """Keep whether a host may have a private address."""
        self.options["allow_private_ips"] = allow

    def allowed_media_domains(self, domains: list[str]) -> None:
        """Keep the domains that may be fetched from."""
        self.options["allowed_media_domains"] = list(domains)

    def timeout_ms(self, timeout_ms: int) -> None:
        """Keep the timeout in milliseconds."""
        self.options["timeout_ms"] = timeout_ms


def api_types(text: str) -> ModelType:
    """Return the types that ``--endpoint-types`` names, comma separated. Raises ConfigError."""
    kinds = ModelType.Empty
    for word in text.split(","):
        if word.strip() not in _API_TYPES:
            raise ConfigError(f"--endpoint-types must name chat, completions or both, got {text!r}")
        kinds |= _API_TYPES[word.strip()]
    return kinds


_API_TYPES = {"chat": ModelType.Chat, "completions": ModelType.Completions}


def _check_texts(name: str, value: Any) -> None:
    texts = isinstance(value, dict) and all(
        isinstance(text, str) for pair in value.items() for text in pair
    )
    if not texts:
        raise TypeError(f"{name} must be a dict of str to str, got {value!r:.80}")


@dataclass(frozen=True)
class FrontendExtensionContext:
    """The state of the frontend when a request arrived. Read it through the methods.

    ``models`` are the names of all models, and whether they are ready.
    """

    ready: bool
    draining: bool
    models: tuple[tuple[str, bool], ...]

    def is_ready(self) -> bool:
        """Return whether the frontend serves requests."""
        return self.ready

    def is_cancelled(self) -> bool:
        """Return whether the frontend shuts down."""
        return self.draining

    def has_any_ready_model(self) -> bool:
        """Return whether a model can be used."""
        return any(ready for _, ready in self.models)

    def is_model_ready_to_serve(self, model: str) -> bool:
        """Return whether ``model`` can be used."""
        return dict(self.models).get(model, False)

    def model_display_names(self) -> list[str]:
        """Return the names of all models, sorted."""
        return sorted(name for name, _ in self.models)

    def serving_ready_display_names(self) -> list[str]:
        """Return the names of the models that can be used, sorted."""
        return sorted(name for name, ready in self.models if ready)


class FrontendResponse:
    """An answer with a status other than 200; ``body`` is anything that JSON has."""

    def __init__(self, status_code: int, body: object) -> None:
        if not isinstance(status_code, int) or not 200 <= status_code <= 599:
            raise ValueError(f"status_code must be between 200 and 599, got {status_code!r}")
        self.status_code = status_code
        self.body = body


class FrontendRoute:
    """A route for GET of one ``path``. ``handler`` takes a :class:`FrontendExtensionContext`.

    It returns what JSON has, or a :class:`FrontendResponse`. It is a plain function, which runs in
    a thread. Raises ValueError or TypeError for anything else.
    """

    def __init__(
        self, method: str, path: str, handler: Callable[[FrontendExtensionContext], Any]
    ) -> None:
        if method.upper() != "GET":
            raise ValueError(f"route {path}: method must be GET, got {method}")
        if _PATH.fullmatch(path) is None:
            raise ValueError(f"route {path}: the path must be fixed, like /my/route")
        if not callable(handler):
            raise TypeError(f"route {path}: the handler must be a function, got {handler!r}")
        if inspect.iscoroutinefunction(handler):
            raise TypeError(f"route {path}: the handler must not be an async function")
        self.method = "GET"
        self.path = path
        self.handler = handler
