"""Text to token ids and back: ``fastokens`` where it is exact for the model, else ``tokenizers``.

``fastokens`` is used if it loads the model's tokenizer.json and agrees with ``tokenizers`` on a
probe text; it is some fifty times faster, so that even long prompts are encoded on the event loop.
Both keep a bounded cache of the segments between special tokens, so that the earlier messages of a
chat are not tokenized again; the ids are the same as without it.
"""

from __future__ import annotations

import copy
import math
from array import array
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import fastokens
import tokenizers

from dynamo.config import preset
from dynamo.errors import ConfigError
from dynamo.frontend.answer.pieces import PieceTable
from dynamo.frontend.prompt.segments import SegmentCache
from dynamo.frontend.prompt.tokenizer_file import TokenizerFile, read_tokenizer_file
from dynamo.llm.model_directory import ModelDirectory
from dynamo.protocols.codec import Tokens

__all__ = ["CACHE_BYTES", "CacheStats", "Tokenizer", "load_tokenizer"]

CACHE_BYTES = 16 << 20
_FAST_INLINE_BYTES = 256 << 10
_SLOW_INLINE_BYTES = 4 << 10
_SHRINKING = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Lowercase": 4}
"""The most bytes of UTF-8 that a normalizer turns into one: U+1D400, a bold A, becomes ``A``."""

_PROBE = (
    "The quick brown fox can't jump over 1234567890 lazy dogs!!  \n\n\t"
    " def f(x):\r\n    return x**2 Grüße, naïve façade; Привет мир; 你好,世界。こんにちは 안녕 "
    "नमस्ते สวัสดี مرحبا e\u0301 \u00a0\u2009\u200b 😀👩\u200d👩\u200d👧 ﬁ Ⅷ ½ ³ “quotes” — … "
    'https://example.com/?q=1&r=%20 {"a": [1, 2.5]}   '
)


class CacheStats(NamedTuple):
    """Segments found and not found since the start, and the size of the cache now."""

    hits: int
    misses: int
    size_bytes: int


class Encoder(Protocol):
    """One way to turn text into ids."""

    name: str
    inline_limit_bytes: int

    def encode(self, text: str, add_special_tokens: bool) -> Tokens:
        """Ids of ``text``."""

    def id_to_token(self, token_id: int) -> str | None:
        """The entry of the vocabulary; None without one."""

    def stats(self) -> CacheStats:
        """Counters of the segment cache."""


