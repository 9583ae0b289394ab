"""What the loop shows: Prometheus metrics under Dynamo's names, and tensorboard's scalars."""

from __future__ import annotations

import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo.config.planner import PlannerSettings
from dynamo.errors import WorkerUnavailable
from dynamo.observability.metrics import Registry
from dynamo.planner.__main__ import DecisionWriter, _until_revoked
from dynamo.planner.capacity.observation import Observation, Pool, Pull, Traffic, WorkerLoad
from dynamo.planner.live.actions import WorkerAction
from dynamo.planner.live.decisions import DecisionRecord, PoolChange
from dynamo.planner.policies.base import PoolDecision, ScalingDecision
from dynamo.planner.reports import metrics as module
from dynamo.planner.reports.explain import StateFile
from dynamo.planner.reports.metrics import PlannerMetrics, TensorboardLog, default_log_dir
from dynamo.serve.state.events import BoxEventLog

NAMES = {
    "num_prefill_replicas",
    "num_decode_replicas",
    "predicted_num_prefill_replicas",
    "predicted_num_decode_replicas",
    "predicted_requests_per_second",
    "predicted_input_sequence_tokens",
    "predicted_output_sequence_tokens",
    "gpu_hours",
    "estimated_ttft_ms",
    "estimated_itl_ms",
    "sla_target_ttft_ms",
    "sla_target_itl_ms",
    "observed_ttft_ms",
    "observed_itl_ms",
    "observed_requests_per_second",
    "observed_request_duration_seconds",
    "observed_input_sequence_tokens",
    "observed_output_sequence_tokens",
    "load_scaling_decision",
    "throughput_scaling_decision",
}
POOLS = {
    "decode": Pool(ready=2, starting=1, gpus_per_worker=2),
    "prefill": Pool(ready=3, draining=1),
}
PULL = Pull(
    at_s=10.0,
    decode=(
        WorkerLoad(worker_id=1, kv_used_blocks=50, kv_total_blocks=100, running=3, waiting=5),
        WorkerLoad(worker_id=2, kv_used_blocks=20, kv_total_blocks=100),
    ),
    prefill_queue=1.5,
)
SEEN = Observation(
    now_s=11.0,
    interval_s=10.0,
    decode=POOLS["decode"],
    prefill=POOLS["prefill"],
    traffic=Traffic(
        duration_s=10, arrived=40, isl=3000, osl=150, ttft_ms=210, itl_ms=20, request_s=3.5
    ),
    pulls=(PULL,),
)
MADE = ScalingDecision(
    pools=(
        PoolDecision(pool="prefill", wanted=3, rule="enough"),
        PoolDecision(pool="decode", wanted=4, rule="KV load 0.95 > 0.9", inputs={"kv_load": 0.95}),
    ),
    forecast={
        "predicted_requests_per_second": 5.0,
        "predicted_input_sequence_tokens": 2900.0,
        "predicted_output_sequence_tokens": 140.0,
        "estimated_ttft_ms": 300.0,
        "estimated_itl_ms": 30.0,
        "predicted_num_decode_replicas": 9.0,  # beyond the budget
    },
)
RECORD = DecisionRecord.of(MADE, SEEN, at_s=1.0, model="tiny", mode="load+sla")
ACTION = WorkerAction(
    service="Worker", model="tiny", pool="decode", adds=True, seconds=2.5, worker="dynamo_Worker_3"
)


def rendered(settings: PlannerSettings | None = None) -> str:
    registry = Registry()
    metrics = PlannerMetrics(registry, "dynamo", settings or PlannerSettings(mode="load+sla"))
    metrics.counted("tiny", 10.0, POOLS)
    metrics.counted("tiny", 370.0, POOLS)
    metrics.pulled("tiny", PULL, POOLS)
    metrics.decided(RECORD, SEEN, MADE)
    metrics.finished(RECORD)
    metrics.acted(ACTION)
    return registry.render().decode()


