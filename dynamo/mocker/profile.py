"""The speed of a profiled engine, for mock workers: the files of --planner-profile-data.

A file ``.npz`` has ``prefill_isl`` and ``prefill_ttft_ms``; ``decode_active_kv_tokens``,
``decode_context_length`` and ``decode_itl``, with a row for each of the first.

A directory of `dynamo profile`, or of Dynamo's profiler, has two files:

| file | arrays |
|---|---|
| `selected_prefill_interpolation/raw_data.npz`, else `prefill_raw_data.json` | `prefill_isl` |
| | `prefill_ttft` |
| `selected_decode_interpolation/raw_data.npz`, else `decode_raw_data.json` | `x_kv_usage` |
| | `y_context_length`, `z_itl` |
| | `max_kv_tokens`, one number |

Times are milliseconds, lengths tokens.
"""

from __future__ import annotations

import json
import zipfile
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynamo.errors import ConfigError

FLAG = "--planner-profile-data"
GRID = 64
"""Cells of the decode surface in each direction, where the points lie on no grid."""
_PREFILL = ("selected_prefill_interpolation/raw_data.npz", "prefill_raw_data.json")
_DECODE = ("selected_decode_interpolation/raw_data.npz", "decode_raw_data.json")
_NEIGHBOURS = 6
_Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ProfiledSpeed:
    """Curves of a profile, linear between their points, constant outside of them.

    ``itl_ms`` has a row for each of ``kv_tokens``, a column for each of ``contexts``. A longer
    prompt than the longest profiled takes time as the last two points do.
    """

    isl: list[float]
    ttft_ms: list[float]
    kv_tokens: list[float]
    contexts: list[float]
    itl_ms: list[list[float]]

    def prefill_ms(self, tokens: int) -> float:
        """Return the milliseconds for ``tokens`` uncached prompt tokens. O(log points)."""
        isl, ttft = self.isl, self.ttft_ms
        if tokens > isl[-1] and len(isl) > 1:
            slope = (ttft[-1] - ttft[-2]) / (isl[-1] - isl[-2])
            return ttft[-1] + max(slope, 0.0) * (tokens - isl[-1])
        low, high, share = _between(isl, tokens)
        return ttft[low] + share * (ttft[high] - ttft[low])

    def decode_ms(self, kv_tokens: float, sequences: int) -> float:
        """Return the milliseconds of a decode step of ``sequences`` that hold ``kv_tokens``."""
        low, high, share = _between(self.kv_tokens, kv_tokens)
        left, right, across = _between(self.contexts, kv_tokens / max(sequences, 1))
        rows = self.itl_ms[low], self.itl_ms[high]
        first, second = (row[left] + across * (row[right] - row[left]) for row in rows)
        return first + share * (second - first)


def read_speed(path: str) -> ProfiledSpeed:
    """Read a profile. Raises ConfigError with the name of what is wrong."""
    source = Path(path)
    if not source.is_dir():
        arrays = _arrays(source)
        isl, ttft = _curve(source, arrays, "prefill_isl", "prefill_ttft_ms")
        kv_tokens = _ascending(source, arrays, "decode_active_kv_tokens")
        contexts = _ascending(source, arrays, "decode_context_length")
        itl = _array(source, arrays, "decode_itl")
        if itl.shape != (kv_tokens.size, contexts.size):
            raise ConfigError(
                f"{FLAG} {source}: decode_itl must have {kv_tokens.size} rows of {contexts.size}, "
                f"has the shape {itl.shape}"
            )
        return _speed(isl, ttft, kv_tokens, contexts, itl)
    prefill, decode = _one_of(source, _PREFILL), _one_of(source, _DECODE)
    isl, ttft = _curve(prefill, _arrays(prefill), "prefill_isl", "prefill_ttft")
    arrays = _arrays(decode)
    columns = [_array(decode, arrays, name).ravel() for name in ("x_kv_usage", "y_context_length")]
    itl = _array(decode, arrays, "z_itl", finite=False).ravel()
    if len({itl.size, *(column.size for column in columns)}) != 1:
        raise ConfigError(
            f"{FLAG} {decode}: x_kv_usage, y_context_length and z_itl differ in length"
        )
    capacity = float(_array(decode, arrays, "max_kv_tokens").ravel()[0])
    finite = np.isfinite(itl)
    if not finite.any() or capacity < 1:
        raise ConfigError(f"{FLAG} {decode}: needs z_itl of a point and max_kv_tokens above 0")
    usage, context = (column[finite] for column in columns)
    return _speed(isl, ttft, *_grid(usage * capacity, context, itl[finite]))


