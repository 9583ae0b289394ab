"""Give a chat template only messages that it prints.

A template drops or refuses what its author did not think of: the role ``developer``, a system
message that is not the first, results of tools. Such messages take another form, with their text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from dynamo.frontend.prompt.messages import Message, joined_contents

_ID_CHARACTERS = 9
_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class PrintedRoles(NamedTuple):
    """What a template prints: ``system`` at the beginning, ``later_system`` anywhere, and
    ``result_system`` also where the last message is not the user's. ``calls``: the tool calls of
    the assistant. ``foreign_ids``: call ids of any form."""

    system: bool = True
    later_system: bool = True
    result_system: bool = True
    developer: bool = True
    tool: bool = True
    calls: bool = True
    foreign_ids: bool = True

    def always(self) -> frozenset[str]:
        """The roles whose messages are printed wherever they are."""
        printed = {
            "user": True,
            "assistant": self.calls and self.foreign_ids,
            "tool": self.tool and self.foreign_ids,
            "system": self.system and self.later_system and self.result_system,
            "developer": self.developer,
        }
        return frozenset(role for role, always in printed.items() if always)


def printable(messages: Sequence[Message], roles: PrintedRoles) -> list[Message]:
    """``messages`` in forms that a template with ``roles`` prints. O(messages)."""
    ready: Sequence[Message] = messages
    # In this order: a step makes messages of roles that a later one may have to change.
    if any(message.get("role") == "function" for message in ready):
        ready = _with_tools(ready)
    if not roles.developer:
        ready = [_recast(message, "developer", "system") for message in ready]
    if not roles.foreign_ids:
        ready = [_with_short_ids(message) for message in ready]
    if not roles.calls:
        ready = [_with_written_calls(message) for message in ready]
    if not roles.tool:
        ready = [_recast(message, "tool", "user") for message in ready]
    return _with_placed_system(ready, roles)


def _recast(message: Message, role: str, new_role: str) -> Message:
    return {**message, "role": new_role} if message.get("role") == role else message


def _with_placed_system(messages: Sequence[Message], roles: PrintedRoles) -> list[Message]:
    """Join the leading system messages, or put them into one of the user; make later ones the
    user's."""
    count = len(messages)
    if not roles.system or not roles.later_system:
        names = [message.get("role") for message in messages]
        count = next((index for index, name in enumerate(names) if name != "system"), count)
    # Later system messages are printed in their places: only the first may have to move.
    elif messages and messages[0].get("role") == "system":
        count = 1
    else:
        return list(messages)
    leading, later = messages[:count], list(messages[count:])
    if not roles.later_system:
        later = [_recast(message, "system", "user") for message in later]
    if not leading:
        return later
    system = leading[0] if count == 1 else {**leading[0], "content": _joined(leading)}
    turns = _user_turns(later)
    is_printed = roles.result_system or (
        turns and all(message.get("role") == "user" for message in later[turns[-1] :])
    )
    if roles.system and (is_printed or not later):
        return [system, *later]
    if not turns:
        return [{**system, "role": "user"}, *later]
    index = turns[-1 if roles.system else 0]  # the last is where such a template prints it
    later[index] = {**later[index], "content": _joined((system, later[index]))}
    return later


def _user_turns(messages: Sequence[Message]) -> list[int]:
    """Return where turns of the user begin, except behind a result, which may take up the text."""
    turns, last = [], None
    for index, message in enumerate(messages):
        role = message.get("role")
        if role == "user" and last not in ("user", "tool"):
            turns.append(index)
        last = role
    return turns


def _joined(messages: Sequence[Message]) -> Any:
    return joined_contents([message.get("content") for message in messages])


def _with_tools(messages: Sequence[Message]) -> list[Message]:
    """``messages`` with calls and results of tools in place of OpenAI's older ones of functions."""
    ready: list[Message] = []
    call_id = ""
    for number, message in enumerate(messages):
        call = message.get("function_call")
        if call is not None and message.get("role") == "assistant":
            # Nine letters and digits: an id that every template takes.
            call_id = f"call{number:05d}"
            calls = [{"id": call_id, "type": "function", "function": call}]
            kept = {name: value for name, value in message.items() if name != "function_call"}
            ready.append({**kept, "tool_calls": calls})
        elif message.get("role") == "function":
            call_id = call_id or f"call{number:05d}"
            ready.append({**message, "role": "tool", "tool_call_id": call_id})
        else:
            ready.append(message)
    return ready


def _with_short_ids(message: Message) -> Message:
    changed = message
    if isinstance(message.get("tool_call_id"), str):
        changed = {**changed, "tool_call_id": _short_id(message["tool_call_id"])}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        short = [
            {**call, "id": _short_id(call["id"])}
            if isinstance(call, dict) and isinstance(call.get("id"), str)
            else call
            for call in calls
        ]
        changed = {**changed, "tool_calls": short}
    return changed


def _short_id(call_id: str) -> str:
    """``call_id`` as nine letters and digits, always the same ones, so that prompts stay equal."""
    if len(call_id) == _ID_CHARACTERS and call_id.isascii() and call_id.isalnum():
        return call_id
    digest = hashlib.blake2b(call_id.encode(errors="surrogatepass"), digest_size=8).digest()
    number, letters = int.from_bytes(digest, "big"), ""
    for _ in range(_ID_CHARACTERS):
        number, digit = divmod(number, len(_LETTERS))
        letters += _LETTERS[digit]
    return letters


def _with_written_calls(message: Message) -> Message:
    """``message`` with its calls as JSON behind its text."""
    calls = message.get("tool_calls")
    if message.get("role") != "assistant" or not isinstance(calls, list) or not calls:
        return message
    functions = [call.get("function") if isinstance(call, dict) else None for call in calls]
    if not all(isinstance(function, dict) for function in functions):
        return message  # refused where its calls are converted
    written = "\n".join(msgspec.json.encode(_named(function)).decode() for function in functions)
    content = [message["content"]] if message.get("content") else []
    return {**message, "tool_calls": None, "content": joined_contents([*content, written])}


def _named(function: Any) -> dict[str, Any]:
    return {"name": function.get("name"), "arguments": _parsed(function.get("arguments"))}


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return msgspec.Raw(arguments) if msgspec.json.decode(arguments) is not None else {}
    except (msgspec.DecodeError, RecursionError):
        return arguments
