"""Adapters come and go while workers serve: on all workers of the model or on none."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from deployment import Deployment, free_port

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
TEXT = "a b c d e f g h i j k l m n o p q r s t u v w x y z"
FLAGS = ("--block-size", "4", "--speedup-ratio", "0")


def adapter(tmp_path: Path, name: str, rank: int = 8) -> str:
    directory = tmp_path / "adapters" / name
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps({"r": rank}))
    return str(directory)


def load(deployment: Deployment, name: str, path: str, **more: Any) -> tuple[int, str]:
    body = {"lora_name": name, "lora_path": path, **more}
    status, _, answer = deployment.request("POST", LOAD, body)
    return status, answer.decode()


def unload(deployment: Deployment, name: str, port: int | None = None) -> tuple[int, str]:
    status, _, answer = deployment.request("POST", UNLOAD, {"lora_name": name}, port=port)
    return status, answer.decode()


def complete(deployment: Deployment, model: str, port: int | None = None) -> int:
    body = {"model": model, "prompt": TEXT, "max_tokens": 1}
    return deployment.request("POST", "/v1/completions", body, port=port)[0]


def rows(deployment: Deployment, port: int | None = None) -> dict[str, tuple[str, str]]:
    listed = json.loads(deployment.request("GET", "/v1/models", port=port)[2])["data"]
    return {row["id"]: (row["parent"], row["root"]) for row in listed if row["parent"]}


def holders(deployment: Deployment, name: str) -> int:
    """The workers to which requests for an adapter may go."""
    body = {"model": name, "prompt": TEXT}
    status, _, answer = deployment.request("POST", "/v1/route", body)
    return len(json.loads(answer)["candidates"]) if status == 200 else 0


def overlap(deployment: Deployment, model: str) -> int:
    answer = deployment.request("POST", "/v1/route", {"model": model, "prompt": TEXT})[2]
    return sum(row["overlap_blocks"] for row in json.loads(answer)["candidates"])


def recorded(deployment: Deployment) -> Any:
    path = deployment.state_dir / deployment.namespace / "adapters.json"
    return json.loads(path.read_text())["models"]


@pytest.fixture
def two(deployment: Deployment) -> Deployment:
    deployment.frontend("--router-mode", "kv")
    for _ in range(2):
        deployment.mocker(*FLAGS)
    deployment.wait_for_workers(2)
    return deployment


def test_all_workers_load_and_unload(two: Deployment, tmp_path: Path) -> None:
    path = adapter(tmp_path, "sql")
    assert load(two, "sql", path) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert rows(two) == {"sql": ("tiny", path)}
    assert complete(two, "sql") == 200
    two.until(lambda: holders(two, "sql") == 2, "both workers serve it")
    assert recorded(two) == {"tiny": {"sql": path}}
    status, text = load(two, "sql", path)
    assert status == 400 and "has already been loaded" in text
    other = adapter(tmp_path, "other")
    assert load(two, "sql", other, load_inplace=True)[0] == 200
    assert rows(two) == {"sql": ("tiny", other)}
    assert unload(two, "sql") == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert rows(two) == {} and recorded(two) == {}
    assert unload(two, "sql")[0] == 404
    two.until(lambda: complete(two, "sql") == 404, "it is forgotten")


def test_bad_bodies_and_names(two: Deployment, tmp_path: Path) -> None:
    path = adapter(tmp_path, "a")
    for name, directory, more, text in (
        ("", path, {}, "must be provided"),
        ("a", "", {}, "must be provided"),
        ("tiny", path, {}, "conflicts with a served base model"),
        ("a", str(tmp_path), {}, "has no adapter_config.json"),
        ("a", str(tmp_path / "none"), {}, "No such file or directory"),
        ("a\n", path, {}, "cannot be printed"),
        ("a", path, {"is_3d_lora_weight": True}, "is_3d_lora_weight"),
        (1, path, {}, "lora_name"),
    ):
        status, answer = load(two, name, directory, **more)  # type: ignore[arg-type]
        assert status == 400 and text in answer, answer
    status, answer = load(two, "a", path, model="none")
    assert status == 404 and "there are: tiny" in answer
    status, answer = unload(two, "tiny")
    assert status == 404 and "cannot be found" in answer
    assert two.request("POST", LOAD, [])[0] == 400
    assert rows(two) == {}
    headers = {"origin": "http://example.com"}
    assert two.request("POST", LOAD, {"lora_name": "a", "lora_path": path}, headers)[0] == 403


def test_what_fails_on_one_worker_is_undone(deployment: Deployment, tmp_path: Path) -> None:
    deployment.frontend("--router-mode", "kv")
    deployment.mocker(*FLAGS)
    deployment.mocker(*FLAGS, "--max-lora-rank", "8")
    deployment.wait_for_workers(2)
    large = adapter(tmp_path, "large", 16)
    status, text = load(deployment, "large", large)
    assert status == 400 and "LoRA rank 16 is greater than max_lora_rank 8" in text
    assert "worker " in text and rows(deployment) == {}
    small = adapter(tmp_path, "small")
    assert load(deployment, "x", small)[0] == 200
    assert load(deployment, "x", large, load_inplace=True)[0] == 400
    assert rows(deployment) == {"x": ("tiny", small)} and complete(deployment, "x") == 200
    # Nothing is left in the engine that had loaded it: the same name is free.
    assert load(deployment, "large", small)[0] == 200


def test_new_workers_load_the_same(two: Deployment, tmp_path: Path) -> None:
    path = adapter(tmp_path, "sql")
    assert load(two, "sql", path)[0] == 200
    two.mocker(*FLAGS)
    two.until(lambda: holders(two, "sql") == 3, "the new worker has loaded it")
    assert unload(two, "sql")[0] == 200
    two.mocker(*FLAGS)
    two.wait_for_workers(4)
    assert rows(two) == {}


def test_a_damaged_record_keeps_no_worker_from_starting(
    deployment: Deployment, tmp_path: Path
) -> None:
    directory = deployment.state_dir / deployment.namespace
    directory.mkdir(mode=0o700, parents=True)
    record = directory / "adapters.json"
    good = adapter(tmp_path, "good")
    entries = {"good": good, "gone": str(tmp_path / "gone"), "number": 7, "": good}
    record.write_text(json.dumps({"models": {"tiny": entries, "other": []}}))
    deployment.frontend()
    deployment.mocker(*FLAGS)
    deployment.until(lambda: rows(deployment) == {"good": ("tiny", good)}, "the good one")
    text = deployment.tail()
    assert "the adapter gone (record) is not loaded" in text
    assert "the adapter 'number' of 'tiny' is ignored" in text
    record.write_text("{")
    deployment.until(lambda: rows(deployment) == {}, "a record that says nothing")
    assert load(deployment, "good", good)[0] == 200
    assert recorded(deployment) == {"tiny": {"good": good}}
    adapter(tmp_path, "../gone")  # now there is one
    record.write_text(json.dumps({"models": {"tiny": {"gone": str(tmp_path / "gone")}}}))
    deployment.until(lambda: list(rows(deployment)) == ["gone"], "the one that was missing")


def test_blocks_are_counted_per_adapter(two: Deployment, tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert load(two, name, adapter(tmp_path, name))[0] == 200
    assert complete(two, "one") == 200
    two.until(lambda: overlap(two, "one") > 0, "its blocks")
    assert overlap(two, "two") == overlap(two, "tiny") == 0


def test_a_sleeping_engine_loads_when_it_wakes(deployment: Deployment, tmp_path: Path) -> None:
    deployment.frontend("--router-mode", "kv")
    deployment.mocker(*FLAGS)
    port = free_port()
    deployment.mocker(*FLAGS, "--enable-sleep-mode", DYN_SYSTEM_PORT=str(port))
    deployment.wait_for_workers(2)

    def control(route: str, body: Any = None) -> tuple[int, Any]:
        status, _, answer = deployment.request("POST", f"/engine/{route}", body, port=port)
        return status, json.loads(answer)

    assert control("sleep")[0] == 200
    deployment.wait_for_workers(1)
    path = adapter(tmp_path, "sql")
    status, answer = control("load_lora", {"lora_name": "x", "lora_path": path})
    assert status == 503 and "the engine sleeps" in answer["error"]
    assert load(deployment, "sql", path)[0] == 200
    assert control("list_loras")[1]["count"] == 0
    assert control("wake_up")[0] == 200
    assert control("list_loras")[1]["loras"] == {"sql": {"path": path, "source": "record"}}
    deployment.until(lambda: holders(deployment, "sql") == 2, "both workers serve it")
    # One worker's route: the others follow the record.
    assert control("unload_lora", {"lora_name": "sql"})[0] == 200
    deployment.until(lambda: rows(deployment) == {}, "the other has followed")
    assert control("load_lora", {"lora_name": "x", "lora_path": path})[0] == 200
    deployment.until(lambda: holders(deployment, "x") == 2, "the other has followed")
    assert control("unload_lora", {"lora": 1})[0] == 400


def test_a_worker_that_dies_does_not_stop_a_load(two: Deployment, tmp_path: Path) -> None:
    path = adapter(tmp_path, "sql")
    worker = two.processes[-1]
    os.kill(worker.pid, signal.SIGKILL)
    status, text = load(two, "sql", path)
    assert status == 200, text
    assert complete(two, "sql") == 200
    two.mocker(*FLAGS)
    two.until(lambda: holders(two, "sql") == 2, "its successor has loaded it")


def test_a_second_frontend_sees_the_same(two: Deployment, tmp_path: Path) -> None:
    port = free_port()
    two.start("dynamo.frontend", "--http-port", str(port))
    two.until(lambda: complete(two, "tiny", port) == 200, "the second frontend")
    path = adapter(tmp_path, "sql")
    assert load(two, "sql", path)[0] == 200
    two.until(lambda: rows(two, port) == {"sql": ("tiny", path)}, "the second frontend sees it")
    assert unload(two, "sql", port)[0] == 200
    two.until(lambda: not rows(two), "the first frontend sees it")


def test_prefill_workers_load_as_well(deployment: Deployment, tmp_path: Path) -> None:
    deployment.frontend("--router-mode", "kv")
    deployment.mocker(*FLAGS, "--disaggregation-mode", "decode")
    port = free_port()
    prefill = (*FLAGS, "--disaggregation-mode", "prefill", "--max-lora-rank", "8")
    deployment.mocker(*prefill, DYN_SYSTEM_PORT=str(port))
    deployment.wait_for_workers(2)
    large, small = adapter(tmp_path, "large", 16), adapter(tmp_path, "small")

    def loras() -> Any:
        answer = deployment.request("POST", "/engine/list_loras", port=port)[2]
        return list(json.loads(answer)["loras"])

    def refused() -> bool:
        """Not before the frontend has found the prefill worker."""
        status, text = load(deployment, "other", large)
        assert status == 200 or (status == 400 and "max_lora_rank 8" in text), text
        return status == 400 or unload(deployment, "other")[0] != 200

    deployment.until(refused, "the prefill worker is asked")
    assert rows(deployment) == {}
    assert load(deployment, "sql", small)[0] == 200 and loras() == ["sql"]
    assert complete(deployment, "sql") == 200
    assert unload(deployment, "sql")[0] == 200 and loras() == []


def test_two_frontends_at_once_end_with_one_adapter(two: Deployment, tmp_path: Path) -> None:
    port = free_port()
    two.start("dynamo.frontend", "--http-port", str(port))
    two.until(lambda: complete(two, "tiny", port) == 200, "the second frontend")
    paths = {address: adapter(tmp_path, str(address)) for address in (two.port, port)}

    def load_there(address: int) -> int:
        body = {"lora_name": "sql", "lora_path": paths[address]}
        return two.request("POST", LOAD, body, port=address)[0]

    for _ in range(5):
        with ThreadPoolExecutor(2) as pool:
            statuses = list(pool.map(load_there, paths))
        assert statuses.count(200) <= 1 and set(statuses) <= {200, 400, 503}, statuses
        if 200 in statuses:
            path = paths[list(paths)[statuses.index(200)]]
            assert recorded(two) == {"tiny": {"sql": path}}
            assert rows(two) == {"sql": ("tiny", path)} and holders(two, "sql") == 2
            assert unload(two, "sql")[0] == 200
        assert rows(two) == {}


def test_a_worker_that_drains_does_not_count(two: Deployment, tmp_path: Path) -> None:
    body = {"model": "tiny", "prompt": TEXT, "max_tokens": 200, "stream": True}
    slow = two.mocker("--block-size", "4", "--speedup-ratio", "0.1")
    two.wait_for_workers(3)
    connections = [open_stream(two, body) for _ in range(6)]  # some on each worker
    slow.send_signal(signal.SIGTERM)
    two.wait_for_workers(2)
    assert load(two, "sql", adapter(tmp_path, "sql"))[0] == 200
    assert holders(two, "sql") == 2
    for connection in connections:
        connection.close()


def open_stream(deployment: Deployment, body: Any) -> HTTPConnection:
    connection = HTTPConnection("127.0.0.1", deployment.port, timeout=30)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection


def test_another_model_at_the_same_endpoint_has_no_part(two: Deployment, tmp_path: Path) -> None:
    two.mocker(*FLAGS, "--model-name", "other", "--max-lora-rank", "1")
    two.wait_for_workers(3)
    two.until(lambda: complete(two, "other") == 200, "the other model")
    path = adapter(tmp_path, "sql")
    status, text = load(two, "sql", path)
    assert status == 400 and "name the base model of the adapter: " in text
    assert load(two, "sql", path, model="other")[0] == 400
    assert load(two, "sql", path, model="tiny")[0] == 200
    assert rows(two) == {"sql": ("tiny", path)}
    for base in ("tiny", "other"):
        status, text = load(two, "sql", path, model=base, load_inplace=True)
        assert status == (200 if base == "tiny" else 400), text
    # Names that differ in signs and capitals only.
    for name in ("a.b", "a_b", "A_B"):
        assert load(two, name, path, model="tiny")[0] == 200
    assert set(rows(two)) == {"sql", "a.b", "a_b", "A_B"}
    assert unload(two, "a.b")[0] == 200
    assert set(rows(two)) == {"sql", "a_b", "A_B"} and complete(two, "A_B") == 200
