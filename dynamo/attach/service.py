"""Relays requests to the attached server: bytes in, bytes out, nothing parsed on the way back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import msgspec

from dynamo.attach.models import ModelNames
from dynamo.attach.pool import ClientRequest, ConnectionPool, Headers
from dynamo.errors import DynamoError, HttpFailure, InvalidArgument
from dynamo.http.client import Target
from dynamo.http.routes import RoutePatterns, is_multipart
from dynamo.protocols import codec
from dynamo.protocols.engine import DP_RANK, HttpRequest, HttpResponseHead
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.requests.admission import AdmissionQueue
from dynamo.runtime.requests.context import CancelKind
from dynamo.runtime.requests.stream import ServerStream

_DECODE = codec.decoder(HttpRequest).decode
_HOP_BY_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
_NOT_SENT = _HOP_BY_HOP | {"host", "content-length", "expect"}
_METHODS = frozenset(("GET", "POST", "DELETE"))


class AttachService:
    """A push handler in front of ``pool``; it relays nothing before :meth:`offer`.

    ``on_unreachable`` is called when the server cannot be connected to. If it has several
    ``ranks``, the header names the one that the router chose.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        admission: AdmissionQueue,
        tasks: Tasks,
        on_unreachable: Callable[[], None],
        ranks: int = 1,
    ) -> None:
        self.ranks = ranks
        self.pool = pool
        self.admission = admission
        self.tasks = tasks
        self.on_unreachable = on_unreachable
        self.names = ModelNames()
        self.routes: Collection[str] = ()
        self.patterns = RoutePatterns()

    def offer(self, chosen: dict[str, str], routes: Collection[str]) -> None:
        """Relay requests for the models ``chosen``, {name: name in the server}, on ``routes``."""
        self.names = ModelNames(chosen)
        self.routes = routes
        self.patterns = RoutePatterns(routes)

    def handle(self, stream: ServerStream, payload: bytes) -> None:
        """Relay one ``HttpRequest``; an error ends the stream."""
        try:
            request = _DECODE(payload)
            request.path = self._target(request)
            if self.ranks > 1 and (rank := stream.headers.get(DP_RANK)) is not None:
                # The router has chosen the rank, so the client's own header gives way.
                others = [header for header in request.headers if header[0] != DP_RANK]
                request.headers = [*others, (DP_RANK, rank)]
            message = request_message(self.pool.target, request, self._body(request))
            RelayedRequest(self, stream, message).submit()
        except msgspec.MsgspecError as error:
            stream.error(InvalidArgument(f"not a request for an Http model: {error}"))
        except DynamoError as error:
            stream.error(error)

    def _body(self, request: HttpRequest) -> bytes:
        """Return the body with the server's own name of its model."""
        for name, value in request.headers:
            if name == "content-type" and is_multipart(value):
                return self.names.rewrite_form(request.body, value)
        return self.names.rewrite(request.body)

    def _target(self, request: HttpRequest) -> str:
        """Return path and query with the server's own name of its model. Raises HttpFailure."""
        if request.method not in _METHODS:
            raise HttpFailure(f"method {request.method!r:.20} is not relayed", 405)
        path = request.path.partition("?")[0]
        if request.method == "POST" and path in self.routes:
            return self.names.rewrite_target(request.path, ())
        match = self.patterns.find(request.method, path)
        if match is None:
            offered = f"{request.method} {path}"
            raise HttpFailure(f"the server of this model does not offer {offered!r:.100}", 404)
        return self.names.rewrite_target(request.path, match.spans)


class RelayedRequest:
    """One request between its stream and the server; the sink of the server's response."""

    __slots__ = ("_message", "_request", "_resuming", "_service", "_started", "_stream")

    def __init__(self, service: AttachService, stream: ServerStream, message: bytes) -> None:
        self._service = service
        self._stream = stream
        self._message = message
        self._request: ClientRequest | None = None
        self._started = False
        self._resuming = False

    def submit(self) -> None:
        """Send when admitted. Raises Overloaded."""
        self._service.admission.submit(self.start)
        if not self._stream.closed:
            self._stream.context.on_cancel(self.cancelled)

    def start(self) -> None:
        """Send to the server; admission calls this."""
        service = self._service
        if self._stream.closed:
            service.admission.release()
            return
        self._started = True
        message, self._message = self._message, b""
        self._request = service.pool.send(message, self)

    def cancelled(self, kind: CancelKind) -> None:
        """Close the connection to the server: it stops computing."""
        # Neither sent nor queued any more: the request has ended.
        if not self._started and not self._service.admission.withdraw(self.start):
            return
        if self._request is not None:
            self._request.cancel()
        self._stream.end()
        self._finish()

    def on_head(self, status: int, headers: Headers) -> None:
        """Send the head."""
        head = HttpResponseHead(status, list(_end_to_end(headers, _HOP_BY_HOP)))
        self._stream.send(codec.encode(head))

    def on_body(self, data: bytes) -> None:
        """Send a part of the body; stop reading from the server while the client is slow."""
        stream = self._stream
        stream.send(data)
        if stream.above_high_water and not self._resuming and self._request is not None:
            self._resuming = True
            self._request.pause()
            self._service.tasks.spawn(self._resume(self._request), name="slow client")

    def on_end(self) -> None:
        """End the stream."""
        self._stream.end()
        self._finish()

    def on_failure(self, error: DynamoError) -> None:
        """End the stream with ``error``; the frontend tries another worker if it may."""
        self._stream.error(error)
        self._finish()
        if error.unsent:
            self._service.on_unreachable()

    async def _resume(self, request: ClientRequest) -> None:
        await self._stream.drained()
        self._resuming = False
        request.resume()

    def _finish(self) -> None:
        self._request = None
        self._stream.context.off_cancel(self.cancelled)  # breaks the cycle of both
        if self._started:
            self._started = False
            self._service.admission.release()


def request_message(target: Target, request: HttpRequest, body: bytes) -> bytes:
    """Return the request for the wire, with the server's key. InvalidArgument: a line end in it."""
    not_sent = _NOT_SENT | {"authorization"} if target.api_key else _NOT_SENT
    lines = [
        f"{request.method} {target.prefix}{request.path} HTTP/1.1",
        f"host: {target.authority}",
    ]
    for name, value in _end_to_end(request.headers, not_sent):
        lines.append(f"{name}: {value}")
    if target.api_key:
        lines.append(f"authorization: Bearer {target.api_key}")
    # RFC 9110, 8.6: a method with a meaning for content has the length also when it is 0.
    if body or request.method != "GET":
        lines.append(f"content-length: {len(body)}")
    text = "\r\n".join(lines)
    ends = len(lines) - 1
    # Every line end is one of ours: another could begin a second request.
    if text.count("\r") != ends or text.count("\n") != ends or lines[0].count(" ") != 2:
        raise InvalidArgument("path or headers have a line end or a space where HTTP allows none")
    try:
        return b"".join((text.encode("latin-1"), b"\r\n\r\n", body))
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"a header is not Latin-1: {error.reason}") from None


def _end_to_end(
    headers: Iterable[tuple[str, str]], dropped: frozenset[str]
) -> Iterable[tuple[str, str]]:
    """Yield the headers without ``dropped`` and those that Connection names. RFC 9110 7.6.1."""
    headers = list(headers)
    for name, value in headers:
        if name == "connection":
            dropped |= {word.strip().lower() for word in value.split(",")}
    return [header for header in headers if header[0] not in dropped]
