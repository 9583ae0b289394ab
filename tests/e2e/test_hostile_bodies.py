"""Mutated requests against a real frontend with a kv router and two mockers."""

from __future__ import annotations

import http.client
from contextlib import closing

import pytest
from deployment import Deployment
from hostile_bodies import SHAPES, Mutations

BODIES = 400


@pytest.mark.parametrize("seed", [11, 12])
def test_an_invalid_request_is_never_a_500(deployment: Deployment, seed: int) -> None:
    deployment.mocker(
        *("--speedup-ratio", "0", "--num-workers", "2", "--block-size", "16"),
        *("--max-model-len", "300"),  # a mutation may remove max_tokens
    )
    deployment.frontend("--router-mode", "kv")
    deployment.wait_for_workers(2)
    mutations = Mutations(seed)
    seen: set[int] = set()
    with closing(http.client.HTTPConnection("127.0.0.1", deployment.port, timeout=30)) as client:
        for _ in range(BODIES):
            path = mutations.random.choice(sorted(SHAPES))
            body, headers = mutations.body(path), mutations.headers()
            target = "/v1/route" if mutations.random.random() < 0.3 else path
            encoded = {name: text.encode("latin-1") for name, text in headers.items()}
            client.request("POST", target, body, {**encoded, "content-type": "application/json"})
            answer = client.getresponse()
            text = answer.read()
            what = f"{target} {headers} {body[:2000]!r} -> {answer.status} {text[:500]!r}"
            # 503: the request names an unregistered worker.
            assert answer.status < 500 or answer.status == 503, what
            assert b'"code":500' not in text, what
            seen.add(answer.status)
        client.request("POST", path, b" " * (5 << 20), {"content-type": "application/json"})
        answer = client.getresponse()  # the limit on bodies follows the context of 300 tokens
        assert (answer.status, b"exceeds 4203904 bytes" in answer.read()) == (413, True)
    assert {200, 400} <= seen <= {200, 400, 404, 413, 503}
    log = deployment.tail()
    assert "Traceback" not in log and " failed" not in log, log
