"""Parse one request head: httptools parses the syntax, this module adds the rules it lacks.

llhttp accepts a second Host, an HTTP/1.0 request with Transfer-Encoding, versions that do not
exist and heads without end. Two readings of one request allow request
smuggling, so everything ambiguous is refused. RFC 9112.

The bounds of the HTTP server on bytes, counts and seconds.
"""

from __future__ import annotations

import ipaddress
import re
import resource
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import unquote

from httptools import (
    HttpParserError,
    HttpParserInvalidMethodError,
    HttpParserUpgrade,
    HttpRequestParser,
)

from dynamo.errors import shorten
from dynamo.http.api_keys import ApiKey
from dynamo.http.errors import HttpStatusError

CHUNKED = -1
_VERSIONS = {b"HTTP/1.1": 1, b"HTTP/1.0": 0}
_OTHER_VERSION = re.compile(rb"HTTP/[0-9]\.[0-9]")
_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_BARE_LF = re.compile(rb"(?<!\r)\n")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~%!$&'()*+;=-]+)(:[0-9]*)?")
_ABSOLUTE = re.compile(r"https?://([^/?#@]+)", re.IGNORECASE)
_ONCE = frozenset(("host", "content-length", "expect", "content-type"))
_LENGTH_DIGITS = 20
_SHOWN_CHARACTERS = 128
_REMEMBERED = 1024
_REMEMBERED_BYTES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpLimits:
    """The bounds of the HTTP server. Comments name the reaction to a request above a bound.

    Seconds are checked by one coarse sweep a server, so they hold to about ``sweep_s``.
    """

    request_line_bytes: int = 8 * 1024  # 414
    header_bytes: int = 32 * 1024  # 431
    header_count: int = 100  # 431
    body_bytes: int = 45 * 1024 * 1024  # 413
    bodies_bytes: int = 256 * 1024 * 1024  # 503; unfinished bodies beyond 64 KiB each, together
    connections: int = 4096  # 503 and close
    header_timeout_s: float = 15.0  # 408; counted from the first byte of a head
    body_timeout_s: float = 120.0  # 408; counted from the end of the head
    response_timeout_s: float = 60.0  # 504; until the first worker has the request
    idle_timeout_s: float = 75.0  # closed without a response
    stall_timeout_s: float = 60.0  # aborted: the client does not read its response
    linger_s: float = 2.0  # how long input of a refused client is discarded before the abort
    sweep_s: float = 1.0
    backlog: int = 2048


