"""The settings of a model in a local directory, in the files that Hugging Face writes.

Workers and the frontend read a model through this class, so that both see one context length, one
set of end tokens and one chat template.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from dynamo.errors import ConfigError

_WORKER_FILES = ("config.json", "tokenizer.json")
_PROMPT_FILES = (
    *_WORKER_FILES,
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
_LENGTH_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "model_max_length",
    "n_ctx",
)
"""Names of the context length, the most common first; a model normally has one of them."""

_NO_LIMIT = 10**9
"""Lengths from here on mean "not limited": transformers writes ``int(1e30)`` for that."""

_FOUR_BYTE_TYPES = ("float32", "float")
_IMAGE_TOKENS = ("image_token_id", "image_token_index")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


_MAX_BYTES = 16 << 20
_MAX_TOKENIZER_BYTES = 256 << 20
"""The largest tokenizer.json of a known model has 35 MB, the largest of the other files 1 MB."""


class _TokenizerFile(msgspec.Struct):
    """What every tokenizer.json has."""

    model: msgspec.Raw


_decode_tokenizer = msgspec.json.Decoder(_TokenizerFile).decode


class ModelDirectory:
    """``path`` is a local directory; a file that is absent counts as an empty object.

    Raises ConfigError for a directory that does not exist; later, for a file that is read and is
    not valid, with the file, the field, its value and the remedy.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            directory = Path(path).expanduser()
            exists = directory.is_dir()
        except (OSError, RuntimeError, ValueError):  # too long, an unknown user, a null byte
            exists = False
        if not exists:
            raise ConfigError(
                f"the model path {str(path)!r:.400} is not a local directory; give the worker's "
                "--model-path a directory, or an id on Hugging Face"
            )
        self.path = directory.resolve()
        self.config = self._read("config.json")
        self.tokenizer_config = self._read("tokenizer_config.json")
        self.generation_config = self._read("generation_config.json")

    @property
    def name(self) -> str:
        """The name a model has when none is given: its id on Hugging Face, or the directory's."""
        # In the cache of Hugging Face a model is models--ORG--NAME/snapshots/COMMIT.
        repository = self.path.parent.parent.name
        if self.path.parent.name == "snapshots" and repository.startswith("models--"):
            return repository.removeprefix("models--").replace("--", "/", 1)
        return self.path.name

    @property
    def tokenizer_path(self) -> Path:
        """The path of tokenizer.json."""
        return self.path / "tokenizer.json"

    def require_worker_files(self) -> None:
        """Raise ConfigError if config.json or tokenizer.json is missing or cut."""
        missing = [name for name in _WORKER_FILES if not (self.path / name).is_file()]
        if missing:
            raise ConfigError(
                f"the model path {str(self.path)!r} has no {' and no '.join(missing)}; "
                "download the model again, complete"
            )
        try:
            _decode_tokenizer(read_model_file(self.tokenizer_path))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{self.tokenizer_path} is not a tokenizer: {error}; copy it again"
            ) from None

    @cached_property
    def context_length(self) -> int | None:
        """Tokens of prompt and output together; None if no file limits them.

        config.json decides. tokenizer_config.json is only the fallback: its ``model_max_length`` is
        often the length that the tokenizer was trained with.
        """
        for name in _LENGTH_FIELDS:
            if length := self._length("config.json", name, self._text_config.get(name)):
                return length
        length = self.tokenizer_config.get("model_max_length")
        return self._length("tokenizer_config.json", "model_max_length", length)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; 0 if config.json does not say."""
        size = self._text_config.get("vocab_size")
        return size if isinstance(size, int) else 0

    @property
    def takes_images(self) -> bool:
        """Whether the model has a part that reads images."""
        return isinstance(self.config.get("vision_config"), dict)

    @property
    def image_token_id(self) -> int | None:
        """The token that chat templates write for an image; None if config.json does not say."""
        for name in _IMAGE_TOKENS:
            token_id = self.config.get(name)
            if isinstance(token_id, int):
                return token_id
        return None

    @property
    def eos_ids(self) -> list[int]:
        """Token ids that end a text: those of generation_config.json, else of config.json."""
        for config in (self.generation_config, self.config, self._text_config):
            ids = config.get("eos_token_id")
            if isinstance(ids, int):
                return [ids]
            if isinstance(ids, list) and ids:
                return [token_id for token_id in ids if isinstance(token_id, int)]
        return []

    @property
    def special_tokens(self) -> dict[str, str]:
        """Text of ``bos_token``, ``eos_token`` and the like, of those that the model has."""
        texts = {}
        for name in _SPECIAL_TOKENS:
            token = self.tokenizer_config.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                texts[name] = text
        return texts

    def kv_bytes_per_token(self, number_bytes: int | None = None) -> int | None:
        """Layers x 2 x KV heads x head size x bytes of a number; None if config.json lacks one.

        A number has ``number_bytes``, by default those of the model's own type.
        """
        config = self._text_config
        layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
        if not isinstance(layers, int) or not isinstance(heads, int) or not heads:
            return None
        hidden = config.get("hidden_size")
        size = config.get("head_dim") or (hidden // heads if isinstance(hidden, int) else None)
        kv_heads = config.get("num_key_value_heads") or heads
        if not isinstance(size, int) or not isinstance(kv_heads, int):
            return None
        kind = str(config.get("torch_dtype") or config.get("dtype") or "")
        own_bytes = 4 if kind in _FOUR_BYTE_TYPES else 2
        # 2: keys and values.
        return layers * 2 * kv_heads * size * (number_bytes or own_bytes)

    def chat_templates(
        self, custom_path: str | Path | None = None
    ) -> tuple[dict[str, str], Path] | None:
        """The sources of the chat templates by name, and the file they are in; None without one.

        The files are tried in the order ``custom_path``, chat_template.jinja, chat_template.json,
        tokenizer_config.json. A single source is named ``default``. Raises ConfigError.
        """
        path = Path(custom_path) if custom_path else self.path / "chat_template.jinja"
        if custom_path or path.exists():
            return {"default": _template_text(path)}, path
        path, source = self.path / "chat_template.json", None
        if path.exists():
            source = self._read(path.name).get("chat_template")
            if source is None:
                raise ConfigError(f"{path} has no `chat_template`; copy it again")
        else:
            path = self.path / "tokenizer_config.json"
            source = self.tokenizer_config.get("chat_template")
        return None if source is None else (_named(source, path), path)

    def checksum(self, *more: object) -> str:
        """32 hex digits over the files that decide how a prompt becomes tokens, and ``more``."""
        digest = hashlib.blake2b(digest_size=16)
        for name in _PROMPT_FILES:
            path = self.path / name
            if path.is_file():
                digest.update(f"{name} {path.stat().st_size}\n".encode())
                digest.update(read_model_file(path))
        digest.update(json.dumps(more, default=str).encode())
        return digest.hexdigest()

    @cached_property
    def _text_config(self) -> dict[str, Any]:
        """config.json, and over it the part about text that multimodal models nest in it."""
        for name in _TEXT_CONFIGS:
            nested = self.config.get(name)
            if isinstance(nested, dict):
                # transformers writes null for "as the outer value".
                return {**self.config, **{k: v for k, v in nested.items() if v is not None}}
        return self.config

    def _length(self, file: str, field: str, value: Any) -> int | None:
        """``value`` as a length; None if it is absent or no limit. ConfigError: not a number."""
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(
                f"{self.path / file}: {field} is {value!r:.80}; it must be a number of tokens: "
                "correct it, or give the worker a context length"
            )
        return int(value) if 0 < value < _NO_LIMIT else None

    def _read(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            return msgspec.json.decode(read_model_file(path), type=dict[str, Any])
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not a JSON object: {error}; copy it again") from None


def read_model_file(path: Path) -> bytes:
    """Return the bytes of a regular file. Raises OSError for any other, and for too large a one.

    A pipe or a device would block the reader, or never end.
    """
    limit = _MAX_TOKENIZER_BYTES if path.name == "tokenizer.json" else _MAX_BYTES
    # O_NONBLOCK: opening a named pipe does not wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        # One byte above the limit shows that the file is too large.
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(f"it is larger than {limit >> 20} MiB")
    return content


def _template_text(path: Path) -> str:
    try:
        return read_model_file(path).decode()
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a null byte in the path
        text = f"chat template {path!s:.400} cannot be read: {error!s:.400}"
        raise ConfigError(text) from None


def _named(source: Any, path: Path) -> dict[str, str]:
    if isinstance(source, str):
        return {"default": source}
    try:
        named = {str(entry["name"]): str(entry["template"]) for entry in source}
    except (TypeError, KeyError):
        named = {}
    if not named:
        raise ConfigError(f"{path}: `chat_template` must be a string or a list of named templates")
    return named
