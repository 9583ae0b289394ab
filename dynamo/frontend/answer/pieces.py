"""The bytes of every token of a byte-level BPE model, ready for streaming.

Such a model writes each byte as one printable character (the GPT-2 alphabet). A token is either
whole characters, and then its text is ready, or part of one, and then its bytes wait for the rest.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from dynamo.frontend.prompt.model_files import TokenizerFile

__all__ = ["PieceTable", "byte_alphabet"]


def byte_alphabet() -> dict[int, int]:
    """Code point of the printable stand-in to byte: printable bytes stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: byte for byte in printable}
    others = (byte for byte in range(256) if byte not in table)
    table.update((0x100 + rank, byte) for rank, byte in enumerate(list(others)))
    return table


class PieceTable:
    """``text[id]`` is the token's text, or None if it is not whole UTF-8; ``partial[id]`` are the
    bytes of those. Ids without a token are empty texts."""

    __slots__ = ("_shown", "partial", "text")

    def __init__(self, pieces: dict[int, bytes]) -> None:
        self.text: list[str | None] = [""] * (max(pieces, default=-1) + 1)
        self.partial: dict[int, bytes] = {}
        self._shown: dict[frozenset[int], list[str | None]] = {}
        for token_id, piece in pieces.items():
            try:
                self.text[token_id] = piece.decode()
            except UnicodeDecodeError:
                self.text[token_id] = None
                self.partial[token_id] = piece

    @classmethod
    def of(cls, parsed: TokenizerFile) -> PieceTable | None:
        """The table of a tokenizer.json, None if its model is not byte-level BPE. O(vocabulary)."""
        decoder = parsed.decoder or {}
        steps = decoder.get("decoders", [decoder])
        vocab = parsed.model.vocab
        if [step.get("type") for step in steps] != ["ByteLevel"] or not isinstance(vocab, dict):
            return None
        alphabet = {code: chr(byte) for code, byte in byte_alphabet().items()}
        known = set(map(chr, alphabet))
        added = {token.content: token.id for token in parsed.added_tokens}
        return cls(
            {
                # A token with a character outside the alphabet is taken as it is written.
                token_id: token.translate(alphabet).encode("latin-1")
                if known.issuperset(token)
                else token.encode()
                for token, token_id in (vocab | added).items()
            }
        )

    def shown(self, skip: frozenset[int]) -> list[str | None]:
        """``text`` with nothing for the ids in ``skip``; made once for each set."""
        texts = self._shown.get(skip)
        if texts is None:
            texts = ["" if each in skip else text for each, text in enumerate(self.text)]
            self._shown[skip] = texts
        return texts

    def piece(self, token_id: int) -> bytes:
        """The bytes of one token; none for an unknown id."""
        if not 0 <= token_id < len(self.text):
            return b""
        text = self.text[token_id]
        return self.partial[token_id] if text is None else text.encode()

    def decode(self, ids: Iterable[int], skip: Container[int]) -> str:
        """Text of all ``ids`` but those in ``skip``; broken UTF-8 becomes U+FFFD."""
        return b"".join(self.piece(each) for each in ids if each not in skip).decode(
            errors="replace"
        )
