"""An upgrade in place, as in docs/upgrade.md: no request under load is lost."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

from deployment import MODEL, free_port
from load_kit import GRAPH, some_requests, under_load
from serving import ROOT, Serving


def install(package: Path, version: str) -> None:
    """Replace each file of ``package``, as git and pip do, by a copy that says ``version``."""
    if package.exists():
        shutil.rmtree(package)
    shutil.copytree(ROOT / "dynamo", package, ignore=shutil.ignore_patterns("*.cpp", "__pycache__"))
    start = package / "__init__.py"
    text = start.read_text()
    assert '__version__ = "' in text
    start.write_text(text.replace('__version__ = "', f'__version__ = "{version}" or "'))


def served_version(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/openapi.json", timeout=30) as answer:
        return str(json.load(answer)["info"]["version"])


def compiled_modules(pid: int) -> list[str]:
    """The compiled modules that a process has mapped: of the version that it began with."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return sorted({line.split(maxsplit=5)[5] for line in maps.splitlines() if "/_fast/" in line})


def test_an_upgrade_in_place_under_load_loses_no_request(serving: Serving, tmp_path: Path) -> None:
    tree = tmp_path / "installed"
    install(tree / "dynamo", "1.old")
    # The tree comes before the one of the tests, for each process of the deployment.
    serving.env["PYTHONPATH"] = str(tree)
    port = free_port()
    serving.graph(GRAPH.format(port=port, model=MODEL, workers=2, speed=2))
    serving.start(
        tmp_path / "graph.yaml", wait="ready: http://127.0.0.1:.* model: tiny   workers: 2"
    )
    assert served_version(port) == "1.old"
    old = {name: serving.pids(name)[0] for name in ("Worker", "Worker_1", "Frontend")}
    assert all(str(tree) in " ".join(compiled_modules(pid)) for pid in old.values())
    with under_load(port) as load:
        some_requests(serving, load)
        install(tree / "dynamo", "2.new")
        some_requests(serving, load)
        for service in ("Worker", "Frontend"):
            command = [sys.executable, "-m", "dynamo", "restart", service]
            command += ["--namespace", serving.namespace]
            done = subprocess.run(
                command, env=serving.env, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stdout + done.stderr
        some_requests(serving, load)
        for name, pid in old.items():
            (new,) = serving.wait_for_pids(name, unlike=pid)
            mapped = compiled_modules(new)
            assert mapped and all(
                path.startswith(str(tree)) and Path(path).exists() for path in mapped
            ), mapped
    assert served_version(port) == "2.new"
    assert serving.stop() == 0
    assert "killing" not in serving.text()
    serving.assert_clean()
