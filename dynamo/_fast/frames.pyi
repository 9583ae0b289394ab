from typing import final

__all__ = ["HEADER_SIZE_BYTES", "OVERSIZE", "Splitter", "pack"]

OVERSIZE: int
HEADER_SIZE_BYTES: int

def pack(kind: int, stream: int, payload: bytes) -> bytes: ...

@final
class Splitter:
    def __new__(cls, limit_bytes: int, preamble: bytes, last_kind: int) -> Splitter: ...
    @property
    def fault(self) -> str | None: ...
    def feed(self, data: bytes) -> list[tuple[int, int, bytes]]: ...