def allow_open_files(count: int) -> int:
    """Raise the soft limit on open files, as far as the hard one allows; return up to ``count``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


class Head:
    """One valid request head.

    ``headers`` has lower-case names, repeated fields joined by ``", "``. ``body_bytes`` is the
    announced length, or CHUNKED. ``minor`` is the x of HTTP/1.x. ``api_key`` is that of the client.
    ``cors`` are header lines for each response.
    """

    __slots__ = (
        "api_key",
        "body_bytes",
        "cors",
        "expects_continue",
        "headers",
        "keep_alive",
        "method",
        "minor",
        "path",
        "query",
    )

    def __init__(self, method: str, target: str, minor: int, headers: dict[str, str]) -> None:
        path, _, self.query = target.partition("?")
        self.path = unquote(path) if "%" in path else path
        self.method = method
        self.minor = minor
        self.headers = headers
        self.keep_alive = minor == 1
        self.expects_continue = False
        self.body_bytes = 0
        self.api_key: ApiKey | None = None
        self.cors = b""


class HeadReader:
    """Parses bytes to a :class:`Head`, or raises HttpStatusError.

    Holds nothing between calls but caches of good input, so one reader serves every connection of
    a server. Clients repeat themselves: a short head seen before, byte for byte, costs 0.2 µs and
    not 3.5; heads are therefore shared and must not be changed. ``check`` sees each new head before
    that: it may change it, or raise HttpStatusError.
    """

    def __init__(self, limits: HttpLimits, check: Callable[[Head], None] | None = None) -> None:
        self._limits = limits
        self._access_check = check
        self._heads: dict[bytes, Head] = {}
        self._names: dict[bytes, str] = {}
        self._hosts: set[str] = set()
        self._served_names: frozenset[str] | None = None
        self._remedy = ""
        self._headers: dict[str, str] = {}
        self._repeated: str | None = None

    def serve_only(self, names: Iterable[str], remedy: str = "") -> None:
        """Refuse (403) requests for hosts other than localhost, IP addresses and ``names``; the
        error ends in ``remedy``.

        A page whose name resolves to this machine (DNS rebinding) is same-origin with the API for
        a browser; only the Host header distinguishes it from a local client.
        """
        self._served_names = frozenset(("localhost", *(plain_name(name) for name in names)))
        self._remedy = remedy

    def forget_heads(self) -> None:
        """Check every head again: the keys have changed."""
        self._heads.clear()

    def read(self, data: bytes, end: int) -> Head:
        """The head in ``data[:end]``, where ``end`` is the offset of its closing CRLFCRLF."""
        raw = data[: end + 4]
        head = self._heads.get(raw)
        if head is None:
            head = self._read(raw)
            if end <= _REMEMBERED_BYTES:
                if len(self._heads) >= _REMEMBERED:
                    self._heads.clear()
                self._heads[raw] = head
        return head

    def _read(self, data: bytes) -> Head:
        limits = self._limits
        line_end = data.find(b"\r\n")
        if line_end > limits.request_line_bytes:
            raise HttpStatusError(414, f"Request line exceeds {limits.request_line_bytes} bytes")
        if len(data) - line_end - 2 > limits.header_bytes:
            raise HttpStatusError(431, f"Request headers exceed {limits.header_bytes} bytes")
        # A bare LF may end a line for another parser on the way (RFC 9112 2.2): request smuggling.
        if data.count(b"\n") != data.count(b"\r\n"):
            raise HttpStatusError(400, "Line ends without CR")
        # Without the last four bytes: one CRLF for each header.
        if data.count(b"\r\n", line_end, -4) > limits.header_count:
            raise HttpStatusError(431, f"Request has more than {limits.header_count} headers")
        method, target, minor = _request_line(data[:line_end])
        if not target.startswith("/") and (method, target) != ("OPTIONS", "*"):
            authority, target = _absolute_form(target)
            self._check_host(authority)  # RFC 9112 3.2.2: it counts, not the Host header
        head = Head(method, target, minor, self._read_headers(data))
        self._check(head)
        if self._access_check is not None:
            try:
                self._access_check(head)
            except HttpStatusError as refusal:
                refusal.set_request(head)
                raise
        return head

    def check_partial(self, data: bytes) -> None:
        """Refuse an incomplete head that no continuation can make valid."""
        limits = self._limits
        line_end = data.find(b"\r\n")
        if (len(data) if line_end < 0 else line_end) > limits.request_line_bytes:
            raise HttpStatusError(414, f"Request line exceeds {limits.request_line_bytes} bytes")
        if line_end >= 0 and len(data) - line_end - 2 > limits.header_bytes:
            raise HttpStatusError(431, f"Request headers exceed {limits.header_bytes} bytes")
        if _BARE_LF.search(data):
            raise HttpStatusError(400, "Line ends without CR")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by httptools for each field."""
        key = self._names.get(name)
        if key is None:
            key = name.decode("latin-1").lower()
            if len(self._names) < _REMEMBERED:
                self._names[name] = key
        headers = self._headers
        if key in headers:
            if key in _ONCE:
                self._repeated = key
            headers[key] += ", " + value.decode("latin-1").strip(" \t")
        else:
            headers[key] = value.decode("latin-1").strip(" \t")  # RFC 9112 5

    def _read_headers(self, head: bytes) -> dict[str, str]:
        headers = self._headers = {}
        self._repeated = None
        try:
            # A fresh parser for each head (0.2 µs): body framing is ours, so no state can linger.
            HttpRequestParser(self).feed_data(head)
        except HttpParserUpgrade:
            pass  # RFC 9110 7.8: a server may ignore Upgrade
        except HttpParserInvalidMethodError:
            raise HttpStatusError(501, "Method not implemented") from None
        except HttpParserError as error:
            raise HttpStatusError(400, f"Malformed request: {error}") from None
        if self._repeated is not None:
            raise HttpStatusError(400, f"Header '{self._repeated}' given more than once")
        return headers

    def _check(self, head: Head) -> None:
        headers = head.headers
        host = headers.get("host")
        if host is None:
            if head.minor:
                raise HttpStatusError(400, "Header 'host' is missing")
        elif host not in self._hosts:
            self._check_host(host)
        connection = headers.get("connection")
        if connection is not None:
            tokens = [token.strip() for token in connection.lower().split(",")]
            head.keep_alive = "close" not in tokens and (head.minor == 1 or "keep-alive" in tokens)
        length = headers.get("content-length")
        if length is not None:
            # 20 digits hold any 64-bit length; int() takes quadratic time in its digits.
            if len(length) > _LENGTH_DIGITS:
                raise HttpStatusError(400, f"Header 'content-length' has {len(length)} digits")
            head.body_bytes = int(length)
        if "transfer-encoding" in headers:
            _check_transfer_encoding(head)
        if "expect" in headers and head.minor:
            if headers["expect"].lower() != "100-continue":
                raise HttpStatusError(417, "Only the expectation 100-continue is understood")
            head.expects_continue = True

    def _check_host(self, host: str) -> None:
        match = _HOST.fullmatch(host)
        if match is None:
            raise HttpStatusError(400, "Header 'host' is malformed")
        names = self._served_names
        if names is not None and not (plain_name(match[1]) in names or _is_address(match[1])):
            raise HttpStatusError(
                403,
                f"Host '{shorten(match[1], _SHOWN_CHARACTERS)}' is not served here; "
                f"use localhost or an IP address{self._remedy}",
            )
        if len(self._hosts) < _REMEMBERED:
            self._hosts.add(host)


