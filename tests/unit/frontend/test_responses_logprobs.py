"""Log probabilities of /v1/responses: those of a message are of its own tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from text_kit import card, outputs

from dynamo.frontend.apis.responses.answer import ResponsesStream
from dynamo.frontend.apis.responses.prompt import parse_response
from dynamo.frontend.prompt.preprocessor import Preprocessor
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import EngineOutput

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("per_output", [1, 3, 1000])
def test_a_message_has_the_tokens_of_its_text(streamed: bool, per_output: int) -> None:
    """Neither markup, reasoning nor calls before or behind it have a part in them."""
    config = RuntimeConfig(tool_call_parser="hermes", reasoning_parser="qwen3")
    model = Preprocessor(card(runtime_config=config))
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    fields = {"model": "m", "input": "hi", "tools": tools, "top_logprobs": 0, "stream": streamed}
    fields["include"] = ["message.output_text.logprobs"]
    request = parse_response(json.dumps(fields).encode())
    request.add_history([])
    stream = ResponsesStream(request, model.chat(request), model.tokenizer, "resp", 17)
    text = f"<think>Hm.</think>Look here. {CALL}Done with it. {CALL} End"
    ids = [token for each in outputs(text, "stop") for token in each.token_ids]
    raw = b""
    for place in range(0, len(ids), per_output):
        part = ids[place : place + per_output]
        stream.choices[0].push(EngineOutput(token_ids=part, log_probs=[-0.5] * len(part)))
        raw += stream.flush() if streamed else b""
    stream.choices[0].push(EngineOutput(token_ids=[], finish_reason="stop"))
    items: Any
    if streamed:
        last = (raw + stream.end()).split(b"data: ")[-2].partition(b"\n\n")[0]
        items = json.loads(last)["response"]["output"]
    else:
        items = json.loads(stream.unary())["output"]
    parts = [item["content"][0] for item in items if item["type"] == "message"]
    assert [part["text"].strip() for part in parts] == ["Look here.", "Done with it.", "End"]
    for part in parts:
        shown = "".join(each["token"] for each in part["logprobs"])
        assert part["text"].strip() in shown
        assert "tool" not in shown and "think" not in shown and "name" not in shown
        assert len(shown) <= len(part["text"]) + 3, "a token of text may have a part of a tag"
