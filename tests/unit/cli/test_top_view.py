"""Frames of ``dynamo top``: panes, sizes, the selection, text of other programs."""

from __future__ import annotations

import time

import msgspec
import pytest
from rich.cells import cell_len

from dynamo.cli.explain import explanation
from dynamo.cli.ps import _lines as ps_lines
from dynamo.cli.text_table import cut, wrap
from dynamo.cli.top_view import SORT_ORDERS, TopView, frame, sorted_workers
from dynamo.protocols.status import (
    BoxStatus,
    GpuHolder,
    GpuStatus,
    ModelFigures,
    ModelStatus,
    PlannerSummary,
    RequestRecord,
    RouteCandidate,
    RouteReceipt,
    WorkerFigures,
    WorkerStatus,
)

GIB = 1 << 30


def worker(number: int, **given: object) -> WorkerStatus:
    base = WorkerStatus(
        name=f"ns_W_{number}",
        service="W",
        state="ready",
        worker=f"{number:x}",
        gpus=(str(number),),
        vram_bytes=2 * GIB,
        in_flight=number,
        kv_use=0.25,
        uptime_s=3661,
    )
    return msgspec.structs.replace(base, **given)


def box(workers: int = 2) -> BoxStatus:
    failed = worker(
        0,
        state="failed",
        last_exit="exited with status 1",
        cause="5 deaths within 60 s",
        remedy="dynamo restart ns_W_0",
        restarts=5,
    )
    figures = ModelFigures(
        model="tiny",
        in_flight=3,
        queued=1,
        output_tokens_per_s=409.4,
        ttft_p50_s=0.024,
        ttft_p99_s=0.041,
        hit_rate=0.62,
        workers=(WorkerFigures(worker="1", kv_use=0.5),),
    )
    return BoxStatus(
        namespace="ns",
        state="running",
        at_s=time.time(),
        frontend="ready",
        url="http://127.0.0.1:8000",
        models=(
            ModelStatus(model="tiny", state="ready", ready=1, wanted=2, figures=figures),
            ModelStatus(model="big", state="loading", wanted=1, progress=0.43, cause="last: x"),
        ),
        workers=(failed, *(worker(number) for number in range(1, workers))),
        gpus=(
            GpuStatus(
                gpu="0",
                name="NVIDIA H100",
                utilization=0.91,
                used_bytes=71 * GIB,
                total_bytes=80 * GIB,
                watts=512.3,
                limit_watts=700.0,
                celsius=64,
                workers=("ns_W_0",),
                holders=(
                    GpuHolder(pid=1, used_bytes=GIB, name="python", worker="ns_W_0"),
                    GpuHolder(pid=4711, used_bytes=2 * GIB, name="evil\x1b[2Jname"),
                ),
            ),
        ),
        planner=PlannerSummary(
            state="paused", mode="load", decisions=("tiny: decode 1 -> 2: the KV load is high",)
        ),
        requests=tuple(
            RequestRecord(
                request_id=f"id{number}",
                model="tiny",
                endpoint="chat",
                received_at_s=time.time(),
                duration_s=0.14,
                worker="1",
                prompt_tokens=2048,
                completion_tokens=20,
                overlap_blocks=120,
                prompt_blocks=128,
                outcome="ok",
                ttft_s=0.035,
            )
            for number in range(30)
        ),
        problems=("ns_W_0 failed: see: dynamo logs ns_W_0",),
    )


def text(status: BoxStatus, view: TopView | None = None, width: int = 200, height: int = 0) -> str:
    view = TopView(keys=False) if view is None else view
    return "\n".join(line for _, line in frame(status, view, width, height))


@pytest.mark.parametrize(
    "shown",
    [
        "frontend ready http://127.0.0.1:8000",
        "███████·  91%  71.0 GiB / 80.0 GiB  512 / 700 W  64 °C  ns_W_0   pid 4711 evil [2Jname",
        "tiny   ready        1/2    409    24 ms     41 ms  3          1       ████····  50%  62%",
        "big    loading 43%",
        "5 deaths within 60 s; exited with status 1; try: dynamo restart ns_W_0",
        "planner: paused, mode load",
        "tiny: decode 1 -> 2: the KV load is high",
        "tiny   35 ms  0.14 s    2048  20   ns_W_1  120/128  ok       id0",
        "ns_W_0 failed: see: dynamo logs ns_W_0",
    ],
)
def test_each_pane(shown: str) -> None:
    assert shown in text(box())