def host_name(header: str) -> str:
    """The name or address in a Host header, without the port; "" if it is malformed."""
    match = _HOST.fullmatch(header)
    return "" if match is None else plain_name(match[1])


def plain_name(host: str) -> str:
    """The host in lower case, without the dot of a fully qualified name."""
    return host.lower().removesuffix(".")


def _request_line(line: bytes) -> tuple[str, str, int]:
    parts = line.split(b" ")
    # llhttp skips a line feed before the method.
    if len(parts) != 3 or not _METHOD.fullmatch(parts[0]):
        raise HttpStatusError(400, "Malformed request line")
    minor = _VERSIONS.get(parts[2])
    if minor is None:
        if _OTHER_VERSION.fullmatch(parts[2]):
            raise HttpStatusError(505, "Only HTTP/1.1 and HTTP/1.0 are spoken here")
        raise HttpStatusError(400, "Malformed request line")
    if not parts[1].isascii():
        raise HttpStatusError(400, "Request target is not ASCII")
    if b"#" in parts[1]:
        raise HttpStatusError(400, "Request target has a fragment")
    return parts[0].decode("ascii"), parts[1].decode("ascii"), minor


def _absolute_form(target: str) -> tuple[str, str]:
    """Authority, and path with query, of ``http://authority/path?query``."""
    match = _ABSOLUTE.match(target)
    if match is None:
        raise HttpStatusError(400, "Request target must be a path")
    rest = target[match.end() :]
    return match[1], rest if rest.startswith("/") else "/" + rest


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _check_transfer_encoding(head: Head) -> None:
    if head.minor == 0:
        raise HttpStatusError(400, "Transfer-Encoding on HTTP/1.0")
    # Which of both counts is ambiguous: RFC 9112 6.3 lets a server refuse.
    if "content-length" in head.headers:
        raise HttpStatusError(400, "Content-Length together with Transfer-Encoding")
    if head.headers["transfer-encoding"].lower() != "chunked":
        raise HttpStatusError(501, "Only the transfer coding 'chunked' is understood")
    head.body_bytes = CHUNKED
