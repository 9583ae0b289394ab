"""Completions as one value: the tokens of a response collected, and a handler served as a model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, cast

from dynamo.llm.register import register_model
from dynamo.llm.types import ModelInput, ModelType, WorkerType
from dynamo.runtime import serve_unary_endpoint

_LOGPROBS = ("log_probs", "top_logprobs", "cum_log_probs")


class LLMUnaryClient:
    """Calls workers in turn and returns a whole completion. One choice, without logprobs."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def complete(self, request: Mapping[str, Any], *, context: Any = None) -> dict[str, Any]:
        """Return the last item of the response, with the token ids of all of them.

        ValueError for a request with several choices or logprobs, RuntimeError for a response that
        is not one complete choice.
        """
        _check_request(request)
        stream = await self._client.round_robin(request, annotated=False, context=context)
        tokens: list[int] = []
        last: dict[str, Any] | None = None
        try:
            async for chunk in stream:
                if last is not None:
                    raise RuntimeError("the response has data after terminal chunk")
                tokens += _tokens_of(chunk)
                if chunk.get("finish_reason") is not None:
                    last = chunk
        finally:
            await stream.aclose()
        if last is None:
            raise RuntimeError("the response has no terminal chunk")
        return {**last, "token_ids": tokens}


class UnaryChatModel:
    """A chat model whose answers a function computes: ``async def handler(request, *, context)``.

    ``source`` is the model of the tokenizer and template, ``namespace`` that of the endpoint
    ``<namespace>.app.generate``, and the default of ``public_name``.
    """

    def __init__(
        self,
        source: str,
        namespace: str,
        public_name: str | None = None,
        chat_template: str | Path | None = None,
    ) -> None:
        self._source = source
        self._namespace = namespace
        self._name = public_name or namespace
        self._template = None if chat_template is None else str(chat_template)

    async def serve(self, runtime: Any, handler: Callable[..., Awaitable[Any]]) -> None:
        """Register the model and serve it until the shutdown."""
        endpoint = runtime.endpoint(f"{self._namespace}.app.generate")
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat,
            endpoint,
            self._source,
            model_name=self._name,
            custom_template_path=self._template,
            worker_type=WorkerType.Aggregated,
            ignore_weights=True,
        )
        await serve_unary_endpoint(endpoint, handler)


def with_engine_data(completion: Any, values: Any) -> dict[str, Any]:
    """Return a copy of ``completion`` with ``values`` added to its ``engine_data``.

    ValueError for anything but objects, and for a key that is there already.
    """
    _require_mapping("LLM completion", completion)
    _require_mapping("engine_data values", values)
    present = completion.get("engine_data") or {}
    _require_mapping("existing engine_data", present)
    if repeated := sorted(set(present) & set(values)):
        raise ValueError(f"engine_data has {', '.join(repeated)} already")
    return {**completion, "engine_data": {**present, **values}}


def _require_mapping(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be an object, got {type(value).__name__}")


def _check_request(request: Mapping[str, Any]) -> None:
    sampling = _part(request, "sampling_options")
    output = _part(request, "output_options")
    if sampling.get("n") not in (None, 1):
        raise ValueError(f"a unary completion requires n=1, got n={sampling['n']}")
    if any(output.get(name) is not None for name in ("logprobs", "prompt_logprobs")):
        raise ValueError("a unary completion does not support logprobs")


def _part(request: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part: Any = request.get(name)
    if part is None:
        return {}
    _require_mapping(name, part)
    return cast(Mapping[str, Any], part)


def _tokens_of(chunk: Any) -> list[int]:
    if not isinstance(chunk, Mapping):
        raise RuntimeError(f"the response has a non-object chunk: {type(chunk).__name__}")
    if chunk.get("index") not in (None, 0):
        raise RuntimeError(f"the response has choice index {chunk['index']}, not choice index 0")
    tokens = chunk.get("token_ids") or []
    if not isinstance(tokens, list) or any(type(one) is not int for one in tokens):
        raise RuntimeError(f"the response has invalid token_ids: {tokens!r:.80}")
    reason = chunk.get("finish_reason")
    if reason is not None and not (isinstance(reason, str) and reason):
        raise RuntimeError(f"the response has an invalid finish_reason: {reason!r:.80}")
    if any(chunk.get(name) is not None for name in _LOGPROBS):
        raise RuntimeError("the response has unsupported logprobs")
    return tokens
