"""A mock of vLLM's EngineCore: its ZeroMQ protocol, fixed tokens at a fixed rate, no model.

python mock_core.py --handshake tcp://127.0.0.1:29550 --tokens 5,6,7 --counters core.bin

It asks the handshake address of a frontend for the addresses of its sockets, as an engine process
of vLLM does, or connects to ``--sockets INPUT OUTPUT``. Every step sends one token of each running
request, all in one message. The wire types are those of vLLM 0.32 and 0.33, which differ in
trailing fields. ``--counters`` holds four numbers that :class:`Counters` reads from outside.
"""

from __future__ import annotations

import argparse
import math
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec
import zmq

_COUNTERS = struct.Struct("<QQQQ")
_IDENTITY = (0).to_bytes(2, "little")  # of the engine with rank 0
_BLOCK_SIZE, _BLOCKS = 16, 100_000
_ADD, _ABORT, _UTILITY = b"\x00", b"\x01", b"\x03"
_FINISHED_BY_LENGTH, _FINISHED_BY_ABORT = 1, 2
_encode = msgspec.msgpack.encode

# EngineCoreOutput is an array of 20: id, tokens, 3 empty, finish reason, 5 empty, prefill stats, …
_OUTPUT = b"\xdc\x00\x14"
_BEFORE_REASON = b"\xc0" * 3
_BEFORE_STATS = b"\xc0" * 5
_AFTER_STATS = b"\xc0\x00" + b"\xc0" * 6


class _SamplingParams(msgspec.Struct):
    max_tokens: int | None = None


class _CoreRequest(msgspec.Struct, array_like=True):
    request_id: str
    prompt_token_ids: msgspec.Raw
    mm_features: msgspec.Raw
    sampling_params: _SamplingParams


@dataclass(slots=True)
class Stream:
    """One running request: the constant bytes of its outputs, and its progress."""

    head: bytes
    prompt_tokens: int
    max_tokens: int
    due_s: float
    sent: int = 0


class Counters(NamedTuple):
    """The pid of a mock core; finished requests, sent tokens, aborted requests."""

    pid: int
    requests: int
    tokens: int
    aborted: int

    @classmethod
    def read(cls, path: Path) -> Counters:
        """Return the numbers in ``path``; zeros before the core has started."""
        found = path.read_bytes() if path.exists() else b""
        return cls(*_COUNTERS.unpack(found or bytes(_COUNTERS.size)))


@dataclass
class Pace:
    """Seconds between steps, and from the arrival of a request to its first token."""

    step_s: float
    prefill_s: float


@dataclass
class Batch:
    """Running requests; ``step`` returns the outputs of all that have a token at ``now_s``."""

    tokens: Sequence[int]
    streams: dict[str, Stream] = field(default_factory=dict)
    finished: int = 0
    sent_tokens: int = 0
    aborted: int = 0

    def __post_init__(self) -> None:
        plain = [b"\x91" + _encode(token) + _BEFORE_REASON for token in self.tokens]
        self._running = [tokens + b"\xc0" + _BEFORE_STATS for tokens in plain]
        self._last = [tokens + _encode(_FINISHED_BY_LENGTH) + _BEFORE_STATS for tokens in plain]

    def add(self, request: _CoreRequest, due_s: float) -> None:
        """Start a request whose first token is sent in the first step after ``due_s``."""
        max_tokens = request.sampling_params.max_tokens
        self.streams[request.request_id] = Stream(
            _OUTPUT + _encode(request.request_id),
            _array_length(bytes(request.prompt_token_ids)),
            16 if max_tokens is None else max_tokens,
            due_s,
        )

    def abort(self, request_ids: Sequence[str]) -> list[bytes]:
        """End requests early; the outputs that say so."""
        reason = b"\x90" + _BEFORE_REASON + _encode(_FINISHED_BY_ABORT) + _BEFORE_STATS + b"\xc0"
        streams = [self.streams.pop(request_id, None) for request_id in request_ids]
        ended = [stream.head + reason + _AFTER_STATS for stream in streams if stream]
        self.aborted += len(ended)
        return ended

    def step(self, now_s: float) -> list[bytes]:
        """One token of each stream that is due."""
        outputs: list[bytes] = []
        ended: list[str] = []
        cycle = len(self.tokens)
        for request_id, stream in self.streams.items():
            sent = stream.sent
            if not sent and stream.due_s > now_s:
                continue
            stream.sent = sent + 1
            if sent + 1 >= stream.max_tokens:
                ended.append(request_id)
                middle = self._last[sent % cycle]
            else:
                middle = self._running[sent % cycle]
            stats = b"\xc0" if sent else _prefill_stats(stream.prompt_tokens)
            outputs += (stream.head, middle, stats, _AFTER_STATS)
        for request_id in ended:
            del self.streams[request_id]
        self.finished += len(ended)
        self.sent_tokens += len(outputs) // 4
        return outputs


class MockCore:
    """Connects to one frontend and serves its requests until it is killed."""

    def __init__(self, pace: Pace, batch: Batch, max_model_len: int) -> None:
        self._context = zmq.Context()
        self._pace = pace
        self._batch = batch
        self._max_model_len = max_model_len
        self._decode_add = msgspec.msgpack.Decoder(_CoreRequest).decode
        self._input: zmq.Socket[bytes]
        self._output: zmq.Socket[bytes]

    def shake_hands(self, address: str) -> None:
        """Ask ``address`` for the addresses of the frontend's sockets and connect to them."""
        handshake = self._socket(zmq.DEALER, address)
        about = {"local": False, "headless": True}
        handshake.send(_encode({"status": "HELLO", **about}))
        metadata = msgspec.msgpack.decode(handshake.recv())
        addresses = metadata["addresses"]
        self.connect(addresses["inputs"][0], addresses["outputs"][0])
        handshake.send(_encode({"status": "READY", "num_gpu_blocks": _BLOCKS, **about}))
        handshake.close(linger=5000)  # until READY is delivered

    def connect(self, requests: str, outputs: str) -> None:
        """Connect to the frontend's two sockets and report to be ready."""
        self._input = self._socket(zmq.DEALER, requests)
        self._output = self._socket(zmq.PUSH, outputs)
        self._input.send(_encode(self._ready_response()))

    def run(self, counters: mmap.mmap) -> NoReturn:
        """Send one message each step while requests run; wait for requests otherwise."""
        poller = zmq.Poller()
        poller.register(self._input, zmq.POLLIN)
        next_step_s = 0.0
        batch = self._batch
        while True:
            wait_s = next_step_s - time.monotonic()
            poller.poll(max(0, math.ceil(wait_s * 1e3)) if batch.streams else None)
            self._receive()
            now_s = time.monotonic()
            if batch.streams and now_s >= next_step_s:
                behind = now_s - next_step_s > self._pace.step_s
                next_step_s = (now_s if behind else next_step_s) + self._pace.step_s
                if outputs := batch.step(now_s):
                    self._send(outputs, len(outputs) // 4)
            done = (batch.finished, batch.sent_tokens, batch.aborted)
            _COUNTERS.pack_into(counters, 0, os.getpid(), *done)

    def _receive(self) -> None:
        while True:
            try:
                kind, *frames = self._input.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if kind == _ADD:
                due_s = time.monotonic() + self._pace.prefill_s
                self._batch.add(self._decode_add(frames[0]), due_s)
            elif kind == _ABORT:
                if ended := self._batch.abort(msgspec.msgpack.decode(frames[0])):
                    self._send(ended, len(ended))
            elif kind == _UTILITY:
                self._answer(*msgspec.msgpack.decode(frames[0])[:3])

    def _answer(self, client_index: int, call_id: int, method: str) -> None:
        """Answer a utility call: the tasks of a generation model, otherwise nothing."""
        value = ["generate"] if method == "get_supported_tasks" else None
        utility = [call_id, None, [None, value]]
        self._output.send(_encode([0, [], None, time.monotonic(), utility] + [None] * 4))

    def _send(self, outputs: list[bytes], count: int) -> None:
        """Send EngineCoreOutputs: rank, outputs, statistics, time, and five empty fields."""
        size = b"\xdd" + count.to_bytes(4, "big")
        timestamp = _encode(time.monotonic())
        head = b"\x99\x00" + size
        self._output.send(b"".join((head, *outputs, b"\xc0", timestamp, b"\xc0" * 5)))

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        if kind == zmq.DEALER:
            socket.setsockopt(zmq.IDENTITY, _IDENTITY)
        socket.connect(address)
        return socket

    def _ready_response(self) -> dict[str, Any]:
        return {
            "max_model_len": self._max_model_len,
            "num_gpu_blocks": _BLOCKS,
            "block_size": _BLOCK_SIZE,
            "effective_attention_block_size": _BLOCK_SIZE,
            "dp_stats_address": None,
            "dtype": "float32",
            "vllm_version": "0.33.0",
            "world_size": 1,
            "data_parallel_size": 1,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "data_parallel_rank": 0,
            "max_num_seqs": 1024,
            "max_num_batched_tokens": 65536,
            "kv_cache_size_tokens": _BLOCK_SIZE * _BLOCKS,
            "kv_cache_max_concurrency": 1.0,
            "instance_id": "mock",
            "supports_lora": False,
            "max_loras": 0,
            "kv_events_config": None,
        }


def main(argv: Sequence[str]) -> NoReturn:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--handshake", metavar="ADDRESS", help="of the frontend")
    where.add_argument("--sockets", nargs=2, metavar=("INPUT", "OUTPUT"), help="of the frontend")
    add("--tokens", required=True, metavar="ID,ID,…", help="of every answer, repeated")
    add("--counters", required=True, type=Path, metavar="FILE", help="four 64-bit numbers")
    add("--step-ms", type=float, default=20.0)
    add("--prefill-ms", type=float, default=0.0)
    add("--max-model-len", type=int, default=131_072)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    pace = Pace(args.step_ms / 1e3, args.prefill_ms / 1e3)
    batch = Batch([int(token) for token in args.tokens.split(",")])
    core = MockCore(pace, batch, args.max_model_len)
    if args.handshake:
        core.shake_hands(args.handshake)
    else:
        core.connect(*args.sockets)
    args.counters.write_bytes(_COUNTERS.pack(os.getpid(), 0, 0, 0))
    with args.counters.open("r+b") as file:
        core.run(mmap.mmap(file.fileno(), _COUNTERS.size))


def _prefill_stats(prompt_tokens: int) -> bytes:
    return _encode({"num_prompt_tokens": prompt_tokens, "num_computed_tokens": prompt_tokens})


def _array_length(raw: bytes) -> int:
    """Length of an encoded array, from its header; 0 for anything else."""
    kind = raw[0]
    if kind & 0xF0 == 0x90:
        return kind & 0x0F
    if kind in (0xDC, 0xDD):
        size = 2 if kind == 0xDC else 4
        return int.from_bytes(raw[1 : 1 + size], "big")
    return 0


if __name__ == "__main__":
    main(sys.argv[1:])