def test_every_metric_of_dynamos_planner_is_there() -> None:
    found = set(re.findall(r"^dynamo_planner_(\w+)\{", rendered(), re.MULTILINE))
    assert found == NAMES


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_prefill_replicas", 3),
        ("num_decode_replicas", 2),
        ("predicted_num_decode_replicas", 4),
        ("gpu_hours", 1),  # (3 x 2 + 4) GPUs for 6 minutes
        ("observed_requests_per_second", 4),
        ("observed_ttft_ms", 210),
        ("predicted_input_sequence_tokens", 2900),
        ("sla_target_itl_ms", 50),
    ],
)
def test_metrics_have_the_figures(name: str, value: float) -> None:
    line = f'dynamo_planner_{name}{{dynamo_namespace="dynamo",model="tiny"}} {value}\n'
    assert line in rendered()


def test_a_removed_model_is_forgotten(tmp_path: Path) -> None:
    registry, settings = Registry(), PlannerSettings()
    metrics, state_file = (
        PlannerMetrics(registry, "dynamo", settings),
        StateFile(tmp_path / "planner.json", settings),
    )
    for observer in (metrics, state_file):
        for model in ("tiny", "other"):
            observer.counted(model, 10.0, {"decode": Pool(ready=1, minimum=0)})
        observer.decided(RECORD, SEEN, MADE)
        observer.forgotten("tiny")
    text = registry.render().decode()
    assert 'model="tiny"' not in text and 'model="other"' in text
    report = msgspec.json.decode((tmp_path / "planner.json").read_bytes())
    assert [one["model"] for one in report["models"]] == ["other"]
    assert report["on_demand"] == ["other"]


def state(text: str, name: str) -> list[str]:
    """Return the current states of an enumeration."""
    return re.findall(rf'^dynamo_planner_{name}{{.*_decision="(\w+)"}} 1$', text, re.MULTILINE)


def test_the_decisions_are_enumerations() -> None:
    both = rendered()
    assert state(both, "load_scaling_decision") == ["scale_up"]
    assert state(both, "throughput_scaling_decision") == ["set_lower_bound"]
    load = rendered(PlannerSettings(mode="load"))
    assert state(load, "throughput_scaling_decision") == ["disabled"]


def scalars(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory))
    found.Reload()
    return found


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    board = TensorboardLog(tmp_path / "logs")
    board.pulled("my/tiny", PULL, POOLS)
    board.close()
    found = scalars(tmp_path / "logs/my_tiny")
    values = {tag: found.Scalars(tag)[0].value for tag in found.Tags()["scalars"]}
    assert values == pytest.approx(
        {
            "prefill_queue_size": 4.5,
            "average_kv_load": 0.4,
            "total_queued_requests": 5,
            "num_prefill_workers": 3,
            "num_decode_workers": 2,
            "num_gpu": 10,
        }
    )
    assert [event.step for event in found.Scalars("num_gpu")] == [0]


def test_tensorboard_has_forecasts_and_actions(tmp_path: Path) -> None:
    board = TensorboardLog(tmp_path)
    board.decided(RECORD, SEEN, MADE)
    board.acted(ACTION)
    board.close()
    found = scalars(tmp_path / "tiny")
    assert found.Scalars("predicted_requests_per_second")[0].value == 5
    assert found.Scalars("observed_ttft_ms")[0].value == 210
    texts = [
        found.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in found.Tags()["tensors"]
    ]
    assert "added dynamo_Worker_3 to Worker in 2.5 s" in texts
    assert any("decode 3 -> 4: KV load 0.95 > 0.9" in text for text in texts)


def test_a_restart_continues_the_curves(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "events.txt").touch()
    for age_s in (700, 0):
        board = TensorboardLog(tmp_path)
        board.pulled("tiny", PULL, POOLS)
        board.close()
        made = max((tmp_path / "tiny").iterdir())
        made.rename(made.with_name(f"events.out.tfevents.{int(time.time()) - age_s}.host"))
    steps = [event.step for event in scalars(tmp_path / "tiny").Scalars("num_gpu")]
    assert steps == [0, pytest.approx(700, abs=30)]


