"""Requests to EngineCore whose parameters vLLM has accepted before.

vLLM checks and encodes each request in Python: about 80 µs, and 0.1 µs a token of the prompt. Its
result depends on the prompt only in two checks. So the encoded sampling parameters are kept by the
fields of the request that they come from, and a later request with the same fields is encoded
around its token ids in C.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import zmq
import zmq.backend
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core_client import AsyncMPClient

from dynamo._fast.engine_core import pack_ids
from dynamo.protocols.engine import PreprocessedRequest

_KEPT = 4096
"""Parameters that are kept; requests with a seed each fill them."""

_MAX_KEY = 4096
"""Bytes of a key whose parameters are kept: a bias for each token is megabytes."""

_ADD = EngineCoreRequestType.ADD.value
_NOW, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_send = zmq.backend.Socket.send  # the checks of zmq.Socket.send cost as much as sending
_encode = msgspec.msgpack.Encoder().encode


class PlainRequests:
    """Sends requests of known parameters: no adapter, salt, priority, grammar, image, transfer or
    output of another worker.

    Works for one rank only: with several, vLLM's client chooses the rank.
    """

    def __init__(self, config: Any, client: Any) -> None:
        self._client = client
        self._enabled = type(client) is AsyncMPClient and len(client.core_engines) == 1
        self._context_length = config.model_config.max_model_len
        self._vocab_size = config.model_config.get_vocab_size()
        self._params: dict[bytes, msgspec.Raw] = {}
        # The client's own socket without its asyncio wrapper, whose send() makes a future.
        self._socket: Any = zmq.Socket.shadow(client.input_socket) if self._enabled else None
        self._out: list[bytes] = []

    def send(self, request: PreprocessedRequest, number: str) -> bool:
        """Send ``request`` under the id ``number``; False: vLLM has to check it first."""
        if not self._enabled or not _is_plain(request) or self._client.resources.engine_dead:
            return False
        ids, params = request.token_ids, self._params.get(_key(request))
        # The length here and the vocabulary below are vLLM's only checks of a prompt. What they
        # refuse goes to vLLM, whose error has its text.
        if params is None or not 0 < len(ids) < self._context_length:
            return False
        packed, largest = pack_ids(ids)
        if largest >= self._vocab_size:
            return False
        engine_request = EngineCoreRequest(
            request_id=number,
            prompt_token_ids=msgspec.Raw(packed),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            external_req_id=number,
        )
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(_encode(engine_request))
        return True

    def _flush(self) -> None:
        """Send the requests of this loop turn: ZeroMQ's thread then wakes up once, not for each."""
        socket, engine = self._socket, self._client.core_engine
        for request in self._out:
            # The frames of vLLM's client: the engine's identity, the kind, the request. NOBLOCK
            # cannot fail: vLLM sets no high-water mark on this socket.
            _send(socket, engine, _MORE)
            _send(socket, _ADD, _MORE)
            _send(socket, request, _NOW)
        self._out.clear()

    def learn(self, request: PreprocessedRequest, engine_request: EngineCoreRequest) -> None:
        """Keep the parameters that vLLM made of ``request``.

        Without ``max_tokens`` they depend on the length of the prompt.
        """
        if not self._enabled or engine_request.sampling_params is None:
            return
        if request.stop_conditions.max_tokens is not None and _is_plain(request):
            key, frames = _key(request), self._client.encoder.encode(engine_request.sampling_params)
            if len(self._params) >= _KEPT:
                self._params.clear()
            # Further frames have tensors, which the kept bytes would lack.
            if len(frames) == 1 and len(key) <= _MAX_KEY:
                self._params[key] = msgspec.Raw(bytes(frames[0]))


def _is_plain(request: PreprocessedRequest) -> bool:
    routing = request.routing
    if routing is not None and (
        routing.lora_name is not None or routing.cache_namespace is not None or routing.priority
    ):
        return False
    return (
        request.multi_modal_data is None
        and request.prefill_result is None
        and request.extra_args is None
        and request.sampling_options.guided_decoding is None
    )


def _key(request: PreprocessedRequest) -> bytes:
    """The fields that ``ParamsBuilder.sampling`` reads."""
    return _encode((request.sampling_options, request.stop_conditions, request.output_options))
