"""``dynamo version``: installed versions, for a bug report."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata

from dynamo import __version__
from dynamo.config import load

_PARTS = ("uvloop", "httptools", "pyzmq", "circus", "tokenizers", "fastokens")


def main(argv: Sequence[str] | None = None) -> int:
    """Print versions; return 0."""
    load("dynamo version", "Print versions.", [], argv)
    print(f"dynamo-appliance {__version__}")
    print(f"python {platform.python_version()} on {platform.platform()}")
    for name in _PARTS:
        try:
            print(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(f"{name} is missing")
    return 0
