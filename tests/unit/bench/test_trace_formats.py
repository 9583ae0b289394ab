"""Azure's, aiperf's and TraceLab's traces: found by their first line, wrong fields named."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo.bench.runner import Runner
from dynamo.bench.stats import Outcome
from dynamo.bench.trace import parents, read_trace
from dynamo.bench.trace_formats import DEFAULT_OUTPUT_TOKENS
from dynamo.bench.workload import Prompts, from_trace
from dynamo.config.client import BenchSettings
from dynamo.errors import ConfigError
from dynamo.http.client import Target
from dynamo_lab.simulation.request import from_trace as replayed

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file of these lines; objects as JSON."""

    def made(*lines: Any, name: str = "trace") -> Path:
        path = tmp_path / name
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(texts) + "\n")
        return path

    return made


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def test_azure_2023(write: Write) -> None:
    path = write(
        AZURE,
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,1396,109",
    )
    first, second = read_trace(path)
    assert (first.input_length, first.output_length, first.timestamp) == (374, 44, 0)
    assert (second.input_length, second.hash_ids) == (1396, [])
    assert second.timestamp == pytest.approx(4314.579)


def test_azure_2024_has_zones_and_may_have_other_columns(write: Write) -> None:
    path = write(
        "\ufeffid,GeneratedTokens,TIMESTAMP,ContextTokens",
        "7,5,2024-05-10 00:00:01.500000+00:00,2162",
        '8,6,"2024-05-10 01:00:01.250000+01:00",10',
    )
    found = read_trace(path)
    assert [(one.timestamp, one.input_length, one.output_length) for one in found] == [
        (-250, 10, 6),
        (0, 2162, 5),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("2023-11-16 18:15:46,x,44", r"trace:2: ContextTokens: not a number of tokens: 'x'"),
        ("2023-11-16 18:15:46,1,-4", r"trace:2: GeneratedTokens: "),
        ("yesterday,1,4", r"trace:2: TIMESTAMP: not a time: 'yesterday'"),
        ("2023-11-16 18:15:46,1", r"trace:2: 2 columns, the first line has 3"),
    ],
)
def test_wrong_rows_of_azure_name_the_field(write: Write, line: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_trace(write(AZURE, line))


def test_prompts_without_blocks_share_nothing(write: Write) -> None:
    path = write(AZURE, *(f"2023-11-16 18:15:4{number},900,4" for number in range(3)))
    planned = from_trace(read_trace(path), block_tokens=256)
    assert [plan.input_tokens for plan in planned] == [450] * 3
    prompts = Prompts()
    assert len({prompts.text(plan.segments)[:99] for plan in planned}) == 3
    assert [(one.isl, one.blocks, one.at_s) for one in replayed(read_trace(path))] == [
        (900, (), 0.0),
        (900, (), 1.0),
        (900, (), 2.0),
    ]


def test_mooncake_lines_of_aiperf(write: Write) -> None:
    text = "word " * 1000
    path = write(
        {"timestamp": 0, "input_length": 655, "output_length": 52, "hash_ids": [0, 1]},
        {"timestamp": 5, "input_length": 300},
        {"timestamp": 7, "text_input": text, "output_length": 1},
        {"timestamp": 8, "text_input": text + "more"},
        {"session_id": 4, "timestamp": 9, "messages": [{"role": "user", "content": text}]},
        {"session_id": 4, "delay": 2000, "messages": [{"role": "user", "content": text}, {"a": 1}]},
    )
    found = read_trace(path)
    assert [one.timestamp for one in found] == [0, 5, 7, 8, 9, 9]
    assert (found[1].hash_ids, found[1].output_length) == ([], DEFAULT_OUTPUT_TOKENS)
    assert found[2].input_length == 1250 and len(found[2].hash_ids) == 3
    assert found[3].hash_ids[:2] == found[2].hash_ids[:2] != found[4].hash_ids[:2]
    assert (found[5].session_id, found[5].delay) == ("4", 2000)
    assert found[5].hash_ids[:2] == found[4].hash_ids[:2]


def test_deltas_add_to_the_prompt(write: Write) -> None:
    line = {"session_id": "s", "message_mode": "delta", "output_length": 512}
    message = [{"role": "user", "content": "x" * 2048}]
    first, second = read_trace(write(*({**line, "messages": message} for _ in range(2))))
    assert first.input_length is not None and second.input_length is not None
    assert second.input_length > 2 * first.input_length + 500
    assert second.hash_ids[0] == first.hash_ids[0]


def test_sessions_of_aiperf(write: Write) -> None:
    path = write(
        {
            "session_id": "a",
            "turns": [
                {"role": "system", "text": "s" * 2048},
                {"text": "hello", "output_length": 3},
                {"text": "again", "delay": 500},
            ],
        },
        {"turns": [{"texts": ["x", "y"]}]},
        {"text": "single", "output_length": 7},
    )
    one, two, other, single = read_trace(path)
    assert (one.session_id, two.session_id, single.session_id) == ("a", "a", None)
    assert (one.output_length, two.output_length, single.output_length) == (3, 128, 7)
    assert two.delay == 500 and two.hash_ids[0] == one.hash_ids[0] not in other.hash_ids
    assert one.input_length == 513 and two.input_length == 513 + 1 + 3  # 5 characters are a token
    assert parents([one, two, other, single]) == [None, 0, None, None]


def test_rounds_of_tracelab(write: Write) -> None:
    def line(session: str, total: int, prefix: int, at: int, **more: Any) -> dict[str, Any]:
        events = [
            {"event_type": "user_message", "timestamp": f"2026-06-08T10:00:{at:02}.000Z"},
            {"event_type": "text", "timestamp": f"2026-06-08T10:00:{at + 2:02}.500Z"},
        ]
        return {
            "session_id": session,
            "round_index": 0,
            "input_tokens_total": total,
            "prefix_tokens": prefix,
            "newly_append_tokens": total - prefix,
            "output_tokens": 9,
            "timing_events": events,
            **more,
        }

    path = write(
        line("claude:1", 1100, 0, 10),
        line("claude:1", 1700, 1100, 15),
        line("claude:1", 600, 512, 20),  # its context was compacted
        line("codex:2", 100, 0, 12, timing_events=[]),
        line("codex:2", 100, 0, 12, input_tokens_total=None),
    )
    found = read_trace(path)
    first, *sessions = [one for one in found if one.session_id == "claude:1"]
    assert (first.hash_ids, first.timestamp, first.delay) == ([0, 1, 2], 0, 0)
    second, third = sessions
    assert (second.hash_ids, second.timestamp, second.delay) == ([0, 1, 3, 4], 5000, 2500)
    assert (third.hash_ids, third.input_length) == ([0, 5], 600)
    codex = [one for one in found if one.session_id == "codex:2"]
    assert [one.timestamp for one in codex] == [0, 2000] and codex[1].input_length == 100


def test_the_time_of_a_round_is_its_last_input_before_output(write: Write) -> None:
    events = [
        {"event_type": "tool_result", "timestamp": "2026-06-08T10:00:01Z"},
        {"event_type": "tool_result", "timestamp": "2026-06-08T10:00:03Z"},
        {"event_type": "tool_call", "timestamp": "2026-06-08T10:00:04Z"},
        {"event_type": "tool_result", "timestamp": "2026-06-08T10:00:09Z"},
    ]
    row = {"session_id": "s", "output_tokens": 1, "input_tokens_total": 5}
    later = [{"event_type": "user_message", "timestamp": "2026-06-08T10:00:10Z"}]
    path = write({**row, "timing_events": events}, {**row, "timing_events": later})
    assert [(one.timestamp, one.delay) for one in read_trace(path)] == [(0, 0), (7000, 6000)]


def test_a_compressed_file(write: Write, tmp_path: Path) -> None:
    plain = write({"hash_ids": [1], "output_length": 2})
    packed = tmp_path / "trace.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(packed) == read_trace(plain)
    packed.write_bytes(packed.read_bytes()[:20])
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(packed)


@pytest.mark.parametrize(
    ("lines", "form", "reason"),
    [
        ([{"turns": [{"role": "user"}]}], "auto", r":1: turns\[0\]\.text: missing"),
        ([{"turns": [{"text": 3}]}], "auto", r":1: turns\[0\]\.text: .*got `int`"),
        ([{"text": "a"}, {"turns": 3}], "auto", r":2: turns: "),
        ([{"output_length": 3}], "auto", r":1: hash_ids: missing"),
        ([{"hash_ids": [1], "output_length": "x"}], "auto", r":1: output_length: "),
        ([{"timing_events": [], "output_tokens": 1}], "auto", r":1: session_id: "),
        (["no JSON"], "auto", r":1: .*malformed"),
        (["a,b,c"], "azure", r":1: the first line must name the columns"),
        ([{"hash_ids": [1], "output_length": 2}], "tracelab", r":1: session_id: "),
    ],
)
def test_errors_name_file_line_and_field(
    write: Write, lines: list[Any], form: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"trace{reason}"):
        read_trace(write(*lines), form=form)


async def test_turns_wait_for_the_answer_before_them(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions run beside each other, the turns of one in turn and after its delay."""
    turns = [{"text": "b" * 99, "delay": 30}, {"text": "c"}]
    path = write(*({"session_id": name, "turns": [{"text": name * 99}, *turns]} for name in "xyz"))
    planned = from_trace(read_trace(path))
    assert {plan.at_s for plan in planned} == {None}
    runner = Runner(Target("127.0.0.1", 9, False), BenchSettings(), "m", Prompts())
    spans: dict[bytes, tuple[float, float]] = {}
    busy = most = 0

    async def send(body: bytes, due_s: float | None = None) -> Outcome:
        nonlocal busy, most
        busy, loop = busy + 1, asyncio.get_running_loop()
        most, begun = max(most, busy), loop.time()
        await asyncio.sleep(0.01)
        busy -= 1
        spans[body] = (begun, loop.time())
        return Outcome()

    monkeypatch.setattr(runner, "send", send)
    await runner.run(planned, 2)
    assert len(spans) == 9 and most == 2
    for plan in planned:
        if plan.after is not None:
            before = spans[runner.body(planned[plan.after])]
            assert spans[runner.body(plan)][0] - before[1] >= plan.delay_s
