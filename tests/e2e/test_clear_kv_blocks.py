"""POST /clear_kv_blocks, and sleep: routers forget the blocks that an engine has dropped."""

from __future__ import annotations

import json
import urllib.request

from deployment import Deployment, free_port

TEXT = "a b c d e f g h i j k l m n o p q r s t u v w x y z"


def overlap(deployment: Deployment) -> int:
    _, _, answer = deployment.request("POST", "/v1/route", {"model": "tiny", "prompt": TEXT})
    return sum(row["overlap_blocks"] for row in json.loads(answer)["candidates"])


def wait_for_overlap(deployment: Deployment, some: bool) -> None:
    what = "cached blocks" if some else "no cached blocks"
    deployment.until(lambda: bool(overlap(deployment)) == some, what)


def cache(deployment: Deployment) -> None:
    body = {"model": "tiny", "prompt": TEXT, "max_tokens": 1}
    assert deployment.request("POST", "/v1/completions", body)[0] == 200
    wait_for_overlap(deployment, True)


def test_routers_forget_what_engines_drop(deployment: Deployment) -> None:
    deployment.frontend("--router-mode", "kv")
    deployment.wait_for_workers(0)
    status, _, body = deployment.request("POST", "/clear_kv_blocks")
    assert (status, json.loads(body)) == (200, {"message": "No active worker groups found"})
    port = free_port()
    deployment.mocker(
        "--block-size", "4", "--speedup-ratio", "0", "--enable-sleep-mode", "--wake-time", "0",
        DYN_SYSTEM_PORT=str(port),
    )  # fmt: skip
    deployment.wait_for_workers(1)
    cache(deployment)
    assert deployment.request("POST", "/clear_kv_blocks", {"model": "tiny"})[0] == 400
    status, _, body = deployment.request("POST", "/clear_kv_blocks")
    answer = json.loads(body)
    assert status == 200 and not answer["failed_workers"]
    assert [row["endpoint"] for row in answer["cleared_workers"]] == [
        f"{deployment.namespace}/backend/clear_kv_blocks"
    ]
    wait_for_overlap(deployment, False)
    cache(deployment)
    engine = f"http://127.0.0.1:{port}/engine"
    for route, workers in (("clear_kv_blocks", 1), ("sleep", 0), ("wake_up", 1)):
        with urllib.request.urlopen(f"{engine}/{route}", b"", timeout=60) as reply:
            assert reply.status == 200
        deployment.wait_for_workers(workers)
        if route == "clear_kv_blocks":
            wait_for_overlap(deployment, False)
            cache(deployment)
    wait_for_overlap(deployment, False)
