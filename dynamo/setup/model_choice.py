"""What ``dynamo run`` and ``init`` find out about a model and this machine."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from dynamo.config import environ
from dynamo.errors import ConfigError
from dynamo.llm.model_source import is_hub_id, local_gguf
from dynamo.serve.gpus.gpus import Gpu
from dynamo.setup.engines import InstalledEngine, NamedModel, choose_engine

_OLLAMA_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(:[A-Za-z0-9._-]+)?")
_OLLAMA = "127.0.0.1:11434"
_CONNECT_S = 0.5


def named_model(text: str) -> NamedModel:
    """Return the model that ``text`` names; looks at local files only. Raises ConfigError."""
    path = Path(text).expanduser()
    if path.is_dir():
        return _directory(path.resolve())
    if path.is_file():
        path = local_gguf(path)
        tokenizer = (path.parent / "tokenizer.json").is_file()
        return NamedModel("gguf", str(path), path.stem, has_tokenizer=tokenizer)
    identifier, _, quantization = text.partition(":")
    if is_hub_id(identifier) and (quantization or "gguf" in identifier.rpartition("/")[2].lower()):
        if identifier.endswith(".gguf"):
            return NamedModel("gguf", identifier, Path(identifier).stem, has_tokenizer=False)
        return NamedModel("gguf-repository", text, identifier)
    if is_hub_id(text):
        return NamedModel("hub", text, text.removeprefix("hf://"))
    if text.endswith(".gguf"):
        raise ConfigError(
            f"no file {text!r} here; give the path of a GGUF file, or on Hugging Face "
            "org/name/file.gguf"
        )
    if _OLLAMA_NAME.fullmatch(text):
        return NamedModel("ollama", text if ":" in text else f"{text}:latest", text)
    raise ConfigError(
        f"no model {text!r}: there is no such directory or file, and it is no id on Hugging Face, "
        "such as Qwen/Qwen3-0.6B"
    )


def _directory(path: Path) -> NamedModel:
    if not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if files:
            raise ConfigError(f"{path} has GGUF files; name one of them, such as {files[0]}")
        raise ConfigError(f"{path} has no config.json; give the directory of a model")
    return NamedModel("directory", str(path), path.name)


def choose(
    model: NamedModel,
    wanted: str | None,
    installed: Sequence[InstalledEngine],
    flags: Sequence[str] = (),
) -> InstalledEngine:
    """Return the engine for ``model``. Raises ConfigError that says what to do instead."""
    if "--tokenizer" in flags or any(word.startswith("--tokenizer=") for word in flags):
        model = NamedModel(model.kind, model.source, model.name)
    try:
        return choose_engine(model, wanted, installed)
    except ConfigError as error:
        if model.kind == "ollama":  # most often a directory that does not exist
            raise ConfigError(
                f"no directory or file {model.name!r} here; a name without '/' is a model of "
                f"Ollama: {error.message}"
            ) from None
        raise


def probe_gpus() -> Sequence[Gpu]:
    """Return the NVIDIA GPUs of this machine."""
    from dynamo.serve.gpus.nvml import probe  # loads the driver's library

    return probe() or ()


def cached_model() -> str | None:
    """Return the id of the model that was downloaded last, from the cache of Hugging Face."""
    env = environ()
    home = Path(env.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    cache = Path(env["HF_HUB_CACHE"]) if env.get("HF_HUB_CACHE") else home / "hub"
    complete = list(cache.glob("models--*--*/snapshots/*/config.json"))
    newest = max(complete, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        return None
    return newest.parents[2].name.removeprefix("models--").replace("--", "/", 1)


def weights_bytes(model: NamedModel) -> int:
    """Return the size of the weights on disk; 0 if they are not here."""
    path = Path(model.source)
    if not path.is_absolute():
        return 0
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def running_ollama() -> str | None:
    """Return the URL of an Ollama that answers here; None without one."""
    given = environ().get("OLLAMA_HOST") or _OLLAMA
    parts = urlsplit(given if "://" in given else f"//{given}")
    host = parts.hostname or "127.0.0.1"
    host = "127.0.0.1" if host == "0.0.0.0" else host
    with contextlib.suppress(OSError, ValueError):
        port = parts.port or 11434
        with socket.create_connection((host, port), _CONNECT_S):
            shown = f"[{host}]" if ":" in host else host
            return f"{parts.scheme or 'http'}://{shown}:{port}"
    return None
