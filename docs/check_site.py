"""Checks a built site: `python docs/check_site.py site`. `make docs` runs it.

Every link, picture, script and style leads to a file of the site, every anchor exists, and nothing but links that a
reader clicks leads to another host.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser loads by itself, by tag.
_LOADED = {"img": "src", "script": "src", "link": "href", "source": "src", "iframe": "src"}
# A page of the theme that only a web server shows: its links are from the root of the site.
_NOT_FOUND = "404.html"


class Page(HTMLParser):
    """The anchors and references of one HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif _LOADED.get(tag) in values and values.get("rel") != "canonical":
            self.loaded.append(values[_LOADED[tag]])


def problems(site: Path) -> Iterator[str]:
    """What is wrong with the site, one sentence each."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html")) if path.name != _NOT_FOUND}
    if not pages:
        yield f"{site} has no pages"
    for path, page in pages.items():
        here = path.relative_to(site)
        for target in page.loaded:
            if urlsplit(target).netloc:
                yield f"{here} loads {target} from another host"
        for target in (*page.loaded, *page.links):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not there.exists():
                yield f"{here} points at {target}, which does not exist"
            elif parts.fragment and there in pages and unquote(parts.fragment) not in pages[there].anchors:
                yield f"{here} points at {target}, and there is no such anchor"


def main() -> int:
    found = list(problems(Path(sys.argv[1]).resolve()))
    sys.stderr.writelines(f"{each}\n" for each in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
