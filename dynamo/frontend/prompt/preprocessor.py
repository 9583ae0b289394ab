"""From a typed request to what engines take: prompt text, token ids, limits, sampling, routing.

Spec 5.6, 7.4. ``n`` choices and lists of prompts become one engine request each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dynamo.errors import InvalidArgument
from dynamo.frontend.prompt.bounds import INLINE_BODY_BYTES, MAX_ENGINE_BYTES
from dynamo.frontend.prompt.messages import message_text
from dynamo.frontend.prompt.off_loop import OffLoop
from dynamo.frontend.prompt.sampling import (
    asked_annotations,
    output_options,
    routing,
    sampling_options,
    stop_conditions,
)
from dynamo.frontend.prompt.template import load_template
from dynamo.frontend.prompt.tokenizer import CACHE_BYTES, Tokenizer, load_tokenizer
from dynamo.llm.model_directory import ModelDirectory
from dynamo.protocols.card import ModelCard
from dynamo.protocols.codec import Tokens, encode, tokens
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.protocols.openai import ChatCompletionRequest, CompletionRequest, GenerationRequest

__all__ = ["Prepared", "Preprocessor", "TokenizedPrompt"]


class TokenizedPrompt(NamedTuple):
    """One prompt: its ids, and its text where there was one (or it is needed for ``echo``)."""

    token_ids: Tokens
    text: str | None


class Prepared(NamedTuple):
    """``requests[p * n + i]`` is choice ``i`` of ``prompts[p]``; its index in the answer is the
    same.

    ``rendered_s`` is the time in the chat template, None without one; ``tokenized_s`` those of the
    prompts that were text.
    """

    requests: list[PreprocessedRequest]
    prompts: list[TokenizedPrompt]
    n: int
    rendered_s: float | None = None
    tokenized_s: Sequence[float] = ()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum([len(prompt.token_ids) for prompt in self.prompts])

    @property
    def formatted_prompt(self) -> str | None:
        """The (first) prompt as text, after the chat template."""
        return self.prompts[0].text


class Preprocessor:
    """Everything about one model that turns requests into engine requests.

    ``card`` names the model directory in ``source_path`` unless ``model_dir`` is given. Raises
    ConfigError naming the file and the remedy. Loading is O(vocabulary): do it off the event loop.
    Bodies up to ``inline_limit_bytes`` go through :meth:`chat` and :meth:`completion`, larger ones
    through :meth:`chat_off_loop` and :meth:`completion_off_loop`. ``on_rendered`` and
    ``on_tokenized`` are called with the seconds that each prompt took.
    """

    def __init__(
        self,
        card: ModelCard,
        model_dir: str | Path | None = None,
        *,
        cache_bytes: int = CACHE_BYTES,
        custom_template_path: str | Path | None = None,
    ) -> None:
        directory = ModelDirectory(model_dir if model_dir is not None else card.source_path)
        self.card = card
        self.tokenizer: Tokenizer = load_tokenizer(directory, cache_bytes)
        self.inline_limit_bytes = min(self.tokenizer.inline_limit_bytes, INLINE_BODY_BYTES)
        self.on_rendered: Callable[[float], None] = _nobody
        self.on_tokenized: Callable[[float], None] = _nobody
        self.template = load_template(directory, custom_template_path or card.custom_template_path)
        self.context_length = (
            card.context_length or card.runtime_config.context_length or directory.context_length
        )

    def chat(self, request: ChatCompletionRequest) -> Prepared:
        """Prepare a chat request. Raises InvalidArgument. O(characters)."""
        return self._report(self._chat(request))

    async def chat_off_loop(self, request: ChatCompletionRequest, threads: OffLoop) -> Prepared:
        """As :meth:`chat`, in a thread."""
        return self._report(await threads.run(self._chat, request))

    def completion(self, request: CompletionRequest) -> Prepared:
        """Prepare a text completion request; as :meth:`chat`."""
        return self._report(self._completion(request))

    async def completion_off_loop(self, request: CompletionRequest, threads: OffLoop) -> Prepared:
        """As :meth:`completion`, in a thread."""
        return self._report(await threads.run(self._completion, request))

    def _report(self, prepared: Prepared) -> Prepared:
        """Report the times of a request, on the event loop."""
        if prepared.rendered_s is not None:
            self.on_rendered(prepared.rendered_s)
        for seconds in prepared.tokenized_s:
            self.on_tokenized(seconds)
        return prepared

    def _chat(self, request: ChatCompletionRequest) -> Prepared:
        limit = request.max_completion_tokens or request.max_tokens
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        given = self._given_ids(request)
        if given is not None:
            return self._prepared(request, [given], limit, logprobs)
        begun = time.perf_counter()
        text = self._render(request)
        rendered = time.perf_counter()
        self._check_size(text)
        ids = self.tokenizer.encode(text, request.add_special_tokens is True)
        tokenized_s = (time.perf_counter() - rendered,)
        prompts = [TokenizedPrompt(ids, text)]
        return self._prepared(request, prompts, limit, logprobs, rendered - begun, tokenized_s)

    def _completion(self, request: CompletionRequest) -> Prepared:
        given = self._given_ids(request)
        if given is not None:
            return self._prepared(request, [given], request.max_tokens, request.logprobs)
        special = request.add_special_tokens is not False
        texts = _prompts(request)
        for each in texts:
            self._check_size(each)
        prompts, tokenized_s = [], []
        for each in texts:
            if isinstance(each, str):
                begun = time.perf_counter()
                prompts.append(TokenizedPrompt(self.tokenizer.encode(each, special), each))
                tokenized_s.append(time.perf_counter() - begun)
            else:
                prompts.append(self._from_ids(each, bool(request.echo)))
        limit, logprobs = request.max_tokens, request.logprobs
        return self._prepared(request, prompts, limit, logprobs, tokenized_s=tokenized_s)

    def _check_size(self, prompt: str | list[int]) -> None:
        """Refuse, before it is tokenized, a prompt that no context can hold."""
        context = self.context_length
        if context is None or 4 * len(prompt) <= context:  # not even with a token for each byte
            return
        least = self.tokenizer.least_tokens(prompt) if isinstance(prompt, str) else len(prompt)
        if least > context:
            raise InvalidArgument(
                f"This model's maximum context length is {context} tokens. However, your prompt "
                f"has at least {least} tokens. Please reduce the length of the prompt."
            )

    def _render(self, request: ChatCompletionRequest) -> str:
        nvext = request.nvext
        if nvext is not None and nvext.use_raw_prompt:
            return "".join(message_text(*each) for each in enumerate(request.messages))
        if self.template is None:
            raise InvalidArgument(
                f"Model `{request.model}` has no chat template; use /v1/completions, or give the "
                "worker a template"
            )
        return self.template.render(
            request.messages,
            None if request.tool_choice == "none" else request.tools,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=request.continue_final_message is True,
            variables=_template_variables(request),
        )

    def _given_ids(self, request: GenerationRequest) -> TokenizedPrompt | None:
        nvext = request.nvext
        if nvext is None or not nvext.token_data:
            return None
        return self._from_ids(nvext.token_data)

    def _from_ids(self, given: list[int], with_text: bool = False) -> TokenizedPrompt:
        if max(given) >= self.tokenizer.vocab_size:
            raise InvalidArgument(
                f"Validation: token id {max(given)} is out of range, "
                f"the vocabulary has {self.tokenizer.vocab_size} tokens"
            )
        return TokenizedPrompt(tokens(given), self.tokenizer.decode(given) if with_text else None)

    def _prepared(
        self,
        request: GenerationRequest,
        prompts: list[TokenizedPrompt],
        max_tokens: int | None,
        logprobs: int | None,
        rendered_s: float | None = None,
        tokenized_s: Sequence[float] = (),
    ) -> Prepared:
        requests = [
            self._engine_request(request, prompt, max_tokens, logprobs) for prompt in prompts
        ]
        n = request.n or 1
        if n > 1 or len(requests) > 1:
            _check_engine_bytes(requests, n)
        if n > 1:
            requests = [_choice(each, number) for each in requests for number in range(n)]
        return Prepared(requests, prompts, n, rendered_s, tokenized_s)

    def _engine_request(
        self,
        request: GenerationRequest,
        prompt: TokenizedPrompt,
        max_tokens: int | None,
        logprobs: int | None,
    ) -> PreprocessedRequest:
        nvext = request.nvext
        limit = self._limit(len(prompt.token_ids), max_tokens)
        eos_ids = self.tokenizer.eos_ids
        return PreprocessedRequest(
            model=request.model,
            token_ids=prompt.token_ids,
            stop_conditions=stop_conditions(request, limit, eos_ids),
            sampling_options=sampling_options(request),
            output_options=output_options(request, logprobs),
            eos_token_ids=eos_ids,
            mdc_sum=self.card.checksum or None,
            annotations=asked_annotations(nvext),
            routing=routing(request, self.card.lora_name),
            router_config_override=nvext.router_config_override if nvext is not None else None,
            backend_instance_id=nvext.backend_instance_id if nvext is not None else None,
        )

    def _limit(self, prompt_tokens: int, max_tokens: int | None) -> int | None:
        """``max_tokens`` if it fits, or what the context leaves. Raises InvalidArgument."""
        if not prompt_tokens:
            raise InvalidArgument("Validation: the prompt has no tokens")
        context = self.context_length
        if context is None:
            return max_tokens
        room = context - prompt_tokens
        if room <= 0:
            raise InvalidArgument(
                f"This model's maximum context length is {context} tokens. However, your prompt "
                f"has {prompt_tokens} tokens. Please reduce the length of the prompt."
            )
        if max_tokens is not None and max_tokens > room:
            raise InvalidArgument(
                f"This model's maximum context length is {context} tokens. However, you requested "
                f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt, {max_tokens} "
                "in the completion). Please reduce the length of the prompt or max_tokens."
            )
        return room if max_tokens is None else max_tokens


def _nobody(seconds: float) -> None:
    """Where nobody counts."""


def _template_variables(request: ChatCompletionRequest) -> dict[str, Any]:
    """What the request adds to what every template sees."""
    variables: dict[str, Any] = {}
    if request.chat_template_args:
        variables.update(request.chat_template_args)
    if request.chat_template_kwargs:
        variables.update(request.chat_template_kwargs)
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    if request.documents is not None:
        variables["documents"] = request.documents
    if variables:
        for name in ("messages", "tools", "add_generation_prompt", "continue_final_message"):
            variables.pop(name, None)
    return variables


def _prompts(request: CompletionRequest) -> list[Any]:
    prompt = request.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return prompt


def _check_engine_bytes(requests: list[PreprocessedRequest], n: int) -> None:
    """Bound what all choices together send. Raises InvalidArgument."""
    first = requests[0]
    options_bytes = len(encode(first)) - 4 * len(first.token_ids)
    tokens = sum([len(each.token_ids) for each in requests])
    total_bytes = n * (4 * tokens + options_bytes * len(requests))
    if total_bytes > MAX_ENGINE_BYTES:
        raise InvalidArgument(
            f"Validation: the prompts and options of {n * len(requests)} choices ('n' for each "
            f"prompt) are {total_bytes} bytes for the engines, at most {MAX_ENGINE_BYTES}; ask for "
            "fewer choices in a request"
        )


def _choice(request: PreprocessedRequest, number: int) -> PreprocessedRequest:
    """A request of its own for choice ``number``; with one seed all would be the same."""
    seed = request.sampling_options.seed
    sampling = request.sampling_options
    if number and seed is not None:
        # Seeds are 64 bits with a sign; the one after the largest is the smallest.
        wrapped = (seed + number + 2**63) % 2**64 - 2**63
        sampling = msgspec.structs.replace(sampling, seed=wrapped)
    return msgspec.structs.replace(request, sampling_options=sampling)
