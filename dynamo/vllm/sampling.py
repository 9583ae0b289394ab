"""The fields of a request as the keyword arguments of vLLM's ``SamplingParams``.

A value that the client did not give comes from the model's generation_config.json, as in vLLM's own
server. Values are passed on unchecked: vLLM's errors name them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from dynamo.errors import InvalidArgument
from dynamo.protocols.engine import (
    GENERATED_TOKENS,
    GRAMMAR_OF_REASONING,
    KV_TRANSFER,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
)

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_PENALTIES = ("presence_penalty", "frequency_penalty")
_GRAMMAR_DETAILS = (
    *("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"),
)
_GRAMMARS = ("json", "regex", "choice", "grammar", "structural_tag")
_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


_MANY_BIASES = 1024
_MOST_BAD_WORDS = 128
"""As vLLM's VLLM_MAX_NUM_BAD_WORDS."""
_OPTIONS = ("allowed_token_ids", "logprob_token_ids", "repetition_detection", "watermarking")


def is_costly(sampling: SamplingOptions) -> bool:
    """Whether vLLM needs milliseconds to check it: a grammar, bad words, or many biases."""
    return bool(
        sampling.guided_decoding
        or sampling.bad_words
        or sampling.engine_options
        or (sampling.logit_bias and len(sampling.logit_bias) > _MANY_BIASES)
    )


class SamplingMapping:
    """``defaults`` are the values of the model's generation_config.json that vLLM applies.

    ``eos_ids`` end a text in vLLM already; ``vocab_size`` bounds the hidden stop ids, which come
    from the model's files and must not make vLLM refuse a request. ``passable`` are parameters of
    vLLM that are no fields here, which clients may set where unknown fields are passed on.
    """

    def __init__(
        self,
        defaults: Mapping[str, Any],
        eos_ids: frozenset[int],
        vocab_size: int,
        prefill_only: bool = False,
        passable: Collection[str] = (),
    ) -> None:
        names = (*_DEFAULTS, *_PENALTIES)
        self._defaults = {name: defaults[name] for name in names if name in defaults}
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._prefill_only = prefill_only
        self._passable = frozenset(passable)

    def arguments(self, request: PreprocessedRequest) -> dict[str, Any]:
        """Return the arguments; those at vLLM's default are left out. Raises InvalidArgument."""
        sampling, stop = request.sampling_options, request.stop_conditions
        # skip_clone: the parameters are made for this request alone, so vLLM need not copy them.
        arguments: dict[str, Any] = {"detokenize": False, "skip_clone": True, **self._defaults}
        _add_numbers(arguments, sampling)
        if request.extra_args is not None:
            generated = request.extra_args.get(GENERATED_TOKENS)
            if generated:
                _penalize(arguments, request.token_ids[-generated:])
        self._add_stops(arguments, stop)
        output = request.output_options
        if output.logprobs is not None:
            arguments["logprobs"] = output.logprobs
        if output.prompt_logprobs is not None:
            arguments["prompt_logprobs"] = output.prompt_logprobs
        if sampling.guided_decoding:
            arguments["structured_outputs"] = _grammar(sampling.guided_decoding)
        if sampling.engine_options is not None:
            self._add_options(arguments, sampling.engine_options)
        transfer = self._transfer(request)
        if transfer is not None:
            # That of this deployment replaces a client's.
            arguments["extra_args"] = {**arguments.get("extra_args", {}), KV_TRANSFER: transfer}
        return arguments

    def _add_options(self, arguments: dict[str, Any], options: Mapping[str, Any]) -> None:
        """Add the fields that vLLM alone has, and of those not known here what it takes."""
        for name in _OPTIONS:
            if name in options:
                arguments[name] = options[name]
        ids = options.get("logprob_token_ids")
        if ids:
            arguments["logprobs"] = len(ids)  # these take the place of the most likely ones
        if "bad_words_token_ids" in options:
            arguments["bad_words_token_ids"] = self._bad_words(options["bad_words_token_ids"])
        extra = dict(options.get("vllm_xargs") or {})
        for name in (KV_TRANSFER, "ec_transfer_params"):
            if options.get(name):
                extra[name] = options[name]
        if extra:
            arguments["extra_args"] = extra
        for name, value in (options.get("passed_fields") or {}).items():
            if name in self._passable:
                arguments[name] = value

    def _bad_words(self, sequences: list[list[int]]) -> list[list[int]]:
        """Check what vLLM checks of ``bad_words``: it takes ids of its own tokenizer alone."""
        if not all(sequences):
            raise InvalidArgument("bad_words_token_ids: a sequence has no tokens; leave it out")
        largest = max(map(max, sequences), default=0)
        if largest >= self._vocab_size:
            raise InvalidArgument(
                f"bad_words_token_ids: token id {largest} is out of range, the vocabulary has "
                f"{self._vocab_size} tokens"
            )
        if len(sequences) > _MOST_BAD_WORDS:
            raise InvalidArgument(
                f"bad_words_token_ids: at most {_MOST_BAD_WORDS} sequences, got {len(sequences)}"
            )
        return sequences

    def _add_stops(self, arguments: dict[str, Any], stop: StopConditions) -> None:
        # A prefill worker computes one token, too: vLLM refuses max_tokens of 0.
        arguments["max_tokens"] = 1 if self._prefill_only else stop.max_tokens
        if stop.min_tokens and not self._prefill_only:
            arguments["min_tokens"] = stop.min_tokens
        if stop.ignore_eos:
            arguments["ignore_eos"] = True
        if stop.max_thinking_tokens is not None:
            arguments["thinking_token_budget"] = stop.max_thinking_tokens
        ids = [*(stop.stop_token_ids or ()), *(stop.stop_token_ids_visible or ())]
        for token_id in stop.stop_token_ids_hidden or ():
            if token_id not in self._eos_ids and token_id < self._vocab_size:
                ids.append(token_id)
        if ids:
            arguments["stop_token_ids"] = ids

    def _transfer(self, request: PreprocessedRequest) -> dict[str, Any] | None:
        """Return what the KV connector needs: a prefill keeps its blocks, a decode fetches them."""
        if self._prefill_only:
            return dict(_REMOTE_DECODE)
        result = request.prefill_result
        transferred = result.get("disaggregated_params") if result else None
        if transferred is None:
            return None
        params = transferred.get(KV_TRANSFER) if isinstance(transferred, dict) else None
        if not isinstance(params, dict):
            raise InvalidArgument(
                f"prefill_result.disaggregated_params has no {KV_TRANSFER}: it is not from a vLLM "
                "prefill worker; use the same engine for prefill and decode"
            )
        return params


