"""`modelserver quantize` of a language model: weights rounded to the nearest, compared on a text."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from modelserver.backend.discovery import find_backend
from modelserver.errors import InvalidArgumentError
from modelserver.repository.layout import CONFIG_FILENAME, looks_like_model, scan_model
from modelserver.toolkit.conversion import Progress
from modelserver.toolkit.loaded_model import define
from modelserver.toolkit.model_directory import check_target, new_model_directory

_CHECKPOINT = "config.json"
_BACKEND = "llm"


@dataclass(frozen=True, slots=True)
class LanguageModelOutcome:
    """`figures` are by name; those of the text are missing without one."""

    output: Path
    figures: Mapping[str, float]
    notes: tuple[str, ...]


def is_language_model(source: str, version: int | None = None) -> bool:
    """Whether a path is a checkpoint in the layout of Hugging Face, or the directory of a model that is one."""
    path = Path(source)
    return path.is_dir() and _checkpoint(path, version) is not None


def quantize_language_model(
    source: str,
    output: Path,
    method: str,
    progress: Progress,
    *,
    text: Path | None = None,
    version: int | None = None,
    force: bool = False,
) -> LanguageModelOutcome:
    """Write the model in `method` into a new model directory. Raises ServerError; then nothing is written."""
    directory = Path(source)
    checkpoint = _checkpoint(directory, version)
    if checkpoint is None:
        raise InvalidArgumentError(f"'{source}' holds no checkpoint: there is no {_CHECKPOINT}")
    check_target(output, force=force, source=directory)
    backend = find_backend(_BACKEND)
    content = None if text is None else _read(text)
    with new_model_directory(output, force=force, source=directory) as made:
        progress(f"quantizing ({method})")
        (made / "1").mkdir()
        figures, notes = backend.quantize_version(checkpoint, made / "1", method)
        config = directory / CONFIG_FILENAME
        if config.is_file():
            shutil.copy2(config, made / CONFIG_FILENAME)
        define(made)
        if content is not None:
            progress("comparing")
            figures = {**figures, **backend.compare_versions(checkpoint, made / "1", content)}
    return LanguageModelOutcome(output, figures, tuple(notes))


def _checkpoint(directory: Path, version: int | None) -> Path | None:
    if (directory / _CHECKPOINT).is_file():
        return directory
    if not looks_like_model(directory):
        return None
    versions = scan_model(directory, directory.resolve().name).versions
    if not versions:
        return None
    found = versions.get(max(versions) if version is None else version)
    return found if found is not None and (found / _CHECKPOINT).is_file() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"'{path}' cannot be read as text: {error}") from None
