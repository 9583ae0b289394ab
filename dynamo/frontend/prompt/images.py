"""Images in chat messages: their checks, and what engine and router get of them.

The engine gets each image as the data: URL that the client sent, and decodes it. The router gets
the prompt as the engine caches it: with the tokens that stand for an image, once an engine has
said which these are, and with the hash of the image in all blocks that it overlaps.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import socket
import ssl
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import SplitResult, quote, urlsplit

import msgspec

from dynamo.errors import InvalidArgument, shorten
from dynamo.frontend.prompt.bounds import MAX_IMAGES, MAX_IMAGES_BYTES
from dynamo.frontend.prompt.messages import IMAGE, Message
from dynamo.frontend.prompt.template import ChatTemplate
from dynamo.http.client import HttpClient, ResponseError, request_head
from dynamo.llm.model_directory import ModelDirectory
from dynamo.protocols.codec import Tokens, tokens
from dynamo.protocols.control import MAX_IMAGES_KEY, ModelCard
from dynamo.protocols.engine import MmObject, MmRoutingInfo, Routing

_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)
_KEPT_TOKENS = 1 << 20
_HASH_BYTES = 32
_TIMEOUT_S = 10.0
_AT_ONCE = 8
_IN_TARGET = "/?&=%:;@+$,!~*'()[]"
"""Characters of a path and query that stay as they are."""
_LIMIT_BYTES = MAX_IMAGES_BYTES * 3 // 4
"""As a data: URL it is a third larger."""


class ImageFetcher:
    """Replaces http(s) URLs in messages by data: URLs. ``hosts`` are names without ports.

    A client could make the frontend send requests inside the operator's network. So only hosts
    that the operator has listed are asked, redirects are not followed, size and time are bounded.
    A slow server occupies no thread, a slow name server only threads of this class.
    """

    def __init__(self, hosts: Sequence[str], timeout_s: float = _TIMEOUT_S) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._timeout_s = timeout_s
        self._permits = asyncio.Semaphore(_AT_ONCE)
        self._threads = ThreadPoolExecutor(_AT_ONCE, "images")

    def wanted(self, messages: Sequence[dict[str, Any]]) -> bool:
        """Return whether ``messages`` name an image by http(s) URL."""
        return any(map(_is_remote, _parts(messages)))

    async def fetch(self, messages: Sequence[dict[str, Any]]) -> None:
        """Put the images into ``messages``. Raises InvalidArgument with the place of a bad one."""
        remote = [
            (f"messages[{position}].content[{number}].image_url.url", part)
            for position, message in enumerate(messages)
            for number, part in enumerate(_parts([message]))
            if _is_remote(part)
        ]
        if len(remote) > MAX_IMAGES:
            raise InvalidArgument(
                f"Validation: {remote[MAX_IMAGES][0]}: a request has at most {MAX_IMAGES} images, "
                f"got {len(remote)}"
            )
        # All are checked before the first is fetched, and the bound ends the fetching at once.
        parsed = [(field, part, self._check(field, part)) for field, part in remote]
        size_bytes = 0
        for field, part, url in parsed:
            data_url = await self._get(field, url)
            size_bytes += len(data_url)
            if size_bytes > MAX_IMAGES_BYTES:
                raise _too_large(field)
            part["image_url"] = {"url": data_url}

    async def _get(self, field: str, url: SplitResult) -> str:
        """Return the image as a data: URL; the deadline is that of the whole exchange."""
        client = HttpClient(_LIMIT_BYTES)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s), self._permits:
                resolved = await loop.run_in_executor(self._threads, _resolve, url)
                await _connect(client, url.hostname or "", resolved)
                await client.request(_request(url))
                _check_answer(field, client)
                image = await loop.run_in_executor(self._threads, base64.b64encode, client.body)
        except (OSError, ValueError, ResponseError) as error:
            # HttpClient stops beyond its limit with an error like any other.
            if len(client.body) > _LIMIT_BYTES:
                raise _too_large(field) from None
            timeout = f"no whole answer in {self._timeout_s:g} s"
            reason = timeout if isinstance(error, TimeoutError) else repr(error)
            raise InvalidArgument(
                f"Validation: {field}: cannot be fetched: {shorten(reason)}"
            ) from None
        finally:
            client.close()
        return f"data:{client.content_type.decode('latin1')};base64,{image.decode()}"

    def _check(self, field: str, part: dict[str, Any]) -> SplitResult:
        text = part["image_url"]["url"]
        try:
            # A bad port raises only where it is read.
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


class _Resolved(NamedTuple):
    """The addresses and the port of a server, and the context for https."""

    addresses: list[str]
    port: int
    tls: ssl.SSLContext | None


def _resolve(url: SplitResult) -> _Resolved:
    """Ask the name server, and read the system's authorities: both block."""
    tls = ssl.create_default_context() if url.scheme == "https" else None
    port = url.port or (443 if tls else 80)
    infos = socket.getaddrinfo(url.hostname, port, type=socket.SOCK_STREAM)
    return _Resolved([str(info[4][0]) for info in infos], port, tls)


