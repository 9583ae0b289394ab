"""The version distinguishes checkouts, with and without git."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo.revision import revision

DAY_S = 86400


def checkout(folder: Path) -> Path:
    """Return the package of a repository with one commit."""
    package = folder / "dynamo"
    package.mkdir(parents=True)
    (package / "module.py").write_text("")
    os.utime(package / "module.py", (DAY_S, DAY_S))
    git(folder, "init", "-q")
    commit(folder)
    return package


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit(folder: Path) -> None:
    git(folder, "commit", "-q", "--allow-empty", "-m", "a change")


def shown(folder: Path) -> str:
    return f"commit {git(folder, 'rev-parse', 'HEAD')[:12]}, files of 1970-01-02"


def test_each_commit_of_a_checkout_is_told_apart(tmp_path: Path) -> None:
    package = checkout(tmp_path)
    first = revision(package)
    assert first == shown(tmp_path)
    commit(tmp_path)
    assert first != revision(package) == shown(tmp_path)


@pytest.mark.parametrize("words", [["pack-refs", "--all"], ["checkout", "-q", "--detach"]])
def test_a_packed_branch_and_a_detached_head(tmp_path: Path, words: list[str]) -> None:
    package = checkout(tmp_path)
    git(tmp_path, "tag", "-a", "-m", "a tag", "v1")
    git(tmp_path, *words)
    assert revision(package) == shown(tmp_path)


def test_a_linked_worktree(tmp_path: Path) -> None:
    checkout(tmp_path / "main")
    linked = tmp_path / "linked"
    git(tmp_path / "main", "worktree", "add", "-q", str(linked))
    commit(linked)
    shutil.copytree(tmp_path / "main/dynamo", linked / "dynamo")
    assert revision(linked / "dynamo") == shown(linked) != shown(tmp_path / "main")


def test_a_copy_without_git_has_the_date_of_its_newest_file(tmp_path: Path) -> None:
    package = tmp_path / "dynamo"
    (package / "part").mkdir(parents=True)
    for name, day in (("old.py", 1), ("part/new.py", 2), ("part/log.txt", 3)):
        (package / name).write_text("")
        os.utime(package / name, (day * DAY_S, day * DAY_S))
    assert revision(package) == "files of 1970-01-03"


@pytest.mark.parametrize("head", ["", "ref: refs/heads/gone", "no commit", "\udcff"])
def test_a_broken_repository_is_none(tmp_path: Path, head: str) -> None:
    package = checkout(tmp_path)
    (tmp_path / ".git/HEAD").write_bytes(head.encode("utf-8", "surrogateescape"))
    assert revision(package) == "files of 1970-01-02"


def test_programs_show_it() -> None:
    command = [sys.executable, "-m", "dynamo.frontend", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith(f" ({revision()})\n")
