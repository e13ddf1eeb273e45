"""Directories of Python models, written for one test."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path


def write_model(root: Path, source: str, config: str = "", files: Mapping[str, str] | None = None) -> Path:
    """The directory of a model `m`, version 1: config.pbtxt, model.py and `files` by their relative path."""
    directory = root / "m"
    contents = {"config.pbtxt": f'backend: "python"\n{config}', "1/model.py": source, **(files or {})}
    for name, text in contents.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return directory
