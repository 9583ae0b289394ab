"""Requests as vLLM's engines take them: sampling parameters, images, errors.

Decoding an image and preparing it for the model takes milliseconds to seconds of CPU, all of it in
threads. vLLM keeps what it has prepared for the next request with the same image.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import inspect
import io
import itertools
import logging
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

import vllm.exceptions
from PIL import Image
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.multimodal.media import ImageMediaIO
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import (
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)

from dynamo.errors import DynamoError, EngineFailure, InvalidArgument
from dynamo.llm.engine_events import LORA_VERSION
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import PreprocessedRequest, Routing
from dynamo.vllm.lora_shapes import ModelShapes
from dynamo.vllm.sampling import SamplingMapping

# Those of vLLM 0.32, which are set here or belong to no client.
_PARAMETERS = frozenset(
    (
        *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature"),
        *("watermarking", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids"),
        *("bad_words", "thinking_token_budget", "include_stop_str_in_output", "ignore_eos"),
        *("max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "prompt_logprob_token_ids"),
        *("prompt_logprob_start", "detokenize", "skip_special_tokens", "output_kind"),
        *("spaces_between_special_tokens", "stream_interval", "structured_outputs", "logit_bias"),
        *("allowed_token_ids", "extra_args", "skip_clone", "repetition_detection"),
        *("logprob_token_ids", "routed_experts_prompt_start", "trace_decode_token_ids"),
    )
)
P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)
CLIENT_ERRORS: tuple[type[Exception], ...] = (
    ValueError,
    TypeError,
    getattr(vllm.exceptions, "VLLMClientError", ValueError),
)
"""What vLLM raises for a request that it refuses."""
_KEY = "image_url"
_threads = ThreadPoolExecutor(4, "inputs")
MAX_PIXELS = 1 << 28
"""Of the images of a request together: sixteen of 16 megapixels."""
_IMAGES_AT_ONCE = 4
"""Requests whose images are decoded in memory at a time."""


def in_input_thread(
    function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> asyncio.Future[T]:
    """Call ``function``, which prepares a request, or begins or ends an engine.

    asyncio's own pool is left to users' code. The result raises what it raises.
    """
    return asyncio.get_running_loop().run_in_executor(_threads, partial(function, *args, **kwargs))


class ImageInputs:
    """Makes inputs of an engine from requests with images, with vLLM's ``renderer``."""

    def __init__(self, renderer: Any, model_config: Any) -> None:
        self._renderer = renderer
        self._loader = image_loader(model_config)
        self._permits = asyncio.Semaphore(_IMAGES_AT_ONCE)

    async def process(self, request: PreprocessedRequest) -> Any:
        """Return vLLM's input: the prompt with the tokens of its images, and the images.

        Raises InvalidArgument with the field and vLLM's text.
        """
        async with self._permits:
            prompt = await load_images(request, self._loader)
            try:
                # Not through the cache that vLLM shares with the engine process: it assumes that
                # every request that was processed is sent, in the same order.
                return await self._renderer.process_for_engine_async(
                    prompt, time.time(), skip_mm_cache=True
                )
            except (AssertionError, ValueError, TypeError, RuntimeError) as error:
                raise InvalidArgument(
                    f"Validation: the images do not fit the prompt or the model: {error}"
                ) from None


def can_profile(config: Any) -> bool:
    """Return whether ``--profiler-config`` names a profiler."""
    return getattr(getattr(config, "profiler_config", None), "profiler", None) is not None


def image_limit(mm_processor: Any) -> int:
    """Return how many images a model with this processor takes; 0 without a processor."""
    return int(mm_processor.info.allowed_mm_limits.get("image", 0)) if mm_processor else 0


def image_loader(model_config: Any) -> ImageMediaIO:
    """Return vLLM's decoder of images, with the options of ``--media-io-kwargs``."""
    multimodal = model_config.multimodal_config
    options = None if multimodal is None else multimodal.media_io_kwargs
    return ImageMediaIO(**(options or {}).get("image", {}))


