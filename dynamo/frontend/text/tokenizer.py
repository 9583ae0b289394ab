"""Text to token ids and back: ``fastokens`` where it is exact for the model, else ``tokenizers``.

``fastokens`` is used if it loads the model's tokenizer.json and agrees with ``tokenizers`` on a
probe text; it is some fifty times faster, so that even long prompts are encoded on the event loop.
Both keep a bounded cache of the segments between special tokens, so that the earlier messages of a
chat are not tokenized again; the ids are the same as without it.

Models whose tokenizer.json has the same content share one encoder. ``fastokens`` keeps the merge
tables of four tokenizers in each thread, and makes those of a fifth again for each text (0.4 ms for
4,000 tokens, 3 ms for 128,000): the fifth and later contents are encoded in other threads, four in
each. Passing a text there and back takes some 20 µs, ``tokenizers`` 200 to 500 µs.
"""

from __future__ import annotations

import copy
import hashlib
import threading
import weakref
from array import array
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import fastokens
import tokenizers

from dynamo.config import preset
from dynamo.frontend.text.pieces import (
    TokenizerFile,
    load_tokenizer_file,
    read_tokenizer_file,
)
from dynamo.frontend.text.segments import SegmentCache
from dynamo.frontend.text.tokenizer_facts import (
    TokenizerFacts,
    find_facts,
    probe_text,
    reference_tokenizer,
)
from dynamo.llm.model_directory import ModelDirectory
from dynamo.protocols.codec import Tokens

CACHE_BYTES = 16 << 20
_FAST_INLINE_BYTES = 256 << 10
_SLOW_INLINE_BYTES = 4 << 10
_TABLES_PER_THREAD = 4
_MAX_PARTS = 16_384  # of some 200 bytes


class CacheStats(NamedTuple):
    """Segments found and not found since the start, and the size of the cache now."""

    hits: int
    misses: int
    size_bytes: int


class Tokenizer:
    """The tokenizer of one model.

    ``eos_ids`` end a text, ``special_ids`` are not shown to users, ``vocab_size`` bounds the ids,
    ``inline_limit_bytes`` is the longest text worth encoding on the event loop, ``pieces`` the
    table for streaming (None if the model has none), ``frames`` the special tokens around texts.
    ``encoder`` is that of all models of the same content.
    """

    def __init__(self, directory: ModelDirectory, cache_bytes: int = CACHE_BYTES) -> None:
        shared = _shared(directory.tokenizer_path, cache_bytes)
        self._shared = shared
        self.encoder = shared.encoder
        self._reference = shared.reference
        self._longest_token_bytes = shared.longest_token_bytes
        self._shrinks_by = shared.shrinks_by
        self._parts: dict[int, tuple[str, list[int]]] = {}
        self.special_ids = shared.special_ids
        self.frames = shared.frames
        self.pieces = shared.pieces
        self.vocab_size = max(directory.vocab_size, shared.size)
        self.eos_ids = _eos_ids(directory, shared.encoder)

    def showing(self, texts: Collection[str]) -> Tokenizer:
        """The same tokenizer, which does not skip the special tokens ``texts``; for a parser."""
        ids = frozenset(number for number in self.special_ids if self.token_text(number) in texts)
        if not ids:
            return self
        tokenizer = copy.copy(self)
        tokenizer.special_ids = self.special_ids - ids
        tokenizer.pieces = None if self.pieces is None else self.pieces.showing(ids)
        return tokenizer

    @property
    def inline_limit_bytes(self) -> int:
        """The longest text to encode on the event loop."""
        return self.encoder.inline_limit_bytes

    def encode(self, text: str, add_special_tokens: bool = False) -> Tokens:
        """Ids as ``array('I')``. O(characters)."""
        return self.encoder.encode(text, add_special_tokens)

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

    def most_characters(self, count: int) -> int | None:
        """The most characters of a text of ``count`` tokens; None where they have no bound."""
        return count * self._longest_token_bytes * self._shrinks_by or None

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
        if not 0 <= token_id < 2**32:  # for which tokenizers raises an OverflowError
            return b""
        return self.decode((token_id,), False).encode()

    def token_text(self, token_id: int) -> str:
        """One token as text; a part of a character is U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_parts(self, token_id: int) -> tuple[str, list[int]]:
        """The text and the bytes of one token, as log probabilities show them: not to be changed.

        Those of the tokens seen last are kept.
        """
        parts = self._parts.get(token_id)
        if parts is None:
            raw = self.token_bytes(token_id)
            if len(self._parts) >= _MAX_PARTS:
                self._parts.clear()
            parts = self._parts[token_id] = raw.decode(errors="replace"), list(raw)
        return parts

    def vocabulary_entry(self, token_id: int) -> str:
        """A token as tokenizer.json spells it, for example ``Ġthe``; "" for an unknown id."""
        return self.encoder.id_to_token(token_id) or ""


class IdNames(Tokenizer):
    """The same tokenizer, which names tokens by their ids, ``token_id:5``, as vLLM's server."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # It shares all tables: the constructor of the parent would read the model's files.
        self.__dict__.update(tokenizer.__dict__)

    def token_text(self, token_id: int) -> str:
        """The name of a token."""
        return f"token_id:{token_id}"

    def token_parts(self, token_id: int) -> tuple[str, list[int]]:
        """The name and the bytes of a token."""
        return self.token_text(token_id), super().token_parts(token_id)[1]


