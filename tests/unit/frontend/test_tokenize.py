"""Bodies of /tokenize and /detokenize, and their answers, compared with the libraries they name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from text_kit import example_preprocessor, example_reference

from dynamo.errors import InvalidArgument
from dynamo.frontend.apis.tokenize import (
    detokenized,
    parse_detokenize,
    parse_tokenize,
    tokenized,
)

TEXT = "Grüße, <|im_start|> 你好 😀 \n"
CHAT = [{"role": "user", "content": "Hello"}]


def ask(**body: Any) -> Any:
    asked = parse_tokenize(json.dumps(body).encode())
    return json.loads(tokenized(example_preprocessor(), asked))


def test_a_text() -> None:
    encoded = example_reference().encode(TEXT)
    found = ask(prompt=TEXT, return_token_strs=True)
    limit = example_preprocessor().context_length
    assert found == {
        "count": len(encoded.ids),
        "max_model_len": limit,
        "tokens": encoded.ids,
        "token_strs": encoded.tokens,
    }
    plain = example_reference().encode(TEXT, add_special_tokens=False).ids
    assert ask(prompt=TEXT, add_special_tokens=False)["tokens"] == plain
    assert ask(prompt=TEXT)["token_strs"] is None
    assert ask(prompt="", add_special_tokens=False)["count"] == 0


def test_a_text_longer_than_the_context() -> None:
    limit = example_preprocessor().context_length
    assert limit is not None and ask(prompt="a " * limit)["count"] > limit
    with pytest.raises(InvalidArgument, match="at most 1048576 tokens are counted"):
        ask(prompt="a " * (40 << 20))


def test_a_chat() -> None:
    template = example_preprocessor().template
    assert template is not None
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for body, options in (
        ({}, {}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"tools": tools}, {"tools": tools}),
        ({"continue_final_message": True}, {"continue_final_message": True}),
    ):
        text = template.render(CHAT, **options)
        expected = example_reference().encode(text, add_special_tokens=False).ids
        assert ask(messages=CHAT, **body)["tokens"] == expected
    text = template.render(CHAT, variables={"enable_thinking": False})
    found = ask(messages=CHAT, chat_template_kwargs={"enable_thinking": False})["tokens"]
    assert found == example_reference().encode(text, add_special_tokens=False).ids


def test_back_to_text() -> None:
    ids = ask(prompt=TEXT, add_special_tokens=False)["tokens"]
    asked = parse_detokenize(json.dumps({"model": "m", "tokens": ids}).encode())
    assert json.loads(detokenized(example_preprocessor(), asked)) == {"prompt": TEXT}
    none = parse_detokenize(b'{"tokens": []}')
    assert json.loads(detokenized(example_preprocessor(), none)) == {"prompt": ""}
    with pytest.raises(InvalidArgument, match="token id 4294967295 in 'tokens' is out of range"):
        detokenized(example_preprocessor(), parse_detokenize(b'{"tokens": [4294967295]}'))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "prompt"),
        ({"prompt": 3}, "prompt: expected"),
        ({"prompt": ["a"]}, "prompt: expected"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"messages": []}, "'messages' field cannot be empty"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\]: missing field `role`"),
        ({"messages": CHAT, "chat_template": "x"}, "'chat_template' of a request is not run"),
        ({"messages": CHAT, "mm_processor_kwargs": {}}, "mm_processor_kwargs"),
        (
            {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
            "exclude each other",
        ),
    ],
)
def test_faults_name_the_field(body: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        ask(**body)


@pytest.mark.parametrize("body", [b"[", b"{}", b'{"tokens": [-1]}', b'{"tokens": ["a"]}'])
def test_faults_of_token_ids(body: bytes) -> None:
    with pytest.raises(InvalidArgument, match="Failed to deserialize"):
        parse_detokenize(body)
