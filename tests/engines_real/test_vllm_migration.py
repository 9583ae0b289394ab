"""A vLLM engine stops, or dies by an error, in the middle of greedy answers: another one writes
the rest."""

from __future__ import annotations

import functools
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from answers_kit import COMPLETIONS, completion
from servers_kit import EngineDeployment, closing, in_parallel, title, tree

BODIES: tuple[dict[str, Any], ...] = (
    {},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.3},
    {"logprobs": 1},
    {"min_tokens": 90, "max_tokens": 100, "ignore_eos": False},
)
"""Requests that run at the same time on the worker that fails."""


def instance_ids(made: EngineDeployment) -> set[int]:
    found = json.loads(made.request("GET", "/health")[2])["instances"]
    return {one["instance_id"] for one in found if one["endpoint"] == "generate"}


def events(made: EngineDeployment, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer as they arrive."""
    connection = http.client.HTTPConnection("127.0.0.1", made.port, timeout=240)
    headers = {"content-type": "application/json"}
    try:
        connection.request("POST", COMPLETIONS, json.dumps(body).encode(), headers)
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
    finally:
        connection.close()


def test_the_rest_is_that_of_an_undisturbed_answer(tmp_path: Path, tiny_model: Path) -> None:
    with closing(EngineDeployment(tmp_path)) as made:
        made.frontend("--router-mode", "kv", "--migration-limit", "3")
        # A process for the computation, as with several GPUs: EngineCore fails when it dies.
        doomed = made.worker(tiny_model, "tiny", "--distributed-executor-backend", "mp")
        made.wait_for_models("tiny")
        (first,) = instance_ids(made)
        made.worker(tiny_model, "tiny")
        made.until(lambda: len(instance_ids(made)) == 2, "a second worker", timeout_s=120)
        (core,) = (one for one in tree(doomed.pid) if "EngineCore" in title(one))
        (computing,) = (one for one in tree(doomed.pid) if "VLLM::Worker" in title(one))

        def ask(given: dict[str, Any], fault: threading.Barrier | None) -> tuple[str, Any, Any]:
            fields = {"max_tokens": 160, "ignore_eos": True, "stream": True, "model": "tiny"}
            body = completion("Tell me more about the river", **(fields | given))
            body |= {"stream_options": {"include_usage": True}}
            if fault is not None:
                body["nvext"] = {"backend_instance_id": first}
            text, reason = "", None
            usage: dict[str, Any] = {}
            for number, event in enumerate(events(made, body)):
                if fault is not None and number == 25:
                    fault.wait(60)
                assert "error" not in event, event
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    text += choice["text"]
                    reason = choice["finish_reason"]
            usage = {key: usage[key] for key in ("prompt_tokens", "completion_tokens")}
            return text, reason, usage

        expected = [ask(given, None) for given in BODIES]
        migrated = 0.0
        for fault in (core.suspend, computing.kill):
            barrier = threading.Barrier(len(BODIES), fault)
            found = in_parallel(functools.partial(ask, fault=barrier), BODIES)
            assert found == expected
            name = "dynamo_frontend_model_migration_total"
            before, migrated = migrated, made.sample(name, migration_type="ongoing_request")
            assert migrated >= before + len(BODIES)  # one more where the other engine is slow
            if fault == core.suspend:
                core.resume()
                made.until(lambda: is_back(made), "the engine is back")
        assert doomed.wait(30) == 1
        made.processes.remove(doomed)


def is_back(made: EngineDeployment) -> bool:
    """Whether all instances are in routing."""
    return b'"unavailable"' not in made.request("GET", "/health")[2]
