"""The files of a profile: two npz archives of Dynamo's format.

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

Upstream's files have the same arrays and units. Only a revision of v0.3 divided the ITL by 1000
after reading it; the stored figures were milliseconds there, too.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynamo.errors import ConfigError

Curve: TypeAlias = NDArray[np.float64]
"""A one-dimensional array of measurements."""

_PREFILL = Path("selected_prefill_interpolation/raw_data.npz")
_DECODE = Path("selected_decode_interpolation/raw_data.npz")


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
    """What `dynamo profile` measured of one worker. An aggregated worker has both parts, too."""

    prefill: PrefillPoints
    decode: DecodePoints


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
    np.savez(
        directory / _DECODE,
        x_kv_usage=decode.kv_usage,
        y_context_length=decode.context,
        z_itl=decode.itl_ms,
        z_thpt_per_gpu=decode.tokens_per_s,
        max_kv_tokens=np.array([decode.max_kv_tokens]),
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
    )


def _arrays(path: Path, names: tuple[str, ...]) -> list[Curve]:
    """Return the arrays ``names`` of one archive: not empty, all of one length."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            found = [np.asarray(archive[name], dtype=float).ravel() for name in names]
    except KeyError as error:
        raise ConfigError(f"{path}: {error.args[0]}; write it again: dynamo profile") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"--profile-results-dir: {path} cannot be read ({error}); "
            "write it with `dynamo profile`, or leave the option out"
        ) from error
    lengths = {array.size for array in found}
    if len(lengths) != 1 or not lengths.pop():
        sizes = ", ".join(f"{name} {array.size}" for name, array in zip(names, found, strict=True))
        raise ConfigError(f"{path}: arrays must have one length above 0: {sizes}")
    for name, array in zip(names, found, strict=True):
        if name != "z_itl" and not np.all(np.isfinite(array) & (array >= 0)):
            raise ConfigError(f"{path}: {name} has a value that is negative or not finite")
    return found
