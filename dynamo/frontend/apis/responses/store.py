"""Stored responses: the conversations that clients continue by ``previous_response_id``.

In memory of this process, bounded by bytes and by count; the least recently used go first. Each
response refers to the one it continues, so a conversation is kept once, however many turns it has.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

MAX_RESPONSES = 4096
_MADE_HERE = re.compile(r"[a-z]+_[0-9a-f]{25,}")
"""Ids of items that were made here have 96 random bits."""
_MESSAGE_BYTES = 600
"""What a message takes besides its texts, which it shares with the items, about."""


class StoredResponse:
    """One response. ``body`` is its JSON; ``items`` are those of its input, ``output`` its own.

    ``messages`` are input and output as a chat, without the instructions. ``total_bytes`` includes
    the responses that it continues.
    """

    __slots__ = (
        "_references",
        "body",
        "items",
        "messages",
        "output",
        "parent",
        "size_bytes",
        "total_bytes",
    )

    def __init__(
        self,
        parent: StoredResponse | None,
        body: bytes,
        messages: Sequence[dict[str, Any]],
        items: tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]],
        items_bytes: int,
    ) -> None:
        """``items`` are those of the input and of the output, ``items_bytes`` their memory."""
        self.parent = parent
        self.body = body
        self.messages = messages
        self.items, self.output = items
        own_bytes = _MESSAGE_BYTES * len(messages) + sum(map(_image_bytes, messages))
        self.size_bytes = len(body) + items_bytes + own_bytes
        self.total_bytes: int = self.size_bytes + (0 if parent is None else parent.total_bytes)
        self._references = 0

    def conversation(self) -> list[StoredResponse]:
        """The responses before this one, the first one first, and this one."""
        responses = []
        response: StoredResponse | None = self
        while response is not None:
            responses.append(response)
            response = response.parent
        return responses[::-1]

    def history(self) -> list[dict[str, Any]]:
        """The messages of the conversation. O(messages)."""
        return [message for response in self.conversation() for message in response.messages]


class ResponseStore:
    """Responses by owner (the name of an API key, "" without keys) and id.

    Without keys all clients are one owner: the ids, which cannot be guessed, keep them apart.
    ``size_bytes`` is what all take together, at most ``limit_bytes``.
    """

    def __init__(self, limit_bytes: int, limit_count: int = MAX_RESPONSES) -> None:
        self.size_bytes = 0
        self._limit_bytes = limit_bytes
        self._limit_count = limit_count
        self._named: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()

    @property
    def enabled(self) -> bool:
        """Whether anything can be stored."""
        return self._limit_bytes > 0

    def __len__(self) -> int:
        return len(self._named)

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """The response, which counts as used now; None if the owner has none of that id."""
        response = self._named.get((owner, response_id))
        if response is not None:
            self._named.move_to_end((owner, response_id))
        return response

    def find_items(
        self, owner: str, wanted: set[str], earlier: StoredResponse | None = None
    ) -> dict[str, dict[str, Any]]:
        """The items of these ids in the conversation of ``earlier`` and in all responses of the
        owner; those that are not there are left out. O(stored items).

        Without keys, items whose ids a client chose are found in the conversation alone.
        """
        items: dict[str, dict[str, Any]] = {}
        _add_items(items, wanted, [] if earlier is None else earlier.conversation())
        if not owner:
            wanted = {item_id for item_id in wanted if _MADE_HERE.fullmatch(item_id)}
        own = [response for (name, _), response in self._named.items() if name == owner]
        # The last used first: a client may have used an id twice.
        _add_items(items, wanted, own[::-1])
        return items

    def put(self, owner: str, response_id: str, response: StoredResponse) -> bool:
        """Store a response; drop the least recently used ones above the bounds.

        Return False, without dropping any, if its conversation alone exceeds them.
        """
        if response.total_bytes > self._limit_bytes:
            return False
        self.delete(owner, response_id)
        self._named[owner, response_id] = response
        self._hold(response)
        # Ends with this response alone at the latest: it fits.
        while self.size_bytes > self._limit_bytes or len(self._named) > self._limit_count:
            self._drop(self._named.popitem(last=False)[1])
        return True

    def delete(self, owner: str, response_id: str) -> bool:
        """Remove a response; those that continue it keep what they need of it."""
        response = self._named.pop((owner, response_id), None)
        if response is not None:
            self._drop(response)
        return response is not None

    def _hold(self, response: StoredResponse | None) -> None:
        """Count one more reference, and the bytes with the first one."""
        while response is not None:
            response._references += 1
            # Those before it are counted already, once for all that continue this one.
            if response._references > 1:
                return
            self.size_bytes += response.size_bytes
            response = response.parent

    def _drop(self, response: StoredResponse | None) -> None:
        while response is not None:
            response._references -= 1
            if response._references:
                return
            self.size_bytes -= response.size_bytes
            response = response.parent

    def _check(self) -> None:
        """Assert that references and bytes are those of what is stored."""
        counts: dict[int, int] = {}
        named = self._named.values()
        alive = {id(turn): turn for last in named for turn in last.conversation()}
        for holder in (*named, *(turn.parent for turn in alive.values())):
            if holder is not None:
                counts[id(holder)] = counts.get(id(holder), 0) + 1
        assert self.size_bytes == sum(turn.size_bytes for turn in alive.values())
        assert all(turn._references == counts[key] for key, turn in alive.items())
        assert self.size_bytes <= self._limit_bytes and len(self) <= self._limit_count


def _add_items(
    items: dict[str, dict[str, Any]], wanted: set[str], responses: Sequence[StoredResponse]
) -> None:
    """Add the items of ``responses`` that are wanted and not found yet."""
    for response in responses:
        if wanted <= items.keys():
            return
        for item in (*response.items, *response.output):
            if item["id"] in wanted:
                items.setdefault(item["id"], item)


def _image_bytes(message: dict[str, Any]) -> int:
    """The images of a message: fetched ones are not among the items."""
    content = message.get("content")
    if not isinstance(content, list):
        return 0
    return sum(sys.getsizeof(part["image_url"]["url"]) for part in content if "image_url" in part)