def load_tokenizer(model: str | Path | ModelDirectory, cache_bytes: int = CACHE_BYTES) -> Tokenizer:
    """The tokenizer in a model directory. Raises ConfigError naming the file and the remedy."""
    directory = model if isinstance(model, ModelDirectory) else ModelDirectory(model)
    return Tokenizer(directory, cache_bytes)


class _Shared:
    """All that models with one content of tokenizer.json have in common.

    ``reference`` is the tokenizer of ``tokenizers``, None if nothing needs it.
    """

    def __init__(self, content: bytes, path: Path, cache_bytes: int) -> None:
        facts = find_facts(content, path)
        self.special_ids = facts.special_ids
        self.size = facts.size
        self.longest_token_bytes = facts.longest_token_bytes
        self.shrinks_by = facts.shrinks_by
        self.frames = facts.frames
        self.pieces = facts.pieces()
        self.reference: tokenizers.Tokenizer | None = None
        fast = _fast_encoder(facts, cache_bytes)
        if fast is not None and self.pieces is not None:
            self.encoder: _FastEncoder | _SlowEncoder = fast
            return
        # Its load holds Python's lock, so it is loaded only where it is needed.
        reference = self.reference = reference_tokenizer(content, path)
        parsed = read_tokenizer_file(content, path)
        self.encoder = fast or _SlowEncoder(reference, parsed, cache_bytes)


_all_shared: weakref.WeakValueDictionary[tuple[bytes, int], _Shared] = weakref.WeakValueDictionary()
_loading: weakref.WeakValueDictionary[tuple[bytes, int], threading.Lock] = (
    weakref.WeakValueDictionary()
)
_lock = threading.Lock()


def _shared(path: Path, cache_bytes: int) -> _Shared:
    """Return what models share that have the content of the file at ``path``."""
    content = load_tokenizer_file(path)
    key = hashlib.sha256(content).digest(), cache_bytes
    with _lock:
        loading = _loading.setdefault(key, threading.Lock())
    with loading:  # a second model of this content waits for the first
        shared = _all_shared.get(key)
        if shared is None:
            shared = _all_shared[key] = _Shared(content, path, cache_bytes)
        return shared


class _EncoderThread:
    """A thread that encodes for up to four tokenizers; it ends with the last of them."""

    def __init__(self) -> None:
        self._texts: SimpleQueue[_Call | None] = SimpleQueue()
        self._results: SimpleQueue[bytes | BaseException] = SimpleQueue()
        self._lock = threading.Lock()
        queues = self._texts, self._results
        threading.Thread(target=_encode_all, args=queues, name="encoder", daemon=True).start()
        # The thread has the queues and not this object, so that the last encoder ends it.
        weakref.finalize(self, self._texts.put, None)

    def call(self, encode: _Encode, text: str, add_special_tokens: bool) -> bytes:
        """Return the ids of ``text`` as bytes. Blocks; several threads may call."""
        with self._lock:
            self._texts.put((encode, text, add_special_tokens))
            result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result


_Encode = Callable[[list[str], bool], tuple[bytes, bytes]]
_Call = tuple[_Encode, str, bool]


def _encode_all(
    texts: SimpleQueue[_Call | None], results: SimpleQueue[bytes | BaseException]
) -> None:
    while (call := texts.get()) is not None:
        encode, text, add_special_tokens = call
        try:
            results.put(encode([text], add_special_tokens)[0])
        except BaseException as error:  # noqa: BLE001 - the caller waits, also after a panic in Rust
            results.put(error)
        del call, encode, text  # do not keep the tokenizer until the next text