async def _connect(client: HttpClient, host: str, server: _Resolved) -> None:
    """Connect to the first address that accepts. Raises OSError."""
    refused: OSError = OSError("no address")
    for address in server.addresses:
        try:
            await client.connect(address, server.port, server.tls, host if server.tls else None)
            return
        except OSError as error:
            refused = error
    raise refused


def _request(url: SplitResult) -> bytes:
    host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname or ""
    authority = host if url.port is None else f"{host}:{url.port}"
    target = quote((url.path or "/") + (f"?{url.query}" if url.query else ""), _IN_TARGET)
    return request_head("GET", target, authority, ("accept: image/*", "connection: close"))


def _check_answer(field: str, client: HttpClient) -> None:
    if client.status != 200:
        raise InvalidArgument(f"Validation: {field}: the server replied {client.status}")
    if not client.content_type.startswith(b"image/"):
        media_type = shorten(client.content_type.decode("latin1"))
        raise InvalidArgument(f"Validation: {field}: expected an image, got `{media_type}`")


def _too_large(field: str) -> InvalidArgument:
    return InvalidArgument(
        f"Validation: {field}: the images of a request have at most {MAX_IMAGES_BYTES >> 20} MiB "
        "as data: URLs; name smaller ones"
    )


class ImageExpansions:
    """The token ids that stand for an image, by its hash, as engines have reported them.

    The least recently used are dropped when together they have more than ``kept_tokens`` tokens.
    Thread-safe.
    """

    def __init__(self, kept_tokens: int = _KEPT_TOKENS) -> None:
        self._kept_tokens = kept_tokens
        self._size = 0
        self._ids: OrderedDict[str, Tokens] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, image_hash: str) -> Tokens | None:
        """Return the ids; None if they are unknown."""
        with self._lock:
            ids = self._ids.get(image_hash)
            if ids is not None:
                self._ids.move_to_end(image_hash)
            return ids

    def put(self, image_hash: str, ids: Tokens) -> None:
        """Keep the ids of an image."""
        with self._lock:
            if image_hash in self._ids or not ids:
                return
            self._ids[image_hash] = ids
            self._size += len(ids)
            while self._size > self._kept_tokens:
                self._size -= len(self._ids.popitem(last=False)[1])


class PromptImages(NamedTuple):
    """The images of one request, in the order of their places.

    ``messages`` are the client's with :data:`IMAGE` in place of each image. ``fields`` are the
    places of the images in the request, ``hashes`` have 64 hex digits. ``expansions`` are those of
    the model, ``options`` those of vLLM's processor and decoder.
    """

    messages: list[Message]
    urls: list[str]
    fields: list[str]
    hashes: list[str]
    expansions: ImageExpansions
    options: Mapping[str, Any]

    @property
    def data(self) -> dict[str, Any]:
        """The request's ``multi_modal_data``."""
        return {"image_url": [{"Url": url} for url in self.urls]}

    @property
    def extra_args(self) -> dict[str, Any]:
        """The request's ``extra_args``."""
        return {"mm_hashes": self.hashes, "mm_fields": self.fields, **self.options}

    def count_tokens(self) -> int | None:
        """Return how many tokens stand for the images; None if an engine has not reported them."""
        expansions = [self.expansions.get(image_hash) for image_hash in self.hashes]
        counts = [len(ids) for ids in expansions if ids is not None]
        return sum(counts) if len(counts) == len(expansions) else None


