"""The fields of a request as arguments of vLLM's SamplingParams."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo.errors import InvalidArgument
from dynamo.protocols import codec
from dynamo.protocols.engine import (
    GENERATED_TOKENS,
    OutputOptions,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
)
from dynamo.vllm.sampling import SamplingMapping

ALWAYS = {"detokenize": False, "skip_clone": True}


def mapping(prefill_only: bool = False, **defaults: Any) -> SamplingMapping:
    return SamplingMapping(defaults, frozenset((2,)), 1000, prefill_only)


def request(
    stop: StopConditions | None = None,
    sampling: SamplingOptions | None = None,
    output: OutputOptions | None = None,
    **more: Any,
) -> PreprocessedRequest:
    return PreprocessedRequest(
        "m",
        codec.tokens([1, 2, 3]),
        stop or StopConditions(max_tokens=5),
        sampling or SamplingOptions(),
        output or OutputOptions(),
        **more,
    )


def test_a_plain_request_has_vllms_defaults() -> None:
    assert mapping().arguments(request()) == {**ALWAYS, "max_tokens": 5}


def test_the_models_generation_config_fills_what_the_client_left_out() -> None:
    found = mapping(temperature=0.6, top_k=20, max_tokens=99).arguments(
        request(sampling=SamplingOptions(temperature=0.0))
    )
    assert found == {**ALWAYS, "max_tokens": 5, "temperature": 0.0, "top_k": 20}


def test_every_sampling_option_is_passed() -> None:
    given: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 0,
        "logit_bias": {"5": 1.5},
        "bad_words": ["word"],
    }
    found = mapping().arguments(request(sampling=SamplingOptions(n=1, **given)))
    assert found == {**ALWAYS, "max_tokens": 5, **given}


def test_stop_ids_of_the_client_and_hidden_ones_that_vllm_does_not_have() -> None:
    stop = StopConditions(
        max_tokens=5,
        min_tokens=2,
        stop_token_ids=[9],
        stop_token_ids_visible=[8],
        stop_token_ids_hidden=[2, 3, 1000],  # vLLM's own, another, outside of the vocabulary
    )
    found = mapping().arguments(request(stop))
    assert found == {**ALWAYS, "max_tokens": 5, "min_tokens": 2, "stop_token_ids": [9, 8, 3]}


def test_ignore_eos_and_the_thinking_budget() -> None:
    stop = StopConditions(max_tokens=5, ignore_eos=True, max_thinking_tokens=4)
    found = mapping().arguments(request(stop))
    assert found == {**ALWAYS, "max_tokens": 5, "ignore_eos": True, "thinking_token_budget": 4}


def test_log_probabilities() -> None:
    found = mapping().arguments(request(output=OutputOptions(logprobs=0, prompt_logprobs=3)))
    assert found == {**ALWAYS, "max_tokens": 5, "logprobs": 0, "prompt_logprobs": 3}


@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar", "structural_tag"])
def test_a_grammar(kind: str) -> None:
    guided = {kind: "x", "backend": "xgrammar", "whitespace_pattern": " "}
    found = mapping().arguments(request(sampling=SamplingOptions(guided_decoding=guided)))
    assert found["structured_outputs"] == {kind: "x", "whitespace_pattern": " "}


def test_beam_search_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="use_beam_search is not supported"):
        mapping().arguments(request(sampling=SamplingOptions(use_beam_search=True)))


def test_a_prefill_computes_one_token_and_keeps_its_blocks() -> None:
    stop = StopConditions(max_tokens=50, min_tokens=2)
    found = mapping(prefill_only=True).arguments(request(stop))
    assert found["max_tokens"] == 1
    assert "min_tokens" not in found
    assert found["extra_args"]["kv_transfer_params"]["do_remote_decode"] is True


def test_a_decode_passes_the_parameters_of_its_prefill() -> None:
    params = {"do_remote_prefill": True, "remote_block_ids": [4]}
    result = {"disaggregated_params": {"kv_transfer_params": params}}
    found = mapping().arguments(request(prefill_result=result))
    assert found["extra_args"] == {"kv_transfer_params": params}


def test_the_prefill_of_another_engine_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="not from a vLLM prefill worker"):
        mapping().arguments(request(prefill_result={"disaggregated_params": {"room": 1}}))


def test_penalties_count_the_output_of_an_earlier_worker() -> None:
    more = {"extra_args": {GENERATED_TOKENS: 2}}
    given = SamplingOptions(frequency_penalty=0.5, logit_bias={"3": 1.0})
    found = mapping().arguments(request(sampling=given, **more))
    assert found["logit_bias"] == {"3": 0.5, "2": -0.5} and found["frequency_penalty"] == 0.5
    assert given.logit_bias == {"3": 1.0}
    found = mapping(presence_penalty=1.5).arguments(request(**more))
    assert found["logit_bias"] == {"2": -1.5, "3": -1.5}
    for sampling in (SamplingOptions(), SamplingOptions(repetition_penalty=1.5)):
        assert "logit_bias" not in mapping().arguments(request(sampling=sampling, **more))
