"""Where peers live: each in an environment of its own under `.bench/`, made on first use."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_HOME = Path(os.environ.get("MODELSERVER_BENCH_HOME", ".bench")).resolve()


@dataclass(frozen=True, slots=True)
class Environment:
    """A peer's own folder, with a virtual environment in it."""

    home: Path

    @property
    def programs(self) -> Path:
        """Where the environment's programs are."""
        return self.home / "venv" / "bin"


def environment(name: str, *requirements: str) -> Environment:
    """The environment of that name, with `requirements` as pip knows them; installs them if that was not done."""
    found = Environment(_HOME / name)
    done = found.home / "ready"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", str(found.home / "venv")], check=True)
        subprocess.run([str(found.programs / "python"), "-m", "pip", "install", "-q", *requirements], check=True)
        done.touch()
    return found
