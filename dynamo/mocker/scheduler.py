"""The scheduler of the simulated engine: which sequences one iteration computes.

Continuous batching: running sequences first, one token each, then prompts from the waiting queue,
in chunks, up to the token budget and the free blocks. When a running sequence gets no block,
another one is preempted: its blocks are freed, it returns to the head of the queue and is computed
again, generated tokens included. The oldest running sequence always advances, so no request hangs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo.errors import InvalidArgument
from dynamo.mocker.blocks import BlockPool, SequenceBlocks
from dynamo.mocker.replies import Reply

if TYPE_CHECKING:
    from dynamo.mocker.engine import Responder


@dataclass(frozen=True, kw_only=True)
class Limits:
    """``watermark`` is the share of the blocks that must stay free when a prompt is admitted."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    chunked_prefill: bool
    watermark: float
    preempt_newest: bool


class Sequence:
    """One request in the engine.

    ``computed`` of its tokens have KV; ``free_slots`` of its last block can take a token without an
    allocation; ``remaining`` tokens are to be generated. While ``paused`` it keeps its blocks and
    does not advance. A ``transferred`` prompt was computed by a prefill worker.
    """

    __slots__ = (
        "blocks",
        "cached_tokens",
        "computed",
        "free_slots",
        "generated",
        "ids",
        "output",
        "paused",
        "prompt_tokens",
        "reason",
        "remaining",
        "running",
        "transferred",
    )

    def __init__(self, blocks: SequenceBlocks, reply: Reply, output: Responder) -> None:
        self.blocks = blocks
        self.output = output
        self.ids = reply.ids
        self.remaining = reply.length
        self.reason = reply.finish_reason
        self.prompt_tokens = len(blocks.tokens)
        self.generated = 0
        self.computed = 0
        self.transferred = False
        self.free_slots = 0
        self.running = False
        self.paused = False
        self.cached_tokens: int | None = None

    def expect_transfer(self, cached_tokens: int | None) -> None:
        """Mark the prompt as computed by a prefill worker, which found ``cached_tokens`` cached."""
        self.transferred = True
        self.cached_tokens = cached_tokens


@dataclass(slots=True)
class Batch:
    """One iteration: ``producing`` get a token at its end, ``decodes`` of them not their first.

    These read ``decode_kv`` tokens of KV, each its own; prompts in computation do not count.
    """

    producing: list[Sequence]
    prefill_tokens: int = 0
    decodes: int = 0
    decode_kv: int = 0


