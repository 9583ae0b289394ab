"""Build the Cython extensions of ``dynamo._fast`` in one of three modes.

``DYNAMO_BUILD`` selects ``release`` (default), ``debug`` (bounds checks, assertions, no
optimisation) or ``sanitize`` (debug plus AddressSanitizer and UndefinedBehaviorSanitizer).
Each mode has its own build directory, because cythonize does not notice changed directives.
A Cython performance hint fails the build: it means a hot loop takes the GIL or boxes a value.
``DYNAMO_PROGRESS`` names a file that gets a line for each step: pip shows no output of a build.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import runpy
import sys
from contextlib import redirect_stderr, suppress
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

MODES: dict[str, dict[str, list[str]]] = {
    "release": {"compile": ["-O3", "-g0", "-DNDEBUG"], "link": []},
    "debug": {"compile": ["-O0", "-g", "-UNDEBUG"], "link": []},
    "sanitize": {
        "compile": [
            "-O1",
            "-g1",  # lines of stack traces
            "-UNDEBUG",
            "-fno-omit-frame-pointer",
            "-fsanitize=address,undefined",
            "-fno-sanitize-recover=undefined",
        ],
        "link": ["-fsanitize=address,undefined"],
    },
}

mode = os.environ.get("DYNAMO_BUILD", "release")
if mode not in MODES:
    raise SystemExit(f"DYNAMO_BUILD must be one of {', '.join(MODES)}, got {mode!r}")
checked = mode != "release"

headers = sorted(map(str, Path("dynamo/_fast").glob("*.hpp")))
extensions = [
    Extension(
        f"dynamo._fast.{source.stem}",
        [str(source)],
        language="c++",
        depends=headers,
        extra_compile_args=["-std=c++17", "-fvisibility=hidden", *MODES[mode]["compile"]],
        extra_link_args=MODES[mode]["link"],
    )
    for source in sorted(Path("dynamo/_fast").glob("*.pyx"))
]


def show(step: str) -> None:
    """Write a line to the file ``DYNAMO_PROGRESS``, if it is set and can be written."""
    with suppress(KeyError, OSError), Path(os.environ["DYNAMO_PROGRESS"]).open("a") as progress:
        progress.write(f"scripts: {step}\n")


class ShownBuild(build_ext):
    """Shows which extension is compiled."""

    _numbers = itertools.count(1)

    def build_extension(self, ext: Extension) -> None:
        """Compile one extension, beside others in other threads."""
        show(f"compiling {ext.name} ({next(self._numbers)} of {len(self.extensions)})")
        super().build_extension(ext)


def stamp(package: Path) -> None:
    """Write into a built ``package`` which source it has, or keep what the sdist has."""
    package.mkdir(parents=True, exist_ok=True)
    revision = runpy.run_path("dynamo/revision.py")["revision"](Path("dynamo").resolve())
    # Not through a hard link, which an sdist may be of the source.
    (package / "revision.txt").unlink(missing_ok=True)
    (package / "revision.txt").write_text(f"{revision}\n")


class StampedPackage(build_py):
    """Writes ``revision.txt`` into a wheel; an editable installation reads the checkout."""

    def run(self) -> None:
        """Copy the modules."""
        super().run()
        if not self.editable_mode:
            stamp(Path(self.build_lib, "dynamo"))


class StampedSource(sdist):
    """Writes ``revision.txt`` into an sdist."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Copy the files."""
        super().make_release_tree(base_dir, files)
        stamp(Path(base_dir, "dynamo"))


def compile_strictly() -> list[Extension]:
    """Cythonize; fail on performance hints, and forget the output so that the next build does."""
    show(f"translating {len(extensions)} extensions to C++")
    log = io.StringIO()
    with redirect_stderr(log):
        modules = cythonize(
            extensions,
            build_dir=f"build/{mode}",
            annotate=mode == "debug",
            compiler_directives={
                "language_level": 3,
                "binding": True,
                "boundscheck": checked,
                "wraparound": False,
                "initializedcheck": checked,
                "cdivision": True,
                "embedsignature": True,
                "auto_pickle": False,
                "autotestdict": False,
            },
        )
    sys.stderr.write(log.getvalue())
    hinted = set(re.findall(r"performance hint: (\S+?)\.pyx:", log.getvalue()))
    for module in hinted:
        Path(f"build/{mode}", f"{module}.cpp").unlink(missing_ok=True)
    if hinted:
        raise SystemExit(f"performance hints in {', '.join(sorted(hinted))} (see above)")
    return list(modules)


# A compiler takes up to 1 GB of memory.
jobs = min(4, os.cpu_count() or 1)

setup(
    ext_modules=compile_strictly(),
    cmdclass={"build_ext": ShownBuild, "build_py": StampedPackage, "sdist": StampedSource},
    options={"build": {"build_base": f"build/{mode}"}, "build_ext": {"parallel": jobs}},
)
