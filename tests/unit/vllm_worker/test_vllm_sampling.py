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
    more: dict[str, Any] = {"extra_args": {GENERATED_TOKENS: 2}}
    given = SamplingOptions(frequency_penalty=0.5, logit_bias={"3": 1.0})
    found = mapping().arguments(request(sampling=given, **more))
    assert found["logit_bias"] == {"3": 0.5, "2": -0.5} and found["frequency_penalty"] == 0.5
    assert given.logit_bias == {"3": 1.0}
    found = mapping(presence_penalty=1.5).arguments(request(**more))
    assert found["logit_bias"] == {"2": -1.5, "3": -1.5}
    for sampling in (SamplingOptions(), SamplingOptions(repetition_penalty=1.5)):
        assert "logit_bias" not in mapping().arguments(request(sampling=sampling, **more))


def test_the_options_that_vllm_alone_has() -> None:
    options: dict[str, Any] = {
        "allowed_token_ids": [1, 2],
        "logprob_token_ids": [5, 6, 7],
        "bad_words_token_ids": [[3]],
        "repetition_detection": {"max_pattern_size": 2, "min_count": 3},
        "watermarking": False,
        "vllm_xargs": {"a": 1},
        "kv_transfer_params": {"b": 2},
    }
    sampling = SamplingOptions(engine_options=options)
    output = OutputOptions(logprobs=0)
    found = mapping().arguments(request(sampling=sampling, output=output))
    extra = {"a": 1, "kv_transfer_params": {"b": 2}}
    for name in ("vllm_xargs", "kv_transfer_params"):
        del options[name]
    assert found == {**ALWAYS, "max_tokens": 5, "logprobs": 3, "extra_args": extra, **options}


def test_a_transfer_of_this_deployment_replaces_that_of_the_client() -> None:
    sampling = SamplingOptions(engine_options={"kv_transfer_params": {"remote_host": "evil"}})
    result = {"disaggregated_params": {"kv_transfer_params": {"remote_host": "ours"}}}
    found = mapping().arguments(request(sampling=sampling, prefill_result=result))
    assert found["extra_args"] == {"kv_transfer_params": {"remote_host": "ours"}}
    found = mapping(prefill_only=True).arguments(request(sampling=sampling))
    assert found["extra_args"]["kv_transfer_params"]["remote_host"] is None


@pytest.mark.parametrize(
    ("sequences", "words"),
    [([[1000]], "token id 1000 is out of range"), ([[]], "no tokens"), ([[1]] * 129, "at most")],
)
def test_bad_words_by_their_ids_are_checked(sequences: list[list[int]], words: str) -> None:
    sampling = SamplingOptions(engine_options={"bad_words_token_ids": sequences})
    with pytest.raises(InvalidArgument, match=words):
        mapping().arguments(request(sampling=sampling))


def test_fields_that_are_passed_on_are_those_that_only_a_newer_vllm_has() -> None:
    passing = SamplingMapping({}, frozenset(), 1000, passable=("new_option",))
    fields = {"new_option": 3, "output_kind": 0, "other": 1}
    sampling = SamplingOptions(engine_options={"passed_fields": fields})
    found = passing.arguments(request(sampling=sampling))
    assert found == {**ALWAYS, "max_tokens": 5, "new_option": 3}


def test_details_of_a_grammar() -> None:
    guided = {"json": {}, "disable_any_whitespace": True, "disable_additional_properties": True}
    found = mapping().arguments(request(sampling=SamplingOptions(guided_decoding=guided)))
    assert found["structured_outputs"] == guided
