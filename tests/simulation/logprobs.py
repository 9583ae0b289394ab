"""Log probabilities: mock workers that send them, as real ones do, and what a client gets of them.

Each token of a whole answer has one entry, each of an echoed prompt, too; in chat the bytes of the
entries are those of the content.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import fake_os
from attempts import request_of
from history import Request

__all__ = ["Entries", "with_logprobs"]


def _of(token_id: int, places: int) -> tuple[float, list[dict[str, Any]]]:
    """Return the log probability of a token, and the most likely ones in its place."""
    top = [{"token_id": token_id + at, "logprob": -0.5 - at, "rank": at + 1}
           for at in range(places)]  # fmt: skip
    return -0.5 - token_id % 8, top


class _Sender:
    """A stream whose outputs get log probabilities."""

    def __init__(self, stream: Any, asked: Any) -> None:
        self._stream = stream
        self._asked = asked
        self._is_first = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def send(self, payload: bytes) -> None:
        from dynamo.protocols import codec
        from dynamo.protocols.engine import EngineOutput

        output = codec.decoder(EngineOutput).decode(payload)
        options, prompt = self._asked.output_options, self._asked.token_ids
        if output.token_ids and options.logprobs is not None:
            pairs = [_of(one, options.logprobs) for one in output.token_ids]
            output.log_probs = [one for one, _ in pairs]
            output.top_logprobs = [top for _, top in pairs]
        if output.token_ids and self._is_first:
            self._is_first = False
            if options.prompt_logprobs is not None:
                entries = [_of(one, max(options.prompt_logprobs, 1))[1] for one in prompt[1:]]
                output.extra_args = {"prompt_logprobs": [None, *entries]}
        self._stream.send(codec.encode(output))


def with_logprobs(init: Any) -> Any:
    """Let a worker's answer have log probabilities if its request asks for them."""

    def made(self: Any, stream: Any, *rest: Any) -> None:
        asked = fake_os.machine().attempts.first(request_of(stream))
        options = None if asked is None else asked.output_options
        wanted = options is not None and (options.logprobs, options.prompt_logprobs) != (None, None)
        init(self, _Sender(stream, asked) if wanted else stream, *rest)

    return made


class Entries:
    """What the choices of one answer have of log probabilities."""

    def __init__(self) -> None:
        self._count = 0
        self._nulls = 0
        self._bytes: dict[int, list[int]] = {}
        self._texts: dict[int, str] = {}

    def add(self, choice: Mapping[str, Any], text: str) -> None:
        """Take a part of a choice, whose content is ``text``."""
        index, found = choice["index"], choice.get("logprobs")
        self._texts[index] = self._texts.get(index, "") + text
        if found is None:
            return
        if "content" in found:
            entries = found["content"] or ()
            self._count += len(entries)
            for one in entries:
                self._bytes.setdefault(index, []).extend(one["bytes"])
        else:
            self._count += len(found["tokens"])
            self._nulls += found["token_logprobs"].count(None)

    def check(self, record: Request, body: Mapping[str, Any]) -> Iterator[str]:
        """Yield what is wrong with those of a whole answer."""
        failed = any(event.kind == "error" for event in record.events)
        usage = next((one.usage for one in record.events if one.usage), None)
        if record.ending != "complete" or record.status != 200 or failed or usage is None:
            return
        wanted = 0
        if record.api in ("chat", "completions") and body.get("logprobs") not in (None, False):
            wanted = usage[1] + (usage[0] if body.get("echo") else 0)
        if self._count != wanted:
            yield f"{self._count} entries of logprobs, {wanted} tokens"
        if wanted and self._nulls != (record.choices if body.get("echo") else 0):
            yield f"{self._nulls} tokens without log probability"  # the first of a prompt has none
        for index, found in self._bytes.items() if "stop" not in body else ():
            if bytes(found).decode(errors="replace") != self._texts[index]:
                yield f"logprobs of {bytes(found)!r} beside the text {self._texts[index]!r}"
