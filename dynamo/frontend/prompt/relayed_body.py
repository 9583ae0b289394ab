"""What the frontend reads of a body that it relays: the model, and the prompt for the router.

A router needs token ids to match prompts with caches. Where the exact ones are not known, the bytes
of the prompt's JSON take their place, four in an id: equal beginnings have equal blocks, and a
block is about as long as one of tokens.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from dynamo.errors import InvalidArgument
from dynamo.frontend.prompt.decode_errors import DESERIALIZE
from dynamo.frontend.prompt.preprocessor import Preprocessor
from dynamo.frontend.prompt.validation import check_json, parse_chat, parse_completion
from dynamo.protocols.codec import Tokens

__all__ = ["CHAT", "COMPLETIONS", "EMBEDDINGS", "RelayedBody", "peek", "prompt_ids"]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
_BYTES_PER_ID = 4
_NULL = b"null"


class RelayedBody(msgspec.Struct):
    """The members that count; the others stay undecoded. Those of the prompt are in the order in
    which chat templates render them."""

    model: str
    stream: Any = None
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()

    @property
    def streams(self) -> bool:
        """Whether the client asked for a stream."""
        return self.stream is True


_decode = msgspec.json.Decoder(RelayedBody).decode


def peek(body: bytes) -> RelayedBody:
    """Read the members that count. Raises InvalidArgument. O(bytes), about 1 GB/s."""
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"{DESERIALIZE}{error}") from None


def prompt_ids(
    preprocessor: Preprocessor | None, path: str, body: bytes, asked: RelayedBody
) -> Tokens:
    """Return ids of the prompt for the router: of its tokens if ``preprocessor`` can make them,
    else of its bytes. Long bodies belong in a thread. O(bytes)."""
    if preprocessor is not None:
        found = _tokenized(preprocessor, path, body)
        if found is not None:
            return found
    members = (
        asked.tools,
        asked.system,
        asked.instructions,
        asked.messages,
        asked.prompt,
        asked.input,
    )
    given = [bytes(one) for one in members]
    text = b"".join([one for one in given if one != _NULL]) or body
    ids = array("I")
    ids.frombytes(text[: len(text) // _BYTES_PER_ID * _BYTES_PER_ID])
    return ids


def _tokenized(preprocessor: Preprocessor, path: str, body: bytes) -> Tokens | None:
    """The tokens of all prompts, one after another; None if the template or we refuse them.

    The server judges the request: its rules may differ from ours.
    """
    try:
        check_json(body)
        if path == CHAT:
            prepared = preprocessor.chat(parse_chat(body, ignore_unsupported=True))
        elif path == COMPLETIONS:
            prepared = preprocessor.completion(parse_completion(body, ignore_unsupported=True))
        else:
            return None
    except InvalidArgument:
        return None
    prompts = [one.token_ids for one in prepared.prompts]
    if len(prompts) == 1:
        return prompts[0]
    joined = array("I")
    for each in prompts:
        joined.extend(each)
    return joined