def test_a_log_that_cannot_be_written_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_FLUSH_S", 0.01)
    (tmp_path / "tiny").symlink_to("/proc/self/task")  # as on a read-only disk: no file can be made
    board = TensorboardLog(tmp_path)
    for _ in range(2000):  # more than any queue
        board.pulled("tiny", PULL, POOLS)
        board.pulled("other", PULL, POOLS)
    board.close()
    assert caplog.text.count("no tensorboard log") == 1
    assert "tensorboard" not in {thread.name for thread in threading.enumerate()}
    assert scalars(tmp_path / "other").Scalars("num_gpu")


def test_a_graph_in_a_read_only_directory_needs_no_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir("/proc")  # in which root, too, can make nothing
    board = TensorboardLog(default_log_dir())
    board.pulled("tiny", PULL, POOLS)
    board.acted(ACTION)
    board.close()
    assert "no tensorboard log" in caplog.text and "--log-dir" in caplog.text


def test_a_full_disk_leaves_whole_records(tmp_path: Path) -> None:
    path = tmp_path / "full"
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        module._append(path, b"records", 0)
    assert not path.is_symlink()  # nothing of a file that could not begin


def test_the_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FILE_BYTES", 2000)
    for _ in range(3):  # restarts
        run = module._Run(tmp_path / "tiny", 1000.0)
        for _ in range(50):
            run.append(b"x" * 700)
    board = TensorboardLog(tmp_path)
    board.pulled("tiny", PULL, POOLS)
    board.close()
    files = sorted((tmp_path / "tiny").iterdir())
    assert len(files) == 8
    assert all(path.stat().st_size <= 2000 for path in files)
    assert files[-1].suffix == ".step0at1000"


def test_a_removed_log_is_begun_again(tmp_path: Path) -> None:
    run = module._Run(tmp_path / "tiny", 1000.0)
    run.append(b"first")
    shutil.rmtree(tmp_path / "tiny")
    run.append(b"second")
    [file] = (tmp_path / "tiny").iterdir()
    assert file.read_bytes().endswith(b"second")
    assert b"brain.Event:2" in file.read_bytes()


def test_figures_without_a_value_are_left_out(tmp_path: Path) -> None:
    board = TensorboardLog(tmp_path)
    board.pulled("tiny", Pull(at_s=1.0), {"decode": Pool(ready=0)})
    board.close()
    tags = scalars(tmp_path / "tiny").Tags()["scalars"]
    assert sorted(tags) == ["num_decode_workers", "num_gpu", "num_prefill_workers"]


def test_the_default_directory_has_the_time() -> None:
    assert re.fullmatch(r"logs/\d{4}_\d{6}", str(default_log_dir()))


def test_a_change_that_waits_is_one_event(tmp_path: Path) -> None:
    class Events(BoxEventLog):
        def add(self, kind: str, name: str = "", text: str = "", **more: object) -> None:
            texts.append(text)

    def change(wanted: int, outcome: str, error: str = "") -> DecisionRecord:
        pool = PoolChange(pool="decode", before=1, wanted=wanted, rule="busy", error=error)
        return DecisionRecord(at_s=0, model="m", mode="load", pools=(pool,), outcome=outcome)

    texts: list[str] = []
    writer = DecisionWriter(tmp_path / "decisions.jsonl", Events(tmp_path))
    for seconds in (9, 4):
        writer.finished(change(2, "failed", f"the next one may begin in {seconds} s"))
    writer.finished(change(2, "no-operation"))
    writer.finished(change(1, "unchanged"))
    assert len(texts) == 1 and texts[0].endswith("in 9 s)")
    for _ in range(2):
        writer.finished(change(2, "done"))
    writer.finished(change(3, "failed", "no GPU"))
    assert len(texts) == 4


async def test_a_lease_that_ends_while_an_endpoint_registers_is_no_crash(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Such as one that was removed from the store: the arbiter starts the planner again."""

    async def serving() -> None:
        raise WorkerUnavailable("lease 1f has ended")

    with caplog.at_level("WARNING"):
        await _until_revoked(serving())
    assert "lease 1f has ended: the planner stops" in caplog.text
