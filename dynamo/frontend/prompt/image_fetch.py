"""Fetch the images that clients name by http(s) URL, from hosts that the operator has allowed.

A client could otherwise make the frontend send requests inside the operator's network. So only
listed hosts are asked, redirects are not followed, and size and time are bounded.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

from dynamo.errors import InvalidArgument, shorten
from dynamo.frontend.prompt.bounds import MAX_IMAGES, MAX_IMAGES_BYTES

__all__ = ["ImageFetcher"]

_TIMEOUT_S = 10.0
_AT_ONCE = 8
_CHUNK_BYTES = 1 << 16
_LIMIT_BYTES = MAX_IMAGES_BYTES * 3 // 4
"""As a data: URL it is a third larger."""


class ImageFetcher:
    """Replaces http(s) URLs in messages by data: URLs. ``hosts`` are names without ports."""

    def __init__(self, hosts: Sequence[str], timeout_s: float = _TIMEOUT_S) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._timeout_s = timeout_s
        self._permits = asyncio.Semaphore(_AT_ONCE)

    def wanted(self, messages: Sequence[dict[str, Any]]) -> bool:
        """Return whether ``messages`` name an image by http(s) URL."""
        return any(map(_is_remote, _parts(messages)))

    async def fetch(self, messages: Sequence[dict[str, Any]]) -> None:
        """Put the images into ``messages``. Raises InvalidArgument with the place of a bad one."""
        found = [
            (f"messages[{position}].content[{number}].image_url.url", part)
            for position, message in enumerate(messages)
            for number, part in enumerate(_parts([message]))
            if _is_remote(part)
        ]
        if len(found) > MAX_IMAGES:
            raise InvalidArgument(
                f"Validation: {found[MAX_IMAGES][0]}: a request has at most {MAX_IMAGES} images, "
                f"got {len(found)}"
            )
        parsed = [(field, part, self._check(field, part)) for field, part in found]
        size_bytes = 0
        for field, part, url in parsed:
            async with self._permits:
                data_url = await asyncio.to_thread(_get, field, url, self._timeout_s)
            size_bytes += len(data_url)
            if size_bytes > MAX_IMAGES_BYTES:
                raise _too_large(field)
            part["image_url"] = {"url": data_url}

    def _check(self, field: str, part: dict[str, Any]) -> SplitResult:
        text = part["image_url"]["url"]
        try:
            url: SplitResult = urlsplit(text)
            host, _ = url.hostname, url.port
        except ValueError as error:
            raise InvalidArgument(f"Validation: {field}: `{shorten(text)}`: {error}") from None
        if host is None or host.lower() not in self._hosts or url.username is not None:
            raise InvalidArgument(
                f"Validation: {field}: images are not fetched from `{shorten(host or text)}`; send "
                "a data: URL, or ask the operator for --allowed-media-domains"
            )
        return url


def _parts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    contents = (message.get("content") for message in messages)
    return [part for content in contents if type(content) is list for part in content]


def _is_remote(part: dict[str, Any]) -> bool:
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, dict) else None
    return isinstance(url, str) and url[:8].lower().startswith(("http://", "https://"))


def _get(field: str, url: SplitResult, timeout_s: float) -> str:
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.hostname or "", url.port, timeout=timeout_s)
    deadline = time.monotonic() + timeout_s
    try:
        connection.request("GET", (url.path or "/") + (f"?{url.query}" if url.query else ""))
        response = connection.getresponse()
        if response.status != 200:
            raise InvalidArgument(f"Validation: {field}: the server replied {response.status}")
        media_type = response.headers.get_content_type()
        if not media_type.startswith("image/"):
            raise InvalidArgument(f"Validation: {field}: expected an image, got `{media_type}`")
        return f"data:{media_type};base64,{_read(field, response, deadline)}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise InvalidArgument(f"Validation: {field}: cannot be fetched: {error!r:.200}") from None
    finally:
        connection.close()


def _read(field: str, response: http.client.HTTPResponse, deadline: float) -> str:
    body = bytearray()
    while chunk := response.read1(_CHUNK_BYTES):
        body += chunk
        if len(body) > _LIMIT_BYTES:
            raise _too_large(field)
        if time.monotonic() > deadline:
            raise TimeoutError("timed out")
    return base64.b64encode(body).decode()


def _too_large(field: str) -> InvalidArgument:
    return InvalidArgument(
        f"Validation: {field}: the images of a request have at most {MAX_IMAGES_BYTES >> 20} MiB "
        "as data: URLs; name smaller ones"
    )
