"""Dynamo's own vLLM worker, unchanged, before our router: its KV events choose the worker.

``DYNAMO_WORKERS`` names a directory with both wheels of Dynamo and the packages that its worker
needs beside those of the engines' environment (docs/dynamo-workers.md); skipped without it.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from answers_kit import COMPLETIONS, completion
from deployment import ROOT, free_port
from servers_kit import EngineDeployment, closing

BLOCK = 32
EXIT_S = 120.0
START_S = 900.0  # the worker loads most of vLLM three times
WORKER = ("common", "vllm", "nixl_connect", "logits_processing")
ABSENT_VISION = '''
"""The one function of images that Dynamo's modules import, where torchvision is missing."""
import importlib.abc
import importlib.machinery
import sys

MODULE = "transformers.models.qwen2_vl.image_processing_qwen2_vl"


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == MODULE else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.smart_resize = None


sys.meta_path.insert(0, Finder())
'''


class DynamoDeployment(EngineDeployment):
    """Our frontend, and workers of Dynamo's wheel."""

    def __init__(self, directory: Path, tree: Path) -> None:
        super().__init__(directory, forked=False)  # another program of the same name
        chosen = directory / "workers"
        (chosen / "dynamo").mkdir(parents=True)
        for name in WORKER:
            (chosen / "dynamo" / name).symlink_to(tree / "dynamo" / name)
        if importlib.util.find_spec("torchvision") is None:
            (chosen / "sitecustomize.py").write_text(ABSENT_VISION)
        self.path = os.pathsep.join(map(str, (chosen, ROOT, tree)))
        self.env |= {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(directory / "kv"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
        }
        (directory / "kv").mkdir(mode=0o700)

    def dynamo_worker(self, model: Path, name: str) -> None:
        """Start ``python -P -m dynamo.vllm`` of Dynamo with KV events."""
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{free_port()}",  # vLLM binds to a wildcard only
            "topic": "kv-events",
        }
        flags = ("--kv-events-config", json.dumps(events))
        self.worker(model, name, *flags, PYTHONPATH=self.path, PYTHONSAFEPATH="1")

    def close(self) -> None:
        """Stop all processes. A worker of Dynamo unloads vLLM after its last log line."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            assert process.wait(EXIT_S) == 0, self.tail()
        super().close()

    def candidates(self, body: dict[str, Any]) -> dict[str, int]:
        """The overlap in blocks that the router assumes for each worker."""
        status, _, answer = self.request("POST", "/v1/route", body)
        assert status == 200, answer
        return {one["worker_id"]: one["overlap_blocks"] for one in json.loads(answer)["candidates"]}

    def until_overlaps(self, body: dict[str, Any], wanted: list[int]) -> None:
        """Wait until the candidates have these overlaps, in ascending order."""
        self.until(lambda: sorted(self.candidates(body).values()) == wanted, f"overlaps {wanted}")


@pytest.fixture
def workers(tmp_path: Path, tiny_model: Path) -> Iterator[DynamoDeployment]:
    given = os.environ.get("DYNAMO_WORKERS")
    if not given:
        pytest.skip("DYNAMO_WORKERS is not set: unpack the wheels of ai-dynamo and name them there")
    with closing(DynamoDeployment(tmp_path / "d", Path(given))) as made:
        made.frontend("--router-mode", "kv")
        for _ in range(2):
            made.dynamo_worker(tiny_model, "tiny")
        made.wait_for_workers(2, timeout_s=START_S)
        yield made


@pytest.mark.timeout(1500)
def test_a_prefix_is_routed_to_the_worker_that_caches_it(workers: DynamoDeployment) -> None:
    """For each of four prompts in turn: one worker has its blocks, and answers it again."""
    chosen = []
    for start in (1, 200, 400, 600):
        prompt = [start + number % 190 for number in range(8 * BLOCK + 5)]
        nvext = {"extra_fields": ["worker_id"]}
        body = completion(prompt, model="tiny", max_tokens=2, nvext=nvext)
        first = workers.post(COMPLETIONS, body)
        worker = first["nvext"]["worker_id"]
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        workers.until_overlaps(body, [0, 8])
        longer = {**body, "prompt": [*prompt, 7, 8, 9]}
        again = workers.post(COMPLETIONS, longer)
        assert again["nvext"]["worker_id"] == worker
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 8 * BLOCK
        chosen.append(worker["decode_worker_id"])
    assert len(set(chosen)) == 2
