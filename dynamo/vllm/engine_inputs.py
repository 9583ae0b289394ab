"""vLLM's parameters of a request, which both drivers of an engine need."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

import vllm.exceptions
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from dynamo.errors import DynamoError, EngineFailure, InvalidArgument
from dynamo.protocols.engine import PreprocessedRequest, Routing
from dynamo.vllm.sampling import SamplingMapping

__all__ = ["CLIENT_ERRORS", "EMBED", "ParamsBuilder", "failure", "priority"]

log = logging.getLogger(__name__)

EMBED = "embed"
"""vLLM's task of an embedding model."""

CLIENT_ERRORS: tuple[type[Exception], ...] = (
    ValueError,
    TypeError,
    getattr(vllm.exceptions, "VLLMClientError", ValueError),
)
"""What vLLM raises for a request that it refuses."""


class ParamsBuilder:
    """Builds sampling parameters; ``loras`` are the loaded adapters by name."""

    def __init__(self, config: Any, worker_id: int, prefill_only: bool = False) -> None:
        model = config.model_config
        self.loras: dict[str, LoRARequest] = {}
        self._numbers = itertools.count()
        self._prefix = f"{worker_id:x}-"
        eos = model.try_get_generation_config().get("eos_token_id")
        self._mapping = SamplingMapping(
            model.get_diff_sampling_param(),
            frozenset([eos] if isinstance(eos, int) else eos or ()),
            model.get_vocab_size(),
            prefill_only,
        )

    def new_id(self) -> str:
        """Return an id that no other request of any worker has."""
        return f"{self._prefix}{next(self._numbers):x}"

    def pooling(self, request: PreprocessedRequest) -> PoolingParams:
        """Return the parameters of an embedding; ``extra_args`` may have its ``dimensions``."""
        return PoolingParams(task=EMBED, dimensions=(request.extra_args or {}).get("dimensions"))

    def sampling(self, request: PreprocessedRequest) -> SamplingParams:
        """Return the sampling parameters. Raises InvalidArgument with vLLM's text."""
        arguments = self._mapping.arguments(request)
        grammar = arguments.get("structured_outputs")
        try:
            if grammar is not None:
                arguments["structured_outputs"] = StructuredOutputsParams(**grammar)
            return SamplingParams.from_optional(**arguments)
        except CLIENT_ERRORS as error:
            raise InvalidArgument(str(error)) from None

    def new_lora(self, name: str, path: str) -> LoRARequest:
        """Return a request to load the adapter in ``path``; ids count from 1."""
        return LoRARequest(name, len(self.loras) + 1, path)

    def lora(self, routing: Routing | None) -> LoRARequest | None:
        """Return the adapter that the request names. Raises InvalidArgument: it is not loaded."""
        name = None if routing is None else routing.lora_name
        if name is None:
            return None
        if name not in self.loras:
            raise InvalidArgument(f"the adapter {name!r} is not loaded in this worker")
        return self.loras[name]


def priority(routing: Routing | None) -> int:
    """Return vLLM's priority, lowest first; Dynamo's clients give important requests high ones."""
    return 0 if routing is None else -(routing.priority or 0)


def failure(error: BaseException) -> DynamoError:
    """Return what ends a request whose task has raised ``error``: nothing else would end it.

    Raises the following again: cancellation, KeyboardInterrupt, SystemExit.
    """
    if isinstance(error, DynamoError):
        return error
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | SystemExit):
        raise error
    log.error("a request could not be prepared or computed", exc_info=error)
    return EngineFailure(f"{type(error).__name__}: {error}")
