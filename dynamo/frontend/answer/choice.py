"""One choice of an answer: engine outputs in, text out, and when it is over."""

from __future__ import annotations

from dynamo.errors import EngineFailure
from dynamo.frontend.answer.detokenizer import Detokenizer
from dynamo.frontend.answer.logprobs import LogprobsCollector
from dynamo.frontend.answer.stops import StopMatcher, StopStrings
from dynamo.protocols.engine import CompletionUsage, EngineOutput, StopConditions

__all__ = ["Choice", "StopRules"]

_FINISH_REASONS = {
    "eos": "stop",
    "stop": "stop",
    "cancelled": "stop",
    "length": "length",
    "content_filter": "content_filter",
    "tool_calls": "tool_calls",
}
_ERROR = "error"
_NO_IDS: frozenset[int] = frozenset()


class StopRules:
    """What ends the choices of a request; made once and shared by all of them.

    ``hidden`` are the stop ids that are not shown, ``stop_ids`` all, ``strings`` the stop strings,
    of which ``include_string`` leaves the one found in the text.
    """

    __slots__ = ("hidden", "include_string", "min_tokens", "stop_ids", "strings")

    def __init__(self, conditions: StopConditions, include_string: bool = False) -> None:
        hidden, shown = conditions.stop_token_ids_hidden, conditions.stop_token_ids
        self.hidden = frozenset(hidden) if hidden else _NO_IDS
        self.stop_ids = self.hidden.union(shown) if shown else self.hidden
        self.min_tokens = conditions.min_tokens or 0
        self.strings = StopStrings(conditions.stop) if conditions.stop else None
        self.include_string = include_string


class Choice:
    """``pending`` are the texts not yet written (none of them empty), ``tokens`` the number
    generated, ``finish_reason`` (OpenAI's) is None until the end, ``usage`` the engine's counts.
    """

    __slots__ = (
        "_detokenizer",
        "_hidden",
        "_min_tokens",
        "_stop_ids",
        "_stops",
        "finish_reason",
        "logprobs",
        "pending",
        "stop_reason",
        "tokens",
        "usage",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        rules: StopRules,
        logprobs: LogprobsCollector | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._hidden = rules.hidden
        self._stop_ids = rules.stop_ids
        self._min_tokens = rules.min_tokens
        strings = rules.strings
        self._stops = None if strings is None else StopMatcher(strings, rules.include_string)
        self.logprobs = logprobs
        self.pending: list[str] = []
        self.tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.usage: CompletionUsage | None = None

    def push(self, output: EngineOutput) -> None:
        """Take one engine output. After the end, nothing. Raises EngineFailure for its error."""
        if self.finish_reason is not None:
            return
        ids = output.token_ids
        reason = output.finish_reason
        if reason is not None and reason.startswith(_ERROR):
            raise EngineFailure(reason.removeprefix(_ERROR).lstrip(": ") or "engine error")
        count = len(ids)
        stop_id: int | None = None
        shown = ids
        if self._stop_ids and not self._stop_ids.isdisjoint(ids):
            shown, count, stop_id = self._cut(ids)
        self.tokens += count
        text = output.text
        if text is None:
            text = self._detokenizer.push(shown)
        if output.completion_usage is not None:
            self.usage = output.completion_usage
        if self.logprobs is not None and output.log_probs:
            self.logprobs.add(output, count)
        if self._stops is not None:
            text = self._match(text)
        if text:
            self.pending.append(text)
        if self.finish_reason is not None:
            return
        if stop_id is not None:
            self.stop_reason = None if stop_id in self._hidden else stop_id
            self._finish("stop")
        elif reason is not None:
            self.stop_reason = output.stop_reason
            self._finish(_FINISH_REASONS.get(reason, reason))

    def close(self) -> None:
        """The engine's stream has ended: show what was held back. Idempotent."""
        if self.finish_reason is None:
            self._release()

    def take(self) -> str:
        """The text since the last call."""
        text = "".join(self.pending)
        self.pending.clear()
        return text

    def _cut(self, ids: list[int]) -> tuple[list[int], int, int | None]:
        """Ids to show, how many count, and the stop id, when ``ids`` may hold one."""
        for place, token_id in enumerate(ids):
            if token_id in self._stop_ids and self.tokens + place >= self._min_tokens:
                return ids[: place + (token_id not in self._hidden)], place + 1, token_id
        return ids, len(ids), None

    def _match(self, text: str) -> str:
        stops = self._stops
        if stops is None or self.tokens <= self._min_tokens:
            return text
        text = stops.push(text)
        if stops.hit is not None:
            self.stop_reason = stops.hit
            self.finish_reason = "stop"
        return text

    def _finish(self, reason: str) -> None:
        self._release()
        self.finish_reason = self.finish_reason or reason

    def _release(self) -> None:
        text = self._detokenizer.finish()
        if self._stops is not None:
            text = self._match(text)
            if self._stops.hit is None:
                text += self._stops.finish()
        if text:
            self.pending.append(text)
