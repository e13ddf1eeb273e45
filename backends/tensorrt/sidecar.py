"""The JSON file beside a plan that describes it, for machines without a GPU, and to verify its bytes."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelserver.backend import InvalidArgumentError

from .engine_info import EngineInfo, from_json, to_json
from .plan import PlanHeader

# A description is short. Whatever is longer is none.
_LONGEST_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Sidecar:
    """`sha256` is the plan's; `built` says how it came to be, for people and for tools."""

    info: EngineInfo
    sha256: str
    built: Mapping[str, Any] = field(default_factory=dict)


def sidecar_path(plan: Path) -> Path:
    return plan.with_name(f"{plan.name}.json")


def read_sidecar(plan: Path) -> Sidecar | None:
    """None where there is none. Raises InvalidArgumentError for a file that is no description of an engine."""
    path = sidecar_path(plan)
    try:
        if path.stat().st_size > _LONGEST_BYTES:
            raise InvalidArgumentError(f"{path}: expected at most {_LONGEST_BYTES} bytes, got {path.stat().st_size}")
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{path}: expected the JSON description of an engine: {error}; delete it") from error
    info = from_json(document, path)
    sha256, built = document.get("sha256"), document.get("built", {})
    if not isinstance(sha256, str) or not isinstance(built, dict):
        raise InvalidArgumentError(f"{path}: expected sha256 and built, got {sha256!r} and {built!r}; delete it")
    return Sidecar(info, sha256, built)


def write_sidecar(plan: Path, info: EngineInfo, sha256: str, built: Mapping[str, Any]) -> Path:
    """Write it whole or not at all; gives back its path."""
    path = sidecar_path(plan)
    text = json.dumps({**to_json(info), "sha256": sha256, "built": dict(built)}, indent=1) + "\n"
    replace_file(path, text.encode())
    return path


def replace_file(path: Path, content: bytes) -> None:
    """`path` with this content, for everybody at once, and on the disk."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def built_facts(header: PlanHeader, facts: Mapping[str, Any]) -> dict[str, Any]:
    """How the plan was built, from its sidecar."""
    return {
        "flavour": header.flavour.value,
        "version": header.version_text,
        "architectures": list(header.architectures),
        **facts,
    }