class _FastEncoder:
    """``fastokens`` with its own segment cache; ``thread`` is where texts are encoded, if any."""

    name = "fastokens"
    inline_limit_bytes = _FAST_INLINE_BYTES

    def __init__(self, source: str) -> None:
        # Several threads encode a long prompt little faster and take 15 % more CPU.
        preset("FASTOKENS_BPE_THREADS", "1")
        self._native = fastokens.Tokenizer.from_json_str(source)
        self._native.no_truncation()
        self._native.no_padding()
        self.thread: _EncoderThread | None = None
        self.id_to_token: Callable[[int], str | None] = self._native.id_to_token
        self.token_to_id: Callable[[str], int | None] = self._native.token_to_id

    def reset_cache(self, cache_bytes: int) -> None:
        """Make a new segment cache of this size; 0 for none."""
        self._native.enable_segment_cache(cache_bytes)

    def encode(self, text: str, add_special_tokens: bool) -> Tokens:
        ids: Tokens = array("I")
        # The flat form is one bytes object: no object per token.
        # A longer text is in a thread of its own already, and takes longer than new tables.
        if self.thread is None or len(text) > _FAST_INLINE_BYTES:
            ids.frombytes(self._native.encode_batch_flat([text], add_special_tokens)[0])
        else:
            encode = self._native.encode_batch_flat
            ids.frombytes(self.thread.call(encode, text, add_special_tokens))
        return ids

    def stats(self) -> CacheStats:
        stats = self._native.segment_cache_stats()
        if stats is None:
            return CacheStats(0, 0, 0)
        return CacheStats(stats["hits"], stats["misses"], stats["bytes"])


_groups: list[weakref.WeakSet[_FastEncoder]] = []
"""The encoders whose tables one thread keeps. Those of the first group work where they are called:
on the event loop, for all but long texts."""


def _join_group(encoder: _FastEncoder) -> None:
    """Give ``encoder`` a place in the first group that has one, and the thread of that group."""
    with _lock:
        group = next((group for group in _groups if len(group) < _TABLES_PER_THREAD), None)
        if group is None:
            group = weakref.WeakSet()
            _groups.append(group)
        if group is not _groups[0]:
            # A thread ends with the encoders of its group, so an empty group needs another.
            members = list(group)
            encoder.thread = members[0].thread if members else _EncoderThread()
        group.add(encoder)


class _SlowEncoder:
    """``tokenizers``, with a :class:`SegmentCache` where the segments are independent."""

    name = "tokenizers"
    inline_limit_bytes = _SLOW_INLINE_BYTES

    def __init__(
        self, reference: tokenizers.Tokenizer, parsed: TokenizerFile, cache_bytes: int
    ) -> None:
        self._reference = reference
        self.id_to_token: Callable[[int], str | None] = reference.id_to_token
        self.token_to_id: Callable[[str], int | None] = reference.token_to_id
        self._adds_nothing = reference.num_special_tokens_to_add(False) == 0
        cache = SegmentCache.of(parsed, self._plain, cache_bytes) if cache_bytes else None
        probe = probe_text(parsed)
        # Twice, because the second time the ids come from the cache.
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

    def stats(self) -> CacheStats:
        cache = self._cache
        if cache is None:
            return CacheStats(0, 0, 0)
        return CacheStats(cache.hits, cache.misses, cache.size_bytes)

    def _plain(self, text: str) -> Tokens:
        return array("I", self._reference.encode(text, add_special_tokens=False).ids)


def _fast_encoder(facts: TokenizerFacts, cache_bytes: int) -> _FastEncoder | None:
    """``fastokens``, if it gives the ids of ``tokenizers`` to the probes; twice, from its cache."""
    try:
        fast = _FastEncoder(facts.source)
        fast.reset_cache(cache_bytes)
        exact = all(
            fast.encode(probe.text, probe.add_special_tokens).tolist() == probe.ids
            for probe in facts.probes * 2
        )
    except (ValueError, RuntimeError, OSError):
        return None
    if not exact:
        return None
    fast.reset_cache(cache_bytes)  # without the probes and their counts
    _join_group(fast)
    return fast


def _eos_ids(directory: ModelDirectory, encoder: _FastEncoder | _SlowEncoder) -> list[int]:
    ids = directory.eos_ids
    name = directory.special_tokens.get("eos_token")
    eos_id = encoder.token_to_id(name) if name is not None else None
    return ids if eos_id is None or eos_id in ids else [*ids, eos_id]
