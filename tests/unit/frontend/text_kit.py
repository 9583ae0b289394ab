"""Shared by the text tests: the example model, requests, outputs."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer as Reference

from dynamo.frontend.prompt.preprocessor import Preprocessor
from dynamo.protocols.control import ModelCard
from dynamo.protocols.engine import EngineOutput

EXAMPLE = Path(__file__).parents[3] / "examples" / "model"


def card(**fields: Any) -> ModelCard:
    base: dict[str, Any] = {
        "display_name": "m",
        "slug": "m",
        "source_path": str(EXAMPLE),
        "namespace": "n",
        "component": "c",
        "endpoint": "e",
        "instance_id": 1,
    }
    return ModelCard(**(base | fields))


@functools.cache
def example_preprocessor() -> Preprocessor:
    return Preprocessor(card(checksum="abc"))


@functools.cache
def example_reference() -> Reference:
    return Reference.from_file(str(EXAMPLE / "tokenizer.json"))


def chat_body(**fields: Any) -> bytes:
    base = {"model": "m", "messages": [{"role": "user", "content": "Hello there"}]}
    return orjson.dumps(base | fields)


def completion_body(**fields: Any) -> bytes:
    return orjson.dumps({"model": "m", "prompt": "Hello there"} | fields)


def ids_of(text: str) -> list[int]:
    return example_preprocessor().tokenizer.encode(text).tolist()


def outputs(text: str, finish_reason: str | None = "stop", **last: Any) -> list[EngineOutput]:
    """One engine output a token, the last with the finish reason."""
    ids = ids_of(text)
    found = [EngineOutput(token_ids=[each]) for each in ids]
    found[-1] = EngineOutput(token_ids=[ids[-1]], finish_reason=finish_reason, **last)
    return found


def events(stream: bytes) -> list[Any]:
    """The JSON of every ``data:`` event; the last must be [DONE]."""
    parts = stream.decode().split("\n\n")
    assert parts.pop() == ""
    data = [part.removeprefix("data: ") for part in parts if part.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(each) for each in data]