class Tokenizer:
    """The tokenizer of one model.

    ``eos_ids`` end a text, ``special_ids`` are not shown to users, ``vocab_size`` bounds the ids,
    ``inline_limit_bytes`` is the longest text worth encoding on the event loop, ``pieces`` the
    table for streaming (None if the model has none).
    """

    def __init__(self, directory: ModelDirectory, cache_bytes: int = CACHE_BYTES) -> None:
        path = directory.tokenizer_path
        parsed = read_tokenizer_file(path)
        reference = _reference(path)
        self.special_ids = frozenset(token.id for token in parsed.added_tokens if token.special)
        self.vocab_size = max(
            directory.vocab_size, reference.get_vocab_size(with_added_tokens=True)
        )
        self.eos_ids = _eos_ids(directory, reference)
        self.pieces = PieceTable.of(parsed)
        self._longest_token_bytes = _longest_token_bytes(parsed, self.pieces)
        self._shrinks_by = _most_shrunk_by(parsed.normalizer)
        self._encoder = _choose_encoder(path, parsed, reference, cache_bytes)
        # The reference holds the whole vocabulary a second time: keep it only if it still works.
        self._reference = None if self.pieces and self._encoder.name == "fastokens" else reference

    def showing(self, texts: Collection[str]) -> Tokenizer:
        """The same tokenizer, which does not skip the special tokens ``texts``; for a parser."""
        ids = frozenset(each for each in self.special_ids if self.token_text(each) in texts)
        if not ids:
            return self
        shown = copy.copy(self)
        shown.special_ids = self.special_ids - ids
        shown.pieces = None if self.pieces is None else self.pieces.showing(ids)
        return shown

    @property
    def inline_limit_bytes(self) -> int:
        """The longest text to encode on the event loop."""
        return self._encoder.inline_limit_bytes

    def encode(self, text: str, add_special_tokens: bool = False) -> Tokens:
        """Ids as ``array('I')``. O(characters)."""
        return self._encoder.encode(text, add_special_tokens)

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens, without encoding ``text``. O(characters).

        It is the bytes of UTF-8 divided by those of the longest token; 0 where one token may cover
        any text: unknown words, unigrams, normalizers that drop characters. White space that a
        special token absorbs (``lstrip``, ``rstrip``) counts as if it were encoded.
        """
        longest_bytes = self._longest_token_bytes * self._shrinks_by
        if not longest_bytes:
            return 0
        if text.isascii():  # Unicode normalizers do not change it
            return -(-len(text) // self._longest_token_bytes)
        return -(-len(text.encode()) // longest_bytes)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of all ``ids`` at once; unknown ids have none."""
        if self.pieces is not None:
            return self.pieces.decode(ids, skip_special_tokens)
        assert self._reference is not None
        return self._reference.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; none for an unknown id."""
        if self.pieces is not None:
            return self.pieces.piece(token_id)
        if not 0 <= token_id < 2**32:
            return b""
        return self.decode((token_id,), False).encode()

    def token_text(self, token_id: int) -> str:
        """One token as text; a part of a character is U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def vocabulary_entry(self, token_id: int) -> str:
        """A token as tokenizer.json spells it, for example ``Ġthe``; "" for an unknown id."""
        return self._encoder.id_to_token(token_id) or ""

    def cache_stats(self) -> CacheStats:
        """Counters of the segment cache."""
        return self._encoder.stats()


def load_tokenizer(model: str | Path | ModelDirectory, cache_bytes: int = CACHE_BYTES) -> Tokenizer:
    """The tokenizer in a model directory. Raises ConfigError naming the file and the remedy."""
    directory = model if isinstance(model, ModelDirectory) else ModelDirectory(model)
    return Tokenizer(directory, cache_bytes)


class _FastEncoder:
    """``fastokens`` with its own segment cache."""

    name = "fastokens"
    inline_limit_bytes = _FAST_INLINE_BYTES

    def __init__(self, path: Path) -> None:
        # Several threads encode a long prompt little faster and take 15 % more CPU.
        preset("FASTOKENS_BPE_THREADS", "1")
        self._native = fastokens.Tokenizer.from_file(str(path))
        self._native.no_truncation()
        self._native.no_padding()

    def reset_cache(self, cache_bytes: int) -> None:
        """Make a new segment cache of this size; 0 for none."""
        self._native.enable_segment_cache(cache_bytes)

    def encode(self, text: str, add_special_tokens: bool) -> Tokens:
        ids: Tokens = array("I")
        # The flat form is one bytes object: no object per token.
        ids.frombytes(self._native.encode_batch_flat([text], add_special_tokens)[0])
        return ids

    def id_to_token(self, token_id: int) -> str | None:
        found: str | None = self._native.id_to_token(token_id)
        return found

    def stats(self) -> CacheStats:
        found = self._native.segment_cache_stats()
        if found is None:
            return CacheStats(0, 0, 0)
        return CacheStats(found["hits"], found["misses"], found["bytes"])


