"""Engines that live as long as the session: each takes half a minute to start."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers_kit import EngineDeployment, closing
from weights_kit import write_byte_llama, write_llama, write_lora

HERE = Path(__file__).parent
# Random weights would write white space for ever.
GRAMMAR_FLAGS = (
    "--structured-outputs-config",
    '{"backend": "xgrammar", "disable_any_whitespace": true}',
)
SESSION_ENGINES = {"ours", "vllm_servers"}
HERMES = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


def adapters(lora: Path) -> tuple[str, str]:
    """The flags that serve the adapter as ``pirate``."""
    return "--lora-modules", f"pirate={lora}"


@pytest.hookimpl(tryfirst=True)  # before the distribution reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip without vLLM; allow for the start of an engine in any test. Tests that share the
    engines of the session share a process, too."""
    missing = importlib.util.find_spec("vllm") is None
    skip = pytest.mark.skip(reason="vLLM is missing, run scripts/test-engines")
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(300))
            shared = SESSION_ENGINES.intersection(getattr(item, "fixturenames", ()))
            item.add_marker(pytest.mark.xdist_group("session" if shared else item.path.stem))
            if missing:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a byte-level tokenizer."""
    return write_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def bytes_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose tokenizer writes unknown characters as bytes."""
    return write_byte_llama(tmp_path_factory.mktemp("models") / "bytes")


@pytest.fixture(scope="session")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter for ``tiny_model``, served as the model ``pirate``."""
    return write_lora(tmp_path_factory.mktemp("models") / "pirate")


@pytest.fixture(scope="session")
def vllm_servers(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, bytes_model: Path, lora: Path
) -> Iterator[tuple[EngineDeployment, EngineDeployment]]:
    """VLLM's own servers with ``tiny`` and ``bytes``, which start side by side."""
    directory = tmp_path_factory.mktemp("vllm")
    with (
        closing(EngineDeployment(directory / "tiny")) as tiny,
        closing(EngineDeployment(directory / "bytes")) as others,
    ):
        flags = (*HERMES, *GRAMMAR_FLAGS, "--enable-lora", *adapters(lora))
        tiny.vllm_server(tiny_model, "tiny", *flags)
        others.vllm_server(bytes_model, "bytes")
        tiny.wait_for_models("tiny")
        others.wait_for_models("bytes")
        yield tiny, others


@pytest.fixture(scope="session")
def vllm_tiny(vllm_servers: tuple[EngineDeployment, EngineDeployment]) -> EngineDeployment:
    """VLLM's own server with the model ``tiny``."""
    return vllm_servers[0]


@pytest.fixture(scope="session")
def vllm_bytes(vllm_servers: tuple[EngineDeployment, EngineDeployment]) -> EngineDeployment:
    """VLLM's own server with the model ``bytes``."""
    return vllm_servers[1]


@pytest.fixture(scope="session")
def ours(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, bytes_model: Path, lora: Path
) -> Iterator[EngineDeployment]:
    """One frontend with KV routing before two workers: the models ``tiny`` with an adapter, and
    ``bytes``."""
    with closing(EngineDeployment(tmp_path_factory.mktemp("ours"))) as made:
        made.frontend("--router-mode", "kv")
        flags = (*GRAMMAR_FLAGS, *adapters(lora))  # the template of the model chooses hermes
        made.worker(tiny_model, "tiny", *flags, **made.status_server())
        made.worker(bytes_model, "bytes")
        made.wait_for_models("tiny", "bytes", "pirate")
        yield made
