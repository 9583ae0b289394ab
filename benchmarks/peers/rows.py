"""The rows of the table: figure, load, and bar."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from load import Load

Kind = Literal["cpu", "ttft", "long", "soak", "startup", "decision", "core", "real"]
FAST, TRICKLE = 1000.0, 10.0
LONG_PROMPT_TOKENS = 22_600
SOAK_REQUESTS = 200_000  # the bars about memory apply to this number
DRIFT_PERCENT = 3.0


@dataclass(frozen=True)
class Row:
    """One figure, or several from one measurement.

    ``speedup`` is the mocker's; ``best_tokenizer`` runs the peer with its fastest tokenizer.
    ``bar`` is the highest ratio ours/theirs that passes; None: no bar. A row of kind core runs
    over a mock EngineCore beside several peers; its bar is for ``judged_peer``.
    """

    key: str
    title: str
    kind: Kind
    load: Load | None = None
    speedup: float = FAST
    bar: float | None = None
    best_tokenizer: bool = False
    judged_peer: str = "vllm-rs"

    @property
    def setting(self) -> tuple[float, bool, bool]:
        """Rows with equal settings share their processes; a soak has its own."""
        return (self.speedup, self.best_tokenizer, self.kind == "soak")

    @property
    def over_vllm(self) -> bool:
        """Return whether the row needs our vLLM worker and its peers."""
        return self.kind in ("core", "real")

    @property
    def needs_systems(self) -> bool:
        """Return whether both systems run for the row."""
        return self.kind not in ("startup", "decision", "core", "real")


def default_rows() -> list[Row]:
    """Return one row for each bar, and some that explain them."""
    return [
        _cpu(Load(60, 1, 256), bar=0.35),
        _cpu(Load(60, 1, 256, repeated=True), bar=0.35),
        _with_best_tokenizer(_cpu(Load(60, 1, 256))),
        _cpu(Load(60, 1, 1)),
        _cpu(Load(800, 1, 32)),
        _with_best_tokenizer(_cpu(Load(800, 1, 32))),
        _cpu(Load(3000, 1, 32)),
        _with_best_tokenizer(_cpu(Load(3000, 1, 32))),
        _cpu(Load(60, 64, 256, stream=True), bar=0.4),
        _cpu(Load(60, 512, 32, stream=True), TRICKLE, bar=0.7),
        Row("ttft", "TTFT", "ttft", Load(60, 16, 1, stream=True), TRICKLE, bar=0.8),
        Row(
            "long",
            "CPU per request: 22k-token prompt (new), 4 connections, theirs with fastokens",
            "long",
            Load(0, 1, 4),
            bar=0.5,
            best_tokenizer=True,
        ),
        Row("rss", "frontend RSS", "soak", Load(60, 1, 64), bar=0.4),
        Row("startup", "`dynamo serve` to first token of the quickstart", "startup"),
        Row("decision", "router decision", "decision"),
        *core_rows(),
        replace(_cpu(Load(60, 32, 8, stream=True), bar=1.0), key="real-stream", kind="real"),
    ]


def core_rows() -> list[Row]:
    """Return the rows over a mock EngineCore, beside vLLM's and SGLang's frontends."""
    loads = {
        Load(60, 1, 128): 0.6,
        Load(60, 1, 256): 0.6,
        Load(60, 64, 256, stream=True): 0.6,
        Load(3000, 1, 32): None,
    }
    rows = []
    for load, bar in loads.items():
        row = _cpu(load, bar=bar)
        key = f"core-{row.key.removesuffix('-new')}"
        rows.append(replace(row, key=key, title=f"over EngineCore, {row.title}", kind="core"))
    return rows


def full_rows() -> list[Row]:
    """The default rows and every combination of the dimensions of the load."""
    rows = {row.key: row for row in default_rows()}
    for words, repeated, max_tokens, stream, connections in product(
        (60, 800, 3000), (False, True), (1, 64, 512), (False, True), (1, 32, 256)
    ):
        row = _cpu(Load(words, max_tokens, connections, stream, repeated))
        rows.setdefault(row.key, row)
    return list(rows.values())


def _with_best_tokenizer(row: Row) -> Row:
    return replace(
        row,
        key=f"{row.key}-fastokens",
        title=f"{row.title}, theirs with fastokens",
        best_tokenizer=True,
    )


def _cpu(load: Load, speedup: float = FAST, bar: float | None = None) -> Row:
    kind = "stream" if load.stream else "unary"
    prompts = "repeated" if load.repeated else "new"
    key = f"{kind}-{load.words}w-{load.max_tokens}t-{load.connections}c-{prompts}"
    unit = "streamed token" if load.stream else "unary request"
    pace = "" if speedup == FAST else ", trickling"
    if pace:
        key += "-trickle"
    connections = f"{load.connections} connection{'s' if load.connections > 1 else ''}"
    title = (
        f"CPU per {unit}: {load.words} words ({prompts}), "
        f"max_tokens {load.max_tokens}, {connections}{pace}"
    )
    return Row(key, title, "cpu", load, speedup, bar)