def _speed(
    isl: _Array, ttft: _Array, kv_tokens: _Array, contexts: _Array, itl: _Array
) -> ProfiledSpeed:
    return ProfiledSpeed(
        isl.tolist(), ttft.tolist(), kv_tokens.tolist(), contexts.tolist(), itl.tolist()
    )


def _grid(kv_tokens: _Array, context: _Array, itl: _Array) -> tuple[_Array, _Array, _Array]:
    """Spread scattered points over a grid: the mean of the nearest, by inverse squared distance."""
    rows, columns = (
        np.linspace(axis.min(), axis.max(), GRID if np.ptp(axis) else 1)
        for axis in (kv_tokens, context)
    )
    # All points may lie on one line: an extent of 0 would divide by it.
    span = np.ptp(kv_tokens) or 1.0, np.ptp(context) or 1.0
    down = (rows[:, None] - kv_tokens) / span[0]
    right = (columns[:, None] - context) / span[1]
    # Never 0, also where a cell lies on a profiled point.
    distance = down[:, None, :] ** 2 + right[None, :, :] ** 2 + 1e-12
    count = min(_NEIGHBOURS, itl.size)
    nearest = np.argpartition(distance, count - 1, axis=2)[:, :, :count]
    weights = 1.0 / np.take_along_axis(distance, nearest, axis=2)
    return rows, columns, (weights * itl[nearest]).sum(axis=2) / weights.sum(axis=2)


def _between(points: list[float], value: float) -> tuple[int, int, float]:
    """Return the indices of the points around ``value``, and its share of the way to the second."""
    high = bisect_right(points, value)
    if high == 0:
        return 0, 0, 0.0
    if high == len(points):
        return high - 1, high - 1, 0.0
    low = high - 1
    return low, high, (value - points[low]) / (points[high] - points[low])


def _one_of(directory: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        if (directory / name).is_file():
            return directory / name
    raise ConfigError(
        f"{FLAG} {directory}: has neither {' nor '.join(names)}; give a directory of "
        "`dynamo profile`, or a file .npz with both curves"
    )


def _arrays(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError("no JSON object")
            return content
        with np.load(path, allow_pickle=False) as archive:
            return dict(archive)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{FLAG} {path}: can't be read ({error}); give a file .npz, or a directory of "
            "`dynamo profile`"
        ) from None


def _array(path: Path, arrays: dict[str, Any], name: str, finite: bool = True) -> _Array:
    if name not in arrays:
        raise ConfigError(f"{FLAG} {path}: has no {name}")
    try:
        array = np.atleast_1d(np.asarray(arrays[name], dtype=float))
    except (TypeError, ValueError):
        raise ConfigError(f"{FLAG} {path}: {name} must be numbers") from None
    if not array.size or (finite and not np.all(np.isfinite(array) & (array >= 0))):
        raise ConfigError(f"{FLAG} {path}: {name} must be finite numbers of at least 0")
    return array


def _ascending(path: Path, arrays: dict[str, Any], name: str) -> _Array:
    array = _array(path, arrays, name).ravel()
    if np.any(np.diff(array) <= 0):
        raise ConfigError(f"{FLAG} {path}: {name} must ascend")
    return array


def _curve(path: Path, arrays: dict[str, Any], x: str, y: str) -> tuple[_Array, _Array]:
    """Return a curve in ascending order of ``x``, one point for each value of it."""
    along, values = _array(path, arrays, x).ravel(), _array(path, arrays, y).ravel()
    if along.size != values.size:
        raise ConfigError(f"{FLAG} {path}: {x} has {along.size} values, {y} has {values.size}")
    ascending, first = np.unique(along, return_index=True)
    return ascending, values[first]
