"""What API keys cost: the head of a request, new and repeated, with keys and without.

The differences count: `new` heads differ in each request (their length, an id), `repeated` ones are
the same bytes. `remembered` and `first` are the check alone.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from dynamo.http.access import Access
from dynamo.http.api_keys import ApiKeys, key_line, new_key
from dynamo.http.head import HeadReader, HttpLimits

KEY = new_key()
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost:8000\r\n"
    b"Content-Type: application/json\r\nUser-Agent: OpenAI/Python 2.8.1\r\nAccept: */*\r\n"
    b"Authorization: Bearer %b\r\nX-Request-Id: %%016d\r\nContent-Length: 512\r\n\r\n"
) % KEY.encode()


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    """100 keys, of which KEY is the last."""
    lines = [key_line(f"k{number}", "user", new_key()) for number in range(99)]
    file = tmp_path / "keys"
    file.write_text("".join(lines) + key_line("mine", "user", KEY))
    file.chmod(0o600)
    return ApiKeys(str(file))


def reader(keys: ApiKeys | None) -> HeadReader:
    check = None if keys is None else Access(keys=keys, is_open=frozenset().__contains__).check_key
    return HeadReader(HttpLimits(), check)


@pytest.mark.parametrize("with_keys", [False, True])
def test_new_head(benchmark: BenchmarkFixture, keys: ApiKeys, with_keys: bool) -> None:
    read, numbers = reader(keys if with_keys else None).read, count()

    def once() -> None:
        head = HEAD % next(numbers)
        read(head, len(head) - 4)

    benchmark(once)


@pytest.mark.parametrize("with_keys", [False, True])
def test_repeated_head(benchmark: BenchmarkFixture, keys: ApiKeys, with_keys: bool) -> None:
    read, head = reader(keys if with_keys else None).read, HEAD % 1
    benchmark(read, head, len(head) - 4)


@pytest.mark.parametrize("remembered", [False, True])
def test_key(benchmark: BenchmarkFixture, keys: ApiKeys, remembered: bool) -> None:
    value = f"Bearer {KEY}"

    def once() -> None:
        if not remembered:
            keys._remembered.clear()
        keys.take({"authorization": value})

    benchmark(once)
