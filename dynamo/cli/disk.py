"""``dynamo list``, ``pull``, ``rm``: the models on disk."""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dynamo.cli.options import DeleteSettings, ListSettings, PullSettings
from dynamo.cli.text_table import aligned
from dynamo.config import from_env, load
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError, DynamoError
from dynamo.llm.model_source import resolve_model
from dynamo.setup.engines import NamedModel, named_model, running_ollama
from dynamo.setup.stored_models import (
    LOCAL,
    OLLAMA,
    StoredModel,
    check_blobs,
    delete,
    stored_models,
    users_of,
)
from dynamo.status.deployment import running_documents

_COLUMNS = ("MODEL", "STORE", "FORMAT", "SIZE", "LAST USED", "SERVED BY")
_DAY_S = 86_400
_OLLAMA_S = 60.0
_LINE_EVERY_S = 2.0


def list_models(argv: Sequence[str] | None = None) -> int:
    """Run ``dynamo list``; return the exit status."""
    text = "List the models on disk: Hugging Face's cache, GGUF files of llama.cpp, Ollama's store."
    (settings,) = load("dynamo list", text, [ListSettings], argv)
    found = _stored()
    if settings.json:
        print(json.dumps([{**asdict(one), "path": str(one.path)} for one in found], indent=2))
        return 0
    rows = [_COLUMNS, *map(_row, found)]
    print("\n".join(aligned(rows)) if found else "no model on disk; try: dynamo pull MODEL")
    return 0


def pull(argv: Sequence[str] | None = None) -> int:
    """Run ``dynamo pull``; return the exit status."""
    text = "Download a model, with its weights. What an interrupted download has is used again."
    (settings,) = load("dynamo pull", text, [PullSettings], argv)
    try:
        if not settings.model:
            raise ConfigError("no model given; try: dynamo pull Qwen/Qwen3-0.6B")
        print(_pull(named_model(settings.model), settings.verify))
    except (DynamoError, OSError) as error:
        print(f"dynamo pull: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print(f"\nstopped; to go on: dynamo pull {settings.model}", file=sys.stderr)
        return 130
    return 0


def remove(argv: Sequence[str] | None = None) -> int:
    """Run ``dynamo rm``; return the exit status."""
    text = "Delete a model from disk. One that a deployment or another process uses is refused."
    (settings,) = load("dynamo rm", text, [DeleteSettings], argv)
    try:
        model = _deletable(settings.model)
        size = _size(model.size_bytes)
        if not settings.yes and not _agrees(f"delete {model.name}, {size}, from {model.path}?"):
            print("nothing was deleted")
            return 1
        if model.store == OLLAMA:
            for _ in _ask_ollama("DELETE", "/api/delete", model.name):
                pass
        else:
            delete(model)
        print(f"deleted {model.name}; {size} are free")
    except (DynamoError, OSError) as error:
        print(f"dynamo rm: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _stored() -> list[StoredModel]:
    return stored_models(running_documents(from_env(RuntimeSettings)))


def _row(model: StoredModel) -> tuple[str, ...]:
    formats = ", ".join(model.formats) or "no weights"
    return (
        model.name,
        model.store,
        formats if model.is_complete else f"{formats}, incomplete",
        _size(model.size_bytes),
        _ago(time.time() - model.used_at_s) if model.used_at_s else "-",
        ", ".join(model.served_by) or "-",
    )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _ago(seconds: float) -> str:
    if seconds < _DAY_S:
        return "today"
    days = int(seconds // _DAY_S)
    return f"{days} day{'s' if days > 1 else ''} ago"


def _pull(model: NamedModel, verify: bool) -> str:
    """Download ``model``; return what to say of it."""
    if model.kind == "ollama":
        shown_s = 0.0
        for reply in _ask_ollama("POST", "/api/pull", model.source):
            if reply.get("total") and time.monotonic() > shown_s:
                shown_s = time.monotonic() + _LINE_EVERY_S
                done = reply.get("completed", 0) / reply["total"]
                print(f"downloading {model.name}: {done:.0%} of {_size(reply['total'])}")
        return f"{model.name} is here; serve it: dynamo run {model.name}"
    if Path(model.source).is_absolute():
        return f"{model.source} is here already; serve it: dynamo run {model.source}"
    source = _gguf_source(model.source) if model.kind == "gguf-repository" else model.source
    begin_s = 0.0 if verify else time.time()
    path = resolve_model(source, weights=True).path
    snapshot = path if path.is_dir() else path.parent
    checked = check_blobs(snapshot, begin_s)
    note = f"{checked} files match their checksums" if checked else "it was complete"
    return f"{source} is here, {note} ({path}); serve it: dynamo run {source}"


def _gguf_source(source: str) -> str:
    """Return the file that ``org/name:QUANTIZATION`` means, as ``org/name/file``."""
    from dynamo.llm.model_download import HubModel

    repository, _, wanted = source.partition(":")
    names = [name for name in HubModel(repository, None, source).files() if name.endswith(".gguf")]
    chosen = [name for name in names if wanted.lower() in name.lower()]
    if len(chosen) == 1:
        return f"{repository}/{chosen[0]}"
    listed = ", ".join(f"{repository}/{name}" for name in chosen or names) or "none"
    raise ConfigError(f"{source!r} is not one GGUF file; name one of: {listed}")


def _deletable(name: str) -> StoredModel:
    """Return the stored model ``name``. Raises ConfigError if it is used, or not in a store."""
    found = _stored()
    matches = [
        one for one in found if name in (one.name, str(one.path)) or one.name == f"{name}:latest"
    ]
    if not matches:
        raise ConfigError(f"no model {name!r} on disk; see: dynamo list")
    model = matches[0]
    if model.served_by:
        raise ConfigError(
            f"{model.name} is served by {', '.join(model.served_by)}; first: dynamo remove MODEL"
        )
    if model.store == LOCAL:
        raise ConfigError(f"{model.name} is in no store of models; delete it with: rm")
    if pids := users_of(model):
        raise ConfigError(f"{model.name} is open in process {', '.join(map(str, pids))}")
    return model


def _agrees(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("give --yes to delete without a question")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def _ask_ollama(method: str, path: str, model: str) -> Iterator[dict[str, Any]]:
    """Yield the lines that a running Ollama answers. Raises DynamoError and OSError."""
    url = running_ollama()
    if url is None:
        raise DynamoError(
            "no Ollama answers here, which keeps its models itself; try: ollama serve"
        )
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=_OLLAMA_S)
    try:
        connection.request(method, path, json.dumps({"model": model}).encode())
        answer = connection.getresponse()
        for line in answer:
            reply = json.loads(line) if line.strip() else {}
            if "error" in reply:
                raise DynamoError(f"Ollama at {url}: {reply['error']}")
            yield reply
        if answer.status >= http.client.BAD_REQUEST:
            raise DynamoError(f"Ollama at {url} answered {answer.status} {answer.reason}")
    except (http.client.HTTPException, ValueError) as error:
        raise DynamoError(f"Ollama at {url}: {error}") from error
    finally:
        connection.close()
