"""Writes a new version into every file that names it: `python .ci/version.py 0.3.0`. It is kept in pyproject.toml."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = ROOT / "pyproject.toml"
# Where else it stands: tags and labels of images, the chart, and examples.
_PLACES = ("docker", "docs/operations.md")
_NAMED = re.compile(
    r"(modelserver:|kubernetes\.io/version: |^appVersion: |^version: |ARG VERSION=|newTag: )(\d+\.\d+\.\d+)",
    re.MULTILINE,
)


def current() -> str:
    return str(tomllib.loads(PYPROJECT.read_text())["project"]["version"])


def files() -> dict[Path, set[str]]:
    """The files besides pyproject.toml that name a version of ours, and what they name."""
    places = [ROOT / place for place in _PLACES]
    found = (path for place in places for path in (place, *place.rglob("*")) if path.is_file())
    paths = [path for path in found if path.suffix != ".pyc"]
    names = {path: {named for _, named in _NAMED.findall(path.read_text())} for path in paths}
    return {path: versions for path, versions in names.items() if versions}


def main() -> int:
    old, new = current(), sys.argv[1]
    PYPROJECT.write_text(PYPROJECT.read_text().replace(f'version = "{old}"', f'version = "{new}"', 1))
    for path in files():
        path.write_text(_NAMED.sub(rf"\g<1>{new}", path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
