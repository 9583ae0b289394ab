"""The commands of examples/cancellation/README.md, as they stand there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from deployment import ROOT, Deployment

README = ROOT / "examples/cancellation/README.md"


def commands() -> list[str]:
    """The lines of the README's first block of shell."""
    block = re.search(r"```sh\n(.*?)```", README.read_text(), re.DOTALL)
    assert block is not None
    return block[1].splitlines()


def argv(line: str) -> list[str]:
    program, *rest = shlex.split(line.removesuffix("&"))
    assert program == "python"
    return [sys.executable, *rest]


class Tiers:
    """The processes that the README starts in the background, and what they print."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._logs: dict[str, Path] = {}

    def start(self, line: str) -> None:
        name = Path(argv(line)[1]).stem
        self._logs[name] = log = self._deployment.logs / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                argv(line), cwd=ROOT, env=self._deployment.env, stdout=out, stderr=out
            )
        self._deployment.processes.append(process)

    def printed(self, name: str, text: str) -> None:
        """Wait until the tier has printed ``text``."""
        self._deployment.until(lambda: text in self._logs[name].read_text(), f"{name}: {text}")


def test_each_way_to_cancel_reaches_the_worker(deployment: Deployment) -> None:
    tiers = Tiers(deployment)
    deployment.env["PYTHONPATH"] = str(ROOT)
    clients = [line for line in commands() if not line.endswith("&")]
    for line in commands():
        if line.endswith("&"):
            tiers.start(line)
    tiers.printed("middle", "ready")
    ways = []
    for line in clients:
        done = subprocess.run(
            argv(line), cwd=ROOT, env=deployment.env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        found = re.search(r"client: (\S+) cancelled \((\w+)\) after (\d+) items", done.stdout)
        assert found is not None, done.stdout + done.stderr
        request_id, how, received = found.groups()
        ways.append(how)
        worker_says = "stopped" if how == "stop" else "killed"
        tiers.printed("worker", f"worker: {request_id} {worker_says} before ")
        if "--direct" not in line and how == "stop":
            tiers.printed("middle", f"middle: {request_id} was cancelled")
        assert 3 <= int(received) < 100
    assert sorted(ways) == ["kill", "leave", "stop"]
    assert "Traceback" not in deployment.tail()
