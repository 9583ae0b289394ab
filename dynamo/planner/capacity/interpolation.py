"""Capacity of a worker that was profiled: its two files in Dynamo's format, and interpolation.

| file | array | unit |
|---|---|---|
| `selected_prefill_interpolation/raw_data.npz` | `prefill_isl` | tokens |
| | `prefill_ttft` | ms |
| | `prefill_thpt_per_gpu` | prompt tokens per second and GPU |
| `selected_decode_interpolation/raw_data.npz` | `x_kv_usage` | share of the KV cache, 0..1 |
| | `y_context_length` | tokens |
| | `z_itl` | ms |
| | `z_thpt_per_gpu` | output tokens per second and GPU |
| | `max_kv_tokens` | tokens, an array of one element |
| | `worker_start_s`, `worker_wake_s` | seconds, one element each; only if measured |

Upstream's files have the same arrays and units, but for the last row. Only a revision of v0.3
divided the ITL by 1000 after reading it; the stored figures were milliseconds there, too.
"""

from __future__ import annotations

import importlib
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynamo.errors import ConfigError
from dynamo.planner.capacity.learned import DecodePoint, Line

GRID = 100
"""Cells of the decode surface in each direction."""
_NEARLY_FULL = 0.9
"""KV usage up to which `dynamo profile` measures."""
Curve: TypeAlias = NDArray[np.float64]
"""A one-dimensional array of measurements."""
_PREFILL = Path("selected_prefill_interpolation/raw_data.npz")
_DECODE = Path("selected_decode_interpolation/raw_data.npz")
_START, _WAKE = "worker_start_s", "worker_wake_s"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillPoints:
    """Prefill measurements, one element a prompt length, lengths ascending.

    ``ttft_ms`` is that of a request that finds the worker idle and no cached prefix;
    ``tokens_per_s`` are prompt tokens per second and GPU.
    """

    isl: Curve
    ttft_ms: Curve
    tokens_per_s: Curve


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodePoints:
    """Decode measurements, one element a point (KV usage, context length), in any order.

    ``context`` is the mean length of a sequence, prompt and output so far, in tokens;
    ``tokens_per_s`` are output tokens per second and GPU. ``max_kv_tokens`` is the size of a
    worker's KV cache.
    """

    kv_usage: Curve
    context: Curve
    itl_ms: Curve
    tokens_per_s: Curve
    max_kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerProfile:
    """What `dynamo profile` measured of one worker. An aggregated worker has both parts, too.

    ``start_s`` is the time from its start until it serves, ``wake_s`` that from its sleep. None:
    not measured, or its engine has no sleep mode.
    """

    prefill: PrefillPoints
    decode: DecodePoints
    start_s: float | None = None
    wake_s: float | None = None


def write_profile(directory: Path, profile: WorkerProfile) -> None:
    """Write both files below ``directory``, which is created. Raises OSError."""
    prefill, decode = profile.prefill, profile.decode
    for path in (_PREFILL, _DECODE):
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        directory / _PREFILL,
        prefill_isl=prefill.isl,
        prefill_ttft=prefill.ttft_ms,
        prefill_thpt_per_gpu=prefill.tokens_per_s,
    )
    times = {_START: profile.start_s, _WAKE: profile.wake_s}
    np.savez(
        directory / _DECODE,
        x_kv_usage=decode.kv_usage,
        y_context_length=decode.context,
        z_itl=decode.itl_ms,
        z_thpt_per_gpu=decode.tokens_per_s,
        max_kv_tokens=np.array([decode.max_kv_tokens]),
        **{name: np.array([value]) for name, value in times.items() if value is not None},
    )


def read_profile(directory: Path) -> WorkerProfile:
    """Read both files below ``directory``. Raises ConfigError with the name of what is wrong."""
    prefill = _arrays(directory / _PREFILL, ("prefill_isl", "prefill_ttft", "prefill_thpt_per_gpu"))
    decode = _arrays(
        directory / _DECODE, ("x_kv_usage", "y_context_length", "z_itl", "z_thpt_per_gpu")
    )
    order = np.argsort(prefill[0], kind="stable")
    isl, ttft, prefill_rate = (column[order] for column in prefill)
    (capacity,) = _arrays(directory / _DECODE, ("max_kv_tokens",))
    usage, context, itl, decode_rate = decode
    return WorkerProfile(
        prefill=PrefillPoints(isl=isl, ttft_ms=ttft, tokens_per_s=prefill_rate),
        decode=DecodePoints(
            kv_usage=usage,
            context=context,
            itl_ms=itl,
            tokens_per_s=decode_rate,
            max_kv_tokens=int(capacity[0]),
        ),
        start_s=_time(directory / _DECODE, _START),
        wake_s=_time(directory / _DECODE, _WAKE),
    )


def _time(path: Path, name: str) -> float | None:
    """Return the seconds ``name`` of an archive; None if it has none."""
    with np.load(path, allow_pickle=False) as archive:
        if name not in archive:
            return None
    return float(_arrays(path, (name,))[0][0])


def _arrays(path: Path, names: tuple[str, ...]) -> list[Curve]:
    """Return the arrays ``names`` of one archive: not empty, all of one length."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = [np.asarray(archive[name], dtype=float).ravel() for name in names]
    except KeyError as error:
        raise ConfigError(f"{path}: {error.args[0]}; write it again: dynamo profile") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"--profile-results-dir: {path} cannot be read ({error}); "
            "write it with `dynamo profile`, or leave the option out"
        ) from error
    lengths = {array.size for array in arrays}
    if len(lengths) != 1 or not lengths.pop():
        sizes = ", ".join(f"{name} {array.size}" for name, array in zip(names, arrays, strict=True))
        raise ConfigError(f"{path}: arrays must have one length above 0: {sizes}")
    for name, array in zip(names, arrays, strict=True):
        if name != "z_itl" and not np.all(np.isfinite(array) & (array >= 0)):
            raise ConfigError(f"{path}: {name} has a value that is negative or not finite")
    return arrays


def load_library(name: str, purpose: str, instead: str) -> Any:
    """Return the module ``name``.

    Raises ConfigError where it is not installed; ``purpose`` is the option that needs it, and
    ``instead`` what does without.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{purpose} needs {name.partition('.')[0]} ({error}): "
            f"pip install 'dynamo-appliance[planner]', or use {instead}"
        ) from error