def test_the_remedy_of_a_problem_is_shown_at_80_columns() -> None:
    problem = "ns_W failed: " + "out of memory " * 10 + "Then: dynamo restart ns_W"
    status = msgspec.structs.replace(box(), problems=(problem,))
    lines = text(status, width=80).splitlines()
    assert lines[1].startswith("ns_W failed: ") and "restart ns_W" in "".join(lines[2:4])
    status = msgspec.structs.replace(box(), problems=("begin " + "x " * 999 + "remedy",))
    lines = text(status, width=80).splitlines()
    assert lines[1].startswith("begin") and lines[2] == "  …"
    assert lines[5].endswith("remedy") and lines[6].startswith("GPUs")


@pytest.mark.parametrize("height", [5, 12, 24, 40, 200])
@pytest.mark.parametrize("width", [20, 80, 300])
def test_a_frame_fits(width: int, height: int) -> None:
    lines = frame(box(50), TopView(selected="ns_W_30"), width, height)
    assert len(lines) == height
    assert all(len(line) <= width and line.isprintable() for _, line in lines if line)
    if width > 20:
        assert lines[-1][1].startswith("↑↓ select")


def test_long_and_wide_names_leave_room_for_the_state() -> None:
    status = box()
    long = "organisation/a-model-with-a-long-name-日本語日本語日本語日本語"
    renamed = [msgspec.structs.replace(one, model=long) for one in status.models]
    status = msgspec.structs.replace(status, models=tuple(renamed))
    narrow = [line for line in text(status, width=80).split("\n") if "organisatio…" in line]
    assert "organisatio…  ready" in narrow[0] and "organisatio…  loading 43%" in narrow[1]
    wide = text(status, width=300).split("\n")
    [head] = [line for line in wide if "MODEL  " in line and "STATE" in line and "QUEUED" in line]
    [row] = [line for line in wide if "ready        1/2" in line]
    assert cell_len(row[: row.index("ready")]) == head.index("STATE")


@pytest.mark.parametrize(
    ("shown", "width", "left"),
    [
        ("abc", 3, "abc"),
        ("abcd", 3, "ab…"),
        ("日本語", 5, "日本…"),
        ("日本語", 4, "日…"),
        ("e\u0301", 1, "e\u0301"),
    ],
)
def test_text_is_cut_by_its_width_on_a_terminal(shown: str, width: int, left: str) -> None:
    assert cut(shown, width, "…") == left and cell_len(left) <= width


