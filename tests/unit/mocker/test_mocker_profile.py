"""Mock workers that are as fast as a profile says: its formats, its curves, its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.errors import ConfigError
from dynamo.mocker.arguments import engine_shape
from dynamo.mocker.profile import read_speed
from dynamo.mocker.settings import MockerSettings
from dynamo.mocker.timing import Timing
from dynamo.planner.capacity.interpolation import (
    DecodePoints,
    PrefillPoints,
    WorkerProfile,
    write_profile,
)

CURVES: dict[str, Any] = {
    "prefill_isl": [100, 200, 400],
    "prefill_ttft_ms": [10, 20, 60],
    "decode_active_kv_tokens": [0, 1000],
    "decode_context_length": [10, 110],
    "decode_itl": [[4, 6], [8, 20]],
}
PREFILL = {"prefill_isl": [400, 100], "prefill_ttft": [80, 20]}
DECODE = {
    "x_kv_usage": [0.1, 0.5, 0.1, 0.5, 0.9],
    "y_context_length": [100, 100, 900, 900, 900],
    "z_itl": [5, 10, 6, 12, float("nan")],
    "max_kv_tokens": [10_000],
}


def npz(path: Path, **changed: Any) -> str:
    arrays = {name: np.asarray(value) for name, value in {**CURVES, **changed}.items()}
    np.savez(path, **arrays)
    return str(path)


def raw(directory: Path, **changed: Any) -> str:
    (directory / "prefill_raw_data.json").write_text(json.dumps(PREFILL))
    (directory / "decode_raw_data.json").write_text(json.dumps({**DECODE, **changed}))
    return str(directory)


def test_curves_of_a_file(tmp_path: Path) -> None:
    speed = read_speed(npz(tmp_path / "p.npz"))
    lengths = {50: 10, 100: 10, 150: 15, 300: 40, 400: 60, 500: 80}
    assert {length: speed.prefill_ms(length) for length in lengths} == lengths
    steps = {(0, 1): 4, (1000, 100): 8, (1000, 1): 20, (5000, 1): 20, (500, 50): 6, (600, 10): 10.4}
    assert {of: speed.decode_ms(*of) for of in steps} == pytest.approx(steps)


def test_points_of_a_directory(tmp_path: Path) -> None:
    speed = read_speed(raw(tmp_path))
    assert speed.prefill_ms(250) == 50
    assert speed.decode_ms(1000, 10) == pytest.approx(5)
    assert speed.decode_ms(5000, 50) == pytest.approx(10)
    assert speed.decode_ms(1000, 1) == pytest.approx(6, abs=0.1)
    assert 5 < speed.decode_ms(3000, 10) < 12


def test_what_dynamo_profile_writes(tmp_path: Path) -> None:
    prefill = PrefillPoints(
        isl=np.array([100.0, 200.0]), ttft_ms=np.array([3.0, 5.0]), tokens_per_s=np.ones(2)
    )
    decode = DecodePoints(
        kv_usage=np.array([0.5]),
        context=np.array([64.0]),
        itl_ms=np.array([7.0]),
        tokens_per_s=np.ones(1),
        max_kv_tokens=1000,
    )
    write_profile(tmp_path, WorkerProfile(prefill=prefill, decode=decode))
    speed = read_speed(str(tmp_path))
    assert (speed.prefill_ms(150), speed.decode_ms(123, 4)) == (4.0, 7.0)


def test_an_iteration_is_the_sum_of_both(tmp_path: Path) -> None:
    profile = npz(tmp_path / "p.npz")
    settings = MockerSettings(planner_profile_data=profile, num_gpu_blocks=100, block_size=10)
    timing = engine_shape(settings).timing
    assert timing.iteration_s(150, 10, 0.0) == pytest.approx(0.015 + 0.004)
    assert timing.iteration_s(0, 1, 1.0) == pytest.approx(0.020)
    slower = Timing(0.5, 2.0, timing.profile, timing.kv_tokens)
    assert slower.iteration_s(150, 10, 0.0) == pytest.approx(2 * (0.015 + 0.002))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"prefill_isl": [1, 2]}, "prefill_isl has 2 values, prefill_ttft_ms has 3"),
        ({"decode_itl": [1, 2]}, "decode_itl must have 2 rows of 2"),
        ({"decode_context_length": [9, 9]}, "decode_context_length must ascend"),
        ({"prefill_ttft_ms": [1, -1, 2]}, "must be finite numbers of at least 0"),
        ({"prefill_ttft_ms": ["a", "b", "c"]}, "prefill_ttft_ms must be numbers"),
        ({"prefill_isl": []}, "must be finite numbers"),
    ],
)
def test_a_bad_file_names_what_is_wrong(tmp_path: Path, changed: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=f"--planner-profile-data .*p.npz: .*{text}"):
        read_speed(npz(tmp_path / "p.npz", **changed))


def test_a_bad_directory_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither selected_prefill_interpolation/raw_data\.npz"):
        read_speed(str(tmp_path))
    with pytest.raises(ConfigError, match="differ in length"):
        read_speed(raw(tmp_path, z_itl=[1]))
    with pytest.raises(ConfigError, match="z_itl of a point"):
        read_speed(raw(tmp_path, z_itl=[float("nan")] * 5))
    (tmp_path / "decode_raw_data.json").write_text("{")
    with pytest.raises(ConfigError, match=r"decode_raw_data.json: can't be read"):
        read_speed(str(tmp_path))
    with pytest.raises(ConfigError, match="can't be read"):
        read_speed(str(tmp_path / "absent.npz"))
