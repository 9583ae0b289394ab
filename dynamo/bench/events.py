"""Parser of server-sent events (WHATWG): any line end, comments, data on several lines."""

from __future__ import annotations

import re

__all__ = ["EventParser"]

_BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\r|\n")


class EventParser:
    """Bytes in, the data of each complete event out, however the bytes are split.

    Lines end with LF, CR LF or CR. An event without its empty line is never returned.
    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
    """

    def __init__(self) -> None:
        self._partial = b""
        self._after_cr = False
        self._at_start = True
        self._data: list[bytes] = []

    @property
    def pending_bytes(self) -> int:
        """Size of the unfinished line."""
        return len(self._partial)

    def feed(self, received: bytes) -> list[bytes]:
        """Return the data of the events that ``received`` completes. O(received + open line)."""
        if self._after_cr and received:
            received = received.removeprefix(
                b"\n"
            )  # CR LF split over two reads: the CR already ended the line
            self._after_cr = False
        if not received:
            return []
        self._after_cr = received.endswith(b"\r")
        text = self._partial + received
        *lines, self._partial = _LINE_END.split(text) if b"\r" in text else text.split(b"\n")
        if lines and self._at_start:
            self._at_start = False
            lines[0] = lines[0].removeprefix(_BOM)
        events = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif line == b"data":
                self._data.append(b"")
        return events
