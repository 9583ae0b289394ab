"""Downloads a model, with its weights; finds models on the Hub. Blocks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.errors import ConfigError, InvalidArgument, Unavailable, as_path
from dynamo.llm.model_source import NamedModel, OnProgress, resolve_model
from dynamo.observability.logs import counted
from dynamo.operations.stored_models import ask_ollama, check_blobs, empty_parts

_HITS = 20
_QUERY_CHARACTERS = 96
_ID_CHARACTERS = 193
"""Of an owner, a slash and a name."""


@dataclass(frozen=True, kw_only=True)
class HubHit:
    """A model that was found on Hugging Face; ``is_gated`` ones need an accepted licence."""

    name: str
    downloads: int = 0
    likes: int = 0
    task: str = ""
    is_gated: bool = False


def pull(model: NamedModel, verify: bool, on_progress: OnProgress | None = None) -> str:
    """Download ``model``; return a sentence about it.

    An interruption keeps the files that are complete. ``on_progress`` receives the bytes that are
    here and those of all files. With ``verify``, files that were here are compared with their
    checksums, too. Raises DynamoError and OSError.
    """
    if model.kind == "ollama":
        for reply in ask_ollama("POST", "/api/pull", model.source):
            if on_progress is not None and reply.get("total"):
                on_progress(reply.get("completed", 0), reply["total"])
        return f"{model.name} is here; serve it: dynamo run {as_path(model.name)}"
    if Path(model.source).is_absolute():
        return f"{model.source} is here already; serve it: dynamo run {as_path(model.source)}"
    source = _gguf_source(model.source) if model.kind == "gguf-repository" else model.source
    repository = "/".join(source.removeprefix("hf://").split("/")[:2])
    empty_parts(repository)
    # Older files were compared when they were downloaded.
    begin_s = 0.0 if verify else time.time()
    path = resolve_model(source, weights=True, on_progress=on_progress).path
    snapshot = path if path.is_dir() else path.parent
    file_count = check_blobs(snapshot, begin_s)
    # Only now: until here their names say that the model is incomplete.
    empty_parts(repository, delete=True)
    matches = counted(file_count, "file matches its checksum", "files match their checksums")
    note = matches if file_count else "it was complete"
    return f"{source} is here, {note} ({path}); serve it: dynamo run {as_path(source)}"


def find_on_hub(text: str) -> list[HubHit]:
    """Return the models on Hugging Face whose names have ``text``, the most downloaded first.

    Raises DynamoError that says why it cannot be asked.
    """
    words = text.strip()
    if not words or len(words) > _QUERY_CHARACTERS:
        raise InvalidArgument(f"give 1 to {_QUERY_CHARACTERS} characters of a model's name")
    # Imported here: it takes 0.2 s.
    from huggingface_hub import constants

    from dynamo.llm.model_download import search_hub

    if constants.HF_HUB_OFFLINE:
        raise Unavailable(
            "this machine does not ask Hugging Face: HF_HUB_OFFLINE is set for the frontend; "
            "models on disk are listed"
        )
    try:
        models = search_hub(words, _HITS)
    except Exception as error:  # of the Hub's library and of its HTTP library
        reason = str(error).partition("\n")[0]
        raise Unavailable(
            f"Hugging Face cannot be asked at {constants.ENDPOINT}: {reason:.200}; models on disk "
            "are listed"
        ) from error
    return [
        _hit(model)
        for model in models
        if isinstance(model.id, str) and len(model.id) <= _ID_CHARACTERS
    ]


def _hit(model: Any) -> HubHit:
    """Return a hit of the Hub, which need not have the types of its library."""
    counts = {name: getattr(model, name) for name in ("downloads", "likes")}
    return HubHit(
        name=model.id,
        task=str(model.pipeline_tag or "")[:_QUERY_CHARACTERS],
        is_gated=bool(model.gated),
        **{name: count for name, count in counts.items() if isinstance(count, int)},
    )


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
