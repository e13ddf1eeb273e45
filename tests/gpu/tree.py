"""The packages of this tree for a Python in which they are not installed, and that has no network to install them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

try:
    import tomllib
except ModuleNotFoundError:
    raise SystemExit(
        f"modelserver needs Python 3.11 or later, and {sys.executable} is {sys.version.split()[0]}"
    ) from None

ROOT = Path(__file__).parents[2]


@contextmanager
def installed_from_tree() -> Iterator[None]:
    """Processes that are started meanwhile import the packages from the tree, with their entry points."""
    with TemporaryDirectory(prefix="modelserver-tree-") as directory:
        write_installation(Path(directory))
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (directory, str(ROOT), str(ROOT / "tests"), before)))
        try:
            yield
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before


def write_installation(directory: Path) -> None:
    """What an installation would add to a directory of packages: names of packages, and the entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (directory / "modelserver").symlink_to(ROOT / "modelserver")
    (directory / "modelserver_backends").symlink_to(ROOT / "backends")
    metadata = directory / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    lines = [
        line
        for group, points in groups.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), "")
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
