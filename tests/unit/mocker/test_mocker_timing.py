"""The timing model and the replies of the simulated engine."""

from __future__ import annotations

from itertools import islice

import pytest

from dynamo.mocker.replies import echo_reply, random_reply, sequence_reply
from dynamo.mocker.timing import Timing
from dynamo.protocols.codec import tokens
from dynamo.protocols.engine import StopConditions


def test_the_polynomial() -> None:
    assert Timing().iteration_s(12, 0, 0.0) == pytest.approx(0.01668, abs=1e-4)
    assert Timing().iteration_s(0, 5, 0.0) == pytest.approx(0.00574)
    assert Timing().iteration_s(0, 5, 7.0) == Timing().iteration_s(0, 5, 1.0)
    assert Timing().iteration_s(0, 0, 0.5) == 0.0


def test_speed_ups() -> None:
    slow = Timing().iteration_s(100, 3, 0.2)
    assert Timing(speedup=10).iteration_s(100, 3, 0.2) == pytest.approx(slow / 10)
    assert Timing(speedup=0).iteration_s(100, 3, 0.2) == 0.0
    assert Timing(decode_speedup=2).iteration_s(0, 3, 0.2) == pytest.approx(
        Timing().iteration_s(0, 3, 0.2) / 2
    )


def test_random_replies_repeat_with_their_seed() -> None:
    one, two, other = (list(islice(random_reply(100, seed).ids, 100)) for seed in (7, 7, 8))
    assert one == two != other
    assert all(1000 <= token < 2000 for token in one)
    assert random_reply(5).finish_reason == "length"


def test_echo_returns_the_prompt_and_stops() -> None:
    whole = echo_reply(tokens([5, 6, 7]), 10)
    assert (list(whole.ids), whole.length, whole.finish_reason) == ([5, 6, 7], 3, "stop")
    cut = echo_reply(tokens([5, 6, 7]), 2)
    assert (list(cut.ids), cut.length, cut.finish_reason) == ([5, 6], 2, "length")


@pytest.mark.parametrize(
    ("prompt", "hidden", "shown", "limit", "expected", "reason"),
    [
        ([5, 6, 2, 8], [2], None, 10, [5, 6, 2], "stop"),
        ([5, 2, 6, 7, 2, 8, 9], [2], None, 10, [6, 7, 2], "stop"),
        ([5, 2, 6, 7, 3, 8, 9], [2, 3], None, 10, [6, 7, 3], "stop"),
        ([5, 2, 6, 7, 2, 8, 9], [2], None, 2, [6, 7], "length"),
        ([5, 6, 2], [2], None, 3, [5, 6, 2], "stop"),
        ([2, 2, 9], [2], None, 10, [2], "stop"),
        ([2, 9], [2], None, 10, [2], "stop"),
        ([5, 6, 7], [2], [6, 7], 10, [5, 6], "stop"),
        ([5, 6, 7], None, [9], 10, [5, 6, 7], "stop"),
        ([5, 6, 7], [], [7], 2, [5, 6], "length"),
    ],
)
def test_echo_of_a_conversation_is_its_last_turn(
    prompt: list[int],
    hidden: list[int] | None,
    shown: list[int] | None,
    limit: int,
    expected: list[int],
    reason: str,
) -> None:
    stops = StopConditions(stop_token_ids=shown, stop_token_ids_hidden=hidden)
    reply = echo_reply(tokens(prompt), limit, stops)
    assert (list(reply.ids), reply.length, reply.finish_reason) == (expected, len(expected), reason)


@pytest.mark.parametrize("begun", [[], [20], [20, 21], [20, 21, 22]])
@pytest.mark.parametrize("system", [[], [90, 91, 94, 30, 2, 94]])
@pytest.mark.parametrize("after_name", [[94], [93, 94]])
def test_echo_of_a_chat_is_its_content(
    begun: list[int], system: list[int], after_name: list[int]
) -> None:
    """90 begins a turn, 94 is a line break; ``begun`` is what another worker sent of the reply."""
    name, content = [90, 92, *after_name], [20, 21, 22, 2]
    prompt = [*system, *name, *content, 94, 90, 95, 96, *after_name, *begun]
    stops = StopConditions(stop_token_ids_hidden=[2])
    assert list(echo_reply(tokens(prompt), 10, stops).ids) == content[len(begun) :]
    other = [*prompt[: len(prompt) - len(begun)], 77]  # the begin of an answer that is no echo
    assert list(echo_reply(tokens(other), 10, stops).ids) == content


@pytest.mark.parametrize("seed", [None, 7])
def test_a_sequence_goes_on_from_any_of_its_tokens(seed: int | None) -> None:
    prompt = [5, 70_000, 2**32 - 1]
    whole = list(islice(sequence_reply(tokens(prompt), 200, seed).ids, 200))
    assert all(1000 <= token < 2000 for token in whole) and len(set(whole)) > 100
    for cut in (1, 2, 99):
        rest = sequence_reply(tokens(prompt + whole[:cut]), 200 - cut, seed)
        assert list(islice(rest.ids, 200 - cut)) == whole[cut:]
    for changed in (whole[1:9], whole[:4] + whole[5:9], [*whole[:3], whole[4], whole[3]]):
        rest = sequence_reply(tokens(prompt + changed), 9, seed)
        assert list(islice(rest.ids, 9)) != whole[len(changed) : len(changed) + 9]
    other = sequence_reply(tokens(prompt), 200, 8)
    assert list(islice(other.ids, 200)) != whole
