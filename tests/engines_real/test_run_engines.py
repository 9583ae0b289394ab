"""`dynamo run MODEL` with the engines that are installed: a streamed answer, nothing left."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import urllib.request
from pathlib import Path

import pytest
from deployment import free_port
from gguf_kit import write_gguf
from servers_kit import CACHE_BYTES, ENGINE_ENV, ENGINE_START_S
from serving import Serving
from weights_kit import CONTEXT


def stream(port: int, model: str) -> list[str]:
    body = {"model": model, "prompt": "one two three", "max_tokens": 4, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return [line.decode() for line in answer if line.startswith(b"data: ")]


def run(serving: Serving, model: Path, name: str, *flags: str, lora: Path | None = None) -> None:
    port = free_port()
    adapters = () if lora is None else ("--lora", f"pirate={lora}", f"other={lora}")
    words = (*adapters, "--port", str(port), "--namespace", serving.namespace, "--", *flags)
    serving.start(str(model), *words, verb="run", wait="", **ENGINE_ENV)
    line = serving.wait_for("ready: |stopped", ENGINE_START_S)
    served = name if lora is None else f"other, pirate, {name}"
    assert f"model: {served}   workers: 1" in line, serving.text()
    if lora is not None:
        assert stream(port, "pirate") and stream(port, "other")
    lines = stream(port, name)
    # A busy machine may read all tokens at once.
    assert len(lines) > 1 and lines[-1].strip() == "data: [DONE]"
    assert serving.stop(signal.SIGINT, timeout_s=60) == 0
    serving.assert_clean()


def test_vllm_serves_a_directory_and_its_adapters(
    serving: Serving, tiny_model: Path, lora: Path
) -> None:
    run(
        *(serving, tiny_model, tiny_model.name, "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", str(CONTEXT), "--kv-cache-memory-bytes", str(CACHE_BYTES)),
        lora=lora,
    )
    assert "run: dynamo.vllm" in serving.text() and "enforce-eager: true" in serving.text()


@pytest.mark.skipif(shutil.which("llama-server") is None, reason="llama-server is missing")
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is missing")
def test_llama_cpp_serves_a_gguf_file(serving: Serving, tmp_path: Path) -> None:
    run(serving, write_gguf(tmp_path / "small.gguf"), "small", "-t", "1")
    assert "profile: llama.cpp" in serving.text()
