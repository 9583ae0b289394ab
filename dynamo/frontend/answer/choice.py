"""One choice of an answer: engine outputs in, text out, until a reason to finish."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import msgspec

from dynamo.errors import EngineFailure
from dynamo.frontend.answer.logprobs import LogprobsCollector
from dynamo.frontend.text.detokenizer import TableDetokenizer, make_detokenizer
from dynamo.frontend.text.tokenizer import Tokenizer
from dynamo.protocols.engine import CompletionUsage, EngineOutput, StopConditions
from dynamo.protocols.openai import GenerationRequest

_FINISH_REASONS = {
    "eos": "stop",
    "stop": "stop",
    "cancelled": "stop",
    "length": "length",
    "content_filter": "content_filter",
    "tool_calls": "tool_calls",
}
_ERROR = "error"
_STOP = "stop"
_NO_EDGE = 0xFFFFFFFF


class StopStrings:
    """The automaton (Aho-Corasick) of a request's stop strings. None of them is empty.

    Text that may be the beginning of a stop string is held back; all other text passes at once. The
    result does not depend on how the text is cut: the stop string that is complete first wins, and
    of several that end at the same character the longest. O(1) a character, for any number of stop
    strings. Immutable and shared by all choices; each keeps one state and the text held back.

    A state is a prefix of a stop string, 0 the empty one; ``depths[state]`` is its length in
    characters, ``hits[state]`` one more than the index in ``strings`` of the stop string that ends
    there, or 0. ``first`` are the first characters of all stop strings.
    Takes at most 24 bytes a character. O(characters).
    """

    __slots__ = ("_branches", "_edges", "_fails", "depths", "first", "hits", "strings")

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(dict.fromkeys(strings))
        self.first = frozenset([string[0] for string in self.strings])
        self.depths = array("I", (0,))
        self.hits = array("H", (0,))
        # Most states have one successor, the next number, by the character in _edges: no dict an
        # entry. Other successors, at most one for each stop string, are in _branches.
        self._edges = array("I", (_NO_EDGE,))
        self._branches: dict[tuple[int, int], int] = {}
        for number, string in enumerate(self.strings, 1):
            self._insert(string, number)
        self._fails = array("I", bytes(4 * len(self._edges)))
        self._link()

    def step(self, state: int, code: int) -> int:
        """Return the state after the character with this code point. Amortized O(1): each turn of
        the loop shortens the prefix, which grows by one a character."""
        edges, branches = self._edges, self._branches
        while True:
            if edges[state] == code:
                return state + 1
            successor = branches.get((state, code))
            if successor is not None:
                return successor
            if not state:
                return 0
            state = self._fails[state]

    def _insert(self, string: str, hit: int) -> None:
        state = depth = 0
        edges, branches = self._edges, self._branches
        codes = array("I", map(ord, string))
        # Share the states of the longest beginning that other stop strings have, too.
        for code in codes:
            successor = state + 1 if edges[state] == code else branches.get((state, code))
            if successor is None:
                break
            state, depth = successor, depth + 1
        tail = codes[depth:]
        if tail:
            head = len(edges)
            # An edge leads to the next number, so only from the newest state; others branch.
            if head == state + 1:
                edges[state] = tail[0]
            else:
                branches[state, tail[0]] = head
            edges.extend(tail[1:])
            edges.append(_NO_EDGE)
            self.depths.extend(range(depth + 1, len(codes) + 1))
            self.hits.frombytes(bytes(2 * len(tail)))
            state = len(edges) - 1
        self.hits[state] = hit

    def _link(self) -> None:
        """Set ``_fails`` of each state: its longest suffix that is a state too."""
        edges, fails, hits = self._edges, self._fails, self.hits
        first = {ord(char) for char in self.first}
        heads = {head: origin for origin, head in self._branches.items()}
        # By depth: step() from the parent's fail uses the fails of shorter states.
        for state in sorted(range(1, len(edges)), key=self.depths.__getitem__):
            head = heads.get(state)
            parent, code = (state - 1, edges[state - 1]) if head is None else head
            fail = fails[parent]
            if parent and (fail or code in first):
                fail = fails[state] = self.step(fail, code)
                # A shorter stop string may end here too; the longest wins.
                hits[state] = hits[state] or hits[fail]


class StopMatcher:
    """The search in one stream. ``hit`` is the stop string found, None before."""

    __slots__ = ("_held", "_include", "_state", "_stops", "hit")

    def __init__(self, stops: StopStrings, include: bool = False) -> None:
        """``include`` shows the stop string."""
        self._stops = stops
        self._include = include
        self._held = ""
        self._state = 0
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Return the text that can be shown now; after a hit, nothing. O(characters)."""
        if self.hit is not None:
            return ""
        stops, state = self._stops, self._state
        if not state and stops.first.isdisjoint(text):
            return text  # the common case, without a loop in Python
        step, hits = stops.step, stops.hits
        for end, char in enumerate(text, 1):
            state = step(state, ord(char))
            if hits[state]:
                hit = self.hit = stops.strings[hits[state] - 1]
                text, self._held = self._held + text[:end], ""
                return text if self._include else text[: len(text) - len(hit)]
        self._state = state
        text = self._held + text
        # The last ``depths`` characters may begin a stop string, none before them can.
        safe = len(text) - stops.depths[state]
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """Return the text held back, at the end of the stream."""
        text, self._held = self._held, ""
        self._state = 0
        return text


