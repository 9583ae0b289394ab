"""Constraints of a client on the choice of worker, and the errors if none fits, over HTTP."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from deployment import Deployment, free_port

BUSY = "Service temporarily unavailable: All workers are busy, please retry later"


class TaintedWorkers:
    """Two workers with the taint gpu=a, one without and with ranks 0 and 1, one frontend."""

    def __init__(self, deployment: Deployment, server: int | None = None) -> None:
        self.deployment = deployment
        self.server = server
        self.ranked = -1
        self.tainted: list[int] = []

    def identify(self) -> None:
        """Find out which worker has which taint."""
        rows = self.candidates()
        self.ranked = next(row["worker_id"] for row in rows if row["dp_rank"] == 1)
        self.tainted = sorted({row["worker_id"] for row in rows} - {self.ranked})

    def candidates(self, **nvext: Any) -> list[dict[str, Any]]:
        body = {"model": "tiny", "prompt": "hello there", "nvext": nvext}
        status, _, answer = self.deployment.request("POST", "/v1/route", body)
        assert status == 200, answer
        rows: list[dict[str, Any]] = json.loads(answer)["candidates"]
        return rows

    def complete(self, headers: dict[str, str] | None = None, **nvext: Any) -> tuple[int, Any]:
        """Return the status, and the worker that answered or the error message."""
        body = {"model": "tiny", "prompt": "a b c d e f g h", "max_tokens": 1, "nvext": nvext}
        headers = {"x-dynamo-route": "1", **(headers or {})}
        status, found, answer = self.deployment.request("POST", "/v1/completions", body, headers)
        if status != 200:
            error = json.loads(answer)
            assert error["code"] == status
            return status, error["message"]
        return status, int(json.loads(found["x-dynamo-route"])["worker"], 16)

    def rank(self) -> str:
        """The rank that the attached server got with its last request."""
        headers = self.deployment.request("GET", "/seen", port=self.server)[2]
        return str(json.loads(headers)["headers"][-1].get("x-data-parallel-rank"))

    def limit(self, body: Any) -> tuple[int, Any]:
        status, _, answer = self.deployment.request("POST", "/busy_threshold", body)
        return status, json.loads(answer)


@pytest.fixture(scope="module", params=["mock workers", "attached servers"])
def workers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TaintedWorkers]:
    made = Deployment(tmp_path_factory.mktemp("eligibility"))
    taints, server = ("--taint", "gpu=a", "--taint", "zone=1"), None
    if request.param == "mock workers":
        common = ("--speedup-ratio", "0", "--block-size", "16")
        made.mocker(*common, "--num-workers", "2", *taints)
        made.mocker(*common, "--data-parallel-size", "2")
    else:
        port = made.openai_server()
        ranks = [("--kv-events-endpoint", f"tcp://127.0.0.1:{free_port()}") for _ in range(2)]
        for flags in (taints, taints, (*ranks[0], *ranks[1])):
            made.attached(port, "--block-size", "16", *flags)
        server = port
    made.frontend("--router-mode", "kv", "--admission-control", "token-capacity")
    try:
        made.wait_for_workers(3)
        here = TaintedWorkers(made, server)
        here.identify()
        yield here
    finally:
        made.close()


def test_an_allow_list(workers: TaintedWorkers) -> None:
    for worker_id in (workers.ranked, workers.tainted[0]):
        assert workers.complete(allowed_worker_ids=[worker_id, 12345]) == (200, worker_id)
    status, message = workers.complete(allowed_worker_ids=[12345])
    assert status == 503
    assert message == "no endpoints: none of the request's allowed workers is registered"


def test_pins(workers: TaintedWorkers) -> None:
    for worker_id in (*workers.tainted, workers.ranked):
        assert workers.complete(backend_instance_id=worker_id) == (200, worker_id)
        assert workers.complete({"x-worker-instance-id": str(worker_id)}) == (200, worker_id)
    assert workers.complete(backend_instance_id=12345) == (
        400,
        "InvalidRequest: nvext.backend_instance_id=12345 does not identify a known worker",
    )
    assert workers.complete({"x-worker-instance-id": "me"}) == (
        400,
        "Header 'x-worker-instance-id' must be a non-negative integer of 64 bits, got 'me'",
    )
    pinned, other = workers.tainted
    assert workers.complete(backend_instance_id=pinned, allowed_worker_ids=[other]) == (
        400,
        f"pinned worker {pinned} is not in the request's allow-list",
    )


def test_dp_ranks(workers: TaintedWorkers) -> None:
    for rank in (0, 1):
        found = workers.complete(backend_instance_id=workers.ranked, dp_rank=rank)
        assert found == (200, workers.ranked)
        assert workers.server is None or workers.rank() == str(rank)
    assert workers.complete(backend_instance_id=workers.ranked, dp_rank=2) == (
        400,
        f"dp_rank 2 is out of bounds for worker {workers.ranked}: [0, 2)",
    )
    assert workers.complete({"x-dp-rank": "7"}, backend_instance_id=workers.ranked)[0] == 400
    assert workers.complete({"x-data-parallel-rank": "7"}, allowed_worker_ids=[workers.ranked]) == (
        400,
        "dp_rank 7 is out of bounds for every worker",
    )
    assert workers.complete(dp_rank=7)[0] == 200  # a worker without ranks serves any


def test_taints(workers: TaintedWorkers) -> None:
    needed = {"required_taints": ["gpu=a", "zone=1"]}
    for _ in range(4):
        status, worker_id = workers.complete(routing_constraints=needed)
        assert status == 200 and worker_id in workers.tainted
    assert workers.complete(routing_constraints={"required_taints": ["gpu=b"]}) == (
        400,
        "no worker has the required taints: gpu=b",
    )
    assert workers.complete(backend_instance_id=workers.ranked, routing_constraints=needed) == (
        400,
        "no worker has the required taints: gpu=a, zone=1",
    )
    for weight, wanted in ((5.0, set(workers.tainted)), (-5.0, {workers.ranked})):
        rows = workers.candidates(routing_constraints={"preferred_taints": {"gpu=a": weight}})
        assert {row["worker_id"] for row in rows if row["chosen"]} <= wanted
    rows = workers.candidates(routing_constraints=needed)
    left_out = {row["excluded"] for row in rows if row["worker_id"] == workers.ranked}
    assert left_out == {"lacks the taints: gpu=a, zone=1"}


@pytest.mark.parametrize(
    ("nvext", "message"),
    [
        ({"allowed_worker_ids": []}, "nvext.allowed_worker_ids: expected `array` of length >= 1"),
        ({"allowed_worker_ids": ["a"]}, "nvext.allowed_worker_ids[0]: expected `int`, got `str`"),
        ({"dp_rank": -1}, "nvext.dp_rank: expected `int` >= 0"),
        ({"dp_rank": 2**64}, f"nvext.dp_rank must be at most {2**64 - 1}, got {2**64}"),
        ({"allowed_worker_ids": [1, 10**30]}, "nvext.allowed_worker_ids must be at most"),
        (
            {"routing_constraints": {"required_taints": "gpu"}},
            "nvext.routing_constraints.required_taints: expected `array | null`, got `str`",
        ),
        (
            {"routing_constraints": {"preferred_taints": {"gpu": "much"}}},
            "nvext.routing_constraints.preferred_taints[...]: expected `float`, got `str`",
        ),
        ({"agent_hints": {"priority": 10**30}}, "nvext.agent_hints.priority: expected `int` <="),
        ({"router_config_override": 3}, "nvext.router_config_override: expected `object | null`"),
        (
            {"router_config_override": {"router_temperature": -1}},
            "router_temperature must be finite and non-negative",
        ),
    ],
)
def test_a_bad_constraint_is_named(
    workers: TaintedWorkers, nvext: dict[str, Any], message: str
) -> None:
    status, said = workers.complete(**nvext)
    assert (status, message in said) == (400, True), said


def test_an_override_reaches_the_decision(workers: TaintedWorkers) -> None:
    body = {"model": "tiny", "prompt": "hello there"}
    weights = {"prefill_load_scale": 3.0, "router_temperature": 0.5}
    override = {"router_config_override": weights}
    answer = workers.deployment.request("POST", "/v1/route", {**body, "nvext": override})[2]
    found = json.loads(answer)
    assert (found["prefill_load_scale"], found["temperature"]) == (3.0, 0.5)
    assert workers.complete(router_config_override=weights)[0] == 200


def test_thresholds_while_the_frontend_runs(workers: TaintedWorkers) -> None:
    deployment = workers.deployment
    nothing = {
        "model": "tiny",
        "active_decode_blocks_threshold": None,
        "active_prefill_tokens_threshold": None,
        "active_prefill_tokens_threshold_frac": None,
    }
    assert workers.limit({"model": "tiny"}) == (200, nothing)
    assert json.loads(deployment.request("GET", "/busy_threshold")[2]) == {"thresholds": []}
    share = {"model": "tiny", "active_decode_blocks_threshold": 0.85}
    assert workers.limit(share) == (200, {**nothing, **share})
    tokens = {"model": "tiny", "active_prefill_tokens_threshold_frac": 2.5}
    assert workers.limit({**tokens, "active_decode_blocks_threshold": None}) == (
        200,
        {**nothing, **share, **tokens},
    )
    listed = json.loads(deployment.request("GET", "/busy_threshold")[2])
    assert listed == {"thresholds": [{**nothing, **share, **tokens}]}
    assert workers.complete()[0] == 200


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (
            {"model": "nope"},
            404,
            "Model 'nope' not found. Thresholds can only be set for discovered models.",
        ),
        (
            {"model": "tiny", "active_decode_blocks_threshold": 1.5},
            400,
            "active_decode_blocks_threshold must be between 0.0 and 1.0, got 1.5",
        ),
        (
            {"model": "tiny", "active_prefill_tokens_threshold_frac": -1.0},
            400,
            "active_prefill_tokens_threshold_frac must be >= 0.0, got -1.0",
        ),
        ({"model": "tiny", "active_prefill_tokens_threshold": -1}, 422, "`int` >= 0"),
        ({"model": "tiny", "active_prefill_tokens_threshold": 1.5}, 422, "`int | null`"),
        ({"model": "tiny", "active_decode_blocks_threshold": "x"}, 422, "`float | null`"),
        ({"active_decode_blocks_threshold": 0.5}, 422, "model"),
        ([], 422, "object"),
    ],
)
def test_bad_thresholds(workers: TaintedWorkers, body: Any, status: int, error: str) -> None:
    got, said = workers.limit(body)
    assert (got, list(said)) == (status, ["error"])
    assert error in said["error"]


def test_get_route_explains_the_choice(workers: TaintedWorkers) -> None:
    def get(query: str, **headers: str) -> tuple[int, Any]:
        status, _, answer = workers.deployment.request("GET", f"/v1/route?{query}", None, headers)
        return status, json.loads(answer)

    status, found = get("prompt=a%20b%20c+d&model=tiny")
    assert status == 200 and len(found["candidates"]) == 4
    status, found = get("prompt=a", **{"x-worker-instance-id": str(workers.ranked)})
    assert {row["worker_id"] for row in found["candidates"] if row["chosen"]} == {workers.ranked}
    assert get("model=tiny")[1]["message"].endswith("`prompt` is missing")
    assert get("prompt=a&promt=b")[1]["message"].endswith("not `promt`")
    assert get("prompt=a&model=nope")[0] == 404


def test_a_busy_pin_and_no_idle_worker(deployment: Deployment) -> None:
    deployment.mocker("--speedup-ratio", "0.01", "--block-size", "16", "--num-workers", "2")
    deployment.frontend("--router-mode", "kv", "--admission-control", "token-capacity")
    deployment.wait_for_workers(2)
    here = TaintedWorkers(deployment)
    workers = {row["worker_id"] for row in here.candidates()}
    limit = {"model": "tiny", "active_prefill_tokens_threshold": 0}
    assert here.limit(limit)[0] == 200
    body = {"model": "tiny", "prompt": "long " * 2000, "max_tokens": 1}
    running = []
    for worker_id in workers:
        connection = http.client.HTTPConnection("127.0.0.1", deployment.port, timeout=30)
        pinned = json.dumps({**body, "nvext": {"backend_instance_id": worker_id}})
        connection.request("POST", "/v1/completions", pinned, {"content-type": "application/json"})
        running.append(connection)
    deadline = time.monotonic() + 20
    while {row["excluded"] for row in here.candidates()} != {"busy"}:
        assert time.monotonic() < deadline, deployment.tail()
    assert here.complete() == (503, BUSY)
    assert here.complete(backend_instance_id=next(iter(workers))) == (503, BUSY)
    assert here.complete(backend_instance_id=12345) == (503, BUSY)  # rejected before it is read
    assert here.limit({**limit, "active_prefill_tokens_threshold": 10**9})[0] == 200
    assert here.complete(backend_instance_id=12345)[0] == 400
    assert {row["excluded"] for row in here.candidates()} == {""}
    for connection in running:
        connection.close()


@pytest.mark.parametrize("mode", ["round-robin", "kv"])
def test_reported_load_counts_after_the_first_threshold(deployment: Deployment, mode: str) -> None:
    deployment.mocker("--speedup-ratio", "1", "--num-gpu-blocks-override", "1000")
    deployment.frontend("--router-mode", mode, "--admission-control", "token-capacity")
    deployment.wait_for_workers(1)
    here = TaintedWorkers(deployment)
    for _ in range(2):  # fills cache blocks, which the worker reports as used
        assert here.complete()[0] == 200
    assert here.limit({"model": "tiny", "active_decode_blocks_threshold": 0.0})[0] == 200
    connection = http.client.HTTPConnection("127.0.0.1", deployment.port, timeout=30)
    body = {"model": "tiny", "prompt": "long " * 400, "max_tokens": 2000, "ignore_eos": True}
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
    )
    deadline = time.monotonic() + 20
    while here.complete()[0] != 503:
        assert time.monotonic() < deadline, deployment.tail()
    assert here.limit({"model": "tiny", "active_decode_blocks_threshold": 1.0})[0] == 200
    assert here.complete()[0] == 200
    connection.close()


def test_without_admission_control_and_without_the_routes(deployment: Deployment) -> None:
    deployment.mocker("--speedup-ratio", "0", "--block-size", "16")
    deployment.frontend("--router-mode", "kv", "--active-prefill-tokens-threshold", "0")
    deployment.wait_for_workers(1)
    here = TaintedWorkers(deployment)
    assert json.loads(deployment.request("GET", "/busy_threshold")[2]) == {"thresholds": []}
    body = {"model": "tiny", "active_prefill_tokens_threshold": 0}
    status, headers, answer = deployment.request("POST", "/busy_threshold", body)
    assert (status, json.loads(answer)["active_prefill_tokens_threshold"]) == (200, 0)
    assert "not in force: needs --admission-control token-capacity" in headers["warning"]
    assert json.loads(answer)["warning"].startswith("kept, not in force")
    assert here.complete()[0] == 200
    deployment.processes[-1].terminate()
    deployment.processes[-1].wait(20)
    deployment.frontend("--router-mode", "kv", DYN_DISABLE_FRONTEND_ADMIN_API="1")
    deployment.wait_for_workers(1)
    status, _, answer = deployment.request("GET", "/busy_threshold")
    assert (status, json.loads(answer)["message"]) == (404, "Route not found: GET /busy_threshold")
    assert deployment.request("POST", "/busy_threshold", body)[0] == 404
