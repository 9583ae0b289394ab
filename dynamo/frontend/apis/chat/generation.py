"""What differs between the APIs that generate text; ``apis/chat/route`` serves them.

An API that is not OpenAI's chat converts its body to a subclass of ChatCompletionRequest, which may
carry what the answer needs of the body, and has an :class:`EventStream` of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from dynamo.frontend.answer.generation import ChatStream, CompletionStream, GenerationStream
from dynamo.frontend.answer.parsed import ParsedChatStream
from dynamo.frontend.prompt.off_loop import OffLoop
from dynamo.frontend.prompt.preprocessor import Prepared, Preprocessor
from dynamo.frontend.prompt.validation import parse_chat, parse_completion
from dynamo.frontend.requests.errors import ErrorShape
from dynamo.http import Exchange


class GenerationApi(NamedTuple):
    """One API.

    ``endpoint`` is the label of the metrics. ``parse`` gets the body and ``ignore_unsupported``, in
    a thread if the body is large; it raises InvalidArgument. ``complete``, if set, follows it on
    the event loop: it adds what the body does not have (headers, key, earlier responses),
    and returns how many bytes of prompt it added; it raises DynamoError. ``stream`` renders answers
    that are content alone, ``parsed_stream`` those of models with a parser.
    """

    endpoint: str
    id_prefix: str
    model_type: str
    parse: Callable[..., Any]
    prepare: Callable[[Preprocessor, Any], Prepared]
    prepare_off_loop: Callable[[Preprocessor, Any, OffLoop], Awaitable[Prepared]]
    stream: type[GenerationStream]
    parsed_stream: type[GenerationStream]
    complete: Callable[[Any, Exchange], int] | None = None
    errors: ErrorShape | None = None

    @classmethod
    def of_chat(
        cls,
        endpoint: str,
        id_prefix: str,
        parse: Callable[..., Any],
        stream: type[GenerationStream],
    ) -> GenerationApi:
        """An API whose ``parse`` returns a chat request, and whose stream parses answers itself."""
        prepare, off_loop = Preprocessor.chat, Preprocessor.chat_off_loop
        return cls(endpoint, id_prefix, "Chat", parse, prepare, off_loop, stream, stream)


CHAT = GenerationApi.of_chat("chat_completions", "chatcmpl-", parse_chat, ChatStream)._replace(
    parsed_stream=ParsedChatStream
)
COMPLETION = GenerationApi(
    "completions",
    "cmpl-",
    "Completions",
    parse_completion,
    Preprocessor.completion,
    Preprocessor.completion_off_loop,
    CompletionStream,
    CompletionStream,
)
