"""The surface of vLLM that our code knows is that of the installed release."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import vllm_surface

SCRIPT = Path(vllm_surface.__file__)


def package() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def test_the_installed_release_has_the_recorded_surface() -> None:
    """A failure lists what a new release has changed: decide about each line, then --record."""
    present = vllm_surface.surface(package())
    assert all(present.values()), [place for place, names in present.items() if not names]
    assert vllm_surface.differences(vllm_surface.recorded(), present) == []


def test_a_change_is_listed(tmp_path: Path) -> None:
    copied = tmp_path / "vllm"
    for place in {place.partition(":")[0] for place in vllm_surface.recorded()}:
        (copied / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(package() / place, copied / place)
    file = copied / "v1/engine/__init__.py"
    file.write_text(file.read_text().replace("    new_token_ids:", "    new_ids:", 1))
    done = subprocess.run(
        [sys.executable, SCRIPT, copied], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and done.stdout.splitlines() == [
        "v1/engine/__init__.py:EngineCoreOutput: + new_ids",
        "v1/engine/__init__.py:EngineCoreOutput: - new_token_ids",
    ]