class Scheduler:
    """The sequences of one data-parallel rank.

    Call :meth:`schedule`, wait for the duration of the iteration, then call :meth:`commit`;
    sequences may be added and aborted in between.
    """

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        self.preemptions = 0
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._reserve = int(limits.watermark * pool.capacity)

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of the longest sequence, prompt and output together, that can be computed."""
        slots = self.pool.capacity * self.pool.block_size
        return min(slots, self.limits.max_model_len or slots)

    def check_length(self, prompt_tokens: int, output_tokens: int) -> None:
        """Raise InvalidArgument for a request that could never finish here."""
        if prompt_tokens + output_tokens > self.max_sequence_tokens:
            capped = self.max_sequence_tokens == self.limits.max_model_len
            limit = "max_model_len" if capped else "the KV cache"
            raise InvalidArgument(
                f"prompt ({prompt_tokens} tokens) plus max_tokens ({output_tokens}) exceeds "
                f"{limit} ({self.max_sequence_tokens} tokens) of this worker; shorten the prompt "
                "or lower max_tokens"
            )

    def add(self, sequence: Sequence) -> None:
        """Append ``sequence`` to the queue, after :meth:`check_length` accepted its length."""
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Remove ``sequence`` and free its blocks; no effect if it has finished. O(sequences)."""
        if sequence.running:
            self._stop(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(self) -> Batch:
        """Allocate blocks for the next iteration; an empty batch if every sequence is paused."""
        batch = Batch([])
        budget = self.limits.max_num_batched_tokens
        preempted = self.preemptions
        for sequence in list(self.running):  # a copy: preemption removes sequences
            if not budget:
                break
            if sequence.running and not sequence.paused:
                budget -= self._advance(sequence, budget, batch)
        # After a preemption nothing is admitted: a new prompt would take the blocks just freed.
        if budget and self.waiting and self.preemptions == preempted:
            self._admit(budget, batch)
        return batch

    def commit(self, batch: Batch) -> None:
        """Emit one token for each sequence of ``batch`` that is still running."""
        for sequence in batch.producing:
            # It may have been aborted during the iteration.
            if not sequence.running:
                continue
            token_id = next(sequence.ids)
            sequence.generated += 1
            sequence.remaining -= 1
            if sequence.remaining:
                sequence.blocks.tokens.append(token_id)
                sequence.output.token(token_id)
            else:
                self._stop(sequence)
                sequence.output.finish(token_id, sequence.reason)

    def _advance(self, sequence: Sequence, budget: int, batch: Batch) -> int:
        """Compute up to ``budget`` tokens of ``sequence``; return how many it used."""
        if sequence.free_slots:  # the common case, a decode within its block: no pool access
            sequence.free_slots -= 1
            sequence.computed += 1
            batch.decodes += 1
            batch.decode_kv += sequence.computed
            batch.producing.append(sequence)
            return 1
        missing = len(sequence.blocks.tokens) - sequence.computed
        count = min(missing, budget) if self.limits.chunked_prefill or missing == 1 else missing
        while not self.pool.grow(sequence.blocks, sequence.computed + count):
            # The sequence may be its own victim: then it waits for blocks.
            if self._preempt(batch) is sequence:
                return 0
        self._mark_computed(sequence, count, missing, batch)
        # Without chunked prefill a prompt longer than the budget runs alone and uses it up.
        return min(count, budget)

    def _mark_computed(self, sequence: Sequence, count: int, missing: int, batch: Batch) -> None:
        sequence.computed += count
        if missing == 1 and (sequence.generated or sequence.transferred):
            batch.decodes += 1
            batch.decode_kv += sequence.computed
        else:
            batch.prefill_tokens += count
        if count == missing:
            batch.producing.append(sequence)
            # The block becomes full, and gets its hash, with its last slot: that token has to go
            # through BlockPool.grow() again, so one slot fewer than are free is counted.
            filled = sequence.computed % self.pool.block_size
            sequence.free_slots = self.pool.block_size - 1 - filled if filled else 0

    def _admit(self, budget: int, batch: Batch) -> None:
        while self.waiting and budget and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            blocks = sequence.blocks
            cached, used = self.pool.cached_prefix(blocks)
            missing = len(blocks.tokens) - cached * self.pool.block_size
            if not self.limits.chunked_prefill and missing > budget and batch.producing:
                return
            needed = -(-len(blocks.tokens) // self.pool.block_size) - used  # blocks, rounded up
            # The reserve lets running sequences grow before they preempt. An idle rank ignores it,
            # or a prompt that needs most of the cache would never start.
            if self.running and self.pool.free - needed < self._reserve:
                return
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.running = True
            self.pool.reuse(blocks, cached)
            sequence.computed = cached * self.pool.block_size
            if sequence.cached_tokens is None:
                sequence.cached_tokens = sequence.computed
            if sequence.transferred and self._allocate_transfer(sequence):
                continue  # computed when the transfer is complete
            budget -= self._advance(sequence, budget, batch)

    def _allocate_transfer(self, sequence: Sequence) -> bool:
        """Allocate the blocks of a transferred prompt; return whether to wait for the transfer.

        A prompt that gets no blocks, or loses them to preemption, is computed here.
        """
        if not self.pool.grow(sequence.blocks, len(sequence.blocks.tokens)):
            sequence.transferred = False
            return False
        # All but the last token: computing that one yields the first output token.
        sequence.computed = len(sequence.blocks.tokens) - 1
        sequence.output.allocated()
        return sequence.paused

    def _preempt(self, batch: Batch) -> Sequence:
        victim = self.running[-1 if self.limits.preempt_newest else 0]
        self._stop(victim)
        victim.transferred = False
        if victim in batch.producing:
            batch.producing.remove(victim)
        self.waiting.appendleft(victim)
        self.preemptions += 1
        return victim

    def _stop(self, sequence: Sequence) -> None:
        sequence.running = False
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.computed = sequence.free_slots = 0

    def _check(self) -> None:
        """Assert all invariants; for tests."""
        self.pool._check()
        assert len(self.running) <= self.limits.max_num_seqs
        assert all(s.running for s in self.running) and not any(s.running for s in self.waiting)
        assert all(s.computed <= len(s.blocks.tokens) for s in self.running)
        occupied = sum(s.blocks.full + s.blocks.private for s in self.running)
        assert self.pool.used <= occupied  # less where sequences share blocks
        assert bool(self.running) or not self.pool.used