class PrefillCurve:
    """Cubic splines over the prompt length; outside the profiled lengths the nearest one counts."""

    def __init__(self, points: PrefillPoints) -> None:
        # A spline needs lengths that increase strictly.
        isl, first = np.unique(points.isl, return_index=True)
        self._range = float(isl[0]), float(isl[-1])
        self._ttft = _spline(isl, points.ttft_ms[first])
        self._rate = _spline(isl, points.tokens_per_s[first])

    def ttft_ms(self, isl: float) -> float:
        """Return the time to first token of a prompt that finds the worker idle."""
        return float(self._ttft(min(max(isl, self._range[0]), self._range[1])))

    @property
    def middle_isl(self) -> float:
        """The geometric mean of the shortest and the longest prompt that was profiled."""
        return math.sqrt(self._range[0] * self._range[1])

    def tokens_per_s(self, isl: float) -> float:
        """Return the prompt tokens per second and GPU."""
        return float(self._rate(min(max(isl, self._range[0]), self._range[1])))


class DecodeSurface:
    """ITL and throughput over KV usage (0..1) and context length (0 to the longest profiled).

    Cubic between the points; a cell outside of them has the value of the nearest point.
    """

    def __init__(self, points: DecodePoints) -> None:
        self._max_kv_tokens = max(points.max_kv_tokens, 1)
        self._usage = np.linspace(0.0, 1.0, GRID)
        self._longest = float(points.context.max())
        finite = np.isfinite(points.itl_ms)
        at = np.column_stack((points.kv_usage[finite], points.context[finite]))
        self._itl = self._surface(at, points.itl_ms[finite])
        self._rate = self._surface(at, points.tokens_per_s[finite])

    def itl_ms(self, concurrency: float, context: float) -> float:
        """Return the ITL with ``concurrency`` sequences of ``context`` tokens on the worker."""
        return float(self._itl[self._cell(concurrency, context)])

    @property
    def max_kv_tokens(self) -> int:
        """The tokens that the KV cache of a worker holds."""
        return self._max_kv_tokens

    def tokens_per_s(self, concurrency: float, context: float) -> float:
        """Return the output tokens per second and GPU at that load."""
        return float(self._rate[self._cell(concurrency, context)])

    def best(self, itl_ms: float, context: float) -> DecodePoint:
        """Return the highest KV usage that keeps the ITL, or the lowest if none does."""
        row = self._row(context)
        within = np.flatnonzero(self._itl[row] <= itl_ms)
        column = int(within[-1]) if within.size else 0
        return DecodePoint(
            tokens_per_s=float(self._rate[row, column]),
            itl_ms=float(self._itl[row, column]),
            kv_usage=float(self._usage[column]),
        )

    def line(self, context: float) -> Line:
        """Return the ITL (ms) over the running sequences, from an idle to a nearly full worker."""
        full = max(_NEARLY_FULL * self._max_kv_tokens / max(context, 1.0), 1.0)
        idle_ms = self.itl_ms(0.0, context)
        return Line(max(self.itl_ms(full, context) - idle_ms, 0.0) / full, idle_ms)

    def _surface(self, at: Any, values: Any) -> Any:
        """Return the grid, one row a context length."""
        griddata = load_library(
            "scipy.interpolate", "--profile-results-dir", "no profile: capacity is then learned"
        ).griddata
        contexts = np.linspace(0.0, self._longest, GRID)
        cells: Any = np.meshgrid(self._usage, contexts)
        nearest = griddata(at, values, tuple(cells), method="nearest", rescale=True)
        # Points on one line span no triangle, and Qhull rejects them.
        if len(at) < 4 or any(np.ptp(axis) == 0 for axis in at.T):
            return nearest
        cubic = griddata(at, values, tuple(cells), method="cubic", rescale=True)
        return np.where(np.isnan(cubic), nearest, cubic)

    def _row(self, context: float) -> int:
        share = context / self._longest if self._longest > 0 else 0.0
        return round(min(max(share, 0.0), 1.0) * (GRID - 1))

    def _cell(self, concurrency: float, context: float) -> tuple[int, int]:
        usage = min(max(concurrency * context / self._max_kv_tokens, 0.0), 1.0)
        return self._row(context), round(usage * (GRID - 1))


class ProfiledCapacity:
    """Both parts of a profile. Prefill and decode were measured one without the other."""

    def __init__(self, profile: WorkerProfile) -> None:
        self.prefill = PrefillCurve(profile.prefill)
        self.decode = DecodeSurface(profile.decode)
        self.start_s, self.wake_s = profile.start_s, profile.wake_s


def read_capacity(directory: str | None) -> ProfiledCapacity | None:
    """Return the profile of --profile-results-dir, None without one. Raises ConfigError."""
    return None if directory is None else ProfiledCapacity(read_profile(Path(directory)))


def _spline(x: Any, y: Any) -> Any:
    if len(x) == 1:
        return lambda _: y[0]
    interpolate = load_library(
        "scipy.interpolate", "--profile-results-dir", "no profile: capacity is then learned"
    )
    return interpolate.CubicSpline(x, y)
