"""What the web page loads: its files, and streams of samples and of log lines."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from importlib import resources
from pathlib import Path, PurePath

import msgspec

from dynamo.errors import ConfigError, InvalidArgument, shorten
from dynamo.http import Exchange, query_fields
from dynamo.http.exchange import NEVER
from dynamo.http.routes import Routes
from dynamo.observability.logs import counted
from dynamo.runtime.process.inotify import Inotify, Mask
from dynamo.status.logs import LogLine, LogReader, select_watchers

log = logging.getLogger(__name__)
_STREAMS = 16
_LINES = 500  # at first, and at once; a service that writes faster has lines left out
_LINE_CHARACTERS = 4000
_DELAY_S = 0.1
_MASK = Mask.MODIFY | Mask.CREATE | Mask.MOVED_TO | Mask.ONLYDIR
_MADE = Mask.CREATE | Mask.MOVED_TO | Mask.ONLYDIR
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PAGE = "/ui"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = (
    ("content-security-policy", _POLICY),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
)
"""Of every response under /ui: own scripts alone, no frames, no text parsed as HTML by a script."""


def file_paths() -> frozenset[str]:
    """The paths of the page's files, which need no key: they show nothing of the deployment."""
    return frozenset(_files())


def install_files(routes: Routes) -> None:
    """Serve the files. A browser asks each time whether its copy is current, and gets a 304."""
    for path, (name, body) in _files().items():
        etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        content_type = _TYPES[PurePath(name).suffix]
        routes.get(path, partial(_respond, body, content_type, etag))


@cache
def _files() -> dict[str, tuple[str, bytes]]:
    """Path → name and content."""
    static = resources.files("dynamo.frontend.ui").joinpath("static")
    files = {}
    for prefix, folder in ((PAGE, static), (f"{PAGE}/vendor", static.joinpath("vendor"))):
        for file in folder.iterdir():
            if file.is_file():
                path = PAGE if file.name == "index.html" else f"{prefix}/{file.name}"
                files[path] = (file.name, file.read_bytes())
    return files


def _respond(body: bytes, content_type: str, etag: str, exchange: Exchange) -> None:
    headers = [*HEADERS, ("cache-control", "no-cache"), ("etag", etag)]
    etags = exchange.headers.get("if-none-match", "")
    # A proxy that compresses marks the tag as weak.
    if etag in {tag.strip().removeprefix("W/") for tag in etags.split(",")}:
        exchange.respond_unchanged(body, content_type, headers)
    else:
        exchange.respond(200, body, content_type, headers)


class LogStreams:
    """Streams of the logs of ``namespace`` in ``directory``."""

    def __init__(self, directory: Path, namespace: str) -> None:
        self.streams = EventStreams(_STREAMS, self._drop_closed)
        self._directory = directory
        self._namespace = namespace
        self._readers: dict[Exchange, tuple[str, LogReader]] = {}
        self._inotify: Inotify | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._changed: set[str] = set()

    def open(self, exchange: Exchange) -> None:
        """Stream the log that the query names: ``name=dynamo_Worker``."""
        name = query_fields(exchange.query).get("name", "")
        try:
            names = select_watchers(self._directory, self._namespace, "")
        except InvalidArgument as error:
            exchange.refuse(404, error.message)
            return
        if name not in names:
            text = f"there is no log of '{shorten(name, 128)}'; there are: {', '.join(names)}"
            exchange.refuse(404, text)
            return
        try:
            self._watch()
        except (ConfigError, OSError) as error:
            exchange.refuse(503, f"the log of {name} can't be followed: {error}")
            return
        # Refused: without other streams the watch of above is not needed.
        if not self.streams.open(exchange):
            self._drop_closed()
            return
        reader = LogReader(self._directory, self._namespace, name)
        self._readers[exchange] = (f"{name}.log", reader)
        self.streams.send_one(exchange, _event("first", reader.last(_LINES)))

    def _watch(self) -> None:
        if self._inotify is None:
            inotify = Inotify(partial(self._on_file, "", 0))
            inotify.add(self._directory, _MASK, self._on_file)
            inotify.add(self._directory.parent, _MADE, self._on_directory)
            self._inotify = inotify

    def _on_directory(self, name: str, mask: int) -> None:
        """Watch the directory again if it was removed and made again."""
        if name == self._directory.name and self._inotify is not None:
            with contextlib.suppress(OSError):
                self._inotify.add(self._directory, _MASK, self._on_file)
            self._on_file("", 0)

    def _on_file(self, name: str, mask: int) -> None:
        """Read a moment later: a burst of lines becomes one event. "" stands for any file."""
        self._changed.add(name)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY_S, self._send)

    def _send(self) -> None:
        self._timer = None
        changed, self._changed = self._changed, set()
        for exchange, (name, reader) in list(self._readers.items()):
            if "" not in changed and name not in changed:
                continue
            lines: deque[LogLine] = deque(maxlen=_LINES)
            left_out = 0
            for line in reader.read():
                # A full deque drops its oldest line.
                left_out += len(lines) == _LINES
                lines.append(line)
            if lines:
                self.streams.send_one(exchange, _event("lines", lines, left_out))

    def _drop_closed(self) -> None:
        """Close the readers of streams that ended; stop watching without any."""
        for exchange in [exchange for exchange in self._readers if exchange not in self.streams]:
            self._readers.pop(exchange)[1].close()
        if not self.streams and self._inotify is not None:
            self._inotify.close()
            self._inotify = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None


