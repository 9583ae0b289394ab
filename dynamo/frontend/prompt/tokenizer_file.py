"""The parts of tokenizer.json that decide how token ids become text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from dynamo.errors import ConfigError

__all__ = ["AddedToken", "TokenizerFile", "read_tokenizer_file"]

_REMEDY = (
    "; a model directory needs tokenizer.json "
    "(AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers writes it)"
)


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


def read_tokenizer_file(path: Path) -> TokenizerFile:
    """Parse tokenizer.json. O(vocabulary). Raises ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=TokenizerFile)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist{_REMEDY}") from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a tokenizer file: {error}{_REMEDY}") from None
