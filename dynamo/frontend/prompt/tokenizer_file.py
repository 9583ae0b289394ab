"""The parts of tokenizer.json that decide how token ids become text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from dynamo.errors import ConfigError
from dynamo.llm.model_directory import read_model_file

__all__ = ["AddedToken", "TokenizerFile", "load_tokenizer_file", "read_tokenizer_file"]


class AddedToken(msgspec.Struct):
    """One entry of ``added_tokens``."""

    id: int
    content: str
    special: bool = False
    normalized: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class TokenizerModel(msgspec.Struct):
    """The vocabulary and its kind (BPE, WordPiece, …)."""

    type: str | None = None
    vocab: dict[str, int] | list[Any] = {}
    byte_fallback: bool | None = None


class TokenizerFile(msgspec.Struct):
    """tokenizer.json."""

    model: TokenizerModel
    added_tokens: list[AddedToken] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


def read_tokenizer_file(content: bytes, path: Path) -> TokenizerFile:
    """Parse ``content``, the tokenizer.json at ``path``. O(vocabulary). Raises ConfigError."""
    try:
        return msgspec.json.decode(content, type=TokenizerFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _rejected(path, f"is not a tokenizer file: {error}") from None


def load_tokenizer_file(path: Path) -> bytes:
    """Return the bytes of tokenizer.json. Raises ConfigError."""
    try:
        return read_model_file(path)
    except FileNotFoundError:
        raise _rejected(path, "does not exist") from None
    except OSError as error:
        raise _rejected(path, f"is not a tokenizer file: {error}") from None


def _rejected(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} {reason}; a model directory needs tokenizer.json "
        "(AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers writes it)"
    )
