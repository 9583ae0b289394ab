"""Questions to the attached server outside of requests: one at a time, small answers, a deadline.

Only this module opens connections for them; what is asked and what it means is in ``describe`` and
``load``.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import orjson

from dynamo.http.client import HttpClient, ResponseError
from dynamo.http.target import Target

__all__ = ["ServerProbe", "ServerUnreachable"]

_ANSWER_BYTES = 16 << 20


class ServerUnreachable(Exception):
    """The server refused the connection, broke it off, or did not answer in time.

    ``slow``: it did not answer in time, so it may be busy and not dead.
    """

    def __init__(self, reason: str, slow: bool = False) -> None:
        super().__init__(reason)
        self.slow = slow


class ServerProbe:
    """Asks ``target`` over one kept connection. Use one call at a time."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        self.target = target
        self._timeout_s = timeout_s
        self._tls = ssl.create_default_context() if target.tls else None
        self._client: HttpClient | None = None

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body of a GET. Raises ServerUnreachable."""
        return await self._ask(self.target.head("GET", path, 0))

    async def json(self, path: str, body: Any = None) -> Any:
        """Return the JSON of a GET, or of a POST of ``body``; None for a status but 200 or no JSON.

        Raises ServerUnreachable.
        """
        if body is None:
            status, answer = await self.get(path)
        else:
            content = orjson.dumps(body)
            head = self.target.head("POST", path, len(content))
            status, answer = await self._ask(head + content)
        try:
            return orjson.loads(answer) if status == 200 else None
        except orjson.JSONDecodeError:
            return None

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()

    async def _ask(self, message: bytes) -> tuple[int, bytes]:
        kept = self._client is not None and self._client.usable
        try:
            async with asyncio.timeout(self._timeout_s):
                try:
                    return await self._send(message)
                except ResponseError:
                    if not kept:
                        raise
                    # The server closes an idle connection when it likes, also at this moment.
                    return await self._send(message)
        except TimeoutError:
            self.close()
            seconds = f"{self._timeout_s:g} s"
            raise ServerUnreachable(f"no answer within {seconds}", slow=True) from None
        except (OSError, UnicodeError, ResponseError) as error:
            self.close()
            raise ServerUnreachable(str(error) or type(error).__name__) from None

    async def _send(self, message: bytes) -> tuple[int, bytes]:
        client = self._client
        if client is None or not client.usable:
            client = self._client = HttpClient(_ANSWER_BYTES)
            await client.connect(self.target.host, self.target.port, self._tls)
        await client.request(message)
        return client.status, bytes(client.body)
