"""Models and tokens of the API worker, for its right answers, too; imports nothing of `dynamo`."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["EYES", "FORMAT", "MODEL", "decoded", "encoded"]

EYES = Path("/dev/shm", f"dynamo-simulate-{os.getuid()}", "eyes")
"""The files of a model that takes images."""
FORMAT = "format-"
"""How the names of models begin that have a format: ``format-TOOLS+REASONING``."""
MODEL = Path(__file__).resolve().parents[2] / "examples/model"


@functools.cache
def _tokenizer() -> Any:
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@functools.cache
def encoded(text: str) -> tuple[int, ...]:
    """Return the token ids of ``text``."""
    return tuple(_tokenizer().encode(text, add_special_tokens=False).ids)


def decoded(tokens: Sequence[int], special: bool = False) -> str:
    """Return the text of token ids, of special ones only if asked."""
    return str(_tokenizer().decode(list(tokens), skip_special_tokens=not special))
