"""Loads read from metric pages, also from hostile ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.attach.profiles import PROFILES, LoadNames, json_load, prometheus_load
from dynamo.observability.metrics_page import samples

NAMES = PROFILES["vllm"].load_names or LoadNames((), (), ())


def test_ranks_and_escaped_labels() -> None:
    page = (
        b'vllm:num_requests_running{model_name="a\\"} 9",engine="1"} 2\n'
        b'vllm:num_requests_running{engine="0"} 1.0 1700000000\n'
        b'vllm:gpu_cache_usage_perc{engine="1"} 1.5\n'
    )
    first, second = prometheus_load(page, NAMES, 100)
    assert (first.dp_rank, first.num_requests_running, first.kv_used_blocks) == (0, 1, None)
    assert (second.dp_rank, second.num_requests_running, second.kv_used_blocks) == (1, 2, 100)
    assert prometheus_load(page, NAMES, None)[1].kv_used_blocks is None


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"<html>vllm:num_requests_running 3</html>",
        b"# vllm:num_requests_running 3",
        b"vllm:num_requests_running nan\nvllm:num_requests_waiting -1",
        b"vllm:num_requests_running_total 3",
        b'vllm:num_requests_running{engine="9999999999"} 3',
    ],
)
def test_pages_without_load(page: bytes) -> None:
    assert prometheus_load(page, NAMES, 100) == []


def test_a_rank_that_is_no_number_is_rank_0() -> None:
    (state,) = prometheus_load(b'vllm:num_requests_running{engine="x"} 3', NAMES, None)
    assert (state.dp_rank, state.num_requests_running) == (0, 3)


@given(st.binary(max_size=200))
def test_any_bytes(noise: bytes) -> None:
    list(samples(b"vllm:num_requests_running" + noise, "vllm:num_requests_running"))
    prometheus_load(b"vllm:num_requests_running" + noise, NAMES, 10)


@pytest.mark.parametrize("page", [None, {}, [], [None], "x", 3])
def test_iterations_without_load(page: Any) -> None:
    assert json_load(page) == []


def test_an_iteration_with_odd_values() -> None:
    (state,) = json_load([{"numActiveRequests": "many", "kvCacheStats": [1]}])
    assert state.num_requests_running is None and state.kv_used_blocks is None
