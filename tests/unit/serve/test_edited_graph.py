"""Services that commands add to and remove from the text of a graph."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import ConfigError
from dynamo.runtime.process.paths import remove_unfinished
from dynamo.serve.graph.changes import GraphEdit, with_service, without_services

GRAPH = """\
# The box in the corner.
namespace: box

# What clients see
Frontend:
  run: dynamo.frontend   # ours
  http-port: 8000
# The small one
Worker: {run: dynamo.mocker,
  model: a}

Worker2:
  run: dynamo.mocker
  envs: &envs
    TEXT: |
      # no comment

      the end
# the last line
"""
KEYS = "run: dynamo.mocker\nmodel: c\nServiceArgs:\n  workers: 2\n"


def test_a_service_comes_after_the_last_one_and_goes_without_a_trace() -> None:
    added = with_service(GRAPH, "g", "Worker3", KEYS)
    assert added.endswith("the end\n\nWorker3:\n  run: dynamo.mocker\n  model: c\n"
                          "  ServiceArgs:\n    workers: 2\n# the last line\n")  # fmt: skip
    assert yaml.safe_load(added)["Worker3"] == yaml.safe_load(KEYS)
    assert without_services(added, "g", ["Worker3"]) == GRAPH.replace("# the last", "\n# the last")


def test_comments_and_order_survive_a_removal() -> None:
    assert without_services(GRAPH, "g", ["Worker", "Worker2"]) == (
        GRAPH[: GRAPH.index("Worker:")] + "\n# the last line\n"
    )
    left = without_services(GRAPH, "g", ["Frontend"])
    assert "# What clients see\n# The small one\nWorker: {" in left


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{Worker: {run: a}}", "between braces"),
        ("Worker: {run: a}\nWorker3: {run: b}", "there is a service Worker3 already"),
        ("Worker: &a {run: a}\nOther: *a\n--- {}", "but found another document"),
        ("- a", "expected a mapping"),
    ],
)
def test_a_text_that_cannot_be_changed_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        with_service(text, "g", "Worker3", KEYS)


def test_what_others_need_is_not_removed() -> None:
    with pytest.raises(ConfigError, match="undefined alias"):
        without_services("A: &a {run: a}\nB: *a\n", "g", ["A"])
    with pytest.raises(ConfigError, match="no service C, D"):
        without_services(GRAPH, "g", ["D", "C", "Worker"])


names = st.from_regex(r"W[a-z]{1,3}", fullmatch=True)  # not On, which is no text in YAML
texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Zl", "Zp"]), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
services = st.dictionaries(names, st.dictionaries(names, values, max_size=4), min_size=2)


@given(services, st.data(), st.booleans())
def test_the_other_services_stay_as_they_are(
    document: dict[str, object], data: st.DataObject, blank: bool
) -> None:
    parts = [yaml.safe_dump({k: v}, allow_unicode=True) for k, v in document.items()]
    text = ("\n# between\n" if blank else "").join(parts)
    name = data.draw(st.sampled_from(sorted(document)))
    left = without_services(text, "g", [name])
    assert yaml.safe_load(left) == {k: v for k, v in document.items() if k != name}
    keys = yaml.safe_dump(document[name], allow_unicode=True)
    assert yaml.safe_load(with_service(left, "g", name, keys)) == document


def test_the_file_keeps_its_mode_its_link_and_what_its_owner_changed(tmp_path: Path) -> None:
    file, link = tmp_path / "graph.yaml", tmp_path / "link.yaml"
    file.write_text(GRAPH.replace("8000", "8001"))
    file.chmod(0o640)
    link.symlink_to(file)
    edit = GraphEdit({"Worker": KEYS, "Worker2": KEYS, "New": KEYS}, ["Gone"])
    edit.choose_names(GRAPH, "Worker3: {}")
    assert edit.added == ["Worker4", "Worker22", "New"]
    edit.write(link)
    assert link.is_symlink() and stat.S_IMODE(file.stat().st_mode) == 0o640
    found = yaml.safe_load(file.read_text())
    assert found["Frontend"]["http-port"] == 8001 and found["Worker4"] == found["Worker22"]
    assert "Worker2" in found and [one.name for one in tmp_path.glob(".*")] == []


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    """And nothing else: not what a process writes now, not other files of the directory."""
    file = tmp_path / "graph.yaml"
    file.write_text(GRAPH)
    code = f"""import os
from pathlib import Path
from dynamo.serve.graph.changes import GraphEdit
Path.replace = lambda *_: os.kill(os.getpid(), 9)
GraphEdit({{"New": {KEYS!r}}}, ()).write(Path({str(file)!r}))"""
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed.returncode == -signal.SIGKILL and file.read_text() == GRAPH
    assert len([*tmp_path.glob(".graph.yaml.*")]) == 1
    kept = {f".graph.yaml.{os.getpid()}", ".graph.yaml.swp", ".other.yaml.999999999", "graph.yaml"}
    for name in kept - {"graph.yaml"}:
        (tmp_path / name).touch()
    remove_unfinished(file)
    assert {one.name for one in tmp_path.iterdir()} == kept


def test_a_file_that_became_wrong_is_not_touched(tmp_path: Path) -> None:
    file = tmp_path / "graph.yaml"
    file.write_text("Worker: [")
    with pytest.raises(ConfigError, match=r"graph\.yaml:1"):
        GraphEdit({"Worker": KEYS}, ()).write(file)
    assert file.read_text() == "Worker: ["


@pytest.mark.parametrize("word", ["--Worker2.model=x", "--Worker2.ServiceArgs.workers=2"])
def test_overrides_of_a_removed_service_go_with_it(word: str) -> None:
    assert GraphEdit({}, ["Worker2"]).is_of_removed(word)
    assert not GraphEdit({}, ["Worker"]).is_of_removed(word)


def test_the_file_keeps_its_line_ends_and_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    path.write_bytes(b"namespace: a\r\nA:\r\n  run: x\r\n")
    with contextlib.suppress(OSError):  # only root can, and not in a user namespace without others
        os.chown(path, 12345, 23456)
    before = path.stat()
    GraphEdit({"B": "run: y\nsay: z\n"}, ()).write(path)
    GraphEdit({}, ["A"]).write(path)
    lines = path.read_bytes().split(b"\n")
    assert b"B:\r" in lines and b"  say: z\r" in lines
    assert all(line.endswith(b"\r") for line in lines[:-1]), lines
    assert (path.stat().st_uid, path.stat().st_gid) == (before.st_uid, before.st_gid)
    assert path.stat().st_mode == before.st_mode
