"""Packages as `pip install` leaves them behind, made from the examples of a page of the documentation."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@contextmanager
def installed_from(page: str, site: Path) -> Iterator[str]:
    """The package of a page's first example under the name in its entry point, for as long as the context lasts."""
    text = (DOCS / page).read_text()
    source = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    entry_point = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)[0]
    found = re.search(r'entry-points\."(.+?)"\]\n(\S+) = "(\w+):(\w+)"', entry_point)
    assert found is not None, "the page has an entry point"
    group, name, package, attribute = found.groups()
    (site / f"{package}.py").parent.mkdir(parents=True, exist_ok=True)
    (site / f"{package}.py").write_text(source)
    info = site / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {package}:{attribute}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        try:
            yield package
        finally:
            sys.modules.pop(package, None)
