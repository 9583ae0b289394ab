"""The tokenizer file of a model, and the bytes of each of its tokens.

Byte-level BPE writes each byte as one printable character (the GPT-2 alphabet); SentencePiece BPE
with byte fallback writes words as text and a byte that is in no word as ``<0xE4>``. In both, a
token is either complete characters, with a text, or part of one, with bytes only.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

import msgspec

from dynamo.errors import ConfigError
from dynamo.llm.model_directory import read_model_file

_FALLBACK_STEPS = ["Replace", "ByteFallback", "Fuse", "Strip"]
_ONE_SPACE = {"content": " ", "start": 1, "stop": 0}
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


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


def _byte_alphabet() -> dict[int, int]:
    """The GPT-2 alphabet, code point to byte: a printable byte is itself, others follow U+00FF."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: byte for byte in printable}
    unprintable = [byte for byte in range(256) if byte not in table]
    table.update((0x100 + rank, byte) for rank, byte in enumerate(unprintable))
    return table


class PieceTable:
    """The text of each token by id: ``text[id]`` is None if it is not whole UTF-8, ``partial[id]``
    are then its bytes. Ids without a token are empty texts. ``visible`` is ``text`` without the
    tokens in ``special_ids``. With ``strip_space`` a text loses a space at its beginning."""

    __slots__ = ("partial", "special_ids", "strip_space", "text", "visible")

    def __init__(
        self,
        text: list[str | None],
        partial: dict[int, bytes],
        special_ids: frozenset[int],
        strip_space: bool = False,
    ) -> None:
        self.special_ids = special_ids
        self.strip_space = strip_space
        self.text = text
        self.partial = partial
        self.visible = list(text)
        for token_id in special_ids:
            if token_id < len(self.visible):
                self.visible[token_id] = ""

    @classmethod
    def of(cls, parsed: TokenizerFile) -> PieceTable | None:
        """The table of a tokenizer.json, None for other decoders. O(vocabulary)."""
        decoder = parsed.decoder or {}
        steps = decoder.get("decoders", [decoder])
        vocab = parsed.model.vocab
        if not isinstance(vocab, dict):
            return None
        to_bytes = _byte_level(steps) or _byte_fallback(steps)
        if to_bytes is None:
            return None
        added = {token.content: token.id for token in parsed.added_tokens}
        pieces = {token_id: to_bytes(token) for token, token_id in (vocab | added).items()}
        text: list[str | None] = [""] * (max(pieces, default=-1) + 1)
        partial: dict[int, bytes] = {}
        for token_id, piece in pieces.items():
            try:
                text[token_id] = piece.decode()
            except UnicodeDecodeError:
                text[token_id] = None
                partial[token_id] = piece
        special_ids = frozenset(token.id for token in parsed.added_tokens if token.special)
        return cls(text, partial, special_ids, strip_space=steps[-1]["type"] == "Strip")

    def showing(self, ids: frozenset[int]) -> PieceTable:
        """A copy whose special tokens ``ids`` are visible. O(vocabulary)."""
        table = copy.copy(self)
        table.special_ids = self.special_ids - ids
        table.visible = list(self.visible)
        for token_id in ids:
            table.visible[token_id] = self.text[token_id]
        return table

    def piece(self, token_id: int) -> bytes:
        """The bytes of one token; none for an unknown id."""
        if not 0 <= token_id < len(self.text):
            return b""
        text = self.text[token_id]
        return self.partial[token_id] if text is None else text.encode()

    def decode(self, ids: Iterable[int], skip_special_tokens: bool) -> str:
        """Text of all ``ids``; broken UTF-8 becomes U+FFFD."""
        skip: Container[int] = self.special_ids if skip_special_tokens else ()
        raw = b"".join(self.piece(token_id) for token_id in ids if token_id not in skip)
        text = raw.decode(errors="replace")
        return text.removeprefix(" ") if self.strip_space else text


def _byte_level(steps: list[dict[str, Any]]) -> Callable[[str], bytes] | None:
    """A function from token to bytes, if the decoder is ByteLevel alone."""
    if [step.get("type") for step in steps] != ["ByteLevel"]:
        return None
    alphabet = {code: chr(byte) for code, byte in _byte_alphabet().items()}
    characters = set(map(chr, alphabet))

    def to_bytes(token: str) -> bytes:
        # A token with a character outside the alphabet is plain text.
        if characters.issuperset(token):
            return token.translate(alphabet).encode("latin-1")
        return token.encode()

    return to_bytes


def _byte_fallback(steps: list[dict[str, Any]]) -> Callable[[str], bytes] | None:
    """The same for the decoder of Llama 2 and Mistral 7B, or Gemma's without the last step.

    A broken character loses its own bytes only; ``tokenizers`` replaces all bytes in a row.
    """
    kinds = [step.get("type") for step in steps]
    if kinds not in (_FALLBACK_STEPS, _FALLBACK_STEPS[:-1]):
        return None
    pattern, content = steps[0]["pattern"].get("String"), steps[0]["content"]
    if not pattern or (kinds == _FALLBACK_STEPS and not _ONE_SPACE.items() <= steps[-1].items()):
        return None

    def to_bytes(token: str) -> bytes:
        if _BYTE_TOKEN.fullmatch(token):
            return bytes((int(token[3:5], 16),))
        return token.replace(pattern, content).encode()

    return to_bytes
