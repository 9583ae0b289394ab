"""Which source an installation has: its commit, and the date of its newest file.

A checkout answers from ``.git``, without git. A wheel and an sdist have ``revision.txt``, which
setup.py writes into them; a copy of the files alone has a date only.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

_COMMIT = re.compile(r"[0-9a-f]{40,64}\Z")
_SHOWN = 12  # digits, as in `git log --abbrev=12`
_SOURCES = (".py", ".pyx", ".pxd", ".hpp", ".json", ".js", ".css", ".html")


def revision(package: Path | None = None) -> str:
    """Return commit and date of the ``package``, this one by default."""
    package = package or Path(__file__).parent
    try:
        return (package / "revision.txt").read_text("utf-8").strip()
    except (OSError, ValueError):
        pass
    commit = _commit(package.parent / ".git")
    return f"{f'commit {commit[:_SHOWN]}, ' if commit else ''}files of {_date(package)}"


def _commit(git: Path) -> str:
    """Return the commit that is checked out, or "" if ``git`` belongs to no checkout."""
    try:
        if git.is_file():  # a linked worktree, or a submodule
            git = git.parent / git.read_text("utf-8").removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text("utf-8").strip()
        if not head.startswith("ref:"):
            return head if _COMMIT.match(head) else ""
        name = head.removeprefix("ref:").strip()
        folders = [git]
        if (git / "commondir").exists():
            folders.append(git / (git / "commondir").read_text("utf-8").strip())
        return next(filter(None, (_reference(folder, name) for folder in folders)), "")
    except (OSError, ValueError):
        return ""


def _reference(folder: Path, name: str) -> str:
    """Return the commit of the branch ``name``, from its file or the packed ones."""
    try:
        commit = (folder / name).read_text("utf-8").strip()
        return commit if _COMMIT.match(commit) else ""
    except OSError:
        pass
    try:
        lines = (folder / "packed-refs").read_text("utf-8").splitlines()
    except OSError:
        return ""
    return next(
        (line.split()[0] for line in lines if line.endswith(f" {name}") and line[0] not in "#^"), ""
    )


def _date(package: Path) -> str:
    """Return the day, in UTC, on which a source of ``package`` was last written."""
    newest = 0.0
    for folder, _, names in os.walk(package):
        for name in names:
            if name.endswith(_SOURCES):
                newest = max(newest, os.lstat(f"{folder}/{name}").st_mtime)
    return time.strftime("%Y-%m-%d", time.gmtime(newest))
