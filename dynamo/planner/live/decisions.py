"""Records of scaling decisions: a log line each, and the file of ``dynamo planner explain``.

A record is made when a policy has decided, and completed when its changes are carried out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import msgspec

from dynamo.errors import shorten
from dynamo.planner.capacity.observation import Observation
from dynamo.planner.policies.base import ScalingDecision
from dynamo.runtime.process.paths import open_private, write_atomic

DECISIONS_FILE = "logs/planner-decisions.jsonl"
"""Path of the file in the run directory of a deployment; its logs stay when it ends."""

_TEXT_CHARACTERS = 300
"""Longest rule or error of a pool, so that a line of the file is bounded, too."""


class PoolChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One pool in a decision: its workers before, wanted and after, and why.

    ``after`` is None until the change is carried out, and with ``--no-operation``.
    """

    pool: str
    before: int
    wanted: int
    rule: str
    after: int | None = None
    inputs: dict[str, float] = {}
    error: str = ""

    @property
    def delta(self) -> int:
        """The workers that are to be added; negative: removed."""
        return self.wanted - self.before

    def text(self, with_figures: bool = True) -> str:
        """Return the change and the rule, for a log line with its figures."""
        step = f"{self.before}" if self.wanted == self.before else f"{self.before} -> {self.wanted}"
        text = f"{self.pool} {step}: {self.rule}"
        if self.inputs and with_figures:
            figures = " ".join(f"{name}={value:.4g}" for name, value in self.inputs.items())
            text += f" [{figures}]"
        if self.error:
            text += f" (failed: {self.error})"
        elif self.after is not None and self.after != self.wanted:
            text += f" (now {self.after})"
        return text


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One decision of a policy for one model.

    ``at_s`` is Unix time. ``outcome`` is ``decided`` until the changes are carried out, then
    ``done`` or ``failed``; ``unchanged`` if there are none; ``no-operation`` if they are only
    logged. ``duration_s`` is the time that the changes took.
    """

    at_s: float
    model: str
    mode: str
    pools: tuple[PoolChange, ...]
    outcome: str = "decided"
    duration_s: float = 0.0

    @classmethod
    def of(
        cls, decision: ScalingDecision, seen: Observation, *, at_s: float, model: str, mode: str
    ) -> DecisionRecord:
        """Return the record of ``decision`` before its changes are carried out."""
        before = {name: pool.workers for name, pool in seen.pools.items()}
        pools = tuple(
            PoolChange(
                pool=choice.pool,
                before=before.get(choice.pool, 0),
                wanted=choice.wanted,
                rule=shorten(choice.rule, _TEXT_CHARACTERS),
                inputs={k: float(v) for k, v in choice.inputs.items() if math.isfinite(v)},
            )
            for choice in decision.pools
        )
        record = cls(at_s=at_s, model=model, mode=mode, pools=pools, outcome="unchanged")
        return msgspec.structs.replace(record, outcome="decided") if record.changes else record

    @property
    def changes(self) -> bool:
        """Whether a pool is to get more or fewer workers."""
        return any(pool.before != pool.wanted for pool in self.pools)

    def observed(self) -> DecisionRecord:
        """Return the record for ``--no-operation``: nothing is carried out."""
        outcome = "no-operation" if self.changes else self.outcome
        return msgspec.structs.replace(self, outcome=outcome)

    def finished(
        self, after: Mapping[str, int], duration_s: float, errors: Mapping[str, str]
    ) -> DecisionRecord:
        """Return the record with the workers ``after`` the changes and the ``errors``, by pool."""
        pools = tuple(
            msgspec.structs.replace(
                pool,
                after=after.get(pool.pool),
                error=shorten(" ".join(errors.get(pool.pool, "").split()), _TEXT_CHARACTERS),
            )
            for pool in self.pools
        )
        outcome = "failed" if errors else "done" if self.changes else self.outcome
        return msgspec.structs.replace(self, pools=pools, outcome=outcome, duration_s=duration_s)

    def text(self) -> str:
        """Return the decision in one line."""
        pools = "; ".join(pool.text() for pool in self.pools) or "no pool to change"
        return f"model {self.model}, policy {self.mode}: {pools}; {self.ending()}"

    def ending(self) -> str:
        """Return the outcome, and how long it took."""
        return f"{self.outcome} in {self.duration_s:.1f} s" if self.duration_s else self.outcome


_decode = msgspec.json.Decoder(DecisionRecord).decode


class DecisionLog:
    """The last ``limit`` decisions in a file of JSON lines.

    Lines are appended; at twice the limit the file is replaced by its newest half, so readers in
    other processes see whole files. One process writes.
    """

    def __init__(self, path: Path, limit: int = 500) -> None:
        self.path = path
        self._limit = limit
        self._lines: int | None = None

    def append(self, record: DecisionRecord) -> None:
        """Add ``record`` as the newest. Raises OSError."""
        line = msgspec.json.encode(record) + b"\n"
        # An earlier planner may have crashed in a line: end it, and count what is there.
        if self._lines is None:
            self._lines = self._shrink()
        with open(self.path, "ab", opener=open_private) as file:
            file.write(line)
        self._lines += 1
        if self._lines >= 2 * self._limit:
            self._lines = self._shrink()

    def read(self) -> list[DecisionRecord]:
        """Return the newest ``limit`` decisions, oldest first; a damaged line is skipped.

        A file that does not exist has no decisions. Other errors are raised as OSError.
        """
        records = []
        for line in self._newest():
            try:
                records.append(_decode(line))
            except msgspec.MsgspecError:
                continue
        return records

    def _newest(self) -> list[bytes]:
        try:
            with self.path.open("rb") as file:
                return list(deque(file, maxlen=self._limit))
        except FileNotFoundError:
            return []

    def _shrink(self) -> int:
        """Keep the newest lines, each of them ended; return their number."""
        lines = [line if line.endswith(b"\n") else line + b"\n" for line in self._newest()]
        if lines:
            write_atomic(self.path, b"".join(lines))
        return len(lines)
