from typing import Any, final

__all__ = ["HEADER_SIZE_BYTES", "OPEN", "OVERSIZE", "Splitter", "TokenSink", "pack", "pack_open"]

OPEN: int
OVERSIZE: int
HEADER_SIZE_BYTES: int

def pack(kind: int, stream: int, payload: bytes) -> bytes: ...
def pack_open(stream: int, endpoint: str, headers: bytes, payload: bytes) -> bytes: ...

@final
class TokenSink:
    active: bool
    def __new__(
        cls,
        owner: Any,
        pieces: list[str | None],
        stop_ids: frozenset[int],
        texts: list[str],
    ) -> TokenSink: ...
    @property
    def owner(self) -> Any: ...
    def take(self) -> tuple[list[int], int]: ...

@final
class Splitter:
    def __new__(
        cls,
        limit_bytes: int,
        preamble: bytes,
        last_kind: int,
        token_kind: int = 0,
        token_prefix: bytes = b"",
    ) -> Splitter: ...
    @property
    def fault(self) -> str | None: ...
    @property
    def sinks(self) -> dict[int, TokenSink]: ...
    @property
    def touched(self) -> list[TokenSink]: ...
    @property
    def fed_s(self) -> float: ...
    def feed(self, data: bytes) -> list[tuple[int, int, bytes]]: ...
