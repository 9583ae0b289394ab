"""A model directory becomes a model card: names, context length, checksum. Spec 7.2."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from dynamo.errors import InvalidArgument

__all__ = ["ModelDirectory", "slug_of"]

_REQUIRED = ("config.json", "tokenizer.json")
_CONTENT = (*_REQUIRED, "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
_NONSENSE_LENGTH = 10**9


class ModelDirectory:
    """A local directory with tokenizer.json and config.json; weights are nobody's business here.

    InvalidArgument names what is missing or unreadable.
    """

    def __init__(self, path: str) -> None:
        directory = Path(path).expanduser()
        if not directory.is_dir():
            raise InvalidArgument(
                f"model_path {path!r} is not a local directory; download the model first, "
                "then give its directory"
            )
        self.path = directory.resolve()
        missing = [name for name in _REQUIRED if not (self.path / name).is_file()]
        if missing:
            raise InvalidArgument(f"model_path {path!r} has no {' and no '.join(missing)}")
        self._config = self._read("config.json")

    @property
    def config(self) -> dict[str, Any]:
        """What config.json says."""
        return self._config

    @property
    def name(self) -> str:
        """The name a model has when none is given."""
        return self.path.name

    def context_length(self) -> int | None:
        """Tokens the model can attend to: ``max_position_embeddings``, else the tokenizer's."""
        for config in (self._config, self._config.get("text_config") or {}):
            for key in ("max_position_embeddings", "n_positions", "max_sequence_length"):
                length = config.get(key)
                if isinstance(length, int) and 0 < length < _NONSENSE_LENGTH:
                    return length
        if (self.path / "tokenizer_config.json").is_file():
            length = self._read("tokenizer_config.json").get("model_max_length")
            if isinstance(length, int) and 0 < length < _NONSENSE_LENGTH:
                return length
        return None

    def checksum(self, *more: object) -> str:
        """32 hex digits over the files that decide how a prompt becomes tokens, and ``more``."""
        digest = hashlib.blake2b(digest_size=16)
        for name in _CONTENT:
            path = self.path / name
            if path.is_file():
                digest.update(f"{name} {path.stat().st_size}\n".encode())
                digest.update(path.read_bytes())
        digest.update(json.dumps(more, default=str).encode())
        return digest.hexdigest()

    def _read(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"{path} can't be read as JSON: {error}") from None
        if not isinstance(content, dict):
            raise InvalidArgument(f"{path} must hold a JSON object")
        return content


def slug_of(name: str) -> str:
    """``name`` in lower case with everything but letters, digits, - and _ replaced by _."""
    return re.sub(r"[^a-z0-9_-]", "_", name.lower())