async def load_images(request: PreprocessedRequest, loader: ImageMediaIO) -> TokensPrompt:
    """Decode the images, in threads. Raises InvalidArgument with the field of a bad one."""
    media = request.multi_modal_data or {}
    extra = request.extra_args or {}
    urls, fields, hashes = media.get(_KEY), extra.get("mm_fields"), extra.get("mm_hashes")
    if set(media) != {_KEY} or not isinstance(urls, list):
        raise InvalidArgument(f"multi_modal_data: expected `{_KEY}`, got {sorted(media)}")
    images, left = [], MAX_PIXELS
    decoding = (extra.get("media_io_kwargs") or {}).get("image")
    if decoding:
        try:
            loader = ImageMediaIO(**{"image_mode": loader.image_mode, **loader.kwargs, **decoding})
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"Validation: media_io_kwargs.image: {error}") from None
    for number, entry in enumerate(urls):
        field = f"multi_modal_data.{_KEY}[{number}]"
        if isinstance(fields, list) and len(fields) == len(urls):
            field = str(fields[number])
        url = entry.get("Url") if isinstance(entry, dict) else None
        image, pixels = await in_input_thread(_load, loader, field, url, left)
        left -= pixels
        images.append(image)
    prompt = TokensPrompt(
        prompt_token_ids=request.token_ids.tolist(), multi_modal_data={"image": images}
    )
    if isinstance(hashes, list) and len(hashes) == len(urls):
        prompt["multi_modal_uuids"] = {"image": hashes}
    if extra.get("mm_processor_kwargs"):
        prompt["mm_processor_kwargs"] = extra["mm_processor_kwargs"]
    if request.routing is not None and request.routing.cache_namespace is not None:
        prompt["cache_salt"] = request.routing.cache_namespace
    return prompt


def expansions(prompt_ids: Tokens, inputs: Any) -> list[Tokens] | None:
    """Return the tokens that stand for each image in vLLM's prompt, which ``prompt_ids`` has as one
    token each; None for a model of another kind."""
    expanded, placeholders = inputs["prompt_token_ids"], inputs["mm_placeholders"].get("image", ())
    images, end, start = [], 0, 0
    for placeholder in placeholders:
        text = placeholder.offset - end
        if expanded[end : placeholder.offset] != prompt_ids[start : start + text].tolist():
            return None
        # One token stands for the image in the frontend's prompt.
        end, start = placeholder.offset + placeholder.length, start + text + 1
        images.append(array("I", expanded[placeholder.offset : end]))
    return images if expanded[end:] == prompt_ids[start:].tolist() else None


def check_context(prompt_tokens: int, context: int) -> None:
    """Raise InvalidArgument if a prompt with its images leaves no room for output."""
    if prompt_tokens >= context:
        raise InvalidArgument(
            f"This model's maximum context length is {context} tokens. However, your prompt with "
            f"its images has {prompt_tokens} tokens. Please reduce the prompt or the images."
        )


