"""`modelserver quantize` and `convert` of a language model: its weights in another form, compared on a text."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from modelserver.backend.discovery import find_backend
from modelserver.errors import InvalidArgumentError
from modelserver.repository.layout import CONFIG_FILENAME, looks_like_model, scan_model
from modelserver.toolkit.conversion import Progress
from modelserver.toolkit.loaded_model import define
from modelserver.toolkit.model_directory import check_target, new_model_directory

_CHECKPOINT = "config.json"
_GGUF = "*.gguf"
_BACKEND = "llm"


@dataclass(frozen=True, slots=True)
class LanguageModelOutcome:
    """`figures` are by name; those of the text are missing without one."""

    output: Path
    figures: Mapping[str, float]
    notes: tuple[str, ...]


def is_language_model(source: str, version: int | None = None) -> bool:
    """Whether a path is a checkpoint in the layout of Hugging Face or in GGUF, or the directory of a model of one."""
    return _checkpoint(Path(source), version) is not None


def quantize_language_model(
    source: str,
    output: Path,
    method: str,
    progress: Progress,
    *,
    text: Path | None = None,
    calibration: Path | None = None,
    version: int | None = None,
    force: bool = False,
) -> LanguageModelOutcome:
    """Write the model in `method` into a new model directory. Raises ServerError; then nothing is written."""
    backend = find_backend(_BACKEND)
    sample = None if calibration is None else _read(calibration)

    def write(checkpoint: Path, target: Path) -> _Written:
        progress(f"quantizing ({method})")
        return backend.quantize_version(checkpoint, target, method, sample)

    return _new_model(source, output, write, progress, text=text, version=version, force=force)


def convert_language_model(
    source: str,
    output: Path,
    form: str,
    progress: Progress,
    *,
    text: Path | None = None,
    version: int | None = None,
    force: bool = False,
) -> LanguageModelOutcome:
    """The same in `form`, "gguf" or "safetensors", with weights in floats."""
    backend = find_backend(_BACKEND)

    def write(checkpoint: Path, target: Path) -> _Written:
        progress(f"converting to {form}")
        return backend.convert_version(checkpoint, target, form)

    return _new_model(source, output, write, progress, text=text, version=version, force=force)


_Written = tuple[Mapping[str, float], list[str]]


def _new_model(
    source: str,
    output: Path,
    write: Callable[[Path, Path], _Written],
    progress: Progress,
    *,
    text: Path | None,
    version: int | None,
    force: bool,
) -> LanguageModelOutcome:
    directory = Path(source)
    checkpoint = _checkpoint(directory, version)
    if checkpoint is None:
        raise InvalidArgumentError(f"'{source}' holds no checkpoint: there is no {_CHECKPOINT} and no {_GGUF}")
    origin = directory if directory.is_dir() else None
    check_target(output, force=force, source=origin)
    content = None if text is None else _read(text)
    with new_model_directory(output, force=force, source=origin) as made:
        (made / "1").mkdir()
        figures, notes = write(checkpoint, made / "1")
        config = directory / CONFIG_FILENAME
        if config.is_file():
            shutil.copy2(config, made / CONFIG_FILENAME)
        define(made)
        if content is not None:
            progress("comparing")
            compared = find_backend(_BACKEND).compare_versions(checkpoint, made / "1", content)
            figures = {**figures, **compared}
    return LanguageModelOutcome(output, figures, tuple(notes))


def _checkpoint(path: Path, version: int | None) -> Path | None:
    if path.is_file():
        return path if path.match(_GGUF) else None
    if not path.is_dir() or _holds_checkpoint(path):
        return path if path.is_dir() else None
    if not looks_like_model(path):
        return None
    versions = scan_model(path, path.resolve().name).versions
    if not versions:
        return None
    found = versions.get(max(versions) if version is None else version)
    return found if found is not None and _holds_checkpoint(found) else None


def _holds_checkpoint(directory: Path) -> bool:
    return (directory / _CHECKPOINT).is_file() or any(directory.glob(_GGUF))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"'{path}' cannot be read as text: {error}") from None
