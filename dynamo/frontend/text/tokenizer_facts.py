"""What a tokenizer.json says, found in a process of its own where the file is large.

``tokenizers`` and the JSON decoder hold Python's lock while they load: a vocabulary of 128,000
tokens would stop every other request of the frontend for a second. The process sends back what the
frontend needs, and ends: nothing of ``tokenizers`` stays in memory.
"""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from dynamo.errors import ConfigError, shorten
from dynamo.frontend.text.pieces import PieceTable, TokenizerFile, read_tokenizer_file
from dynamo.frontend.text.token_frames import TokenFrames, find_frames

_INLINE_BYTES = 256 << 10
"""Up to this size the file is read here, in some 20 ms."""

_PROCESSES = 2
_TIMEOUT_S = 120.0
_SHRINKING = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Lowercase": 4}
"""The most bytes of UTF-8 that a normalizer turns into one: U+1D400, a bold A, becomes ``A``."""

PROBE = (
    "The quick brown fox can't jump over 1234567890 lazy dogs!!  \n\n\t"
    " def f(x):\r\n    return x**2 Grüße, naïve façade; Привет мир; 你好,世界。こんにちは 안녕 "
    "नमस्ते สวัสดี مرحبا e\u0301 \u00a0\u2009\u200b 😀👩\u200d👩\u200d👧 ﬁ Ⅷ ½ ³ “quotes” — … "
    'https://example.com/?q=1&r=%20 {"a": [1, 2.5]}   '
)

_processes = threading.BoundedSemaphore(_PROCESSES)


class Probe(msgspec.Struct):
    """A text and the ids that ``tokenizers`` gives it."""

    text: str
    add_special_tokens: bool
    ids: list[int]


class TokenizerFacts(msgspec.Struct):
    """What the frontend needs of a tokenizer.json, whose text for ``fastokens`` is ``source``.

    ``size`` counts all tokens, added ones too. ``text`` and ``partial`` are those of the
    :class:`PieceTable`; ``text`` is None without one. A token has at most ``longest_token_bytes``
    bytes of text, which the normalizer may have made of ``shrinks_by`` times as many; 0 without a
    bound.
    """

    source: str
    probes: list[Probe]
    special_ids: frozenset[int]
    size: int
    longest_token_bytes: int
    shrinks_by: int
    frames: TokenFrames
    text: list[str | None] | None = None
    partial: dict[int, bytes] = {}
    strip_space: bool = False

    def pieces(self) -> PieceTable | None:
        """The table for streaming, None if the model has none."""
        if self.text is None:
            return None
        return PieceTable(self.text, self.partial, self.special_ids, self.strip_space)


def find_facts(content: bytes, path: Path) -> TokenizerFacts:
    """The facts in ``content``, a file read at ``path``. Blocks. Raises ConfigError.

    A large file takes another process, of which at most two run at a time.
    """
    if len(content) <= _INLINE_BYTES:
        return _facts(content, path)
    command = [sys.executable, "-m", __name__, str(path)]
    with _processes:
        try:
            # By stdin, because the file at ``path`` may have been replaced since it was read.
            done = subprocess.run(command, input=content, capture_output=True, timeout=_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"{path} was not read: {error}; load the model again") from None
    if done.returncode == 0:
        try:
            return msgspec.msgpack.decode(done.stdout, type=TokenizerFacts)
        except msgspec.DecodeError as error:  # something else has written to stdout
            raise ConfigError(
                f"{path} was not read: its reader wrote {shorten(done.stdout[:100])}: {error}; let "
                "nothing print when Python starts (sitecustomize, .pth files)"
            ) from None
    text = done.stderr.decode(errors="replace").strip()[-1000:]
    if done.returncode != _REJECTED:
        text = f"{path} was not read: its reader ended with {done.returncode}: {text}"
    raise ConfigError(text)


def reference_tokenizer(content: bytes, path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of ``tokenizers``, whose ids are the right ones. Raises ConfigError."""
    try:
        reference = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise ConfigError(
            f"{path} is not a tokenizer that this version of `tokenizers` "
            f"({tokenizers.__version__}) reads: {error}; save it again or update the library"
        ) from None
    reference.no_truncation()
    reference.no_padding()
    return reference


def probe_text(parsed: TokenizerFile) -> str:
    """A text with many scripts and some of the special tokens."""
    special = [token.content for token in parsed.added_tokens[:8] + parsed.added_tokens[-8:]]
    return PROBE + "".join(f"{content}a b{content} " for content in special) + PROBE


def _facts(content: bytes, path: Path) -> TokenizerFacts:
    parsed = read_tokenizer_file(content, path)
    reference = reference_tokenizer(content, path)
    pieces = PieceTable.of(parsed)
    facts = TokenizerFacts(
        source=content.decode(),
        probes=[
            Probe(text, special, reference.encode(text, add_special_tokens=special).ids)
            for text in (probe_text(parsed), " " + PROBE, "")
            for special in (False, True)
        ],
        special_ids=frozenset(token.id for token in parsed.added_tokens if token.special),
        size=reference.get_vocab_size(with_added_tokens=True),
        longest_token_bytes=_longest_token_bytes(parsed, pieces),
        shrinks_by=_most_shrunk_by(parsed.normalizer),
        frames=find_frames(reference),
    )
    if pieces is not None:
        facts.text, facts.partial = pieces.text, pieces.partial
        facts.strip_space = pieces.strip_space
    return facts


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
    return max((len(pieces.piece(token_id)) for token_id in range(len(pieces.text))), default=0)


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
        if not isinstance(text, str) or not isinstance(content, str):
            return 0  # a pattern matches any length
        # No bound where it shrinks: a text may become nothing, an ASCII one too.
        return 1 if len(text.encode()) <= len(content.encode()) else 0
    return _SHRINKING.get(str(kind), 0)


def _quickly_parsed(source: str) -> str:
    """The same tokenizer in a form that ``fastokens`` parses in half the time.

    It parses with Python's lock, and builds its tables without. A merge as one string with a space
    is one object where a list is three; no token of such a merge may contain a space.
    """
    document: dict[str, Any] = msgspec.json.decode(source)
    model = document["model"]
    merges = model.get("merges")
    if isinstance(merges, list) and all(
        isinstance(merge, list) and len(merge) == 2 and not any(" " in token for token in merge)
        for merge in merges
    ):
        model["merges"] = [" ".join(merge) for merge in merges]
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = dict(sorted(model["vocab"].items()))
    return msgspec.json.encode(document).decode()


def _main() -> int:
    """Read a tokenizer.json from stdin, write its facts to stdout; argv has its path."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the frontend, which ends our input
    try:
        facts = _facts(sys.stdin.buffer.read(), Path(sys.argv[1]))
    except ConfigError as error:
        sys.stderr.write(error.message)
        return _REJECTED
    facts.source = _quickly_parsed(facts.source)
    sys.stdout.buffer.write(msgspec.msgpack.encode(facts))
    return 0


_REJECTED = 3

if __name__ == "__main__":
    sys.exit(_main())
