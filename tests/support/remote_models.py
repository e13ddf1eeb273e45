"""Models of the backend `remote`."""

from __future__ import annotations

from pathlib import Path

from support.model_files import write_model


def write_remote(repository: Path, name: str, endpoints: str = "", *, more: str = "", **parameters: object) -> Path:
    """A remote model; `more` is further text of its config.pbtxt."""
    written = {"endpoints": endpoints, **parameters}
    lines = [
        f'parameters {{ key: "{key}" value {{ string_value: "{_escaped(str(value))}" }} }}'
        for key, value in written.items()
        if value not in ("", None)
    ]
    return write_model(repository, name, "\n".join(['backend: "remote"', more, *lines]))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