class _SlowEncoder:
    """``tokenizers``, with a :class:`SegmentCache` where the segments are independent."""

    name = "tokenizers"
    inline_limit_bytes = _SLOW_INLINE_BYTES

    def __init__(
        self, reference: tokenizers.Tokenizer, parsed: TokenizerFile, cache_bytes: int
    ) -> None:
        self._reference = reference
        self._adds_nothing = reference.num_special_tokens_to_add(False) == 0
        cache = SegmentCache.of(parsed, self._plain, cache_bytes) if cache_bytes else None
        probe = _probe(parsed)
        if cache and any(cache.encode(probe) != self._plain(probe) for _ in range(2)):
            cache = None
        self._cache = cache
        if cache:
            cache.clear()

    def encode(self, text: str, add_special_tokens: bool) -> Tokens:
        if self._cache is not None and (self._adds_nothing or not add_special_tokens):
            return self._cache.encode(text)
        encoding = self._reference.encode(text, add_special_tokens=add_special_tokens)
        return array("I", encoding.ids)

    def id_to_token(self, token_id: int) -> str | None:
        found: str | None = self._reference.id_to_token(token_id)
        return found

    def stats(self) -> CacheStats:
        cache = self._cache
        if cache is None:
            return CacheStats(0, 0, 0)
        return CacheStats(cache.hits, cache.misses, cache.size_bytes)

    def _plain(self, text: str) -> Tokens:
        return array("I", self._reference.encode(text, add_special_tokens=False).ids)


def _reference(path: Path) -> tokenizers.Tokenizer:
    try:
        reference = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise ConfigError(
            f"{path} is not a tokenizer that this version of `tokenizers` "
            f"({tokenizers.__version__}) reads: {error}; save it again or update the library"
        ) from None
    reference.no_truncation()
    reference.no_padding()
    return reference


def _choose_encoder(
    path: Path, parsed: TokenizerFile, reference: tokenizers.Tokenizer, cache_bytes: int
) -> Encoder:
    try:
        fast = _FastEncoder(path)
        fast.reset_cache(cache_bytes)
        probe = _probe(parsed)
        exact = all(
            fast.encode(text, special).tolist()
            == reference.encode(text, add_special_tokens=special).ids
            for text in (probe, probe, " " + _PROBE, "")
            for special in (False, True)
        )
    except (ValueError, RuntimeError, OSError):
        exact = False
    if not exact:
        return _SlowEncoder(reference, parsed, cache_bytes)
    fast.reset_cache(cache_bytes)  # without the probes and their counts
    return fast


def _probe(parsed: TokenizerFile) -> str:
    special = [token.content for token in parsed.added_tokens[:8] + parsed.added_tokens[-8:]]
    return _PROBE + "".join(f"{content}a b{content} " for content in special) + _PROBE


def _longest_token_bytes(parsed: TokenizerFile, pieces: PieceTable | None) -> int:
    """The most bytes of text that one token covers; 0 without a bound."""
    vocab = parsed.model.vocab
    if parsed.model.byte_fallback and isinstance(vocab, dict):
        # Not the pieces: "▁" decodes to a space, but a "▁" in the text is encoded by it too, and
        # that is three bytes.
        texts = [*vocab, *(token.content for token in parsed.added_tokens)]
        return max(len(text.encode()) for text in texts)
    if pieces is None:
        return 0
    return max((len(pieces.piece(each)) for each in range(len(pieces.text))), default=0)


def _most_shrunk_by(normalizer: dict[str, Any] | None) -> int:
    """The most bytes that the normalizer turns into one; 0 without a bound."""
    if normalizer is None:
        return 1
    kind = normalizer.get("type")
    if kind == "Sequence":
        return math.prod(map(_most_shrunk_by, normalizer.get("normalizers", ())))
    if kind == "Prepend":
        return 1
    if kind == "Replace":
        pattern, content = normalizer.get("pattern"), normalizer.get("content")
        text = pattern.get("String") if isinstance(pattern, dict) else None
        grows = isinstance(text, str) and isinstance(content, str) and len(text) <= len(content)
        return 1 if grows else 0
    return _SHRINKING.get(str(kind), 0)


def _eos_ids(directory: ModelDirectory, reference: tokenizers.Tokenizer) -> list[int]:
    found = directory.eos_ids
    name = directory.special_tokens.get("eos_token")
    named = reference.token_to_id(name) if name is not None else None
    return found if named is None or named in found else [*found, named]
