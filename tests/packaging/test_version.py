"""The version is kept in pyproject.toml; whatever else names it follows, and users can read what it brings."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = runpy.run_path(str(ROOT / ".ci" / "version.py"))
VERSION = SCRIPT["current"]()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
# Lines of a screen, roughly.
SCREEN = 60


def sections() -> dict[str, list[str]]:
    """Version -> the lines of its section of the changelog."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[1:]:
        title, *lines = part.splitlines()
        found[title.partition(" - ")[0].strip()] = lines
    return found


def test_every_file_that_names_the_version_names_the_same() -> None:
    named = SCRIPT["files"]()
    assert {path.name for path in named} >= {"Dockerfile", "Chart.yaml", "operations.md", "compose.yaml"}
    others = {str(path.relative_to(ROOT)): versions for path, versions in named.items() if versions != {VERSION}}
    assert not others, f"run: python .ci/version.py {VERSION}"


def test_the_version_has_release_notes_and_a_section_of_the_changelog() -> None:
    assert VERSION in sections()
    notes = ROOT / "docs" / "releases" / f"{VERSION}.md"
    assert notes.read_text().startswith(f"# Release {VERSION}\n")


@pytest.mark.parametrize("version", sections())
def test_a_version_takes_a_screen_of_the_changelog(version: str) -> None:
    assert len(sections()[version]) <= SCREEN, "condense it; what users need stands in docs/releases/"


def test_releases_are_newest_first() -> None:
    released = [tuple(map(int, version.split("."))) for version in sections() if version != "Unreleased"]
    assert released == sorted(released, reverse=True)
