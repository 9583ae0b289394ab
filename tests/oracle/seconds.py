"""The reference implementation of ``dynamo._fast.seconds``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Fit", "Prompt", "Slot", "costs", "others", "pressure"]


@dataclass(frozen=True)
class Fit:
    """Seconds of a prefill, of each of its tokens, of each pair of tokens."""

    fixed_s: float
    token_s: float
    attention_s: float

    def work_s(self, prefills: float, tokens: float, attention: float) -> float:
        """Seconds at slowness 1."""
        return prefills * self.fixed_s + tokens * self.token_s + attention * self.attention_s


@dataclass(frozen=True)
class Slot:
    """One candidate: its queue as (tokens, cached tokens) of each prompt, the prompt's blocks
    there, and what it was sent before as (when, seconds of work). ``measured`` are prompts that it
    has computed, as (tokens, times as long as the fit says)."""

    queue: Sequence[tuple[int, int]]
    since_s: float
    measured: Sequence[tuple[int, float]]
    capacity: int
    decoding: int
    decode_blocks: int
    device: int
    host: int
    disk: int
    shared: int
    spent: Sequence[tuple[float, float]]

    def slowness(self, fit: Fit) -> float:
        """How many times as long as the fit says it takes."""
        took = expected = 0.0
        found = 1.0
        for tokens, ratio in self.measured:
            work = fit.work_s(1, tokens, tokens * tokens / 2)
            if work:
                took, expected = took or 2 * work, expected or 2 * work
                took = 0.95 * took + min(ratio, 8 * found) * work
                expected = 0.95 * expected + work
                found = min(max(took / expected, 1 / 16), 16)
        return found

    def wait_s(self, fit: Fit, now_s: float, held_s: float) -> float:
        """Seconds until it begins with the prompt."""
        slowness = self.slowness(fit)
        each = [slowness * fit.work_s(1, t, t * (c + t / 2)) for t, c in self.queue]
        done = min(max(now_s - self.since_s, 0), each[0]) if each else 0
        excess = self.decode_blocks - self.capacity
        full_s = held_s * excess / self.decode_blocks if self.capacity and excess > 0 else 0
        return max(sum(each) - done, full_s, 0)

    def use(self, now_s: float) -> float:
        """The share of the last 15 s, roughly, for which it had work."""
        now_s = max([now_s, *(at_s for at_s, _ in self.spent)])
        return sum(work * math.exp((at_s - now_s) / 15) for at_s, work in self.spent) / 15

    def room_s(self, held_s: float) -> float:
        """What a prompt costs those that will wait for blocks."""
        used = self.decode_blocks / self.capacity if self.capacity else 0
        return held_s * min(used**4, 4)


@dataclass(frozen=True)
class Prompt:
    """The prompt, and what the pool says of it."""

    isl_tokens: int
    block_size: int
    weights: tuple[float, float, float]
    assumed: float
    rent: float
    held_s: float
    stall: float

    def work_s(self, fit: Fit, slot: Slot) -> float:
        """Seconds at slowness 1 to compute what ``slot`` has not cached."""
        host, disk, shared = self.weights
        blocks = slot.device + host * slot.host + disk * slot.disk + shared * slot.shared
        tokens = max(self.isl_tokens - blocks * self.block_size, 1)
        cached = self.isl_tokens - tokens
        return fit.work_s(1, tokens, tokens * (cached + tokens / 2))


def delay(use: float, most: float) -> float:
    """What a second of work costs those after it where so much of the time is in use."""
    return min(use, most) / (1 - min(use, most))


def others(prompt: Prompt, slots: Sequence[Slot], now_s: float) -> float:
    """What a second of added work costs others."""
    return delay(prompt.assumed + sum(slot.use(now_s) for slot in slots) / len(slots), 30 / 31)


def costs(
    fit: Fit, prompt: Prompt, slots: Sequence[Slot], now_s: float
) -> list[tuple[float, float, float, float]]:
    """Wait, work, others and running of each slot; no block was evicted too early."""
    least = min(prompt.work_s(fit, slot) for slot in slots)
    price = others(prompt, slots, now_s)
    found = []
    for slot in slots:
        slowness = slot.slowness(fit)
        work = slowness * prompt.work_s(fit, slot)
        added = work - slowness * least
        rebate = min(prompt.rent, (1 + price) * added)
        own = least * delay(prompt.assumed + slot.use(now_s), 0.8)
        running = slot.decoding * (prompt.stall * work + 1e-4)
        wait = slot.wait_s(fit, now_s, prompt.held_s)
        longer = own + price * added - rebate + slot.room_s(prompt.held_s)
        found.append((wait, work, longer, running))
    return found


def pressure(stored: float, missed: float, capacity: float) -> float:
    """What a second of work costs in evictions, which cause others in turn."""
    share = min(missed / max(stored, capacity), 0.95)
    return share / (1 - share)