def _add_numbers(arguments: dict[str, Any], sampling: SamplingOptions) -> None:
    if sampling.use_beam_search:
        raise InvalidArgument("use_beam_search is not supported; leave it out and use n")
    # By name and not in a loop: this is paid for each request.
    if sampling.temperature is not None:
        arguments["temperature"] = sampling.temperature
    if sampling.top_p is not None:
        arguments["top_p"] = sampling.top_p
    if sampling.top_k is not None:
        arguments["top_k"] = sampling.top_k
    if sampling.min_p is not None:
        arguments["min_p"] = sampling.min_p
    if sampling.seed is not None:
        arguments["seed"] = sampling.seed
    _add_penalties(arguments, sampling)
    if sampling.bad_words:
        arguments["bad_words"] = sampling.bad_words


def _add_penalties(arguments: dict[str, Any], sampling: SamplingOptions) -> None:
    if sampling.presence_penalty is not None:
        arguments["presence_penalty"] = sampling.presence_penalty
    if sampling.frequency_penalty is not None:
        arguments["frequency_penalty"] = sampling.frequency_penalty
    if sampling.repetition_penalty is not None:
        arguments["repetition_penalty"] = sampling.repetition_penalty
    if sampling.logit_bias:
        arguments["logit_bias"] = sampling.logit_bias


def _penalize(arguments: dict[str, Any], generated: Iterable[int]) -> None:
    """Keep the penalties for tokens that an earlier worker ``generated``: vLLM counts only
    its own output, and these are in its prompt.

    A frequency penalty is linear, so a bias replaces it exactly. A presence penalty counts twice
    for a token that is generated again. vLLM's repetition penalty covers the prompt, too.
    """
    frequency = arguments.get("frequency_penalty") or 0.0
    presence = arguments.get("presence_penalty") or 0.0
    if not frequency and not presence:
        return
    bias = dict(arguments.get("logit_bias") or {})
    for token_id, count in Counter(generated).items():
        key = str(token_id)
        bias[key] = bias.get(key, 0.0) - frequency * count - presence
    arguments["logit_bias"] = bias


def has_reasoning(guided: Mapping[str, Any] | None) -> bool:
    """Whether the grammar describes the whole answer, with the reasoning before it."""
    return guided is not None and guided.get(GRAMMAR_OF_REASONING) is True


def refusal(request: PreprocessedRequest, error: Exception) -> InvalidArgument:
    """Return vLLM's refusal of ``request`` in terms of its fields: the client wrote no tag."""
    if not has_reasoning(request.sampling_options.guided_decoding):
        return InvalidArgument(str(error))
    return InvalidArgument(
        "Validation: the 'parameters' of a function in 'tools' cannot be a grammar: "
        f"{error.__cause__ or error}; correct its schema or set 'tool_choice' to 'auto'"
    )


def _grammar(guided: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of vLLM's ``StructuredOutputsParams``.

    A ``backend`` is ignored, as in vLLM's server: the engine has one.
    """
    grammar = {name: guided[name] for name in _GRAMMARS if guided.get(name) is not None}
    details = {name: guided[name] for name in _GRAMMAR_DETAILS if guided.get(name) is not None}
    return {**grammar, **details}
