"""Print the licences of the installed packages that requirements.lock names, as a page."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

LOCK = Path(__file__).resolve().parents[1] / "requirements.lock"
_PINNED = re.compile(r"^([A-Za-z0-9_.-]+)==([^ ;\\]+)", re.MULTILINE)


def main() -> None:
    """Print a row for each package, by name."""
    print("# Licences of the dependencies\n")
    print(
        "Of the versions in `requirements.lock`, by their own metadata. `scripts/lock` makes this"
    )
    print(
        "page. Nothing of them is copied into this repository. The web page has copies of two npm"
    )
    print(
        "packages, unchanged, with [their licences]"
        "(../dynamo/frontend/ui/static/vendor/LICENSES.txt).\n"
    )
    print("| package | version | licence |\n|---|---|---|")
    rows = {}
    for name, version in _PINNED.findall(LOCK.read_text()):
        try:
            found = metadata(name)
        except PackageNotFoundError:
            continue  # of another Python
        if found["Version"] == version:
            rows[name] = (version, _licence(found))
    for name, (version, licence) in sorted(rows.items()):
        print(f"| {name} | {version} | {licence} |")


def _licence(found: object) -> str:
    """The expression, else the classifiers, else the first line of the text."""
    fields = found.json  # type: ignore[attr-defined]
    if expression := fields.get("license_expression"):
        return str(expression)
    given = [
        one.rpartition(" :: ")[2] for one in fields.get("classifier", []) if one.startswith("Lic")
    ]
    return ", ".join(given) or str(fields.get("license", "see its files")).splitlines()[0]


if __name__ == "__main__":
    main()
