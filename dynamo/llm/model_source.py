"""Finds a model by its name: a local directory, a GGUF file, or an id on Hugging Face.

:func:`resolve_model` is the one function for every worker, and for ``register_model``. The cache,
the credentials and the network are those of ``huggingface_hub``: ``HF_HOME``, ``HF_TOKEN``,
``HF_ENDPOINT`` and ``HF_HUB_OFFLINE`` apply.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dynamo.errors import ConfigError, shorten
from dynamo.llm.model_directory import ModelDirectory
from dynamo.runtime.process.paths import expanded

OnProgress = Callable[[int, int], object]
"""Receives the bytes of a download that are here, and those of all its files."""

_PREFIX = "hf://"
_GGUF = ".gguf"
_MAGIC = b"GGUF"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
_ID = re.compile(rf"{_NAME}/{_NAME}")
_OLD_ID = re.compile(_NAME)
_GGUF_IN_ID = re.compile(rf"({_NAME}/{_NAME})/(.+{re.escape(_GGUF)})")
_ADDRESS = re.compile(
    rf"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/({_NAME}/{_NAME})"
    r"(?:/(?:blob|resolve|tree)/[^/?#]+(?:/([^?#]*))?)?/*(?:[?#].*)?$"
)
_OLLAMA_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(:[A-Za-z0-9._-]+)?")
_PROMPT_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")


@dataclass(frozen=True)
class NamedModel:
    """What a user names as a model.

    ``kind`` is directory, hub (an id on Hugging Face), gguf (a file, local or there),
    gguf-repository (an id of a repository of such files) or ollama. ``source`` is what engines
    take, with absolute paths; ``name`` is its name in the API. ``has_tokenizer`` is false for a
    GGUF file without tokenizer.json beside it.
    """

    kind: str
    source: str
    name: str
    has_tokenizer: bool = True


@dataclass(frozen=True)
class ResolvedModel:
    """A model on this machine.

    ``path`` is a directory, or a GGUF file. ``name`` is the model's name in the API unless another
    is given: the id on Hugging Face, the name of the directory, or of the file without ``.gguf``.
    """

    path: Path
    name: str

    @property
    def is_gguf(self) -> bool:
        """Whether ``path`` is a GGUF file."""
        return self.path.suffix == _GGUF

    def directory(self) -> ModelDirectory:
        """Return the directory with the tokenizer and config.json, which the frontend reads.

        That of a GGUF file is the one it is in. Raises ConfigError without tokenizer.json there:
        the tokenizer in a GGUF file is in another form, and converting it is not exact.
        """
        if not self.is_gguf:
            return ModelDirectory(self.path)
        if not (self.path.parent / "tokenizer.json").is_file():
            raise ConfigError(
                f"{self.path} is a GGUF file, and there is no tokenizer.json beside it, which the "
                "frontend reads: give the directory of the original model's tokenizer, or copy its "
                "tokenizer.json, tokenizer_config.json and config.json beside the file"
            )
        return ModelDirectory(self.path.parent)


def named_model(text: str) -> NamedModel:
    """Return the model that ``text`` names; looks at local files only. Raises ConfigError."""
    text = _pasted(text)
    path = expanded(text)
    try:
        is_dir, is_file = path.is_dir(), path.is_file()
    except OSError as error:  # such as a name that is too long
        raise ConfigError(f"no model {shorten(text)!r}: {error.strerror}") from None
    if is_dir:
        return _directory(path.resolve())
    if is_file:
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
            f"no file {shorten(text)!r} here; give the path of a GGUF file, or on Hugging Face "
            "org/name/file.gguf"
        )
    if _OLLAMA_NAME.fullmatch(text):
        return NamedModel("ollama", text if ":" in text else f"{text}:latest", text)
    raise ConfigError(
        f"no model {shorten(text)!r}: there is no such directory or file, and it is no id on "
        "Hugging Face, such as Qwen/Qwen3-0.6B"
    )


def _directory(path: Path) -> NamedModel:
    if not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if files:
            raise ConfigError(f"{path} has GGUF files; name one of them, such as {files[0]}")
        raise ConfigError(f"{path} has no config.json; give the directory of a model")
    return NamedModel("directory", str(path), path.name)


def resolve_model(
    source: str | Path,
    *,
    weights: bool = False,
    revision: str | None = None,
    download: bool = True,
    on_progress: OnProgress | None = None,
) -> ResolvedModel:
    """Return the model that ``source`` names on this machine; download it if necessary.

    ``source`` is a directory, a GGUF file, an id on Hugging Face (``org/name``, ``hf://org/name``)
    or a GGUF file there (``org/name/file.gguf``). A name whose first part is a directory here is
    a path; ids without an organization need the prefix ``hf://``. Without ``weights`` only the
    files that make prompts are downloaded: configuration, tokenizer, chat template. ``revision``
    is a branch, a tag or a commit on Hugging Face. With ``download`` false only the cache is read.

    Blocking, with progress in the log, as a bar on a terminal, or to ``on_progress``, which is
    called in threads of the Hub's library. Raises ConfigError; it is
    ModelUnreachable if the same call may succeed later.
    """
    path = expanded(source)
    if path.is_dir():
        return ResolvedModel(path.resolve(), ModelDirectory(path).name)
    if path.is_file():
        return ResolvedModel(local_gguf(path), path.stem)
    parts = _split(str(source))
    if parts is None:
        raise ConfigError(
            f"no such directory: the model {str(source)!r}; give a local directory, a GGUF file, "
            "or an id on Hugging Face such as Qwen/Qwen3-0.6B"
        )
    repository, file = parts
    # Imported here: it takes 0.2 s, and a local directory does not need it.
    from dynamo.llm.model_download import HubModel

    model = HubModel(repository, revision, str(source), on_progress)
    if file is not None:
        return ResolvedModel(model.fetch_file(file, download), Path(file).stem)
    patterns = None if weights else _PROMPT_FILES
    return ResolvedModel(model.fetch(patterns, download), repository)


def _pasted(text: str) -> str:
    """Return the id in an address of a model or a file on Hugging Face, else ``text`` itself."""
    match = _ADDRESS.match(text.strip())
    if match is None:
        return text
    file = match[2] or ""
    return f"{match[1]}/{file}" if file.endswith(_GGUF) else match[1]


def is_hub_id(source: str) -> bool:
    """Whether ``source`` would be looked up on Hugging Face: it is no local path."""
    return not expanded(source).exists() and _split(source) is not None


def local_gguf(path: Path) -> Path:
    """Return the absolute path of the GGUF file ``path``. Raises ConfigError if it is none."""
    if path.suffix != _GGUF:
        raise ConfigError(
            f"the model {str(path)!r} is a file, but not a GGUF file; give the directory it is in"
        )
    try:
        with path.open("rb") as file:
            start = file.read(len(_MAGIC))
    except OSError as error:
        raise ConfigError(f"the model {str(path)!r} cannot be read: {error.strerror}") from None
    if start != _MAGIC:  # a cut download, or the pointer of Git LFS instead of the file
        raise ConfigError(
            f"{path} is not a GGUF file: it begins with {start!r}, not {_MAGIC!r}; "
            "download it again"
        )
    return path.resolve()


def _split(source: str) -> tuple[str, str | None] | None:
    """Return the id of a repository, and of a GGUF file in it; None if ``source`` is no id."""
    text = source.removeprefix(_PREFIX)
    prefixed = text != source
    if prefixed and _OLD_ID.fullmatch(text):
        return text, None
    # A misspelt path below a directory of this machine is not looked for on Hugging Face.
    if not prefixed and Path(text.partition("/")[0]).is_dir():
        return None
    if _ID.fullmatch(text) and not text.endswith(_GGUF):
        return text, None
    match = _GGUF_IN_ID.fullmatch(text)
    return (match[1], match[2]) if match else None
