"""The text of answers that are sent again: every API, and servers that send anything."""

from __future__ import annotations

import json
from itertools import product

import pytest

from dynamo.cli.replay import answer_text


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"choices": [{"message": {"content": "a"}}, {"text": "b"}]}, "ab"),
        ({"choices": [{"delta": {"content": None}}]}, ""),
        ({"type": "response.output_text.delta", "delta": "a"}, "a"),
        ({"type": "response.completed", "output": [{"content": [{"text": "a"}]}]}, ""),
        ({"output": [{"content": [{"text": "a"}]}]}, "a"),
        ({"type": "content_block_delta", "delta": {"text": "a"}}, "a"),
        ({"type": "message", "content": [{"type": "text", "text": "a"}]}, "a"),
    ],
)
def test_each_form_of_answer(answer: object, text: str) -> None:
    assert answer_text(json.dumps(answer)) == text
    assert answer_text(f"data: {json.dumps(answer)}\n\ndata: [DONE]\n") == text


def test_answers_of_no_form() -> None:
    values = (None, 5, True, "t", {"a": 1}, [None, 5, {"message": 5, "delta": [1], "content": 5}])
    for key, value in product(("type", "choices", "delta", "output", "content"), values):
        assert answer_text(json.dumps({key: value})) == ""
