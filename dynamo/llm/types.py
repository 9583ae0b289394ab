"""What a worker accepts, serves and can hold: the types of the public API. Spec 7.11."""

from __future__ import annotations

import enum
import json

from dynamo.errors import ConfigError
from dynamo.protocols.card import RuntimeConfig

__all__ = ["ModelInput", "ModelRuntimeConfig", "ModelType", "WorkerType", "api_types"]


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
    """Capacity and features of a worker: set attributes, pass it to :func:`register_model`."""

    def set_engine_specific(self, key: str, value: str) -> None:
        """Store the JSON text ``value``. ValueError if it is not JSON."""
        self.runtime_data[key] = json.loads(value)

    def get_engine_specific(self, key: str) -> str | None:
        """Return the JSON text under ``key``; None if it is not set."""
        return json.dumps(self.runtime_data[key]) if key in self.runtime_data else None

    def set_disaggregated_endpoint(self, host: str | None = None, port: int | None = None) -> None:
        """Set the address from which decode workers fetch KV blocks."""
        self.bootstrap_host = host
        self.bootstrap_port = port


def api_types(text: str) -> ModelType:
    """Return the types that ``--endpoint-types`` names, comma separated. Raises ConfigError."""
    found = ModelType.Empty
    for word in text.split(","):
        if word.strip() not in _API_TYPES:
            raise ConfigError(f"--endpoint-types must name chat, completions or both, got {text!r}")
        found |= _API_TYPES[word.strip()]
    return found


_API_TYPES = {"chat": ModelType.Chat, "completions": ModelType.Completions}