@pytest.mark.parametrize("width", [1, 2, 7, 20, 80])
@pytest.mark.parametrize(
    "given", ["", "one", "a few words of text", "显存不足：无法加载模型 out of memory", "x" * 50]
)
def test_wrapped_lines_fit_and_lose_nothing(given: str, width: int) -> None:
    lines = wrap(given, width)
    if width > 1:  # a Chinese character takes two cells
        assert all(cell_len(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == given.replace(" ", "")
    assert wrap("one two", 5, "  ") == ["one", "  two"]


def test_a_problem_in_chinese_is_wrapped() -> None:
    problem = "ns_W failed: last output: " + "显存不足" * 15 + ". Then: dynamo restart ns_W"
    status = msgspec.structs.replace(box(), problems=(problem,))
    lines = text(status, width=80).splitlines()
    shown = "".join(line.strip() for line in lines[1:4])
    assert shown.count("显存不足") == 15 and "dynamo restart ns_W" in shown


def test_the_list_of_ps_fits_a_terminal() -> None:
    name = "组织/大型语言模型" * 5
    model = {"model": name, "state": "ready", "figures": {"in_flight": 3}}
    found = {"namespace": "ns", "state": "running", "frontend": "ready", "models": [model]}
    for width in (60, 80, 160):
        head, row, *_ = ps_lines(found, width)
        assert max(cell_len(head), cell_len(row)) <= width
        assert "GPUS" not in head or width == 160
    assert "GPUS" in next(iter(ps_lines(found))) and name in "".join(ps_lines(found))


def test_the_table_of_explain_fits_80_columns() -> None:
    terms = {"prompt": 24.5, "queued_prefill": 0.0, "cached": -24.0, "decode": 24.0}
    rows = tuple(
        RouteCandidate(worker="f" * 16, chosen=chosen, cost=24.5, terms=terms)
        for chosen in (True, False)
    )
    record = RequestRecord(
        request_id="9a76bf84-b360-4450-925c-3ba6cb0dfda6",
        model="通义千问",
        endpoint="chat_completions",
        received_at_s=1.0,
        duration_s=1.0,
        outcome="ok",
        worker="f" * 16,
        route=RouteReceipt(mode="kv", reason="the cheapest of 2", unit="blocks", candidates=rows),
    )
    assert all(cell_len(line) <= 80 for line in explanation(record, 80))
    piped = [*explanation(record)]
    assert sum(line.endswith("  chosen") for line in piped) == 1
    assert not any("rank" in line for line in piped)
    named = {"f" * 16: "ns_" + "W" * 60}
    assert all(cell_len(line) <= 80 for line in explanation(record, 80, named))
    assert any(
        named["f" * 16] + ", the cheapest of 2" in line for line in explanation(record, 0, named)
    )
    assert not any("fff" in line for line in explanation(record, 0, named))


def test_the_selected_worker_is_shown() -> None:
    status = box(100)
    for number in (0, 1, 50, 98, 99):
        lines = frame(status, TopView(selected=f"ns_W_{number}"), 150, 40)
        [chosen] = [line for style, line in lines if style == "chosen"]
        assert chosen.split()[0] == f"ns_W_{number}"


@pytest.mark.parametrize(
    ("given", "shown"),
    [({}, ""), ({"can_sleep": True}, "s sleep  "), ({"state": "asleep"}, "s wake  ")],
)
def test_sleep_is_offered_if_the_engine_can(given: dict[str, object], shown: str) -> None:
    status = msgspec.structs.replace(box(), workers=(worker(1, **given),))
    keys = frame(status, TopView(selected="ns_W_1"), 150, 40)[-1][1]
    assert f"d drain  {shown}p pause" in keys


@pytest.mark.parametrize("order", SORT_ORDERS)
def test_sort_orders(order: str) -> None:
    status = box(5)
    names = [one.name for one in sorted_workers(status, order)]
    assert len(names) == 5
    if order == "in flight":
        assert names[0] == "ns_W_4"
    if order in ("state", "restarts"):
        assert names[0] == "ns_W_0"


def test_a_log_instead_of_the_panes() -> None:
    view = TopView(log_of="ns_W_0", log_lines=[f"line {number}" for number in range(100)])
    lines = [line for _, line in frame(box(), view, 80, 20)]
    assert lines[0] == "log of ns_W_0"
    assert lines[17] == "line 99"
    assert lines[19] == "q back"


def test_missing_parts() -> None:
    stopped = BoxStatus(namespace="ns", state="stopped", at_s=0.0, frontend="none")
    assert "no deployment runs in namespace 'ns'; start one: dynamo run MODEL" in text(stopped)
    bare = BoxStatus(namespace="ns", state="running", at_s=0.0, frontend="down")
    for part in ("no GPU", "no model", "no worker", "planner: none runs", "none yet"):
        assert part in text(bare)
    model = ModelStatus(model="m", state="zero", idle_until_s=12.0)
    shown = text(msgspec.structs.replace(bare, models=(model,)))
    assert "gives up its GPUs in 12 s without requests" in shown
    assert "no worker" in shown and "zero" not in shown


def test_ps_says_that_a_model_has_no_worker() -> None:
    model = {"model": "m", "state": "zero", "cause": "no worker runs", "remedy": "dynamo load m"}
    found = {"state": "running", "frontend": "ready", "models": [model]}
    _, row, _, why = ps_lines(found)
    assert row.startswith("m      no worker  0/0")
    assert why == "m: no worker runs; try: dynamo load m"


def test_ps_says_how_answers_are_parsed() -> None:
    models = [
        {"model": "m", "state": "ready", "figures": {"model": "m", "tool_call_parser": "hermes"}},
        {"model": "n", "state": "ready", "figures": {"model": "n"}},
    ]
    lines = list(ps_lines({"state": "running", "frontend": "ready", "models": models}))
    assert lines[-1] == "m: tool calls as hermes, reasoning as none"
    assert not any(line.startswith("n:") for line in lines)


def test_a_narrow_terminal_cuts_no_figure() -> None:
    shown = text(box(), width=80).splitlines()
    (model,) = [line for line in shown if line.startswith("  tiny") and "ready" in line]
    (second,) = [line for line in shown if line.startswith("  ns_W_1")]
    assert " 50%" in model and " 25%" in second, shown
    assert not any("…" in line for line in (model, second))


def test_a_key_for_the_planner_needs_a_planner() -> None:
    view = TopView(keys=True)
    assert "p pause" in text(box(), view, height=40)
    assert "p pause" not in text(msgspec.structs.replace(box(), planner=None), view, height=40)


def test_equal_workers_are_in_the_order_of_their_numbers() -> None:
    many = msgspec.structs.replace(box(), workers=tuple(map(worker, (10, 9, 2, 1))))
    assert [one.name[5:] for one in sorted_workers(many, "state")] == ["1", "2", "9", "10"]
