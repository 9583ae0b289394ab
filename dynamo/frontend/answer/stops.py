"""Stop strings in a text that arrives in pieces of any size.

Text that may be the beginning of a stop string is held back; all other text passes at once. The
result does not depend on how the text is cut: the stop string that is complete first wins, and of
several that end at the same character the longest.

The search is an Aho-Corasick automaton: linear in the characters of the stop strings to build,
O(1) a character to run, for any number of stop strings. It is immutable and shared by all choices
of a request; a choice keeps one state and the text held back.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

__all__ = ["StopMatcher", "StopStrings"]

_NO_EDGE = 0xFFFFFFFF


class StopStrings:
    """The automaton of a request's stop strings. None of them is empty.

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
            found = branches.get((state, code))
            if found is not None:
                return found
            if not state:
                return 0
            state = self._fails[state]

    def _insert(self, string: str, hit: int) -> None:
        state = depth = 0
        edges, branches = self._edges, self._branches
        codes = array("I", map(ord, string))
        for code in codes:
            known = state + 1 if edges[state] == code else branches.get((state, code))
            if known is None:
                break
            state, depth = known, depth + 1
        rest = codes[depth:]
        if rest:
            head = len(edges)
            if head == state + 1:
                edges[state] = rest[0]
            else:
                branches[state, rest[0]] = head
            edges.extend(rest[1:])
            edges.append(_NO_EDGE)
            self.depths.extend(range(depth + 1, len(codes) + 1))
            self.hits.frombytes(bytes(2 * len(rest)))
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
                return self._found(text[:end], stops.strings[hits[state] - 1])
        self._state = state
        text = self._held + text
        # The last ``depths`` characters may begin a stop string, none before them can.
        shown = len(text) - stops.depths[state]
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """Return the text held back, at the end of the stream."""
        held, self._held = self._held, ""
        self._state = 0
        return held

    def _found(self, text: str, hit: str) -> str:
        text = self._held + text
        self.hit, self._held = hit, ""
        return text if self._include else text[: len(text) - len(hit)]
