"""Settings that contradict each other and bad files of settings are rejected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamo.config.worker import WorkerSettings
from dynamo.errors import ConfigError
from dynamo.mocker.arguments import engine_shape, stagger_delay_s, with_extra_arguments
from dynamo.mocker.settings import MockerSettings


def test_block_size_follows_the_engine_type() -> None:
    assert engine_shape(MockerSettings()).block_size == 64
    assert engine_shape(MockerSettings(engine_type="sglang")).block_size == 1
    assert engine_shape(MockerSettings(engine_type="trtllm")).block_size == 32
    assert engine_shape(MockerSettings(engine_type="trtllm", block_size=16)).block_size == 16


def test_fewer_batched_tokens_than_sequences_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 8 .* --max-num-seqs 256"):
        engine_shape(MockerSettings(max_num_batched_tokens=8))


def test_a_file_of_settings_overrides_the_flags(tmp_path: Path) -> None:
    path = tmp_path / "extra.json"
    path.write_text(json.dumps({"num-gpu-blocks-override": 7, "speedup_ratio": 0, "block_size": 4}))
    merged = with_extra_arguments(MockerSettings(block_size=16, extra_engine_args=str(path)))
    assert (merged.num_gpu_blocks, merged.speedup_ratio, merged.block_size) == (7, 0.0, 4)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "can't be read as JSON"),
        ("[1]", "must hold a JSON object"),
        ('{"blok_size": 4}', "unknown blok_size; known are"),
        ('{"block_size": 0}', "--block-size must be between 1 and 4096, got 0"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "extra.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=says):
        with_extra_arguments(MockerSettings(extra_engine_args=str(path)))


def test_many_workers_start_with_delays() -> None:
    assert stagger_delay_s(MockerSettings(stagger_delay_s=0.5)) == 0.5
    delays = [
        stagger_delay_s(MockerSettings(stagger_delay_s=-1, num_workers=n)) for n in (8, 64, 200)
    ]
    assert delays == [0.0, 0.1, 0.2]


@pytest.mark.parametrize("given", ["ns.comp.ep", "dyn://ns.comp.ep"])
def test_an_endpoint_may_have_a_scheme(given: str) -> None:
    """Programs log it as ``dyn://`` and this path."""
    assert WorkerSettings(endpoint=given).endpoint_or("a.b.c") == "ns.comp.ep"
    assert WorkerSettings().endpoint_or("a.b.c") == "a.b.c"


@pytest.mark.parametrize("given", ["", "a", "5557,5558,", "5557", "5557,5558", "65535,1", "0,9"])
def test_ports_of_engine_events_are_one_for_each_worker(given: str) -> None:
    settings = MockerSettings(zmq_kv_events_ports=given, num_workers=2, data_parallel_size=2)
    with pytest.raises(ConfigError, match=f"--zmq-kv-events-ports {given}: "):
        engine_shape(settings)


def test_host_memory_needs_prefix_caching() -> None:
    with pytest.raises(ConfigError, match="--num-host-blocks needs prefix caching"):
        engine_shape(MockerSettings(num_host_blocks=1, enable_prefix_caching=False))
