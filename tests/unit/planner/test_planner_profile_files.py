"""Profile files: a round trip, upstream's arrays, and errors that name file and remedy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dynamo.errors import ConfigError
from dynamo.planner.capacity.interpolation import (
    DecodePoints,
    PrefillPoints,
    ProfiledCapacity,
    WorkerProfile,
    read_profile,
    write_profile,
)
from dynamo.planner.capacity.observation import Pool
from dynamo.planner.policies.budget import StartUpTime

PREFILL = "selected_prefill_interpolation/raw_data.npz"
DECODE = "selected_decode_interpolation/raw_data.npz"


def example() -> WorkerProfile:
    isl = np.array([100.0, 1000.0, 4000.0])
    return WorkerProfile(
        prefill=PrefillPoints(isl=isl, ttft_ms=isl / 10 + 5, tokens_per_s=isl / (isl / 10 + 5)),
        decode=DecodePoints(
            kv_usage=np.array([0.1, 0.9, 0.1, 0.9]),
            context=np.array([500.0, 500.0, 2000.0, 2000.0]),
            itl_ms=np.array([5.0, 12.0, 6.0, 15.0]),
            tokens_per_s=np.array([2000.0, 7500.0, 833.0, 3000.0]),
            max_kv_tokens=100_000,
        ),
    )


def test_a_profile_survives_the_round_trip(tmp_path: Path) -> None:
    write_profile(tmp_path / "results", example())
    read = read_profile(tmp_path / "results")
    want = example()
    for part in ("isl", "ttft_ms", "tokens_per_s"):
        np.testing.assert_array_equal(getattr(read.prefill, part), getattr(want.prefill, part))
    for part in ("kv_usage", "context", "itl_ms", "tokens_per_s"):
        np.testing.assert_array_equal(getattr(read.decode, part), getattr(want.decode, part))
    assert read.decode.max_kv_tokens == 100_000


@pytest.mark.parametrize(("start_s", "wake_s"), [(None, None), (41.5, None), (41.5, 0.4)])
def test_the_times_of_a_worker_are_kept_where_they_were_measured(
    tmp_path: Path, start_s: float | None, wake_s: float | None
) -> None:
    write_profile(tmp_path, replace(example(), start_s=start_s, wake_s=wake_s))
    read = read_profile(tmp_path)
    assert (read.start_s, read.wake_s) == (start_s, wake_s)


def test_a_profile_is_the_first_guess_of_both_times() -> None:
    start = StartUpTime(ProfiledCapacity(replace(example(), start_s=180.0, wake_s=0.5)))
    start.observe(Pool(ready=1, asleep=1), 0.0)
    assert (start.seconds, start.wake_s) == (180.0, 0.5)
    start.observe(Pool(ready=1), 5.0)
    start.changed(Pool(ready=1), 2, 10.0)
    start.observe(Pool(ready=2), 50.0)
    assert start.seconds == 40.0


def test_files_have_the_arrays_that_dynamo_reads(tmp_path: Path) -> None:
    write_profile(tmp_path, example())
    with np.load(tmp_path / PREFILL) as prefill, np.load(tmp_path / DECODE) as decode:
        assert set(prefill) == {"prefill_isl", "prefill_ttft", "prefill_thpt_per_gpu"}
        assert set(decode) == {
            *("x_kv_usage", "y_context_length", "z_itl", "z_thpt_per_gpu", "max_kv_tokens")
        }
        assert decode["max_kv_tokens"].shape == (1,)


def test_prompt_lengths_are_sorted_and_scalars_accepted(tmp_path: Path) -> None:
    write_profile(tmp_path, example())
    np.savez(
        tmp_path / PREFILL,
        prefill_isl=[1000, 100],
        prefill_ttft=[105, 15],
        prefill_thpt_per_gpu=[9.5, 6.7],
    )
    with np.load(tmp_path / DECODE) as old:
        arrays = {name: old[name] for name in old}
    arrays["z_itl"][-1] = float("nan")  # a point that was not measured
    np.savez(tmp_path / DECODE, **{**arrays, "max_kv_tokens": 5000})
    read = read_profile(tmp_path)
    assert read.prefill.isl.tolist() == [100, 1000]
    assert read.prefill.ttft_ms.tolist() == [15, 105]
    assert read.decode.max_kv_tokens == 5000


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prefill_isl": [1.0]}, "arrays must have one length"),
        ({"prefill_ttft": [1.0, -1.0, 2.0]}, "prefill_ttft has a value"),
        ({"prefill_ttft": [1.0, float("nan"), 2.0]}, "prefill_ttft has a value"),
        ({"prefill_ttft": None}, "prefill_ttft"),
    ],
)
def test_wrong_arrays_are_named(tmp_path: Path, change: dict[str, object], says: str) -> None:
    write_profile(tmp_path, example())
    with np.load(tmp_path / PREFILL) as old:
        arrays: dict[str, object] = {name: old[name] for name in old}
    arrays.update(change)
    present = {name: np.asarray(v) for name, v in arrays.items() if v is not None}
    np.savez(tmp_path / PREFILL, **present)
    with pytest.raises(ConfigError, match=says):
        read_profile(tmp_path)


@pytest.mark.parametrize("content", [None, b"", b"not an archive"])
def test_a_missing_or_broken_file_names_the_command(tmp_path: Path, content: bytes | None) -> None:
    write_profile(tmp_path, example())
    (tmp_path / DECODE).unlink()
    if content is not None:
        (tmp_path / DECODE).write_bytes(content)
    with pytest.raises(ConfigError, match=r"selected_decode_interpolation.*dynamo profile"):
        read_profile(tmp_path)
