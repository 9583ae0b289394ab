from typing import final

__all__ = ["HEADER_SIZE_BYTES", "OPEN", "OVERSIZE", "Splitter", "pack", "pack_open"]

OPEN: int
OVERSIZE: int
HEADER_SIZE_BYTES: int

def pack(kind: int, stream: int, payload: bytes) -> bytes: ...
def pack_open(stream: int, endpoint: str, headers: bytes, payload: bytes) -> bytes: ...

@final
class Splitter:
    def __new__(cls, limit_bytes: int, preamble: bytes, last_kind: int) -> Splitter: ...
    @property
    def fault(self) -> str | None: ...
    def feed(self, data: bytes) -> list[tuple[int, int, bytes]]: ...
