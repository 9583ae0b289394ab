"""Turn settings into the shape of the simulated engine; reject settings that contradict."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from dynamo.config.option import from_env
from dynamo.config.parser import option_of
from dynamo.errors import ConfigError
from dynamo.mocker.engine import EngineShape
from dynamo.mocker.scheduler import Limits
from dynamo.mocker.settings import MockerSettings
from dynamo.mocker.timing import KV_BYTES_PER_TOKEN, Timing, Transfer

_BLOCK_SIZES = {"vllm": 64, "sglang": 1, "trtllm": 32}
_MAX_PORT = 65535
_MANY_WORKERS, _VERY_MANY_WORKERS = 32, 128


def with_extra_arguments(settings: MockerSettings) -> MockerSettings:
    """Return ``settings`` overridden by the file of ``--extra-engine-args``. Raises ConfigError.

    A key is a flag without its dashes (``num-gpu-blocks-override`` or with underscores) or the name
    of the setting.
    """
    if settings.extra_engine_args is None:
        return settings
    where = f"--extra-engine-args {settings.extra_engine_args}"
    try:
        extra = json.loads(Path(settings.extra_engine_args).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: can't be read as JSON: {error}") from None
    if not isinstance(extra, dict):
        raise ConfigError(f"{where}: must hold a JSON object")
    names = _setting_names()
    unknown = sorted(key for key in extra if key.replace("-", "_") not in names)
    if unknown:
        raise ConfigError(f"{where}: unknown {', '.join(unknown)}; known are {', '.join(names)}")
    values: dict[str, Any] = dataclasses.asdict(settings)
    values.update((names[key.replace("-", "_")], value) for key, value in extra.items())
    return from_env(MockerSettings, {}, **values)


def engine_shape(settings: MockerSettings) -> EngineShape:
    """Return the shape of every rank. Raises ConfigError for contradicting settings."""
    if settings.max_num_batched_tokens < settings.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {settings.max_num_batched_tokens} is less than "
            f"--max-num-seqs {settings.max_num_seqs}: not every sequence could get a token; "
            "raise the first or lower the second"
        )
    if settings.num_host_blocks and not settings.enable_prefix_caching:
        raise ConfigError(
            "--num-host-blocks needs prefix caching; leave out --no-enable-prefix-caching"
        )
    block_size = settings.block_size or _BLOCK_SIZES[settings.engine_type]
    event_ports(settings)
    speed = None
    if settings.planner_profile_data is not None:
        from dynamo.mocker.profile import read_speed  # takes 0.1 s, for numpy

        speed = read_speed(settings.planner_profile_data)
    return EngineShape(
        blocks=settings.num_gpu_blocks,
        block_size=block_size,
        prefix_caching=settings.enable_prefix_caching,
        limits=Limits(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=settings.max_model_len,
            chunked_prefill=settings.enable_chunked_prefill,
            watermark=settings.watermark,
            preempt_newest=settings.preemption_mode == "lifo",
        ),
        timing=Timing(
            settings.speedup_ratio,
            settings.decode_speedup_ratio,
            speed,
            settings.num_gpu_blocks * block_size,
        ),
        prefill_only=settings.disaggregation_mode == "prefill",
        transfer=Transfer(
            settings.kv_bytes_per_token or KV_BYTES_PER_TOKEN,
            settings.kv_transfer_bandwidth_gb_s * 1e9,
            settings.speedup_ratio,
        ),
        stream_interval=settings.stream_interval,
        host_blocks=settings.num_host_blocks,
    )


def event_ports(settings: MockerSettings) -> list[int]:
    """Return the first port of each worker for engine events, none without. Raises ConfigError."""
    text = settings.zmq_kv_events_ports
    if text is None:
        return []
    words, ranks = text.split(","), settings.data_parallel_size
    ports = [int(word) for word in words if word.strip().isdecimal()]
    if len(ports) != settings.num_workers or len(ports) != len(words):
        raise ConfigError(
            f"--zmq-kv-events-ports {text}: needs one port for each of --num-workers "
            f"{settings.num_workers}, separated by commas"
        )
    taken = [port + rank for port in ports for rank in range(ranks)]
    if min(taken) < 1 or max(taken) > _MAX_PORT or len(set(taken)) < len(taken):
        raise ConfigError(
            f"--zmq-kv-events-ports {text}: each worker takes {ranks} ports from its own on, of 1 "
            f"to {_MAX_PORT}, and no two the same; choose others"
        )
    return ports


def stagger_delay_s(settings: MockerSettings) -> float:
    """Seconds between the starts of two workers of this process."""
    if settings.stagger_delay_s >= 0:
        return settings.stagger_delay_s
    if settings.num_workers <= _MANY_WORKERS:
        return 0.0
    return 0.1 if settings.num_workers <= _VERY_MANY_WORKERS else 0.2


def _setting_names() -> dict[str, str]:
    names = {}
    for field in dataclasses.fields(MockerSettings):
        spec = option_of(field)
        for name in (field.name, *(flag.lstrip("-").replace("-", "_") for flag in spec.flags)):
            names[name] = field.name
    del names["extra_engine_args"]
    return names


def check_settings(settings: MockerSettings) -> None:
    """Raise ConfigError for settings with which no worker starts."""
    engine_shape(with_extra_arguments(settings))
