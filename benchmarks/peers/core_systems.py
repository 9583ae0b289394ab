"""Frontends over a mock of vLLM's EngineCore: ours, vllm-rs, smg, and vllm-router before vllm-rs.

All serve the model directory that ``build`` gets under the name ``m``, with the same tokens at the
same pace. Sockets between frontend and core are UNIX sockets for all of them.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from load import HERE
from mock_core import Counters
from systems import Product, System, file_discovery, free_port, process_cpu_s
from tokenizers import Tokenizer

STEP_MS, PREFILL_MS = 20.0, 80.0
_ANSWER = (
    "The router sends each request to the worker that has most of its prompt in the cache, and "
    "every token of the answer is written to the client as soon as the engine has sampled it. "
)
_FNV_BASIS, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3


@dataclass(frozen=True)
class CorePrograms:
    """Interpreters with vLLM and with the gateways, and vLLM's Rust frontend."""

    engine_python: Path
    vllm_rs: Path
    gateways: Path


@dataclass(frozen=True)
class Setup:
    """What every system needs; each has its own directory in ``directory``."""

    directory: Path
    model: Path
    ours: Product
    programs: CorePrograms


class CoreSystem(System):
    """A frontend over one mock core; subclasses start the frontend."""

    def __init__(self, name: str, setup: Setup, env: dict[str, str] | None = None) -> None:
        self._setup = setup
        super().__init__(name, setup.directory / name, env or {})
        self._counters = self._directory / "counters"

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of the processes that are counted: all between the client and the core."""
        return (self.name,)

    def cpu_s(self) -> tuple[float, float]:
        """Return the CPU seconds of the measured processes and of the mock core."""
        core = process_cpu_s(Counters.read(self._counters).pid)
        return sum(process_cpu_s(self.pid(name)) for name in self.measured), core

    def parts_cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of each measured process."""
        names = self.measured if len(self.measured) > 1 else ()
        return {name: process_cpu_s(self.pid(name)) for name in names}

    def metrics(self) -> dict[str, float]:
        """Return what the core has sent."""
        counted = Counters.read(self._counters)
        return {"tokens": counted.tokens, "requests": counted.requests}

    def core_command(self, *where: str) -> list[str]:
        """Return the command of a mock core that connects to ``where``."""
        tokenizer = Tokenizer.from_file(str(self._setup.model / "tokenizer.json"))
        tokens = tokenizer.encode(_ANSWER, add_special_tokens=False).ids
        return [
            *(sys.executable, str(HERE / "mock_core.py"), *where),
            *("--tokens", ",".join(map(str, tokens)), "--counters", str(self._counters)),
            *("--step-ms", f"{STEP_MS:g}", "--prefill-ms", f"{PREFILL_MS:g}"),
        ]

    def run_vllm_rs(self, port: int) -> None:
        """Start vllm-rs, which starts the core in place of Python's."""
        engine = self._directory / "engine"
        port_option = "--data-parallel-rpc-port"
        command = shlex.join(self.core_command("--handshake"))
        command = command.replace("--handshake", "--handshake tcp://127.0.0.1:$2")
        engine.write_text(
            f'#!/bin/sh\nwhile [ "$1" != {port_option} ]; do shift; done\nexec {command}\n'
        )
        engine.chmod(0o700)
        self.run("vllm-rs", [
            *(str(self._setup.programs.vllm_rs), "serve", str(self._setup.model)),
            *("--served-model-name", "m", "--python", str(engine)),
            *("--host", "127.0.0.1", "--port", str(port)),
        ])  # fmt: skip


class Ours(CoreSystem):
    """Our frontend in kv mode, and ``dynamo.vllm`` bound to the core's sockets."""

    def __init__(self, setup: Setup) -> None:
        sockets = [f"ipc://{setup.directory / 'ours' / end}" for end in ("in", "out")]
        super().__init__("ours", setup, file_discovery(setup.directory / "ours") | setup.ours.env)
        self._sockets = sockets

    @property
    def measured(self) -> tuple[str, ...]:
        """Both count: the worker decodes the engine's messages."""
        return ("frontend", "worker")

    def start(self) -> None:
        """Start the core, the worker and the frontend."""
        setup = self._setup
        self.run("core", self.core_command("--sockets", *self._sockets))
        self.run("worker", [
            *(str(setup.programs.engine_python), "-m", "dynamo.vllm", "--model", str(setup.model)),
            *("--served-model-name", "m", "--load-format", "dummy", "--dtype", "float32"),
            *("--enforce-eager", "--block-size", "16", "--max-num-seqs", "1024"),
        ], {"DYN_VLLM_CORE_ADDRESSES": " ".join(self._sockets), "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind"})  # fmt: skip
        self.run("frontend", [
            *(str(setup.ours.python), "-m", "dynamo.frontend", "--router-mode", "kv"),
            *("--http-host", "127.0.0.1", "--http-port", str(self.port)),
        ])  # fmt: skip


class VllmRs(CoreSystem):
    """vLLM's own Rust frontend, one process."""

    def __init__(self, setup: Setup) -> None:
        super().__init__("vllm-rs", setup)

    def start(self) -> None:
        """Start it; it starts the core."""
        self.run_vllm_rs(self.port)


class Smg(CoreSystem):
    """SGLang's gateway, which speaks to the core directly; logs warnings only."""

    def __init__(self, setup: Setup) -> None:
        super().__init__("smg", setup)

    def start(self) -> None:
        """Start the core and the gateway, which calls the model by the name of its directory."""
        (self._directory / "m").symlink_to(self._setup.model)
        socket = str(self._directory / "socket")
        address = f"tcp://127.0.0.1:{_smg_port(socket)}"
        self.run("core", self.core_command("--handshake", address))
        self.run("smg", [
            *(str(self._setup.programs.gateways), "-m", "smg.launch_router", "--backend", "vllm"),
            *("--worker-urls", f"ipc://{socket}", "--model-path", "m", "--log-level", "warn"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--prometheus-host", "127.0.0.1"),
            *("--prometheus-port", str(free_port())),
        ])  # fmt: skip


class VllmRouter(CoreSystem):
    """vllm-router before vllm-rs: it forwards HTTP, and only it is counted."""

    def __init__(self, setup: Setup) -> None:
        super().__init__("vllm-router", setup)

    def start(self) -> None:
        """Start vllm-rs, which starts the core, and the router."""
        upstream = free_port()
        self.run_vllm_rs(upstream)
        self.run("vllm-router", [
            *(str(self._setup.programs.gateways), "-m", "vllm_router.launch_router"),
            *("--worker-urls", f"http://127.0.0.1:{upstream}", "--log-level", "warning"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--prometheus-host", "127.0.0.1"),
            *("--prometheus-port", str(free_port())),
        ])  # fmt: skip


PEERS: dict[str, Callable[[Setup], CoreSystem]] = {
    "vllm-rs": VllmRs,
    "smg": Smg,
    "vllm-router": VllmRouter,
}


def _smg_port(path: str) -> int:
    """Return the port of the handshake that smg derives from the path of its socket (FNV-1a)."""
    found = _FNV_BASIS
    for byte in path.encode():
        found = (found ^ byte) * _FNV_PRIME % 2**64
    return 20000 + found % 10000