class ImageReader:
    """Reads the images of requests to one model, which takes at most ``limit`` in a prompt.

    ``token_id`` is the token that the chat template writes for an image, None if it is unknown.
    """

    def __init__(self, limit: int, token_id: int | None) -> None:
        self.limit = min(limit, MAX_IMAGES)
        self.expansions = ImageExpansions()
        self._token_id = token_id

    @classmethod
    def of(
        cls, card: ModelCard, directory: ModelDirectory, template: ChatTemplate | None
    ) -> ImageReader | None:
        """Return a reader; None for a model that takes no images.

        Workers say in their cards how many they take. If they do not, config.json decides.
        """
        limit = card.runtime_config.runtime_data.get(MAX_IMAGES_KEY)
        if not isinstance(limit, int):
            limit = MAX_IMAGES * directory.takes_images
        if not limit or template is None or not template.prints_images:
            return None
        return cls(limit, directory.image_token_id)

    def read(
        self, messages: Sequence[Message], options: Mapping[str, Any] | None = None
    ) -> PromptImages | None:
        """Return the images of ``messages``; None without any. Raises InvalidArgument.

        With other ``options`` of the processor an image is another one. O(messages, and bytes of
        images).
        """
        images: PromptImages | None = None
        for position, message in enumerate(messages):
            content = message.get("content")
            if type(content) is not list:
                continue
            for number, part in enumerate(content):
                if part["type"] == "image_url":
                    field = f"messages[{position}].content[{number}].image_url"
                    images = images or PromptImages(
                        list(messages), [], [], [], self.expansions, options or {}
                    )
                    images.urls.append(_url(field, part))
                    images.fields.append(field)
            if images is not None:
                parts = [IMAGE if part["type"] == "image_url" else part for part in content]
                images.messages[position] = {**message, "content": parts}
        if images is not None:
            self._check(images)
            suffix = json.dumps(options, sort_keys=True) if options else ""
            images.hashes.extend(_hash(url + suffix) for url in images.urls)
        return images

    def routing(self, routing: Routing | None, images: PromptImages, ids: Tokens) -> Routing:
        """Return ``routing`` with the prompt as an engine caches it."""
        info = self._with_expansions(images, ids)
        if info is None:
            # Equal prompts with equal images are found, and no others.
            whole = [(0, len(ids))]
            objects = [MmObject(_short(image_hash), whole) for image_hash in images.hashes]
            info = MmRoutingInfo(ids, objects)
        return msgspec.structs.replace(routing or Routing(), mm_routing_info=info)

    def _with_expansions(self, images: PromptImages, ids: Tokens) -> MmRoutingInfo | None:
        """Put the tokens of the images into ``ids``; None if their places are unknown."""
        # A client may write the token itself: then no place is certain.
        if self._token_id is None or ids.count(self._token_id) != len(images.hashes):
            return None
        whole, objects, start = tokens(()), [], 0
        for image_hash in images.hashes:
            index = ids.index(self._token_id, start)
            whole += ids[start:index]
            begin = len(whole)
            expansion = self.expansions.get(image_hash)
            if expansion is None:
                whole.append(self._token_id)
            else:
                whole += expansion
            objects.append(MmObject(_short(image_hash), [(begin, len(whole))]))
            start = index + 1
        whole += ids[start:]
        return MmRoutingInfo(whole, objects)

    def _check(self, images: PromptImages) -> None:
        count, size_bytes = len(images.urls), sum(map(len, images.urls))
        if count > self.limit:
            raise InvalidArgument(
                f"Validation: {images.fields[self.limit]}: this model takes at most {self.limit} "
                f"images in a request, got {count}"
            )
        if size_bytes > MAX_IMAGES_BYTES:
            raise InvalidArgument(
                f"Validation: {images.fields[-1]}: the images of a request have at most "
                f"{MAX_IMAGES_BYTES >> 20} MiB as data: URLs, got {size_bytes} bytes; send smaller "
                "ones"
            )


def _url(field: str, part: Mapping[str, Any]) -> str:
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, dict) else None
    if not isinstance(url, str):
        raise InvalidArgument(f"Validation: {field}: expected an object with a `url`")
    if _DATA_URL.match(url) is None:
        raise InvalidArgument(
            f"Validation: {field}.url: expected `data:image/…;base64,…`, got `{shorten(url)}`; "
            "images are not fetched without --allowed-media-domains"
        )
    return url


def _hash(url: str) -> str:
    return hashlib.blake2b(url.encode(), digest_size=_HASH_BYTES).hexdigest()


def _short(image_hash: str) -> int:
    """Return the 64 bits of a hash that routing needs."""
    return int(image_hash[:16], 16)
