"""Measure one request and one token in the modules that handle text, in microseconds.

python benchmarks/micro/bench_text.py
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import tokenizers

from dynamo.frontend.answer.completions import ChatStream
from dynamo.frontend.answer.events import ParsedChatStream
from dynamo.frontend.answer.logprobs import ChatLogprobs
from dynamo.frontend.prompt.preprocessor import Prepared, Preprocessor
from dynamo.frontend.prompt.validation import parse_chat
from dynamo.frontend.text.tokenizer import Tokenizer
from dynamo.protocols import codec
from dynamo.protocols.control import ModelCard, RuntimeConfig
from dynamo.protocols.engine import CompletionUsage, EngineOutput, PromptTokensDetails
from dynamo.protocols.openai import ChatCompletionRequest

MODEL = Path(__file__).parents[2] / "examples" / "model"
FRESH = 128
ROUNDS = 25


def main() -> None:
    """One table."""
    card = ModelCard("m", "m", str(MODEL), "n", "c", "e", 1)
    preprocessor = Preprocessor(card)
    sys.stdout.write(f"{'case':48}{'µs':>10}\n")
    requests(preprocessor)
    tokenizing(preprocessor)
    streaming(preprocessor)
    formats()


def requests(preprocessor: Preprocessor) -> None:
    """From the body to what the engine is sent, 60 words, prompts never repeated."""
    bodies = [_body(60, seed) for seed in range(FRESH)]
    parsed = [parse_chat(body) for body in bodies]
    prepared = [preprocessor.chat(each) for each in parsed]
    render = preprocessor.template.render if preprocessor.template is not None else None
    assert render is not None
    _row("decode and validate, 60 words", parse_chat, bodies)
    _row("render the chat template", lambda each: render(each.messages), parsed)
    _row("prepare (template, tokens, engine request)", preprocessor.chat, parsed)
    _row("encode the engine request", lambda each: codec.encode(each.requests[0]), prepared)


def tokenizing(preprocessor: Preprocessor) -> None:
    """Prompts never seen before; beside them `tokenizers`."""
    reference = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    for words in (60, 800, 21_500):
        count = FRESH if words < 1000 else 8
        # Fresh words in each round, or the segment cache would answer.
        texts = [_words(words, seed) for seed in range(count * ROUNDS)]
        tokens = len(preprocessor.tokenizer.encode(_words(words, -1)))
        name = f"tokenize {words} words, {tokens} tokens"
        _row(name, preprocessor.tokenizer.encode, texts, once=True)
        _row("  the same again", preprocessor.tokenizer.encode, texts[:8])
        _row("  with `tokenizers`", reference.encode, texts[:8])


def streaming(preprocessor: Preprocessor) -> None:
    """From engine outputs to bytes for the client."""
    request = parse_chat(_body(60, 0))
    prepared = preprocessor.chat(request)
    token = EngineOutput(token_ids=[1500])
    usage = CompletionUsage(80, 1, 81, PromptTokensDetails(64))
    last = EngineOutput(token_ids=[1500], finish_reason="length", completion_usage=usage)
    top = [{"token_id": 1200 + rank, "logprob": -1.0 * rank} for rank in range(5)]
    scored = EngineOutput(token_ids=[1500], log_probs=[-0.1], top_logprobs=[top])
    collector = ChatLogprobs(preprocessor.tokenizer, len(top))
    raw = codec.encode(token)
    decode = codec.decoder(EngineOutput).decode

    def make(each: ChatCompletionRequest = request) -> ChatStream:
        return ChatStream(each, prepared, preprocessor.tokenizer, "chatcmpl-" + "0" * 36, 1)

    stream, merged = make(), make()
    stopping = make(parse_chat(_body(60, 0, stop=["STOP", "\n\nUser:"])))

    def write(answer: ChatStream) -> bytes:
        answer.choices[0].push(token)
        return answer.flush()

    for each in (stream, merged, stopping):
        write(each)

    def five(_: EngineOutput) -> bytes:
        for _turn in range(5):
            merged.choices[0].push(token)
        return merged.flush()

    def unary(_: EngineOutput) -> bytes:
        answer = make()
        answer.choices[0].push(last)
        return answer.unary()

    def likeliest(_: EngineOutput) -> object:
        collector.add(scored, 1)
        return collector.drain()

    many = [token] * 2000
    _row("decode one engine output", decode, [raw] * 2000)
    _row("detokenize and write one token as SSE", lambda _: write(stream), many)
    _row("  with stop strings", lambda _: write(stopping), many)
    _row("  five tokens in one chunk", five, many)
    _row("the five likeliest of one token", likeliest, many)
    _row("make a stream", lambda _: make(), many)
    _row("make a stream, one token, unary body", unary, many)


def formats() -> None:
    """Requests whose answers are parsed: prepare one, and make its stream."""
    function = {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}
    tools = [{"type": "function", "function": function}]
    for name, config, fields in (
        ("reasoning", RuntimeConfig(reasoning_parser="qwen3"), {}),
        ("reasoning, n=4", RuntimeConfig(reasoning_parser="qwen3"), {"n": 4}),
        ("one tool", RuntimeConfig(tool_call_parser="hermes"), {"tools": tools}),
    ):
        card = ModelCard("m", "m", str(MODEL), "n", "c", "e", 1, runtime_config=config)
        preprocessor = Preprocessor(card)
        request = parse_chat(_body(60, 0, **fields))
        prepared = preprocessor.chat(request)

        def make(
            _: int,
            request: ChatCompletionRequest = request,
            prepared: Prepared = prepared,
            tokenizer: Tokenizer = preprocessor.tokenizer,
        ) -> ChatStream:
            return ParsedChatStream(request, prepared, tokenizer, "chatcmpl-" + "0" * 36, 1)

        _row(f"prepare, {name}", preprocessor.chat, [request] * 500)
        _row(f"make a stream, {name}", make, [0] * 500)


def _row(name: str, call: Callable[[Any], object], given: list[Any], once: bool = False) -> None:
    """``once``: every value is used in one round only."""
    size = len(given) // ROUNDS if once else len(given)
    best = math.inf
    for turn in range(ROUNDS):
        values = given[turn * size : (turn + 1) * size] if once else given
        start = time.perf_counter()
        for each in values:
            call(each)
        best = min(best, time.perf_counter() - start)
    sys.stdout.write(f"{name:48}{best / size * 1e6:>10.2f}\n")


def _body(words: int, seed: int, **fields: object) -> bytes:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": _words(words, seed)},
    ]
    base = {"model": "m", "messages": messages, "max_tokens": 64, "temperature": 0.7}
    return orjson.dumps(base | fields)


def _words(count: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choices(_VOCABULARY, k=count))


def _vocabulary() -> list[str]:
    reference = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    words = (word[1:] for word in reference.get_vocab() if word.startswith("Ġ"))
    return sorted(word for word in words if word.isascii() and word.isalpha())


_VOCABULARY = _vocabulary()

if __name__ == "__main__":
    main()
