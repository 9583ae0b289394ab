"""Build the Cython extensions of ``dynamo._fast`` in one of three modes.

``DYNAMO_BUILD`` selects ``release`` (default), ``debug`` (bounds checks, assertions, no
optimisation) or ``sanitize`` (debug plus AddressSanitizer and UndefinedBehaviorSanitizer).
Each mode has its own build directory, because cythonize does not notice changed directives.
"""

from __future__ import annotations

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

MODES: dict[str, dict[str, list[str]]] = {
    "release": {"compile": ["-O3", "-DNDEBUG"], "link": []},
    "debug": {"compile": ["-O0", "-g", "-UNDEBUG"], "link": []},
    "sanitize": {
        "compile": [
            "-O1",
            "-g",
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

extensions = [
    Extension(
        f"dynamo._fast.{source.stem}",
        [str(source)],
        language="c++",
        extra_compile_args=["-std=c++17", "-fvisibility=hidden", *MODES[mode]["compile"]],
        extra_link_args=MODES[mode]["link"],
    )
    for source in sorted(Path("dynamo/_fast").glob("*.pyx"))
]

setup(
    ext_modules=cythonize(
        extensions,
        build_dir=f"build/{mode}",
        annotate=checked,
        compiler_directives={
            "language_level": 3,
            "binding": True,
            "boundscheck": checked,
            "wraparound": False,
            "initializedcheck": checked,
            "cdivision": True,
            "embedsignature": True,
        },
    ),
    options={"build": {"build_base": f"build/{mode}"}},
)
