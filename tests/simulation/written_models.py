"""Models of the simulation's API worker that write what their prompt decides.

Some have a chat template of their own and say the prompt; some say an answer of a format of tool
calls, which the frontend reads; one takes images. :mod:`written_calls` has the right answers.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from api_tokens import EYES, FORMAT, MODEL, decoded, encoded

from dynamo.llm import (
    KvRouterConfig,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    RouterConfig,
    RouterMode,
    register_model,
)
from dynamo.runtime import Context, DistributedRuntime

__all__ = ["TEMPLATES", "WritingEngine", "case_text", "serve_written"]

TEMPLATES = Path(__file__).with_name("templates")
_IMAGE_TOKENS = [4099, 4099, 4099]
_MARK = re.compile(r"answer case (\d+);")
_SIZES = (1, 1, 2, 5)
"""Tokens of an output."""
Write = Callable[[str, dict[str, Any]], str]


class WritingEngine:
    """Says what ``write`` makes of the text of the prompt."""

    def __init__(self, write: Write) -> None:
        self._write = write

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncIterator[Any]:
        prompt = request["token_ids"]
        tokens = encoded(self._write(decoded(prompt, special=True), request))
        most = request["stop_conditions"].get("max_tokens") or len(tokens)
        size = _SIZES[len(prompt) % len(_SIZES)]
        sent = tokens[:most]
        asked = request["output_options"].get("logprobs") is not None
        for at in range(0, len(sent), size):
            if context.is_stopped():
                return
            item: dict[str, Any] = {"token_ids": list(sent[at : at + size])}
            if not at:
                item |= self._first(request)
            if asked:
                item |= _logprobs(item["token_ids"])
            yield item
        yield {"token_ids": [], "finish_reason": "length" if len(tokens) > most else "stop"}

    def _first(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return what the first output has beside its tokens."""
        extra: dict[str, Any] = {}
        images = (request.get("multi_modal_data") or {}).get("image_url", ())
        if images:
            extra["mm_expansions"] = [_IMAGE_TOKENS] * len(images)
        most = request["output_options"].get("prompt_logprobs")
        if most is not None:
            rows = [
                [{"token_id": token, "logprob": -0.25, "rank": 1}] for token in request["token_ids"]
            ]
            extra["prompt_logprobs"] = [None, *rows[1:]]
        return {"extra_args": extra} if extra else {}


def _logprobs(tokens: list[int]) -> dict[str, Any]:
    top = [[{"token_id": token, "logprob": -0.5, "rank": 1}] for token in tokens]
    return {"log_probs": [-0.5] * len(tokens), "top_logprobs": top}


def _said(prompt: str, request: dict[str, Any]) -> str:
    return prompt


def _seen(prompt: str, request: dict[str, Any]) -> str:
    """Say the prompt, the sizes of its images, and where the client had them."""
    images = (request.get("multi_modal_data") or {}).get("image_url", ())
    fields = (request.get("extra_args") or {}).get("mm_fields", ())
    sizes = [len(one["Url"]) for one in images]
    return f"{prompt.replace('<tool_call>', 'IMAGE')} {sizes} {' '.join(fields)}"


def case_text(name: str) -> Write:
    """Return what a model of a format says: the answer whose number its prompt has."""
    from written_calls import format_cases

    texts = [case.text for case in format_cases(name)]

    def write(prompt: str, request: dict[str, Any]) -> str:
        found = _MARK.findall(prompt)
        return texts[int(found[-1])] if found else "No case."

    return write


def _routers() -> list[RouterConfig]:
    """Return routers, of which each serves as well as the frontend's own."""
    kv = KvRouterConfig(router_temperature=0.4, router_queue_threshold=8.0)
    return [
        RouterConfig(RouterMode.LeastLoaded),
        RouterConfig(RouterMode.PowerOfTwoChoices),
        RouterConfig(RouterMode.KV, kv, session_affinity_ttl_secs=5.0),
        RouterConfig(RouterMode.KV, kv.copy().with_overrides(2.0)),
        RouterConfig(
            RouterMode.KV, KvRouterConfig.from_json('{"router_track_output_blocks": true}')
        ),
    ]


async def serve_written(runtime: DistributedRuntime, name: str) -> None:
    """Register one of the models, and serve it."""
    endpoint = runtime.namespace("box").component(name.replace("+", "_")).endpoint("generate")
    config = ModelRuntimeConfig()
    config.kv_event_publishing_enabled = False
    write: Write = _said
    path, template = str(MODEL), None
    if name.startswith(FORMAT):
        tools, _, reasoning = name.removeprefix(FORMAT).partition("+")
        config.tool_call_parser, config.reasoning_parser = tools, reasoning or None
        write = case_text(name)
    elif name == "eyes":
        write, path = _seen, str(EYES)
        config.set_engine_specific("max_images", "2")
    elif name != "direct":
        template = str(TEMPLATES / f"{name}.jinja")
    kinds = ModelType.Chat | ModelType.Completions
    routers = _routers()
    router = routers[zlib.crc32(name.encode()) % len(routers)]
    await register_model(
        ModelInput.Tokens,
        kinds,
        endpoint,
        path,
        name,
        router_config=RouterConfig(RouterMode.Direct) if name == "direct" else router,
        runtime_config=config,
        custom_template_path=template,
    )
    await endpoint.serve_endpoint(WritingEngine(write).generate)
