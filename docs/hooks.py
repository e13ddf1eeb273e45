"""What the site needs beyond Markdown: see mkdocs.yml.

Pages are written to be read in the repository too, so that some of their links leave docs/. Here SECURITY.md and
CHANGELOG.md become pages of the site, and links to source files become the paths of those files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# Files of the repository's root, and the pages that they are here.
_ROOT_PAGES = {"CHANGELOG.md": "changelog.md", "SECURITY.md": "threat-model.md", "README.md": "index.md"}
_LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)\s]+)\)")
_MARKER = re.compile(r"^(<!-- (?:begin|end): \w+ -->)$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in _ROOT_PAGES.items():
        if page not in files.src_uris:
            files.append(File.generated(config, page, content=_of_root((ROOT / source).read_text())))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Markers stand on lines of their own, so that tables between them are tables; links stay within the site."""
    depth = "../" * page.file.src_uri.count("/")
    return _MARKER.sub(r"\n\1\n", _LINK.sub(lambda match: _within(match, depth), markdown))


def _of_root(text: str) -> str:
    """A page of the repository's root with the links that it has in docs/."""

    def moved(match: re.Match[str]) -> str:
        target = match[3]
        if "://" in target or target.startswith("#"):
            return match[0]
        there = target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"
        return f"{match[1]}[{match[2]}]({there})"

    return _LINK.sub(moved, text)


def _within(match: re.Match[str], depth: str) -> str:
    mark, text, target = match.groups()
    outside = f"../{depth}"
    if not target.startswith(outside) or mark:
        return match[0]
    name, _, anchor = target.removeprefix(outside).partition("#")
    page = _ROOT_PAGES.get(name)
    if page is None:
        return f"{text} (`{name}`)" if text.strip("`") != name else f"`{name}`"
    return f"[{text}]({depth}{page}{'#' if anchor else ''}{anchor})"
