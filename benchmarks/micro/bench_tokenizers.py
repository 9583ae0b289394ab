"""Time requests that alternate between tokenizers, and what loading one does to other requests.

    python benchmarks/micro/bench_tokenizers.py [--size 4096 60000 128000] [--models 1 4 5 16]

The vocabularies are made here: byte-level BPE in the form of the example model, with merges of
random words. Each request encodes 60 words. "pause" is the longest time in which another thread did
not get Python's lock while a tokenizer was loaded; on a busy machine it includes other programs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from dynamo.frontend.text.tokenizer import Tokenizer, load_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "model"
REQUESTS = 400
SYLLABLES = [a + b + c for a in "bcdfghjklmnprstvw" for b in "aeiou" for c in ("", "n", "r", "s")]


def write_model(directory: Path, size: int, seed: int) -> list[str]:
    """Write a model with ``size`` tokens; return words that it has as tokens."""
    draw = random.Random(seed)
    document = json.loads((EXAMPLE / "tokenizer.json").read_text())
    letters = [token for token in document["model"]["vocab"] if len(token) == 1]
    vocab = {token: number for number, token in enumerate(letters)}
    merges, words = [], []
    while len(vocab) < size:
        words.append("".join(draw.choices(SYLLABLES, k=draw.randint(1, 5))))
        left = "Ġ"
        for letter in words[-1]:
            if left + letter not in vocab:
                vocab[left + letter] = len(vocab)
                merges.append([left, letter])
            left += letter
    document["model"] |= {"vocab": vocab, "merges": merges}
    for number, token in enumerate(document["added_tokens"]):
        token["id"] = len(vocab) + number
    directory.mkdir()
    (directory / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False))
    return words


class Pauses:
    """``longest_s`` without Python's lock in a thread that wants it each millisecond."""

    def __enter__(self) -> Pauses:
        self.longest_s = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        last_s = time.perf_counter()
        while not self._end.is_set():
            time.sleep(0.001)
            now_s = time.perf_counter()
            self.longest_s = max(self.longest_s, now_s - last_s)
            last_s = now_s


def resident_mib() -> float:
    """The resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def encode_us(tokenizers: list[Tokenizer], words: list[str]) -> float:
    """The median time of a request, each to the next of ``tokenizers``."""
    draw = random.Random(1)
    times = []
    for number in range(REQUESTS):
        text = " ".join(draw.choices(words, k=60))
        begun_s = time.perf_counter()
        tokenizers[number % len(tokenizers)].encode(text)
        times.append(time.perf_counter() - begun_s)
    return statistics.median(times[2 * len(tokenizers) :]) * 1e6


def main() -> None:
    """One row per size of the vocabulary and number of models, of different content or of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, nargs="+", default=[4096, 60_000, 128_000])
    parser.add_argument("--models", type=int, nargs="+", default=[1, 4, 5, 16])
    args = parser.parse_args()
    for size in args.size:
        measure(size, args.models)


def measure(size: int, counts: list[int]) -> None:
    """Print the rows of vocabularies of ``size`` tokens."""
    with tempfile.TemporaryDirectory() as name:
        loaded: list[Tokenizer] = []
        before_mib, load_s, pause_s = resident_mib(), 0.0, 0.0
        for number in range(max(counts)):
            words = write_model(Path(name, str(number)), size, number)
            begun_s = time.perf_counter()
            with Pauses() as pauses:
                loaded.append(load_tokenizer(Path(name, str(number))))
            load_s = max(load_s, time.perf_counter() - begun_s)
            pause_s = max(pause_s, pauses.longest_s)
            if len(loaded) in counts:
                print_row(size, loaded, words, resident_mib() - before_mib)
        sys.stdout.write(
            f"{size:7}: at most {load_s:.2f} s to load, with a pause of {pause_s * 1e3:.0f} ms\n"
        )
        same = [load_tokenizer(Path(name, "0")) for _ in loaded]
        sys.stdout.write(f"{size:7}: {len(same)} of one content {encode_us(same, words):.1f} µs\n")


def print_row(size: int, loaded: list[Tokenizer], words: list[str], used_mib: float) -> None:
    """Print the cost of requests to ``loaded``."""
    sys.stdout.write(
        f"{size:7}: {len(loaded):2} contents {encode_us(loaded, words):7.1f} µs a request, "
        f"{used_mib:.0f} MiB\n"
    )


if __name__ == "__main__":
    main()
