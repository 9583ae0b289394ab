"""Every API gives the answer of token by token, however the tokens arrive.

``DYN_TEST_ANSWERS=1000`` drives that many answers of each case instead of a few.
"""

from __future__ import annotations

import os
import random
from typing import Any, NamedTuple

import pytest
from answer_cases import TOOLS
from answer_driver import APIS, Answer, Cuts, DrivenSite, drive, make_outputs
from test_request import turn

ROUNDS = int(os.environ.get("DYN_TEST_ANSWERS", "4"))


class Given(NamedTuple):
    """What the model says, its formats, and the request in the fields of OpenAI's chat.

    Of a ``broken`` text every third token is missing, so that characters are cut.
    """

    text: str
    tool: str | None = None
    reasoning: str | None = None
    fields: dict[str, Any] = {}  # noqa: RUF012 - never changed
    broken: bool = False

    def ids(self, site: DrivenSite) -> list[int]:
        """The tokens that the model generates."""
        ids = site.ids(self.text)
        return [each for place, each in enumerate(ids) if place % 3 or not self.broken]


ARGUMENTS = '{"city": "Köln 😀", "days": [1]}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
GIVEN = {
    "text": Given("Hello 😀 wörld 你好, " * 6),
    "broken": Given("你好 a 😀 b 你 c 好 d 😀😀 e" * 4, broken=True),
    "calls": Given(f"I look.\n{CALL}\n{CALL}\nand then", "hermes"),
    "calls alone": Given(f"{CALL}{CALL}", "hermes"),
    "reasoning": Given(f"<think>\nHm 😀, so\n</think>\n\nLet me look. {CALL}", "hermes", "qwen3"),
    "reasoning cut": Given("<think>\nHm, so so so", None, "qwen3"),
    "arguments cut": Given(f"ok {CALL[:70]}", "hermes"),
    "a string of arguments": Given(
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud83d\\ude00\\"}"}</tool_call>',
        "hermes",
    ),
    "text in a call": Given(
        "I look. <tool_call><function=get_weather>\nwell <parameter=city>Paris</parameter> so 😀\n"
        "<parameter=days>3</parameter></function></tool_call> and then",
        "qwen3_coder",
    ),
    "stop": Given("one two three four END five six", fields={"stop": ["END", "six"]}),
    "stop in a part": Given("one two thEN EN ENENDfive", fields={"stop": ["END"]}),
    "min_tokens": Given(
        "one END two END three END four", fields={"stop": ["END"], "min_tokens": 5}
    ),
    "logprobs": Given("Hello 😀 wörld 你好, so", fields={"logprobs": True}),
    "logprobs and stop": Given("Hello 😀 wörld END so", fields={"logprobs": True, "stop": ["END"]}),
}


UNKNOWN: dict[str, set[str]] = {
    "chat": set(),
    "completions": set(),
    "responses": {"stop", "min_tokens"},
    "messages": {"logprobs", "min_tokens"},
}
FUNCTIONS = [one["function"] for one in TOOLS]
TOOLS_OF: dict[str, Any] = {
    "chat": TOOLS,
    "responses": [{"type": "function", **one} for one in FUNCTIONS],
    "messages": [
        {"name": one["name"], "input_schema": {"type": "object", **one.get("parameters", {})}}
        for one in FUNCTIONS
    ],
}


def request(api: str, given: Given) -> dict[str, Any] | None:
    """The fields of ``given`` in the words of ``api``; None if it has no words for them."""
    fields = dict(given.fields)
    if not UNKNOWN[api].isdisjoint(fields) or (
        api == "completions" and (given.tool or given.reasoning)
    ):
        return None
    if given.tool is not None:
        fields["tools"] = TOOLS_OF[api]
    if api == "completions" and "logprobs" in fields:
        fields["logprobs"] = 1
    if api == "responses" and fields.pop("logprobs", None):
        fields |= {"top_logprobs": 1, "include": ["message.output_text.logprobs"]}
    if api == "messages" and "stop" in fields:
        fields["stop_sequences"] = fields.pop("stop")
    return fields


CASES = [
    pytest.param(api, name, id=f"{api}: {name}")
    for api in APIS
    for name, given in GIVEN.items()
    if request(api, given) is not None
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("api", "name"), CASES)
async def test_no_answer_depends_on_how_its_tokens_arrive(
    api: str, name: str, stream: bool
) -> None:
    given = GIVEN[name]
    fields = request(api, given)
    assert fields is not None
    site = DrivenSite(given.tool, given.reasoning)
    ids = given.ids(site)

    async def answer(cuts: Cuts) -> Answer:
        return await drive(site, api, ids, cuts, stream=stream, **fields)

    expected = await answer(Cuts())
    for seed in range(ROUNDS):
        assert await answer(Cuts(random.Random(f"{name} {seed}"))) == expected, seed
    site.settled()


@pytest.mark.parametrize(("api", "name"), CASES)
async def test_a_body_is_what_its_stream_is(api: str, name: str) -> None:
    given = GIVEN[name]
    fields = request(api, given)
    assert fields is not None
    site = DrivenSite(given.tool, given.reasoning)
    ids = given.ids(site)
    streamed = await drive(site, api, ids, Cuts(), stream=True, **fields)
    assert await drive(site, api, ids, Cuts(), stream=False, **fields) == streamed


async def test_a_token_behind_half_a_character_of_the_read_before() -> None:
    """The compiled sink takes no token while a character is cut."""
    site = DrivenSite()
    site.ask("chat", stream=True)
    whole, plain = site.ids("😀"), site.ids(" a")
    assert len(whole) > 1
    outputs = make_outputs([*whole, whole[0], *plain, *plain], Cuts())
    frames = site.frames(outputs)
    cut = len(whole) + 1
    for read in (frames[:cut], frames[cut:]):
        site.worker.data_received(b"".join(read))
        await turn()
    text = "".join(part["choices"][0]["delta"].get("content", "") for part in site.events[:-2])
    assert text == "😀\ufffd a a"
    site.settled()
