"""Stop strings are found for any cutting of the text, and no more is held back than needed."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.stops import cut_at_stop

from dynamo.frontend.answer.choice import StopMatcher, StopStrings

letters = st.text("ab\U0001f600", max_size=40)
stop_lists = st.lists(st.text("ab\U0001f600", min_size=1, max_size=9), min_size=1, max_size=9)


def stream(matcher: StopMatcher, text: str, sizes: list[int]) -> str:
    shown, start, turn = "", 0, 0
    while start < len(text):
        size = sizes[turn % len(sizes)]
        shown += matcher.push(text[start : start + size])
        start, turn = start + size, turn + 1
    return shown


@settings(max_examples=400)
@given(letters, stop_lists, st.lists(st.integers(1, 5), min_size=1), st.booleans())
def test_agrees_with_the_reference(
    text: str, stops: list[str], sizes: list[int], include: bool
) -> None:
    matcher = StopMatcher(StopStrings(stops), include)
    shown = stream(matcher, text, sizes)
    held = matcher.finish()
    assert (shown + held, matcher.hit) == cut_at_stop(text, stops, include)
    assert held == "" or any(stop.startswith(held) for stop in stops)


@given(letters, stop_lists)
def test_holds_back_as_little_as_possible(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    shown = stream(matcher, text, [1])
    if matcher.hit is None:
        held = text[len(shown) :]
        longest = max(
            (end for stop in stops for end in range(len(stop)) if text.endswith(stop[:end])),
        )
        assert len(held) == longest


def test_nothing_after_a_hit() -> None:
    matcher = StopMatcher(StopStrings(["END"]))
    assert [matcher.push("a E"), matcher.push("ND b"), matcher.push("c")] == ["a ", "", ""]
    assert (matcher.hit, matcher.finish()) == ("END", "")


def test_the_automaton_is_linear_in_the_stop_strings() -> None:
    rng = random.Random(5)
    longest = "".join(rng.choices("ab", k=512))
    strings = [longest[:end] + "c" for end in range(1, 512, 16)]
    stops = StopStrings([*strings, *strings])
    assert len(stops.depths) <= 1 + len(longest) + len(strings)
    assert len(StopStrings(["x" * 512]).depths) == 513
    matcher = StopMatcher(stops)
    assert matcher.push(longest[:400]) + matcher.finish() == longest[:400]
    assert matcher.push("b" + strings[9]) == "b" and matcher.hit == strings[9]
