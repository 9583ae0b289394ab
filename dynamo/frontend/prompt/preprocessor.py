"""From a typed request to engine requests: prompt text, token ids, limits, sampling, routing.

``n`` choices and lists of prompts become one engine request each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dynamo import __version__
from dynamo._fast.histogram import Histogram
from dynamo.config.frontend import FrontendSettings
from dynamo.errors import InvalidArgument, shorten
from dynamo.frontend.formats.forced_calls import is_forced
from dynamo.frontend.formats.formats import AnswerFormat, ModelFormats
from dynamo.frontend.prompt.bounds import (
    INLINE_BODY_BYTES,
    MAX_COUNTED_TOKENS,
    check_engine_value,
)
from dynamo.frontend.prompt.engine_options import (
    expand_choices,
    image_options,
    known_annotations,
    prompt_logprobs,
    request_routing,
    sampling_options,
    stop_conditions,
)
from dynamo.frontend.prompt.images import ImageReader, PromptImages
from dynamo.frontend.prompt.messages import message_text
from dynamo.frontend.prompt.off_loop import OffLoop
from dynamo.frontend.prompt.template import (
    ChatTemplate,
    TemplateTimeout,
    load_template,
    request_template,
    template_variables,
)
from dynamo.frontend.prompt.tool_choice import forced_schema, has_grammar
from dynamo.frontend.prompt.truncation import cut_ids, prompt_cut
from dynamo.frontend.text.token_frames import Cut, shortened
from dynamo.frontend.text.tokenizer import CACHE_BYTES, Tokenizer, load_tokenizer
from dynamo.llm.model_directory import ModelDirectory
from dynamo.protocols.codec import Tokens, tokens
from dynamo.protocols.control import ModelCard
from dynamo.protocols.engine import (
    GRAMMAR_OF_REASONING,
    OutputOptions,
    PreprocessedRequest,
)
from dynamo.protocols.openai import ChatCompletionRequest, CompletionRequest, GenerationRequest

_DEFAULTS = FrontendSettings()
_TEMPLATES = 8
"""Templates of requests that stay compiled."""


class TokenizedPrompt(msgspec.Struct, frozen=True):
    """One prompt: its ids, and its text if the client sent text or asked for ``echo``."""

    token_ids: Tokens
    text: str | None


class Prepared(msgspec.Struct, frozen=True):
    """Engine requests: ``requests[p * n + i]`` is choice ``i`` of ``prompts[p]``, as in the answer.

    ``prompt_tokens`` counts each prompt once. ``rendered_s`` is the time in the chat template, None
    without one; ``tokenized_s`` those of the prompts that were text. ``answer`` is how to read the
    answer, None if it is content alone. ``images`` are those of a chat that has some,
    ``fingerprint`` is that of the model and its software.
    """

    requests: list[PreprocessedRequest]
    prompts: list[TokenizedPrompt]
    n: int
    prompt_tokens: int
    rendered_s: float | None = None
    tokenized_s: Sequence[float] = ()
    answer: AnswerFormat | None = None
    images: PromptImages | None = None
    fingerprint: str = ""


class PromptMetrics(NamedTuple):
    """The histograms of rendering and tokenization."""

    template: Histogram
    tokenize: Histogram
    tokenize_ms: Histogram


class Preprocessor:
    """Tokenizer, chat template and limits of one model.

    ``card`` names the model directory in ``source_path`` unless ``model_dir`` is given. Raises
    ConfigError naming the file and the remedy. Loading is O(vocabulary): do it off the event loop.
    Bodies up to ``inline_limit_bytes`` go through :meth:`chat` and :meth:`completion`, larger ones
    through :meth:`chat_off_loop` and :meth:`completion_off_loop`. ``metrics``, if
    any, observe the seconds that each prompt took. ``settings`` say what prompts leave out, where
    answers have reasoning, and whether chats may bring a template or options of images.
    """

    def __init__(
        self,
        card: ModelCard,
        model_dir: str | Path | None = None,
        *,
        cache_bytes: int = CACHE_BYTES,
        custom_template_path: str | Path | None = None,
        metrics: PromptMetrics | None = None,
        settings: FrontendSettings = _DEFAULTS,
    ) -> None:
        directory = ModelDirectory(model_dir if model_dir is not None else card.source_path)
        self.card = card
        self._checksum = card.checksum or None
        self.fingerprint = f"dynamo-{__version__}-{card.checksum[:8]}".rstrip("-")
        self.tokenizer: Tokenizer = load_tokenizer(directory, cache_bytes)
        self.formats = ModelFormats.of(card, self.tokenizer, settings.reasoning_field_name)
        self.inline_limit_bytes = min(self.tokenizer.inline_limit_bytes, INLINE_BODY_BYTES)
        self._metrics = metrics
        self._settings = settings
        self.template = load_template(directory, custom_template_path or card.custom_template_path)
        self._compile: Callable[[str], ChatTemplate] | None = None
        if settings.trust_request_chat_template:  # each is compiled in a thread
            specials = directory.special_tokens
            self._compile = lru_cache(_TEMPLATES)(lambda text: request_template(text, specials))
        self.context_length = (
            card.context_length or card.runtime_config.context_length or directory.context_length
        )
        self.images = ImageReader.of(card, directory, self.template)

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

    def chat_ids(self, request: ChatCompletionRequest) -> Tokens:
        """The ids of the prompt alone, for a request that another server judges. Thread-safe.

        Raises InvalidArgument for messages that the template refuses, or too long ones.
        """
        return self._ids(request, self._render(request))

    def chat_tokens(self, request: ChatCompletionRequest) -> Tokens:
        """The ids of the prompt, however long; an image is what the template writes for it.

        Thread-safe. Raises InvalidArgument. O(characters).
        """
        images = None if self.images is None else self.images.read(request.messages)
        text = self._render(request, None if images is None else images.messages)
        return self.text_tokens(text, request.add_special_tokens is True)

    def text_tokens(self, text: str, add_special_tokens: bool) -> Tokens:
        """The ids of a text, which need not fit into the context. As :meth:`chat_tokens`."""
        least = self.tokenizer.least_tokens(text) if len(text) > MAX_COUNTED_TOKENS else 0
        if least > MAX_COUNTED_TOKENS:
            raise InvalidArgument(
                f"Validation: at most {MAX_COUNTED_TOKENS} tokens are counted, your prompt has at "
                f"least {least}; send a shorter one"
            )
        return self.tokenizer.encode(text, add_special_tokens)

    def completion_ids(self, request: CompletionRequest) -> Tokens:
        """As :meth:`chat_ids`, of all prompts one after another."""
        special = request.add_special_tokens is not False
        joined = tokens(())
        for prompt in _prompts(request):
            self._check_size(prompt)
            if isinstance(prompt, str):
                joined += self.tokenizer.encode(prompt, special)
            else:
                joined += self._from_ids(prompt).token_ids
        return joined

    def _report(self, prepared: Prepared) -> Prepared:
        """Report the times of a request, on the event loop: the counters are not locked."""
        metrics = self._metrics
        if metrics is not None:
            if prepared.rendered_s is not None:
                metrics.template.observe(prepared.rendered_s)
            for seconds in prepared.tokenized_s:
                metrics.tokenize.observe(seconds)
                metrics.tokenize_ms.observe(seconds * 1e3)
        return prepared

    def _chat(self, request: ChatCompletionRequest) -> Prepared:
        max_tokens = request.max_completion_tokens or request.max_tokens
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        images = None
        options = image_options(request, self._settings.trust_request_mm_kwargs)
        if self.images is not None:
            images = self.images.read(request.messages, options)
        if request.nvext is not None and request.nvext.token_data:
            answer = self._answer_format(request, None)
            prepared = self._from_token_data(
                request, request.nvext.token_data, max_tokens, logprobs, images
            )
            if answer is not None:
                _mark_tagged(prepared.requests, answer)
            return msgspec.structs.replace(prepared, answer=answer)
        begun = time.perf_counter()
        text = self._render(request, None if images is None else images.messages)
        rendered = time.perf_counter()
        if images is not None and request.truncate_prompt_tokens is not None:
            raise InvalidArgument(
                "Validation: 'truncate_prompt_tokens' could cut an image; send a shorter prompt"
            )
        ids = self._ids(request, text)
        tokenized_s = time.perf_counter() - rendered
        answer = None
        # Before the engine requests, which get the grammar that a forced call sets.
        if self.formats is not None or request.tool_choice is not None:
            answer = self._answer_format(request, text)
        prompts = [TokenizedPrompt(ids, text)]
        requests = self._engine_requests(request, prompts, max_tokens, logprobs, images)
        if answer is not None:
            _mark_tagged(requests, answer)
        times = rendered - begun, (tokenized_s,)
        n, mark = request.generated_choices, self.fingerprint
        return Prepared(requests, prompts, n, len(ids), *times, answer, images, mark)

    def _answer_format(
        self, request: ChatCompletionRequest, prompt: str | None
    ) -> AnswerFormat | None:
        """How to read the answer to ``prompt``; None for content alone.

        A forced tool call sets the request's grammar, and so does a strict tool. Raises
        InvalidArgument where a call cannot be forced.
        """
        formats = self.formats
        forced = is_forced(request.tool_choice)
        if forced and (formats is None or not formats.can_force):
            raise InvalidArgument(
                f"Validation: 'tool_choice' {shorten(repr(request.tool_choice))} is not "
                f"possible with model `{request.model}`: its workers name no tool-call parser "
                "(--dyn-tool-call-parser), or harmony, which takes no grammar; use 'auto'"
            )
        if formats is None:
            return None
        prefill = tag = None
        if request.continue_final_message and formats.has_tags:
            prefill = message_text(len(request.messages) - 1, request.messages[-1])
        if request.tools and not has_grammar(request):
            tag = formats.structural_tag(request, prompt, prefill)
            if tag is not None:
                check_engine_value("tools", tag)
                request.structural_tag = msgspec.json.encode(tag).decode()
            elif forced:
                request.guided_json = forced_schema(request)
        return formats.answer(request, prompt, prefill, tag is not None)

    def _completion(self, request: CompletionRequest) -> Prepared:
        # With 0 the prompt alone is wanted: engines generate a token at least.
        max_tokens = 1 if request.max_tokens == 0 else request.max_tokens
        logprobs = request.logprobs
        if request.nvext is not None and request.nvext.token_data:
            return self._from_token_data(request, request.nvext.token_data, max_tokens, logprobs)
        special = request.add_special_tokens is not False
        sources, cut = _prompts(request), prompt_cut(request, self.context_length)
        # All before the first is tokenized: one that cannot fit refuses the request.
        for source in () if cut is not None else sources:
            self._check_size(source)
        prompts, tokenized_s = [], []
        for source in sources:
            if isinstance(source, str):
                begun = time.perf_counter()
                if cut is None:
                    prompt = TokenizedPrompt(self.tokenizer.encode(source, special), source)
                else:
                    prompt = TokenizedPrompt(cut_ids(self.tokenizer, source, cut, special), None)
                prompts.append(prompt)
                tokenized_s.append(time.perf_counter() - begun)
            else:
                prompts.append(self._from_ids(source, bool(request.echo), cut))
        requests = self._engine_requests(request, prompts, max_tokens, logprobs)
        prompt_tokens = sum([len(prompt.token_ids) for prompt in prompts])
        n, mark = request.generated_choices, self.fingerprint
        return Prepared(
            requests, prompts, n, prompt_tokens, tokenized_s=tokenized_s, fingerprint=mark
        )

    def _from_token_data(
        self,
        request: GenerationRequest,
        token_data: list[int],
        max_tokens: int | None,
        logprobs: int | None,
        images: PromptImages | None = None,
    ) -> Prepared:
        """Prepare ``nvext.token_data``, which replaces messages and prompts."""
        prompt = self._from_ids(token_data)
        requests = self._engine_requests(request, [prompt], max_tokens, logprobs, images)
        n, count = request.generated_choices, len(prompt.token_ids)
        mark = self.fingerprint
        return Prepared(requests, [prompt], n, count, images=images, fingerprint=mark)

    def _ids(self, request: ChatCompletionRequest, text: str) -> Tokens:
        """The ids of the prompt of a chat. Raises InvalidArgument."""
        special = request.add_special_tokens is True
        if request.truncate_prompt_tokens is not None:
            cut = prompt_cut(request, self.context_length)
            if cut is not None:
                return cut_ids(self.tokenizer, text, cut, special)
        self._check_size(text)
        return self.tokenizer.encode(text, special)

    def _check_size(self, prompt: str | list[int]) -> None:
        """Refuse a prompt that cannot fit into the context, before it is tokenized."""
        context = self.context_length
        # A character has at most four bytes, and a byte at most one token.
        if context is None or 4 * len(prompt) <= context:
            return
        least = self.tokenizer.least_tokens(prompt) if isinstance(prompt, str) else len(prompt)
        if least > context:
            raise _too_long(context, f"your prompt has at least {least} tokens")

    def _render(
        self, request: ChatCompletionRequest, messages: list[Mapping[str, Any]] | None = None
    ) -> str:
        """Return the prompt of ``messages``, by default those of ``request``."""
        nvext = request.nvext
        if nvext is not None and nvext.use_raw_prompt:
            return "".join(message_text(*numbered) for numbered in enumerate(request.messages))
        template = self.template
        if template is None or request.chat_template is not None:
            template = self._own_template(request)
        excluded = (
            request.tool_choice == "none" and self._settings.exclude_tools_when_tool_choice_none
        )
        try:
            return template.render(
                request.messages if messages is None else messages,
                None if excluded else request.tools,
                add_generation_prompt=request.add_generation_prompt is not False,
                continue_final_message=request.continue_final_message is True,
                variables=template_variables(request),
            )
        except TemplateTimeout:
            if request.chat_template is None:  # another one says nothing about the model's own
                self.inline_limit_bytes = 0  # from here on all requests of this model take a thread
            raise

    def _own_template(self, request: ChatCompletionRequest) -> ChatTemplate:
        """The template that a request brings. Raises InvalidArgument, also if it brings none."""
        if request.chat_template is None:
            raise InvalidArgument(
                f"Model `{request.model}` has no chat template; use /v1/completions, or give the "
                "worker a template"
            )
        if self._compile is None:
            raise InvalidArgument(
                "Validation: 'chat_template' of a request is not run; leave it out for the "
                "model's own template, which takes 'chat_template_kwargs', or ask the operator "
                "for --trust-request-chat-template"
            )
        return self._compile(request.chat_template)

    def _from_ids(
        self, ids: list[int], with_text: bool = False, cut: Cut | None = None
    ) -> TokenizedPrompt:
        if cut is not None:
            ids = shortened(ids, cut.limit, cut.side)
        if max(ids) >= self.tokenizer.vocab_size:
            raise InvalidArgument(
                f"Validation: token id {max(ids)} is out of range, "
                f"the vocabulary has {self.tokenizer.vocab_size} tokens"
            )
        return TokenizedPrompt(tokens(ids), self.tokenizer.decode(ids) if with_text else None)

    def _engine_requests(
        self,
        request: GenerationRequest,
        prompts: list[TokenizedPrompt],
        max_tokens: int | None,
        logprobs: int | None,
        images: PromptImages | None = None,
    ) -> list[PreprocessedRequest]:
        """One for each choice of each prompt; they share what does not differ.

        A chat, which has one prompt, may have ``images``.
        """
        limits = [self._limit(len(prompt.token_ids), max_tokens) for prompt in prompts]
        nvext, n = request.nvext, request.generated_choices
        sampling, echoed = sampling_options(request), prompt_logprobs(request, logprobs)
        if logprobs is None and n > (request.n or 1):
            logprobs = 0  # to choose the best of them by that of each token
        output = OutputOptions(
            logprobs=logprobs,
            prompt_logprobs=echoed,
            skip_special_tokens=request.skip_special_tokens,
        )
        annotations: list[str] = []
        if nvext is not None and nvext.annotations:
            annotations = known_annotations(nvext.annotations)
        routing = None
        if (
            nvext is not None
            or request.cache_salt is not None
            or self.card.lora_name is not None
            or request.priority is not None
            or request.session_id is not None
        ):
            routing = request_routing(request, self.card.lora_name)
        if images is not None and self.images is not None:
            routing = self.images.routing(routing, images, prompts[0].token_ids)
            if max_tokens is None:
                limits = [None]  # the engine counts the tokens of the images
        eos_ids = self.tokenizer.eos_ids
        requests = [
            PreprocessedRequest(
                model=request.model,
                token_ids=prompt.token_ids,
                stop_conditions=stop_conditions(request, limit, eos_ids),
                sampling_options=sampling,
                output_options=output,
                eos_token_ids=eos_ids,
                mdc_sum=self._checksum,
                annotations=annotations,
                routing=routing,
                router_config_override=nvext.router_config_override if nvext is not None else None,
                backend_instance_id=nvext.backend_instance_id if nvext is not None else None,
                extra_args=None if images is None else images.extra_args,
                multi_modal_data=None if images is None else images.data,
            )
            for prompt, limit in zip(prompts, limits, strict=True)
        ]
        return expand_choices(requests, n) if n > 1 or len(requests) > 1 else requests

    def _limit(self, prompt_tokens: int, max_tokens: int | None) -> int | None:
        """Return ``max_tokens``, but at most the rest of the context, which is the default."""
        if not prompt_tokens:
            raise InvalidArgument("Validation: the prompt has no tokens")
        context = self.context_length
        if context is None:
            return max_tokens
        left = context - prompt_tokens
        if left <= 0:
            raise _too_long(context, f"your prompt has {prompt_tokens} tokens")
        return left if max_tokens is None else min(max_tokens, left)


def _mark_tagged(requests: list[PreprocessedRequest], answer: AnswerFormat) -> None:
    """Tell the engine that a structural tag of ours describes the reasoning, too."""
    if answer.tagged:
        for request in requests:
            guided = {
                **(request.sampling_options.guided_decoding or {}),
                GRAMMAR_OF_REASONING: True,
            }
            request.sampling_options.guided_decoding = guided


def _too_long(context: int, reason: str) -> InvalidArgument:
    return InvalidArgument(
        f"This model's maximum context length is {context} tokens. However, {reason}. "
        "Please reduce the length of the prompt."
    )


def _prompts(request: CompletionRequest) -> list[Any]:
    prompt = request.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return prompt
