"""What the README and the pages of docs/ point at is there: links, anchors, paths, and functions named in a file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
)
PAGE_IDS = [str(page.relative_to(ROOT)) for page in PAGES]

_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_FUNCTION = re.compile(r"([\w./-]+\.py): (\w[\w.]*)")
# A path of this repository in prose: it begins with a directory that git knows at the top.
_TOP = "|".join(re.escape(path.name) for path in sorted(ROOT.iterdir()) if path.is_dir() and path.name[0] != ".")
_PATH = re.compile(rf"(?:\.ci|{_TOP})/[\w./-]*")


def prose(page: Path) -> str:
    return _FENCED.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@cache
def names_in(path: Path) -> frozenset[str]:
    """Functions and classes of a file, methods as `Class.method` too."""
    return frozenset(_names(ast.parse(path.read_text()), ""))


def _names(node: ast.AST, prefix: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + child.name
            yield from _names(child, f"{prefix}{child.name}.")


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in _LINK.findall(prose(page)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_paths_exist(page: Path) -> None:
    spans = [span.partition(": ")[0] for span in _CODE.findall(prose(page))]
    paths = [span for span in spans if _PATH.fullmatch(span)]
    assert not [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_functions_exist_in_their_files(page: Path) -> None:
    named = [match.groups() for span in _CODE.findall(prose(page)) if (match := _FUNCTION.fullmatch(span))]
    assert named or page.name != "architecture.md", "the pattern finds nothing"
    missing = [f"{file}: {name}" for file, name in named if name not in names_in(ROOT / file)]
    assert not missing


def test_every_room_is_in_the_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    entries = [path for path in (ROOT / "modelserver").iterdir() if path.suffix == ".py" or path.is_dir()]
    rooms = [path.name + "/" if path.is_dir() else path.stem for path in entries if path.name != "__pycache__"]
    missing = [room for room in rooms if room != "__init__" and f"`{room}" not in text]
    assert not missing