def _event(name: str, lines: Iterable[LogLine], left_out: int = 0) -> bytes:
    texts = [_text(line) for _, line in lines]
    if left_out:
        texts.insert(0, f"… {counted(left_out, 'line')} left out …")
    return event(name, msgspec.json.encode(texts))


def _text(line: bytes) -> str:
    # A bar of progress overwrites its line: only what stands behind the last \r is visible.
    text = _ESCAPES.sub("", line.decode(errors="replace")).rstrip("\r").rpartition("\r")[2]
    return text if len(text) <= _LINE_CHARACTERS else text[:_LINE_CHARACTERS] + " …"


def event(name: str, data: bytes) -> bytes:
    """Return the event ``name`` with ``data``, which is JSON and so has no line break."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


class Columns(msgspec.Struct, frozen=True):
    """Records of one type as JSON of a third of the size.

    ``columns`` has the values of a field, by its name, one for each of the ``count`` records; a
    field that has its default in all of them is left out. Values of the columns in ``texts`` are
    indices in their list there.
    """

    count: int
    columns: dict[str, list[object]]
    texts: dict[str, list[object]]


def columns(records: Sequence[msgspec.Struct]) -> Columns:
    """Return ``records``, whose values are hashable, by their fields."""
    table = Columns(len(records), {}, {})
    for field in msgspec.structs.fields(records[0]) if records else ():
        values = [getattr(record, field.name) for record in records]
        different = dict.fromkeys(values)
        if different.keys() == {field.default}:
            continue
        if isinstance(values[0], str) and len(different) < len(values):
            table.texts[field.name] = [*different]
            indices = {value: index for index, value in enumerate(different)}
            values = [indices[value] for value in values]
        table.columns[field.name] = values
    return table


class EventStreams:
    """Open streams, at most ``limit``, each with the section of the page that it shows.

    ``on_change`` is called when one is opened or closed.
    """

    def __init__(self, limit: int, on_change: Callable[[], None] | None = None) -> None:
        self._limit = limit
        self._open: dict[Exchange, str] = {}
        self._on_change = on_change
        self._ended = ""

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, exchange: Exchange) -> bool:
        return exchange in self._open

    def shows(self, section: str) -> bool:
        """Whether a page shows ``section``."""
        return section in self._open.values()

    def open(self, exchange: Exchange, section: str = "") -> bool:
        """Begin a stream, or refuse it: too many, or the frontend stops. HEAD gets no events."""
        if self._ended:
            exchange.refuse(503, self._ended)
        elif len(self._open) >= self._limit:
            text = f"{self._limit} pages or logs are open already; close one of them"
            exchange.refuse(503, text)
        elif exchange.method == "HEAD":
            exchange.respond(200, b"", "text/event-stream", HEADERS)
        else:
            self._start(exchange, section)
            return True
        return False

    def send(self, data: bytes, section: str | None = None) -> None:
        """Send an event to each stream, of ``section`` if given; drop those that read slowly."""
        # A copy: one that reads too slowly is removed on the way.
        for exchange, page_section in list(self._open.items()):
            if section in (None, page_section):
                self.send_one(exchange, data)

    def send_one(self, exchange: Exchange, data: bytes) -> None:
        """Send an event to one stream, or drop it if its client reads too slowly."""
        if exchange.above_high_water:
            log.info("%s: dropped a page that reads too slowly", exchange.path)
            self._forget(exchange)
            exchange.abort()
        else:
            exchange.write(data)

    def close(self, message: str, section: str | None = None) -> None:
        """End all streams, or those of ``section``; their pages show ``message`` and open them
        again."""
        for exchange, page_section in list(self._open.items()):
            if section in (None, page_section):
                self.close_one(exchange, message)

    def close_one(self, exchange: Exchange, message: str) -> None:
        """End one stream; the page shows ``message``."""
        if exchange in self._open:
            self._forget(exchange)
            exchange.end(event("end", msgspec.json.encode({"message": message})))

    def end(self, message: str) -> None:
        """End all streams, and refuse others, with ``message``."""
        self._ended = message
        self.close(message)

    def _start(self, exchange: Exchange, section: str) -> None:
        exchange.deadline = NEVER
        exchange.keep_alive = False  # so that its end also ends the connection, in a drain too
        exchange.on_disconnect = lambda: self._forget(exchange)
        exchange.start(200, "text/event-stream", [*HEADERS, ("cache-control", "no-store")])
        self._open[exchange] = section
        self._changed()

    def _forget(self, exchange: Exchange) -> None:
        self._open.pop(exchange, None)
        exchange.on_disconnect = None
        self._changed()

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change()
