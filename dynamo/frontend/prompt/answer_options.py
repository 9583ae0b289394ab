"""Checks of the fields that say how to answer: stop conditions, choices, tools, streaming.

What the frontend cannot do is refused, never ignored: a client that asked for the best of five
answers must not take the first for it. docs/openai.md lists the rules.
"""

from __future__ import annotations

from dynamo.errors import InvalidArgument, shorten
from dynamo.protocols.openai import (
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    ChatCompletionRequest,
    GenerationRequest,
)

__all__ = ["check_answer_options", "check_tool_choice"]

_FREE_CHOICES = ("none", "auto")


def check_answer_options(request: GenerationRequest) -> None:
    """Check what both routes take. Raises InvalidArgument naming the field, value and remedy."""
    if request.stop is not None:
        _check_stop(request.stop)
    if request.stop_token_ids is not None and len(request.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidArgument(
            f"Validation: 'stop_token_ids' takes at most {MAX_STOP_TOKEN_IDS} ids, "
            f"got {len(request.stop_token_ids)}"
        )
    if request.best_of is not None:
        _check_best_of(request.best_of, request.n or 1)
    if request.stream_options is not None and not request.stream:
        raise InvalidArgument(
            "Validation: 'stream_options' is only allowed when 'stream' is true; leave it out"
        )


def check_tool_choice(request: ChatCompletionRequest) -> None:
    """Refuse to force a tool call: nothing parses the answer. Raises InvalidArgument."""
    for name, value in (
        ("tool_choice", request.tool_choice),
        ("function_call", request.function_call),
    ):
        if value is not None and value not in _FREE_CHOICES:
            raise InvalidArgument(
                f"Validation: '{name}' must be 'auto' or 'none', got {shorten(repr(value))}; "
                "a tool call cannot be enforced without a tool-call parser"
            )


def _check_stop(stop: str | list[str]) -> None:
    strings = [stop] if isinstance(stop, str) else stop
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidArgument(
            f"Validation: 'stop' takes at most {MAX_STOP_STRINGS} strings, got {len(strings)}"
        )
    for string in strings:
        if not string:
            raise InvalidArgument("Validation: 'stop' strings cannot be empty")
        if len(string) > MAX_STOP_CHARACTERS:
            raise InvalidArgument(
                f"Validation: a 'stop' string takes at most {MAX_STOP_CHARACTERS} characters, "
                f"got {len(string)}: {shorten(repr(string))}"
            )


def _check_best_of(best_of: int, n: int) -> None:
    if best_of < n:
        raise InvalidArgument(
            f"Validation: 'best_of' must not be less than 'n', got {best_of} < {n}"
        )
    if best_of > n:
        raise InvalidArgument(
            f"Validation: 'best_of' above 'n' is not supported, got {best_of} > {n}; leave it out "
            "and choose among 'n' answers"
        )
