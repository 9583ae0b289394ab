"""``dynamo profile``: what is refused before a worker is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_lab.cli.profile import main

GRAPH = Path(__file__).resolve().parents[3] / "examples/planner.yaml"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "no graph file given"),
        (["nowhere.yaml"], "cannot read nowhere.yaml"),
        ([str(GRAPH), "--output", "/proc/profile"], "--output /proc/profile: cannot write there"),
        ([str(GRAPH), "--output", "/dev/null"], "--output /dev/null: cannot write there"),
        ([str(GRAPH), "--service", "Frontend"], "no such worker"),
    ],
)
def test_a_wrong_flag_is_named(
    words: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--no-plots"]) == 2
    assert text in capsys.readouterr().err
