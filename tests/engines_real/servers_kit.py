"""Real engines under test: our worker and frontend, and vLLM's own server to compare with."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import psutil
from deployment import Deployment, free_port
from forked_kit import ForkedModule, fork_context
from prometheus_client.parser import text_string_to_metric_families
from weights_kit import CONTEXT

from dynamo.frontend.text.tokenizer import Tokenizer, load_tokenizer

ENGINE_START_S = 120.0
# Ten engines may run at once. A flag: the environment's VLLM_CPU_KVCACHE_SPACE is in whole GiB.
CACHE_BYTES = 64 << 20
# As on one GPU: the engine's own process computes. The default for CPUs is one process more, which
# takes a third of the start; the tests of `dynamo run` and of migration have it.
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
ENGINE_FLAGS = (
    "--dtype",
    "float32",
    "--enforce-eager",
    "--block-size",
    "32",
    "--max-model-len",
    str(CONTEXT),
    "--kv-cache-memory-bytes",
    str(CACHE_BYTES),
    "--distributed-executor-backend",
    UNIPROC,
)
ENGINES = ("dynamo.vllm", "vllm.entrypoints.openai.api_server")
# What our worker and vLLM's own server import.
PRELOADED = ("vllm.entrypoints.openai.api_server", "vllm.v1.engine.async_llm")
ENGINE_ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # One thread an engine: several engines share two cores, and sums always have one order.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Each engine would compile a function at its first log probabilities, for 3 s of CPU time.
    "TORCHDYNAMO_DISABLE": "1",
}


class EngineDeployment(Deployment):
    """Processes with real engines. ``close`` fails if any process of theirs is left."""

    def __init__(self, directory: Path, forked: bool = True, cores_forked: bool = True) -> None:
        """Start engines and their EngineCores as forks, or as users do: see :class:`ForkedModule`
        and :func:`fork_engine_cores`."""
        directory.mkdir(parents=True, exist_ok=True)
        super().__init__(directory, forked)
        self._prepare = fork_engine_cores if cores_forked else None
        self.env |= ENGINE_ENV
        self.tokenizer: Tokenizer | None = None
        """The tokenizer of the model that vLLM's own server serves here."""
        self.status_port = 0
        self._started: set[psutil.Process] = set()

    def _spawn(
        self, module: str, flags: tuple[str, ...], env: dict[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        if self.forked and module in ENGINES:
            fork_context(PRELOADED, ENGINE_ENV)
            return ForkedModule(module, flags, env, log, self._prepare)
        return self._run(module, flags, env, log)

    def worker(self, model: Path, name: str, *flags: str, **env: str) -> subprocess.Popen[bytes]:
        """Start our worker with vLLM inside."""
        named = ("--model", str(model), "--served-model-name", name)
        return self.start("dynamo.vllm", *named, *ENGINE_FLAGS, *flags, **env)

    def vllm_server(self, model: Path, name: str, *flags: str) -> subprocess.Popen[bytes]:
        """Start vLLM's own server on the port of this deployment."""
        self.tokenizer = load_tokenizer(model)
        named = ("--model", str(model), "--served-model-name", name, "--port", str(self.port))
        return self.start("vllm.entrypoints.openai.api_server", *named, *ENGINE_FLAGS, *flags)

    def status_server(self) -> dict[str, str]:
        """The variables of a worker whose status server :meth:`control` calls."""
        self.status_port = free_port()
        return {"DYN_SYSTEM_PORT": str(self.status_port)}

    def control(self, route: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """POST to an engine route of the worker's status server; status and body."""
        status, _, answer = self.request("POST", f"/engine/{route}", body, port=self.status_port)
        return status, json.loads(answer)

    def engine_sample(self, name: str, **labels: str) -> float:
        """The sum of vLLM's samples ``name`` with ``labels`` on the page of that worker."""
        text = self.request("GET", "/metrics", port=self.status_port)[2].decode()
        return sum(
            float(one.value)
            for family in text_string_to_metric_families(text)
            for one in family.samples
            if one.name == name and labels.items() <= one.labels.items()
        )

    def wait_for_models(self, *names: str, timeout_s: float = ENGINE_START_S) -> None:
        """Wait until the server on our port lists ``names``; fails with the logs."""
        deadline = time.monotonic() + timeout_s
        listed: set[str] = set()
        while not listed.issuperset(names):
            assert time.monotonic() < deadline, f"{names} not in {listed}\n{self.tail()}"
            for process in self.processes:
                assert process.poll() is None, f"{process.args!r} ended\n{self.tail()}"
            time.sleep(0.1)
            with contextlib.suppress(OSError, ValueError, KeyError):
                body = json.loads(self.request("GET", "/v1/models")[2])
                listed = {model["id"] for model in body["data"]}

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send ``body``, which must be answered with 200; return the answer."""
        status, _, answer = self.request("POST", path, body)
        assert status == 200, f"{status}: {answer.decode()}"
        found: dict[str, Any] = json.loads(answer)
        return found

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a streamed answer; the last one must be ``[DONE]``."""
        status, _, answer = self.request("POST", path, {**body, "stream": True})
        assert status == 200, f"{status}: {answer.decode()}"
        events = [
            line.removeprefix("data: ")
            for line in answer.decode().split("\n")
            if line.startswith("data: ")
        ]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    def engine_cores(self) -> list[psutil.Process]:
        """The processes of vLLM's EngineCore."""
        return [one for one in self.descendants() if "EngineCore" in title(one)]

    def descendants(self) -> set[psutil.Process]:
        """Our processes and all that they have started, as far as they run."""
        for process in self.processes:
            self._started |= tree(process.pid)
        self._started = {one for one in self._started if is_alive(one)}
        return self._started

    def close(self) -> None:
        """Stop all processes; whatever they have started must end with them."""
        self.descendants()
        try:
            super().close()
            self.until(lambda: not self.descendants(), "all processes have ended")
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill what is left."""
        for process in self.descendants():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for started in self.processes:
            started.wait()


class AttachedEngine(EngineDeployment):
    """Our frontend and worker, in front of the server of ``engine``."""

    def __init__(self, directory: Path, engine: EngineDeployment) -> None:
        super().__init__(directory)
        self.engine = engine

    def attach(self, *flags: str) -> None:
        """Start the worker."""
        self.start("dynamo.attach", "--url", self.engine.url, *flags)


def fork_engine_cores() -> None:
    """Let the engine of this process fork its EngineCore, which would import vLLM for 9 s of CPU
    time. An engine of `dynamo serve` or `dynamo run`, and one that is not forked, starts it."""
    import vllm.v1.engine.utils

    # It finds where a title goes while the environment is the first one.
    importlib.import_module("setproctitle").getproctitle()
    vllm.v1.engine.utils.get_mp_context = lambda: multiprocessing.get_context("fork")


Made = TypeVar("Made", bound=EngineDeployment)


def tree(pid: int) -> set[psutil.Process]:
    """The process and its descendants. A marker in the environment would not do: EngineCore
    writes its title over it."""
    try:
        process = psutil.Process(pid)
        return {process, *process.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def title(process: psutil.Process) -> str:
    """The command line, which may be a title."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def in_parallel(call: Callable[[Any], Any], values: Sequence[Any], width: int = 8) -> list[Any]:
    """``call`` of each value, several at a time, so that the engine computes batches."""
    with ThreadPoolExecutor(width) as pool:
        return list(pool.map(call, values))


@contextlib.contextmanager
def closing(made: Made) -> Iterator[Made]:
    """Close ``made`` at the end; kill its processes after an error, which is then the one shown."""
    try:
        yield made
    except BaseException:
        made.kill()
        raise
    made.close()
