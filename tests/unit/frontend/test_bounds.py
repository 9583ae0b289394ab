"""Bounds on one request: each is checked before the work that it bounds."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from http_bench import Bench
from hypothesis import given, settings
from hypothesis import strategies as st
from test_request import Site
from text_kit import EXAMPLE, card, chat_body, completion_body, example_preprocessor
from tokenizer_kit import write_llama_like, write_metaspace, write_model

from dynamo.errors import InvalidArgument, Unavailable
from dynamo.frontend.apis.operator.routing import ExplainRoutes
from dynamo.frontend.prompt import bounds
from dynamo.frontend.prompt.off_loop import OffLoop
from dynamo.frontend.prompt.preprocessor import Preprocessor
from dynamo.frontend.prompt.validation import parse_chat, parse_completion
from dynamo.frontend.text.tokenizer import Tokenizer, load_tokenizer
from dynamo.http.routes import Routes

COMPLETION = "/v1/completions"
LONGEST = 15  # bytes of the longest token of the example model
LARGE = bounds.INLINE_BODY_BYTES + 1


@pytest.fixture
async def site() -> Site:
    return Site()


async def answered(site: Site) -> None:
    async with asyncio.timeout(30):
        while running := list(site.tasks._running):
            await asyncio.wait(running)


def refuse_to_tokenize(site: Site) -> None:
    def encode(*_: object) -> Any:
        raise AssertionError("tokenized")

    site.preprocessor.tokenizer.encode = encode  # type: ignore[method-assign, assignment]


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def with_field(name: str, value: bytes) -> bytes:
    return chat_body()[:-1] + f',"{name}":'.encode() + value + b"}"


# -- JSON


@pytest.mark.parametrize("depth", [bounds.MAX_JSON_DEPTH, 100_000])
async def test_nesting_is_refused_by_name(site: Site, depth: int) -> None:
    site.post(with_field("metadata", nested(depth)))
    await answered(site)
    assert site.status == 400
    assert "'metadata' is nested too deeply: at most 128 levels" in site.answer["message"]
    site.settled()


def test_nesting_up_to_the_bound_passes() -> None:
    assert parse_chat(with_field("metadata", nested(bounds.MAX_JSON_DEPTH - 1))).metadata


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("metadata", b"[" + b"[]," * 400_000 + b"[]]"),
        ("metadata", b"[" + b"1.7976931348623157e308," * 2000 + b"1]"),
        ("metadata", b"{" + b'"":1,' * 200_000 + b'"":1}'),
        ("tools", b"[" + b'{"type":"function"},' * 100_000 + b"{}]"),
    ],
)
async def test_too_many_values_are_refused_by_name(site: Site, name: str, value: bytes) -> None:
    site.post(with_field(name, value))
    await answered(site)
    assert site.status == 400
    assert f"'{name}' has too many JSON values" in site.answer["message"]


def test_a_prompt_of_a_million_ids_passes() -> None:
    ids = [12345] * 1_000_000
    assert parse_completion(completion_body(prompt=ids)).prompt == ids


def test_arguments_of_tool_calls_are_bounded() -> None:
    calls = [{"function": {"name": "f", "arguments": nested(5000).decode()}}]
    body = chat_body(messages=[{"role": "assistant", "content": "", "tool_calls": calls}])
    with pytest.raises(InvalidArgument, match=r"messages\[0\].tool_calls: `arguments` is nested"):
        example_preprocessor().chat(parse_chat(body))


@pytest.mark.parametrize("calls", [5, 0, {}, {"a": 1}, "x", "", True])
def test_tool_calls_must_be_a_list(calls: object) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    with pytest.raises(InvalidArgument, match=r"messages\[1\].tool_calls: expected `array \| null"):
        example_preprocessor().chat(parse_chat(chat_body(messages=messages)))


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**400, {"a": [1, {"b": 2**70}]}])
@pytest.mark.parametrize("name", ["top_k", "guided_json", "router_config_override"])
async def test_integers_beyond_64_bits_are_refused_by_name(
    site: Site, name: str, value: object
) -> None:
    if name == "router_config_override":
        fields: dict[str, Any] = {"nvext": {name: {"overlap_score_weight": value}}}
    else:
        fields = {name: value}
    raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}], **fields})
    site.post(raw.encode())
    assert site.status == 400
    message = site.answer["message"]
    assert name in message.lower() and len(message) < 300, message
    site.settled()


def test_the_schema_of_a_response_format_is_checked() -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"maximum": 1}}}
    assert parse_chat(chat_body(response_format=schema)).response_format
    text = json.dumps({**schema, "json_schema": {"schema": {"maximum": 2**64}}})
    with pytest.raises(InvalidArgument, match="response_format: integers must be between"):
        parse_chat(with_field("response_format", text.encode()))


def test_quoted_values_are_shortened() -> None:
    for fields, start in (
        ({"x" * 5000: 1}, "Unsupported parameter(s): `xxx"),
        ({f"x{number}": 1 for number in range(1000)}, "Unsupported parameter(s): `x0`"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            parse_chat(chat_body(**fields))
        assert caught.value.message.startswith(start) and len(caught.value.message) < 200
    with pytest.raises(InvalidArgument) as caught:
        parse_chat(with_field("n", b"1" * 4000))
    assert len(caught.value.message) < 200


# -- lists and choices


@pytest.mark.parametrize(
    ("prompt", "n", "choices"),
    [(["a"] * 60_000, 128, 7_680_000), ([[1]] * 1025, 1, 1025), (["a"] * 9, 128, 1152)],
)
async def test_choices_are_counted_before_any_prompt_is_tokenized(
    site: Site, prompt: Any, n: int, choices: int
) -> None:
    refuse_to_tokenize(site)
    site.post({"model": "tiny", "prompt": prompt, "n": n}, COMPLETION)
    await answered(site)
    assert (site.status, site.streams) == (400, [])
    assert f"must not exceed 1024 choices, got {choices}" in site.answer["message"]
    assert "'prompt'" in site.answer["message"] and "'n'" in site.answer["message"]


async def test_the_route_that_explains_counts_choices_too(site: Site) -> None:
    refuse_to_tokenize(site)
    routes = Routes()
    explain = ExplainRoutes(site, site.tasks, 503, site.active.off_loop)  # type: ignore[arg-type]
    explain.install(routes)
    site.bench = Bench(handler=routes)
    site.post({"model": "tiny", "prompt": ["a"] * 60_000, "n": 128}, "/v1/route")
    await answered(site)
    assert site.status == 400 and "choices, got 7680000" in site.answer["message"]


def test_as_many_choices_as_allowed_pass() -> None:
    assert parse_completion(completion_body(prompt=["a"] * 8, n=128)).n == 128
    assert parse_completion(completion_body(prompt=[1] * 5000, n=128)).n == 128


@pytest.mark.parametrize("name", ["messages", "tools"])
def test_lists_have_bounds(name: str) -> None:
    limit = getattr(bounds, f"MAX_{name.upper()}")
    item = {"role": "user", "content": "a"}
    assert parse_chat(chat_body(**{name: [item] * limit}))
    with pytest.raises(InvalidArgument, match=f"'{name}' must have at most {limit} entries, got"):
        parse_chat(chat_body(**{name: [item] * (limit + 1)}))


def test_bytes_of_all_choices_are_bounded() -> None:
    bias = {str(number): 1 for number in range(40_000)}
    request = parse_completion(completion_body(prompt=["a"] * 1000, logit_bias=bias))
    with pytest.raises(InvalidArgument, match=r"1000 choices .* bytes for the engines, at most"):
        example_preprocessor().completion(request)
    request = parse_completion(completion_body(prompt=["a"] * 8, n=4, logit_bias=bias))
    assert len(example_preprocessor().completion(request).requests) == 32


async def test_many_long_choices_are_sent_over_several_turns(site: Site) -> None:
    site.post({"model": "tiny", "prompt": [5] * 4000, "n": 128, "max_tokens": 1}, COMPLETION)
    assert 0 < len(site.streams) < 128
    site.streams[0].say([5], finish_reason="length")
    site.streams[0].sink.on_end()
    await answered(site)
    assert len(site.streams) == 128
    for stream in site.streams[1:]:
        stream.say([5], finish_reason="length")
        stream.sink.on_end()
    assert site.status == 200 and len(site.answer["choices"]) == 128
    site.settled()


async def test_a_client_that_leaves_ends_the_sending(site: Site) -> None:
    site.post({"model": "tiny", "prompt": [5] * 4000, "n": 128}, COMPLETION)
    sent = len(site.streams)
    site.bench.connection.connection_lost(None)
    await answered(site)
    assert len(site.streams) == sent
    site.settled()


async def test_annotations_are_a_set_of_known_names(site: Site) -> None:
    names = ["token_ids", "nonsense", "request_id"] * 3000
    site.chat(stream=True, nvext={"annotations": names})
    (stream,) = site.streams
    assert stream.request.annotations == ["token_ids", "request_id"]
    stream.say([5], finish_reason="stop")
    stream.sink.on_end()
    await asyncio.sleep(0)
    assert site.body.count(b"event: token_ids") == site.body.count(b"event: request_id") == 1


# -- prompts that no context can hold


@pytest.mark.parametrize("path", [COMPLETION, "/v1/chat/completions"])
async def test_a_prompt_that_no_context_can_hold_is_not_tokenized(site: Site, path: str) -> None:
    refuse_to_tokenize(site)
    text = "a" * (4096 * LONGEST + 1)
    if path == COMPLETION:
        site.post({"model": "tiny", "prompt": ["a", text]}, path)
    else:
        site.post({"model": "tiny", "messages": [{"role": "user", "content": text}]}, path)
    await answered(site)
    assert site.status == 400
    text = r"maximum context length is 4096 tokens\. However, your prompt has at least 4[01]\d\d"
    assert re.search(text, site.answer["message"])


def with_normalizer(directory: Path, normalizer: dict[str, Any] | None) -> Tokenizer:
    parsed = json.loads((EXAMPLE / "tokenizer.json").read_text())
    write_model(directory, parsed | {"normalizer": normalizer})
    return load_tokenizer(directory)


def test_the_least_tokens_of_each_family(tmp_path: Path) -> None:
    strip = {"type": "Strip", "strip_left": True, "strip_right": True}
    assert with_normalizer(tmp_path / "none", None).least_tokens("é" * 15) == 2
    assert with_normalizer(tmp_path / "nfc", {"type": "NFC"}).least_tokens("é" * 31) == 2
    assert with_normalizer(tmp_path / "nfc", {"type": "NFC"}).least_tokens("a" * 31) == 3
    assert with_normalizer(tmp_path / "strip", strip).least_tokens(" " * 1000) == 0
    space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}  # three bytes to one
    assert with_normalizer(tmp_path / "space", space).least_tokens("▁" * 1000) == 0
    write_metaspace(tmp_path / "unigram")
    assert load_tokenizer(tmp_path / "unigram").least_tokens("a" * 1000) == 0
    write_llama_like(tmp_path / "llama")
    vocab = json.loads((tmp_path / "llama/tokenizer.json").read_text())["model"]["vocab"]
    longest = max(len(text.encode()) for text in vocab)
    assert load_tokenizer(tmp_path / "llama").least_tokens("a" * longest * 10) == 10


PIECES = [
    "a",
    " ",
    "▁",
    "\n",
    "é",
    "😀",
    "the ",
    "\u1100\u1161\u11a8",
    "\u212b",
    "\u212a",
    "\u1fbe",
]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=60).map("".join))
@settings(deadline=None)
def test_the_least_tokens_are_a_lower_bound(text: str) -> None:
    for tokenizer in families():
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text)), ascii(text)


@functools.cache
def families() -> list[Tokenizer]:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_llama_like(root / "llama")
        write_metaspace(root / "unigram")
        forms = [with_normalizer(root / form, {"type": form}) for form in ("NFC", "NFKC", "NFKD")]
        return [load_tokenizer(root / "llama"), load_tokenizer(root / "unigram"), *forms]


# -- large bodies


async def test_large_bodies_are_worked_on_in_threads(site: Site) -> None:
    seen: list[str] = []
    begun = asyncio.Event()
    begin = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, begun.set)
    go_on = threading.Event()
    encode = site.preprocessor.tokenizer.encode

    def watched(*words: Any) -> Any:
        seen.append(threading.current_thread().name)
        begin()
        assert go_on.wait(30)
        return encode(*words)

    site.preprocessor.tokenizer.encode = watched  # type: ignore[method-assign, assignment]
    messages = [{"role": "user", "content": "a"}] * 10 + [{"role": "user", "content": "b " * 10}]
    site.post({"model": "tiny", "messages": messages, "metadata": "x" * LARGE})
    async with asyncio.timeout(30):
        await begun.wait()  # the loop runs on
    assert site.bench.transport.out == b"" and site.active.admitted > 0
    go_on.set()
    await answered(site)
    assert seen[0].startswith("prompt")
    (stream,) = site.streams
    stream.say([5], finish_reason="stop")
    stream.sink.on_end()
    assert site.status == 200
    assert site.active.off_loop.held_bytes == 0
    site.settled()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_a_large_body_behind(site: Site, stream: bool) -> None:
    site.chat(metadata="x" * LARGE, stream=stream)
    site.bench.connection.connection_lost(None)
    await answered(site)
    assert site.streams == [] and site.active.off_loop.held_bytes == 0
    kind = "stream" if stream else "unary"
    assert site.ended("cancelled", kind) == 1
    name = "dynamo_frontend_model_cancellation_total"
    assert site.sample(name, endpoint="chat_completions", model="tiny", request_type=kind) == 1
    site.settled()


async def test_a_large_body_with_a_fault(site: Site) -> None:
    site.chat(metadata="x" * LARGE, temperature=9)
    await answered(site)
    assert site.status == 400 and "Temperature" in site.answer["message"]
    assert site.ended("validation", model="unknown_model") == 1
    site.settled()


async def test_large_bodies_together_are_bounded(site: Site) -> None:
    site.active.off_loop = OffLoop(LARGE + 1000)
    site.chat(metadata="x" * LARGE)
    other, connection = site.bench.connect()
    first, site.bench.transport, site.bench.connection = site.bench.transport, other, connection
    site.chat(metadata="x" * LARGE)
    await answered(site)
    assert site.status == 503 and "retry-after: 1\r\n" in site.head + "\r\n"
    assert "large requests are in preparation" in site.answer["message"]
    assert first.out == b"" and len(site.streams) == 1


async def test_one_body_larger_than_the_bound_is_accepted() -> None:
    threads = OffLoop(10)
    with threads.hold(100), pytest.raises(Unavailable), threads.hold(1):
        pass
    assert threads.held_bytes == 0
    assert await threads.run(lambda: threading.current_thread().name) != "MainThread"
    threads.close()


@pytest.mark.parametrize("size", [10, LARGE])
async def test_the_body_is_not_kept_while_the_answer_is_generated(site: Site, size: int) -> None:
    exchanges: list[Any] = []
    serve = site.bench.server.handler

    def watched(exchange: Any) -> None:
        exchanges.append(exchange)
        serve(exchange)

    site.bench.server.handler = watched
    site.chat(metadata="x" * size)
    await answered(site)
    assert len(site.streams) == 1
    assert [one.body for one in exchanges] == [b""]


# -- the default limit on bodies


def test_the_default_body_limit_fits_the_contexts() -> None:
    mib = 1 << 20
    assert bounds.body_limit_bytes([]) == 45 * mib
    assert bounds.body_limit_bytes([8192]) == 4 * mib + 8192 * 32
    assert bounds.body_limit_bytes([8192, 131072]) == 8 * mib
    assert bounds.body_limit_bytes([8192, None]) == 45 * mib
    assert bounds.body_limit_bytes([10**9]) == 45 * mib
    assert bounds.body_limit_bytes([8192], media=True) == 45 * mib


def test_a_context_full_of_ids_fits_the_default_body_limit() -> None:
    for context in (2048, 131_072, 1_048_576):
        body = completion_body(prompt=[151_643] * context)
        assert len(body) <= bounds.body_limit_bytes([context])


def test_the_bound_on_bytes_needs_a_context() -> None:
    preprocessor = Preprocessor(card())
    preprocessor.context_length = None
    assert preprocessor.completion(parse_completion(completion_body(prompt="a" * 100_000)))


HANGING = """
import asyncio, threading
from dynamo.frontend.prompt.off_loop import OffLoop, end_without_threads
from dynamo.runtime.process.threads import in_daemon_thread

begun = threading.Event()

def hang():
    begun.set()
    threading.Event().wait()

async def main():
    assert await in_daemon_thread(int, "7") == 7
    task = asyncio.create_task({call})
    await asyncio.to_thread(begun.wait)
    task.cancel()
    {end}

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("call", "end", "status"),
    [
        ("in_daemon_thread(hang)", "", 0),
        ("OffLoop().run(hang)", "end_without_threads(0.01, 0)", 0),
        ("asyncio.to_thread(hang)", "end_without_threads(0.01, 1)", 1),
    ],
)
def test_a_thread_that_hangs_does_not_hold_up_the_end_of_the_process(
    call: str, end: str, status: int
) -> None:
    program = HANGING.format(call=call, end=end)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == status, done.stderr.decode()
