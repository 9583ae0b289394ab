"""Requests that a worker prepares in a task: whatever that raises ends its request.

vLLM is not needed here: its modules are stubs where it is missing.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import struct
import sys
import zlib
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from dynamo.errors import DynamoError, InvalidArgument
from dynamo.protocols import codec
from dynamo.protocols.engine import (
    OutputOptions,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
)
from dynamo.runtime.process.tasks import Tasks


class Stub(ModuleType):
    """A module in which every name can be called, and bases are classes."""

    __path__: list[str] = []  # noqa: RUF012 - as of a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        if name.endswith(("Base", "Error", "IO", "Logger")):
            return type(name, (Exception,), {})
        return MagicMock()


class Stubs(MetaPathFinder, Loader):
    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith("vllm") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is no code."""


class Panic(BaseException):
    """As a panic in Rust: no Exception."""


class Sink:
    def __init__(self) -> None:
        self.rejected: asyncio.Future[DynamoError] = asyncio.get_running_loop().create_future()

    def on_rejected(self, error: DynamoError) -> None:
        self.rejected.set_result(error)


@pytest.fixture(autouse=True)
def vllm_modules() -> Iterator[None]:
    if importlib.util.find_spec("vllm") is not None:
        yield
        return
    before, stubs = set(sys.modules), Stubs()
    sys.meta_path.append(stubs)
    yield
    sys.meta_path.remove(stubs)
    for name in set(sys.modules) - before:
        if name.startswith(("vllm", "dynamo.vllm")):
            del sys.modules[name]


def request(**fields: Any) -> PreprocessedRequest:
    return PreprocessedRequest(
        "m",
        codec.tokens([1, 2, 3]),
        StopConditions(max_tokens=5),
        SamplingOptions(bad_words=["word"]),
        OutputOptions(),
        **fields,
    )


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize(
    "error", [InvalidArgument("no"), RuntimeError("Already borrowed"), Panic("index")]
)
async def test_a_request_that_cannot_be_prepared_ends(error: BaseException, images: bool) -> None:
    from dynamo.vllm.core import CoreEngine

    engine: Any = CoreEngine.__new__(CoreEngine)
    params, stuck = MagicMock(), MagicMock(side_effect=error)
    params.new_id.return_value = "1"
    engine._params, engine._make_params = params, MagicMock() if images else stuck
    engine._requests = SimpleNamespace(send=lambda *_: False)
    engine._images = SimpleNamespace(process=stuck)
    engine._running, engine._messages, engine._tasks = {}, 0, Tasks("test")
    engine._tokenizing = asyncio.Lock()
    sink = Sink()
    given = request(multi_modal_data={"image_url": []}) if images else request()
    engine.submit(given, sink, 0)
    async with asyncio.timeout(10):
        found = await sink.rejected
    assert str(error) in found.message
    assert engine.progress() == (0, 0)
    await engine._tasks.close()


@pytest.mark.parametrize("error", [DynamoError("no"), RuntimeError("wrong"), Panic("index")])
async def test_a_request_that_async_llm_cannot_compute_ends(error: BaseException) -> None:
    from dynamo.vllm.async_llm import AsyncLLMEngine

    engine: Any = AsyncLLMEngine.__new__(AsyncLLMEngine)
    engine._params, engine._running, engine.steps = MagicMock(), {"1": None}, 0
    engine._llm = SimpleNamespace(generate=MagicMock(side_effect=error))
    sink: Any = Sink()
    await engine._generate(request(), "1", MagicMock(), sink, None)
    assert str(error) in sink.rejected.result().message
    assert engine.progress() == (0, 0)


def png(width: int, height: int) -> bytes:
    """The head of an image of this size, without its pixels."""
    parts = {b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(part)) + name + part + struct.pack(">I", zlib.crc32(name + part))
        for name, part in parts.items()
    )


async def test_images_are_counted_before_they_are_decoded() -> None:
    from dynamo.vllm.engine_inputs import MAX_PIXELS, load_images

    loader = MagicMock()

    async def load(*sizes: tuple[int, int]) -> None:
        urls = [f"data:image/png;base64,{base64.b64encode(png(*size)).decode()}" for size in sizes]
        data = {"image_url": [{"Url": url} for url in urls]}
        await load_images(request(multi_modal_data=data), loader)

    await load(*[(4000, 4000)] * 16)
    assert loader.load_bytes.call_count == 16
    loader.load_bytes.reset_mock()
    text = (
        rf"image_url\[3\]: the images of a request have at most {MAX_PIXELS} pixels, got 320000000"
    )
    with pytest.raises(InvalidArgument, match=text):
        await load(*[(10_000, 8_000)] * 4)
    assert loader.load_bytes.call_count == 3
    with pytest.raises(InvalidArgument, match=r"image_url\[0\]: not an image"):
        await load((100_000, 100_000))


def test_large_parameters_are_not_kept() -> None:
    """4,096 of them are kept: a bias for each token would take gigabytes."""
    from dynamo.vllm.plain_requests import PlainRequests

    requests: Any = PlainRequests.__new__(PlainRequests)
    requests._enabled, requests._params = True, {}
    requests._client = MagicMock()
    requests._client.encoder.encode.return_value = [b"encoded"]
    given = request()
    requests.learn(given, MagicMock())
    assert len(requests._params) == 1
    given.sampling_options.logit_bias = {str(each): 1.0 for each in range(1000)}
    requests.learn(given, MagicMock())
    assert len(requests._params) == 1
