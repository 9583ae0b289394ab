"""What a model directory says of its model: ids that end a text, context length, special tokens.

Reads tokenizer.json, tokenizer_config.json, config.json and generation_config.json as Hugging Face
writes them. A missing or bad file is a ConfigError that names the file and the remedy.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec

from dynamo.errors import ConfigError

__all__ = ["AddedToken", "ModelFiles", "TokenizerFile", "read_model_files"]

_CONTEXT_KEYS = (
    "max_position_embeddings",
    "max_sequence_length",
    "seq_length",
    "n_positions",
    "n_ctx",
)
_REMEDY = (
    "; a model directory needs tokenizer.json "
    "(AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers writes it)"
)


class AddedToken(msgspec.Struct):
    """One entry of ``added_tokens`` in tokenizer.json."""

    id: int
    content: str
    special: bool = False
    normalized: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class _Model(msgspec.Struct):
    type: str | None = None
    vocab: dict[str, int] | list[Any] = {}
    byte_fallback: bool | None = None


class TokenizerFile(msgspec.Struct):
    """The parts of tokenizer.json that tell how ids become text."""

    model: _Model
    added_tokens: list[AddedToken] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFiles:
    """``directory`` and the settings found in it; absent optional files are empty dicts."""

    directory: Path
    tokenizer_config: dict[str, Any]
    config: dict[str, Any]
    generation_config: dict[str, Any]

    @property
    def tokenizer_path(self) -> Path:
        """Where tokenizer.json is."""
        return self.directory / "tokenizer.json"

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and answer together, None if no file says."""
        for config in self._configs():
            for key in _CONTEXT_KEYS:
                if isinstance(value := config.get(key), int):
                    return value
        return None

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, 0 if no file says."""
        for config in self._configs():
            if isinstance(value := config.get("vocab_size"), int):
                return value
        return 0

    def named_token(self, name: str) -> str | None:
        """Text of e.g. ``bos_token``, which is a string or an object with ``content``."""
        value = self.tokenizer_config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) else None

    def eos_ids(self) -> list[int]:
        """Ids in generation_config.json, else in config.json."""
        for config in (self.generation_config, *self._configs()):
            value = config.get("eos_token_id")
            if isinstance(value, int):
                return [value]
            if isinstance(value, list) and value:
                return [each for each in value if isinstance(each, int)]
        return []

    def _configs(self) -> list[dict[str, Any]]:
        """config.json, and in models of several modalities the part about text."""
        nested = self.config.get("text_config")
        return [self.config, nested] if isinstance(nested, dict) else [self.config]

    def tokenizer_file(self) -> TokenizerFile:
        """Parse tokenizer.json. O(vocabulary). Raises ConfigError."""
        path = self.tokenizer_path
        try:
            return msgspec.json.decode(path.read_bytes(), type=TokenizerFile)
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist{_REMEDY}") from None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not a tokenizer file: {error}{_REMEDY}") from None


def read_model_files(directory: str | Path) -> ModelFiles:
    """Read a model directory. Raises ConfigError for a missing directory or a torn file."""
    root = Path(directory)
    if not root.is_dir():
        raise ConfigError(
            f"model directory {root} does not exist; give the path of a local directory "
            "with tokenizer.json, tokenizer_config.json and config.json"
        )
    return ModelFiles(
        directory=root,
        tokenizer_config=_optional(root / "tokenizer_config.json"),
        config=_optional(root / "config.json"),
        generation_config=_optional(root / "generation_config.json"),
    )


def _optional(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a JSON object: {error}; copy it again") from None
