"""What a worker takes and does: the enumerations of the public API. Spec 7.11."""

from __future__ import annotations

import enum

__all__ = ["ModelInput", "ModelType", "WorkerType"]


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
