"""What a worker accepts, serves and can hold: the types of the public API. Spec 7.11."""

from __future__ import annotations

import enum
import json

from dynamo.protocols.card import RuntimeConfig

__all__ = ["ModelInput", "ModelRuntimeConfig", "ModelType", "WorkerType"]


class ModelInput(enum.Enum):
    """What the worker is sent: the text, the tokens of the prompt, or tensors."""

    Text = "Text"
    Tokens = "Tokens"
    Tensor = "Tensor"

    def __str__(self) -> str:
        """The word on the model card."""
        return self.value


class ModelType(enum.Flag):
    """Which APIs the model answers; combine with ``|``."""

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
        """``Chat | Completions``, as on the model card."""
        return " | ".join(kind.name for kind in ModelType if kind in self and kind.name is not None)


class WorkerType(enum.Enum):
    """Which part of a request the worker computes."""

    Aggregated = "Aggregated"
    Prefill = "Prefill"
    Decode = "Decode"
    Encode = "Encode"

    def __str__(self) -> str:
        """The word on the model card."""
        return self.value


class ModelRuntimeConfig(RuntimeConfig, omit_defaults=True):
    """Set its attributes, then hand it to :func:`dynamo.llm.register_model`."""

    def set_engine_specific(self, key: str, value: str) -> None:
        """Remember the JSON text ``value``. ValueError if it is not JSON."""
        self.runtime_data[key] = json.loads(value)

    def get_engine_specific(self, key: str) -> str | None:
        """The JSON text under ``key``."""
        return json.dumps(self.runtime_data[key]) if key in self.runtime_data else None

    def set_disaggregated_endpoint(self, host: str | None = None, port: int | None = None) -> None:
        """Where decode workers fetch the KV cache from."""
        self.bootstrap_host = host
        self.bootstrap_port = port
