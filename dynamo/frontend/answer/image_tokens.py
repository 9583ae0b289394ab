"""Learn from an engine's first output which tokens stand for the images of the prompt.

Later requests with the same image, most often the next turn of the conversation, are then routed by
the prompt as the engine caches it.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from typing import Any

from dynamo.frontend.answer.logprobs import LogprobsCollector
from dynamo.frontend.prompt.preprocessor import Prepared
from dynamo.protocols.codec import Tokens, tokens
from dynamo.protocols.engine import EngineOutput

__all__ = ["ImageTokens", "collect_image_tokens"]

_KEY = "mm_expansions"
log = logging.getLogger(__name__)


class ImageTokens:
    """A collector for one choice: keeps the tokens of images, and passes outputs to ``inner``."""

    def __init__(self, prepared: Prepared, inner: LogprobsCollector | None) -> None:
        self._prepared = prepared
        self._inner = inner

    def add(self, output: EngineOutput, count: int) -> None:
        """Add ``output``."""
        given = None if output.extra_args is None else output.extra_args.get(_KEY)
        if given is not None:
            self._learn(given)
        if self._inner is not None:
            self._inner.add(output, count)

    def drain(self) -> dict[str, Any] | None:
        """Return the entries of ``inner`` since the last call."""
        return None if self._inner is None else self._inner.drain()

    def _learn(self, given: Any) -> None:
        images = self._prepared.images
        assert images is not None, "collect_image_tokens is for requests with images"
        try:
            found = [_ids(each) for each in given]
        except (TypeError, ValueError, OverflowError) as error:
            log.warning("ignoring %s of an engine: %s", _KEY, error)
            return
        if len(found) == len(images.hashes):
            for image_hash, ids in zip(images.hashes, found, strict=True):
                images.expansions.put(image_hash, ids)


def collect_image_tokens(
    prepared: Prepared, collectors: Sequence[LogprobsCollector]
) -> Sequence[LogprobsCollector]:
    """Wrap ``collectors``, one for each choice or none, for a prompt with images."""
    found: Sequence[LogprobsCollector | None] = collectors or [None] * len(prepared.requests)
    return [ImageTokens(prepared, each) for each in found]


def _ids(given: Any) -> Tokens:
    """Raise TypeError or OverflowError for a value that is no list of ids."""
    if not isinstance(given, array | list):
        raise TypeError(f"expected token ids, got {type(given).__name__}")
    return tokens(given)