def _load(loader: ImageMediaIO, field: str, url: Any, left: int) -> tuple[Any, int]:
    """Return the decoded image and its pixels, of which the request has ``left``.

    An image of some kilobytes may have millions of pixels, three bytes each once decoded.
    """
    if not isinstance(url, str) or not url.startswith("data:") or ";base64," not in url:
        raise InvalidArgument(f"Validation: {field}: expected a data: URL in base64")
    try:
        data = base64.b64decode(url.partition(";base64,")[2], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument(f"Validation: {field}: the URL is not base64: {error}") from None
    try:
        with Image.open(io.BytesIO(data)) as opened:  # reads the head alone
            pixels = opened.width * opened.height
        if pixels <= left:
            return loader.load_bytes(data), pixels
    except Exception as error:  # noqa: BLE001 - an image library raises anything for bad bytes
        raise InvalidArgument(f"Validation: {field}: not an image: {error}") from None
    raise InvalidArgument(
        f"Validation: {field}: the images of a request have at most {MAX_PIXELS} pixels, got "
        f"{MAX_PIXELS - left + pixels}; send smaller or fewer images"
    )


PROMPT_LOGPROBS_WITH_ADAPTERS = (
    "log probabilities of the prompt (prompt_logprobs, or echo with logprobs) are refused by a "
    "worker with LoRA adapters: its vLLM would end with an error; send the request to a worker "
    "of the model that was started without --lora-modules and --enable-lora"
)


NAMED_LOGPROBS_ON_V1 = (
    "logprob_token_ids is refused by this worker: it uses vLLM's model runner V1, with which other "
    "requests of the same step would get wrong log probabilities; use top_logprobs, or a worker "
    "with model runner V2"
)


class ParamsBuilder:
    """Builds sampling parameters; ``loras`` are the loaded adapters by name."""

    def __init__(self, config: Any, worker_id: int, prefill_only: bool = False) -> None:
        model = config.model_config
        self.loras: dict[str, LoRARequest] = {}
        self._lora_ids = itertools.count(1)  # vLLM refuses the id 0
        self._takes_loras = config.lora_config is not None
        self.shapes = ModelShapes(model.model)
        self._numbers = itertools.count()
        self._prefix = f"{worker_id:x}-"
        eos = model.try_get_generation_config().get("eos_token_id")
        # With adapters vLLM 0.32 maps the rows of logits as one a request: those of a prompt beside
        # another request end its engine.
        self._prompt_logprobs = not self._takes_loras
        # vLLM 0.32's V1 runner returns one tensor for all rows of a step: that of the named tokens.
        self._named_logprobs = bool(getattr(config, "use_v2_model_runner", True))
        self._mapping = SamplingMapping(
            model.get_diff_sampling_param(),
            frozenset([eos] if isinstance(eos, int) else eos or ()),
            model.get_vocab_size(),
            prefill_only,
            inspect.signature(SamplingParams.from_optional).parameters.keys() - _PARAMETERS,
        )

    def new_id(self) -> str:
        """Return an id that no other request of any worker has."""
        return f"{self._prefix}{next(self._numbers):x}"

    def pooling(self, request: PreprocessedRequest) -> PoolingParams:
        """Return the parameters of an input to pool; ``extra_args`` are those of the service."""
        return PoolingParams(**(request.extra_args or {}))

    def sampling(self, request: PreprocessedRequest) -> SamplingParams:
        """Return the sampling parameters. Raises InvalidArgument with vLLM's text."""
        if request.output_options.prompt_logprobs is not None and not self._prompt_logprobs:
            raise InvalidArgument(PROMPT_LOGPROBS_WITH_ADAPTERS)
        arguments = self._mapping.arguments(request)
        if arguments.get("logprob_token_ids") and not self._named_logprobs:
            raise InvalidArgument(NAMED_LOGPROBS_ON_V1)
        grammar = arguments.get("structured_outputs")
        repetition = arguments.get("repetition_detection")
        bad_words = arguments.pop("bad_words_token_ids", None)
        if bad_words and arguments.get("bad_words"):
            raise InvalidArgument("bad_words and bad_words_token_ids exclude each other")
        try:
            if grammar is not None:
                arguments["structured_outputs"] = StructuredOutputsParams(**grammar)
            if repetition is not None:
                arguments["repetition_detection"] = RepetitionDetectionParams(**repetition)
            params = SamplingParams.from_optional(**arguments)
        except CLIENT_ERRORS as error:
            raise InvalidArgument(str(error)) from None
        if bad_words:
            params._bad_words_token_ids = bad_words  # vLLM makes them of texts alone
        return params

    def new_lora(self, name: str, path: str, version: str) -> LoRARequest:
        """Return a request to load the adapter in ``path``, with an id that none had before.

        Raises InvalidArgument if the engine takes no adapters.
        """
        if not self._takes_loras:
            raise InvalidArgument(
                "this worker takes no LoRA adapters: start it with --enable-lora, and "
                "--max-lora-rank for adapters of a rank above 16"
            )
        # vLLM's cached blocks are those of a name and a path: other files need another name.
        cache_name = f"{name}{LORA_VERSION}{version}" if version else name
        return LoRARequest(cache_name, next(self._lora_ids), path)

    def use_lora(self, name: str, adapter: LoRARequest | None) -> None:
        """Compute later requests for ``name`` with ``adapter``, None: reject them."""
        if adapter is None:
            self.loras.pop(name, None)
        else:
            self.loras[name] = adapter

    def lora(self, routing: Routing | None) -> LoRARequest | None:
        """Return the adapter that the request names. Raises InvalidArgument: it is not loaded."""
        name = None if routing is None else routing.lora_name
        if name is None:
            return None
        if name not in self.loras:
            raise InvalidArgument(f"the adapter {name!r} is not loaded in this worker")
        return self.loras[name]


def lora_problem(name: str, path: str, error: Exception) -> str:
    """Return why vLLM cannot load an adapter, with its text."""
    text = str(error) or type(error).__name__
    return f"the adapter {name!r} in {path} cannot be loaded: {text}"


def priority(routing: Routing | None) -> int:
    """Return vLLM's priority, lowest first; Dynamo's clients give important requests high ones."""
    return 0 if routing is None else -(routing.priority or 0)


def failure(error: BaseException) -> DynamoError:
    """Return what ends a request whose task has raised ``error``: nothing else would end it.

    Raises the following again: cancellation, KeyboardInterrupt, SystemExit.
    """
    if isinstance(error, DynamoError):
        return error
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | SystemExit):
        raise error
    log.error("a request could not be prepared or computed", exc_info=error)
    return EngineFailure(f"{type(error).__name__}: {error}")
