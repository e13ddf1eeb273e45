"""The site of the documentation: what `make docs` builds can be found, is complete, and shows measured figures."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import modelserver_backends.llm
import pytest
import yaml

import modelserver.api
import modelserver.backend
import modelserver.backend.child
import modelserver.backend.process
from docs.check_site import problems
from docs.plots import IMAGES, PERFORMANCE, PLOTS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# Pages that the site makes of files at the repository's root.
MADE = {"changelog.md": "CHANGELOG.md", "threat-model.md": "SECURITY.md"}


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without calling what it names."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def _pages(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    for inner in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from _pages(inner)


def test_the_navigation_has_every_page_once() -> None:
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)  # a SafeLoader
    listed = list(_pages(config["nav"]))
    assert sorted(listed) == sorted([*(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")), *MADE])
    assert all((ROOT / source).exists() for source in MADE.values())


@pytest.mark.parametrize("name", PLOTS)
def test_the_plots_show_the_tables(name: str) -> None:
    drawn = (IMAGES / f"{name}.svg").read_text()
    assert drawn == PLOTS[name](PERFORMANCE.read_text()), "run: python docs/plots.py"


def _referred(page: str) -> list[str]:
    return re.findall(r"^::: ([\w.]+)$", (DOCS / "reference" / page).read_text(), re.MULTILINE)


def test_the_reference_has_all_that_a_backend_author_imports() -> None:
    contract = (modelserver.backend, modelserver.backend.process, modelserver.backend.child)
    public = [f"{module.__name__}.{name}" for module in contract for name in module.__all__]
    assert sorted(_referred("backend.md")) == sorted(public)


def test_the_reference_names_what_the_author_of_an_api_imports() -> None:
    listed = [name.removeprefix("modelserver.api.") for name in _referred("api.md")]
    assert "ApiContext" in listed
    assert set(listed) <= set(modelserver.api.__all__)


def test_the_reference_has_all_of_the_language_models_library() -> None:
    listed = [name.removeprefix("backends.llm.") for name in _referred("llm.md")]
    assert sorted([*listed, "BACKEND"]) == sorted(modelserver_backends.llm.__all__)


def test_the_reference_of_tools_names_what_exists() -> None:
    names = _referred("tools.md")
    assert "modelserver.bench.session.run_bench" in names
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


PAGE = '<html><head>{head}</head><body><h1 id="top">A</h1><a href="{link}">b</a></body></html>'


@pytest.mark.parametrize(
    ("head", "link", "complaint"),
    [
        ("", "other.html#top", None),
        ("", "https://example.org/", None),
        ("", "missing.html", "missing.html, which does not exist"),
        ("", "other.html#nowhere", "no such anchor"),
        ("", "#nowhere", "no such anchor"),
        ('<script src="https://example.org/x.js"></script>', "#top", "from another host"),
        ('<link rel="stylesheet" href="missing.css">', "#top", "missing.css, which does not exist"),
    ],
)
def test_what_is_wrong_with_a_built_site_is_found(tmp_path: Path, head: str, link: str, complaint: str | None) -> None:
    (tmp_path / "index.html").write_text(PAGE.format(head=head, link=link))
    (tmp_path / "other.html").write_text(PAGE.format(head="", link="index.html"))
    found = list(problems(tmp_path))
    assert len(found) == (complaint is not None)
    assert not found or complaint in found[0]


def test_a_site_without_pages_is_wrong(tmp_path: Path) -> None:
    assert list(problems(tmp_path))