class ChoiceRules:
    """What the choices of a request share; made once, because the automaton may be large.

    ``stop_ids`` end a choice, ``eos_ids`` among them without a stop reason; ``strings`` are the
    stop strings. ``include_stop`` shows the string or token that ended the choice, ``prompt_only``
    nothing that is generated.
    """

    __slots__ = (
        "eos_ids", "include_stop", "min_tokens", "prompt_only", "skip_special", "stop_ids",
        "strings",
    )  # fmt: skip

    def __init__(self, request: GenerationRequest, conditions: StopConditions) -> None:
        eos, others = conditions.stop_token_ids_hidden, conditions.stop_token_ids
        self.eos_ids = frozenset(eos or ())
        self.stop_ids = self.eos_ids.union(others) if others else self.eos_ids
        # Not that of the conditions, which the context limits: they are those of one prompt.
        self.min_tokens = request.min_tokens or 0
        self.strings = StopStrings(conditions.stop) if conditions.stop else None
        self.include_stop = request.include_stop_str_in_output is True
        self.skip_special = request.skip_special_tokens is not False
        self.prompt_only = request.max_tokens == 0


class Choice:
    """One choice of an answer, as far as its engine has sent it.

    ``pending`` are the texts not yet written (none of them empty), ``tokens`` the number generated,
    ``stop_ids`` those that may end it. ``finish_reason`` (OpenAI's) is None until the end,
    ``usage`` the engine's counts. ``prompt_output`` of the tokens are in the engine's prompt: an
    earlier one generated them.
    """

    __slots__ = (
        "_detokenizer", "_one_by_one", "_rules", "_stops", "finish_reason", "logprobs",
        "pending", "prompt_output", "stop_ids", "stop_reason", "tokens", "usage",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer,
        rules: ChoiceRules,
        logprobs: LogprobsCollector | None = None,
    ) -> None:
        self._detokenizer = make_detokenizer(tokenizer, rules.skip_special)
        self._rules = rules
        self.stop_ids = rules.stop_ids
        self._stops: StopMatcher | None = None
        # The counts end with the token that completes a stop string, not with its output.
        self._one_by_one = rules.strings is not None
        if rules.strings is not None:
            self._stops = StopMatcher(rules.strings, rules.include_stop)
        self.logprobs = logprobs
        self.pending: list[str] = []
        self.tokens = 0
        self.prompt_output = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.usage: CompletionUsage | None = None

    def push(self, output: EngineOutput) -> bool:
        """Add one engine output; return whether the choice is finished, then outputs are ignored.

        Raises EngineFailure for an error in the output.
        """
        if self.finish_reason is not None:
            return True
        ids, reason = output.token_ids, output.finish_reason
        if reason is not None and reason.startswith(_ERROR):
            raise EngineFailure(reason.removeprefix(_ERROR).lstrip(": ") or "engine error")
        count = len(ids)
        if count > 1 and self._one_by_one and output.text is None:
            # any() stops at the token that ends the choice.
            return any(map(self.push, _single_tokens(output)))
        stop_id: int | None = None
        # isdisjoint runs in C: an output without a stop id, as most are, costs no loop.
        if self.stop_ids and not self.stop_ids.isdisjoint(ids):
            ids, count, stop_id = self._cut(ids)
            reason = reason if stop_id is None else _STOP
        self.tokens += count
        text = output.text if output.text is not None else self._detokenizer.push(ids)
        self.usage = output.completion_usage or self.usage
        if self.logprobs is not None:
            self.logprobs.add(output, count)
        if self._stops is not None:
            text = self._match(self._stops, text)
        if text:
            self.pending.append(text)
        if reason is None or self.finish_reason is not None:  # a stop string found wins
            return self.finish_reason is not None
        self.stop_reason = (
            output.stop_reason
            if stop_id is None
            else (None if stop_id in self._rules.eos_ids else stop_id)
        )
        self._release()
        self.finish_reason = _FINISH_REASONS.get(reason, reason)
        return True

    def plain_texts(self) -> list[str | None] | None:
        """The text of each token while :meth:`push` adds just that to ``pending``; else None.

        Tokens without a text and ``stop_ids`` are for :meth:`push`. The others may be added to
        ``pending`` and reported to :meth:`count`.
        """
        detokenizer = self._detokenizer
        if (
            self.finish_reason is not None
            or self._stops is not None
            or self.logprobs is not None
            or not isinstance(detokenizer, TableDetokenizer)
        ):
            return None
        return detokenizer.texts

    def count(self, ids: list[int]) -> None:
        """Count the tokens ``ids``, whose texts are in ``pending``."""
        self.tokens += len(ids)

    def echo(self, text: str) -> None:
        """Show ``text`` before the generated text."""
        self.pending.append(text)

    def continued(self) -> None:
        """Another worker goes on, with the tokens so far in its prompt; its counts include them."""
        self.prompt_output = self.tokens
        self.usage = None

    def close(self) -> None:
        """Show the text held back when the engine's stream ends. Idempotent."""
        if self.finish_reason is None:
            self._release()

    def _cut(self, ids: list[int]) -> tuple[list[int], int, int | None]:
        """Ids to show, how many count, and the stop id, when ``ids`` may hold one."""
        rules = self._rules
        for index, token_id in enumerate(ids):
            if token_id in rules.stop_ids and self.tokens + index >= rules.min_tokens:
                return ids[: index + rules.include_stop], index + 1, token_id
        return ids, len(ids), None

    def _match(self, stops: StopMatcher, text: str) -> str:
        """The part of ``text`` that can be shown now, up to a stop string."""
        # Text of the first ``min_tokens`` is never searched, not even later: it is shown already.
        if self.tokens <= self._rules.min_tokens:
            return text
        text = stops.push(text)
        if stops.hit is not None:
            self.stop_reason = stops.hit
            self.finish_reason = "stop"
        return text

    def _release(self) -> None:
        """Show the beginning of a stop string that was held back."""
        if self._stops is not None and (text := self._stops.finish()):
            self.pending.append(text)


class PromptOnlyChoice(Choice):
    """A choice that shows its prompt alone: what the engine generates for it is dropped."""

    __slots__ = ()

    def push(self, output: EngineOutput) -> bool:
        """Add one engine output without its tokens; as in :class:`Choice`."""
        return super().push(
            msgspec.structs.replace(
                output, token_ids=[], text=None, log_probs=None, top_logprobs=None
            )
        )

    def plain_texts(self) -> None:
        """Return None: no token is shown."""


def _single_tokens(output: EngineOutput) -> Iterator[EngineOutput]:
    """The same as several outputs of one token; the last has the reason of the end."""
    logprobs, top = output.log_probs or (), output.top_logprobs or ()
    last = len(output.token_ids) - 1
    for index, token_id in enumerate(output.token_ids):
        yield EngineOutput(
            token_ids=[token_id],
            log_probs=list(logprobs[index : index + 1]),
            top_logprobs=list(top[index : index + 1]),
            finish_reason=output.finish_reason if index == last else None,
            stop_reason=output.stop_reason if index == last else None,
            completion_usage=output.completion_usage,
            # Facts of the prompt come once, with its first token.
            extra_args=None if index else output.extra_args,
        )
