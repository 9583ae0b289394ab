"""Response items that every engine sends: one token, and the usage at the end.

Its own module because a worker's time per token is spent here.
"""

from __future__ import annotations

import struct
from functools import lru_cache

from dynamo.protocols.engine import TOKEN_PREFIX, CompletionUsage, PromptTokensDetails

# An item with one token differs only in the id at its end: a prefix and a cache cost less than
# encoding a struct.
_U16 = struct.Struct(">BH")
_U32 = struct.Struct(">BI")


@lru_cache(maxsize=8192)
def token_item(token_id: int) -> bytes:
    """Return ``EngineOutput(token_ids=[token_id])`` as MessagePack."""
    if token_id < 0x80:
        return TOKEN_PREFIX + bytes((token_id,))
    if token_id < 0x10000:
        return TOKEN_PREFIX + _U16.pack(0xCD, token_id)
    return TOKEN_PREFIX + _U32.pack(0xCE, token_id)


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> CompletionUsage:
    """Return the usage of a request; ``cached_tokens`` of its prompt came from the KV cache,
    None if that is unknown."""
    return CompletionUsage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )
