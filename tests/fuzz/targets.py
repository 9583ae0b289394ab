"""What is fuzzed: a function for each kind of input, which raises for a broken promise.

Each takes any bytes. An error that the reader of the input promises is no finding; any other
exception is one, and so is another result for the same bytes in other pieces.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

__all__ = ["TARGETS", "Target"]

Target = Callable[[bytes], None]
Make = Callable[[], Target]


def _cuts(data: bytes) -> tuple[bytes, list[int]]:
    """Split fuzzed bytes into input and the places of cuts, which are its last bytes."""
    if len(data) < 4:
        return data, []
    body, tail = data[:-3], data[-3:]
    return body, sorted({byte * (len(body) + 1) // 256 for byte in tail})


def _pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *cuts, len(data)]
    return [data[a:b] for a, b in pairwise(edges) if a < b]


def http() -> Target:
    """Requests: the same exchanges and answers in one piece and in several."""
    from http_bench import Bench

    async def serve(pieces: list[bytes]) -> tuple[object, ...]:
        bench = Bench(body_bytes=2000)
        for piece in pieces:
            if bench.transport.closed or bench.transport.aborted:
                break
            bench.feed(piece)
        seen = [(one.method, one.path, bytes(one.body)) for one in bench.seen]
        answers = [
            line for line in bench.transport.out.split(b"\r\n") if not line.startswith(b"date:")
        ]
        return seen, answers, bench.refused

    def check(data: bytes) -> None:
        body, cuts = _cuts(data)
        whole = asyncio.run(serve([body]))
        parts = asyncio.run(serve(_pieces(body, cuts)))
        assert whole[0] == parts[0], (whole, parts)
        assert whole[2] == parts[2], (whole, parts)

    return check


def tls() -> Target:
    """TLS: requests as without it, in any records and pieces; other bytes end the connection."""
    import ssl
    import tempfile

    from certificates import Authority, plain_context
    from http_bench import Bench, MockTransport

    from dynamo.http.connection import HttpConnection
    from dynamo.http.tls import ServerTls
    from dynamo.http.tls_connection import TlsConnection

    with tempfile.TemporaryDirectory() as directory:
        server_tls = ServerTls(*Authority(Path(directory)).sign("server"))

    def exchanges(bench: Bench) -> list[tuple[str, str, bytes]]:
        return [(one.method, one.path, bytes(one.body)) for one in bench.seen]

    async def serve(handshakes: bool, records: list[bytes], raw: bytes, cuts: list[int]) -> Bench:
        bench, transport = Bench(body_bytes=2000), MockTransport()
        inner = HttpConnection(bench.server)
        connection = TlsConnection(server_tls, inner, inner.reader, TlsConnection.decode)
        connection.connection_made(transport)
        received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = plain_context().wrap_bio(received, sent)
        for _ in range(3 if handshakes else 0):
            with suppress(ssl.SSLWantReadError):
                client.do_handshake()
            connection.data_received(sent.read())
            received.write(transport.out)
            transport.out = b""
        for record in records:
            client.write(record)
        for piece in _pieces(sent.read() + raw, cuts):
            if not transport.closed:
                connection.data_received(piece)
        return bench

    def check(data: bytes) -> None:
        body, cuts = _cuts(data[1:])
        if data[:1] >= b"\x80":
            bench = asyncio.run(serve(True, _pieces(body, cuts), b"", cuts))
            plain = Bench(body_bytes=2000)
            plain.feed(body)
            assert exchanges(bench) == exchanges(plain), (exchanges(bench), exchanges(plain))
        else:
            assert not asyncio.run(serve(data[:1] >= b"\x40", [], body, cuts)).seen

    return check


def chat() -> Target:
    """Bodies of chat: a request within its bounds, or InvalidArgument."""
    from dynamo.errors import InvalidArgument
    from dynamo.frontend.prompt.validation import parse_chat, parse_completion

    def check(data: bytes) -> None:
        for parse in (parse_chat, parse_completion):
            try:
                parse(data)
            except InvalidArgument as error:
                assert error.message

    return check


def json_shape() -> Target:
    """The compiled measure of JSON and its reference agree."""
    from oracle import json_shape as reference

    from dynamo._fast import json_shape as compiled

    def check(data: bytes) -> None:
        assert compiled.measure(data, 500, 20) == reference.measure(data, 500, 20)

    return check


def frames() -> Target:
    """Frames of the request plane: as the reference splits them, in any pieces."""
    from oracle.frames import split

    from dynamo._fast.frames import Splitter
    from dynamo.errors import DynamoError
    from dynamo.runtime.requests.frames import (
        LAST_KIND,
        PREAMBLE,
        FrameError,
        parse_error,
        parse_open,
    )

    def check(data: bytes) -> None:
        body, cuts = _cuts(data)
        body = PREAMBLE + body if body[:1] != b"\xff" else body[1:]
        expected, faulty = split(body, 1000, PREAMBLE, LAST_KIND)
        for pieces in ([body], _pieces(body, cuts)):
            splitter = Splitter(1000, PREAMBLE, LAST_KIND)
            found = [frame for piece in pieces for frame in splitter.feed(piece)]
            assert found == expected, (found, expected)
            assert (splitter.fault is not None) == faulty
        for _, _, payload in expected:
            try:
                parse_open(payload)
            except FrameError as error:
                assert error.message
            assert isinstance(parse_error(payload), DynamoError)

    return check


def worker_messages() -> Target:
    """MessagePack from workers: decoded as its type, or a MsgspecError; encoded again the same."""
    import msgspec

    from dynamo.protocols import codec
    from dynamo.protocols.engine import EngineOutput, PreprocessedRequest
    from dynamo.protocols.kv import KvEventBatch, KvMetrics, KvQueryAnswer
    from dynamo.runtime.events.plane import MALFORMED, unpack

    kinds: tuple[Any, ...] = (
        EngineOutput,
        PreprocessedRequest,
        KvEventBatch,
        KvQueryAnswer,
        list[KvMetrics],
    )
    decoders = [codec.decoder(kind) for kind in kinds]

    def check(data: bytes) -> None:
        for decoder in decoders:
            try:
                value = decoder.decode(data)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                continue
            encoded = codec.encode(value)
            assert codec.encode(decoder.decode(encoded)) == encoded
        try:
            unpack(data)
        except MALFORMED:
            return

    return check


def kv_events() -> Target:
    """KV events of any worker: the index agrees with its reference and keeps its invariants."""
    from oracle.radix import RadixTree as Reference

    from dynamo._fast.radix import RadixTree

    refused = ("ParentNotFound", "InvalidSequence", "ValueError")

    def packed(values: list[int]) -> bytes:
        return struct.pack(f"<{len(values)}Q", *values)

    def apply(tree: Any, kind: int, worker: int, blocks: list[int], make: Any) -> str:
        slot = tree.slot(worker, 0)
        try:
            if kind < 2:
                parent = blocks[0] if kind and blocks else None
                tree.store(slot, parent, make(blocks), make([each % 7 for each in blocks]))
            elif kind == 2:
                tree.remove(slot, make(blocks))
            else:
                tree.clear(slot)
        except Exception as error:
            if type(error).__name__ not in refused:
                raise
            return type(error).__name__
        return ""

    def check(data: bytes) -> None:
        tree, reference = RadixTree(), Reference()
        at = 0
        while at + 3 <= len(data):
            kind, worker, count = data[at] % 4, data[at + 1] % 3, data[at + 2] % 9
            blocks = list(data[at + 3 : at + 3 + count])
            at += 3 + count
            one = apply(tree, kind, worker, blocks, packed)
            other = apply(reference, kind, worker, blocks, list)
            assert one == other, (kind, worker, blocks, one, other)
        tree._check()
        assert tree.blocks() == reference.blocks()
        wanted = [each % 7 for each in data[:16]]
        assert list(tree.match(packed(wanted))) == list(reference.match(wanted))

    return check


def answers() -> Target:
    """Texts of models: every parser builds one message, however the text is cut."""
    from answer_cases import TOOLS

    from dynamo.frontend.formats.message import AnswerMessage
    from dynamo.frontend.formats.request_tools import RequestTools
    from dynamo.frontend.formats.table import TOOL_FORMATS

    names = sorted(TOOL_FORMATS)
    tools = RequestTools.of(TOOLS)

    def message(name: str, pieces: list[str]) -> object:
        made = AnswerMessage(lambda: "id")
        parser = TOOL_FORMATS[name].make(made, tools)
        for piece in pieces:
            parser.push(piece)
        parser.finish()
        return json.dumps(made.whole(), sort_keys=True)

    def check(data: bytes) -> None:
        if not data:
            return
        name, body = names[data[0] % len(names)], data[1:]
        body, cuts = _cuts(body)
        text = body.decode(errors="replace")
        edges = [0, *(min(cut, len(text)) for cut in cuts), len(text)]
        parts = [text[a:b] for a, b in pairwise(edges)]
        whole = message(name, [text])
        assert whole == message(name, parts), (name, text, parts)
        assert whole == message(name, list(text)), (name, text)

    return check


def templates() -> Target:
    """Chat templates: compiled and tried within their time, or ConfigError."""
    from dynamo.errors import DynamoError
    from dynamo.frontend.prompt.template import ChatTemplate

    def check(data: bytes) -> None:
        try:
            ChatTemplate({"default": data.decode(errors="replace")}, {"bos_token": "<s>"}, "fuzz")
        except DynamoError as error:
            assert error.message

    return check


def tokenizer_files() -> Target:
    """A tokenizer.json: its facts, or ConfigError."""
    from dynamo.errors import ConfigError
    from dynamo.frontend.text.tokenizer_facts import find_facts

    def check(data: bytes) -> None:
        try:
            find_facts(data, Path("tokenizer.json"))
        except ConfigError as error:
            assert error.message

    return check


def graphs() -> Target:
    """Graph files: a graph, or ConfigError with a text."""
    from dynamo.errors import ConfigError
    from dynamo.serve.graph.graph import parse_graph

    def check(data: bytes) -> None:
        try:
            parse_graph(data.decode(errors="replace"), "graph.yaml", [], None, "dynamo")
        except ConfigError as error:
            assert error.message

    return check


def graph_edits() -> Target:
    """A service added to a graph and removed again: the rest means the same, or ConfigError."""
    import yaml

    from dynamo.errors import ConfigError
    from dynamo.serve.graph.changes import with_service, without_services

    keys = "run: dynamo.mocker\nmodel: m\n"

    def check(data: bytes) -> None:
        text = data.decode(errors="replace")
        try:
            added = with_service(text, "graph.yaml", "Worker99", keys)
            before = yaml.safe_load(text)
            assert yaml.safe_load(added) == {**before, "Worker99": yaml.safe_load(keys)}
            assert yaml.safe_load(without_services(added, "graph.yaml", ["Worker99"])) == before
            for name in before:
                without_services(added, "graph.yaml", [name])
        except ConfigError as error:
            assert error.message

    return check


def circus_replies() -> Target:
    """Replies of any program at the endpoint of circus: read, or CircusError."""
    from dynamo.operations.steps.circus import (
        CircusError,
        read_options,
        read_reply,
        read_statuses,
    )

    def check(data: bytes) -> None:
        for read in (read_statuses, read_options):
            with suppress(CircusError):
                read(read_reply(data))

    return check


def statefiles() -> Target:
    """Statefiles: what is read is written again the same, and its GPUs and services are read."""
    from dynamo.serve.state.document import Document
    from dynamo.serve.state.entries import read_services
    from dynamo.serve.state.ledger import GpuLedger

    def check(data: bytes) -> None:
        try:
            written = json.loads(data)
        except (ValueError, RecursionError):
            return
        if not isinstance(written, dict):
            return
        document = Document.of(Document.of(written).written())  # commands are quoted again once
        again = document.written()
        assert Document.of(again).written() == again
        read_services(document)
        GpuLedger(document, lambda owner: False)

    return check


def records() -> Target:
    """Records and leases of discovery: decoded, or BadRecord or ValueError."""
    from dynamo.protocols.control import (
        EndpointRecord,
        EventChannelRecord,
        LeaseRecord,
        OnDemandModel,
        decode_card,
        record_decoder,
    )
    from dynamo.runtime.discovery.layout import (
        BadRecord,
        decode_lease,
        decode_stored,
        encode_stored,
        join_key,
    )

    kinds: list[Any] = [EndpointRecord, EventChannelRecord, LeaseRecord, OnDemandModel]
    decoders: list[Any] = [decode_card, *map(record_decoder, kinds)]

    def check(data: bytes) -> None:
        with suppress(BadRecord):
            stored = decode_stored(data)
            assert decode_stored(encode_stored(stored.lease_id, stored.value)) == stored
        with suppress(BadRecord):
            decode_lease("1f", data)
        for decode in decoders:
            with suppress(ValueError):
                decode(data)
        with suppress(BadRecord):
            join_key("instances", data.decode(errors="replace"))

    return check


def overrides() -> Target:
    """Words of a command line for services: overrides, or ConfigError."""
    from dynamo.errors import ConfigError
    from dynamo.serve.graph.graph import parse_graph
    from dynamo.serve.graph.overrides import split_overrides

    text = "F: {run: dynamo.frontend}\nW: {run: dynamo.mocker, model-path: m}\n"

    def check(data: bytes) -> None:
        words = data.decode(errors="replace").split("\n")
        try:
            _, found = split_overrides(words)
            parse_graph(text, "graph.yaml", found, None, "dynamo")
        except ConfigError as error:
            assert error.message

    return check


TARGETS: dict[str, Make] = {
    make.__name__.replace("_", "-"): make
    for make in (
        http,
        tls,
        chat,
        json_shape,
        frames,
        worker_messages,
        kv_events,
        answers,
        templates,
        tokenizer_files,
        graphs,
        graph_edits,
        circus_replies,
        statefiles,
        records,
        overrides,
    )
}
