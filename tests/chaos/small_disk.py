"""A small file system for the state of a deployment, which can be filled: a tmpfs, for root."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

__all__ = ["SmallDisk"]

SIZE = "48m"
_CHUNK = b"\0" * 65536


class SmallDisk:
    """A tmpfs at ``path``; where mounting is forbidden, ``path`` stays as it is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(mode=0o700)
        options = f"size={SIZE},mode=700"
        command = ["mount", "-t", "tmpfs", "-o", options, "chaos", str(path)]
        self.mounted = (
            os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
        )

    @property
    def filler(self) -> Path:
        """The file that takes the space; its name marks a temporary file of a writer."""
        return self.path / ".filler"

    def fill(self) -> None:
        """Leave no byte free."""
        with self.filler.open("ab", buffering=0) as file:
            for chunk in (_CHUNK, b"\0"):
                try:
                    while file.write(chunk):
                        pass
                except OSError:
                    continue

    def free(self) -> None:
        """Give the space back. Idempotent."""
        self.filler.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount it."""
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.path)], check=True)
            self.mounted = False
