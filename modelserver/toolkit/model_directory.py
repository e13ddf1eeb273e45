"""A new model directory: filled under a temporary name, and moved into place atomically."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modelserver.errors import AlreadyExistsError, InvalidArgumentError, ServerError
from modelserver.repository.layout import looks_like_model

# Where torch.export keeps the inputs that a program was traced with.
_EXAMPLES = "/data/sample_inputs/"


@contextmanager
def new_model_directory(target: Path, *, force: bool, source: Path | None = None) -> Iterator[Path]:
    """An empty directory of `target`'s name; when the block ends without an error it takes `target`'s place.

    Raises AlreadyExistsError when something is there and `force` is off; with it InvalidArgumentError for what is no
    model directory, or is, contains or lies within `source`: these are never removed.
    """
    target = target.absolute()
    check_target(target, force=force, source=source)
    # Hidden, so that a server that watches the repository does not take it for a model.
    staging = target.parent / f".{target.name}.{os.getpid()}.new"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        made = staging / target.name
        try:
            made.mkdir(parents=True)
        except OSError as error:
            raise ServerError(
                f"cannot write in '{target.parent}': {error.strerror}; name a place that you own"
            ) from None
        yield made
        _publish(made, target, staging / "old")
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_target(target: Path, *, force: bool, source: Path | None = None) -> None:
    """Raise the errors of `new_model_directory`."""
    if not target.name or target.name.startswith("."):
        raise InvalidArgumentError(f"'{target}' cannot be a model: the last part of the path is the model's name")
    if target.parent.exists() and not target.parent.is_dir():
        raise InvalidArgumentError(f"'{target.parent}' is not a directory; expected a model repository")
    if source is not None and _overlap(target, source):
        raise InvalidArgumentError(f"the new model '{target}' and its source '{source}' overlap: choose another name")
    if not os.path.lexists(target):
        return
    if not force:
        raise AlreadyExistsError(f"'{target}' is there already: choose another name, or replace it with --force")
    if target.is_symlink() or not target.is_dir():
        raise InvalidArgumentError(f"'{target}' is not a directory: --force replaces model directories only")
    if any(target.iterdir()) and not looks_like_model(target):
        raise InvalidArgumentError(
            f"'{target}' does not look like a model (no config.pbtxt, no version directory): --force replaces "
            "models only"
        )


def _overlap(target: Path, source: Path) -> bool:
    one, other = target.resolve(), source.resolve()
    return one == other or one in other.parents or (other.is_dir() and other in one.parents)


def _publish(made: Path, target: Path, old: Path) -> None:
    """Replace `target` by `made`; if that fails, the old directory is restored."""
    try:
        was_there = target.exists()
        if was_there:
            target.rename(old)
        try:
            made.rename(target)
        except OSError:
            if was_there:
                old.rename(target)
            raise
    except OSError as error:
        raise ServerError(f"cannot write '{target}': {error.strerror}") from None


def model_bytes(directory: Path) -> int:
    """Bytes of all its files, except the example inputs of torch.export programs, which only compilers need."""
    return sum(path.stat().st_size - _example_bytes(path) for path in directory.rglob("*") if path.is_file())


def _example_bytes(path: Path) -> int:
    if path.suffix != ".pt2" or not zipfile.is_zipfile(path):
        return 0
    with zipfile.ZipFile(path) as archive:
        return sum(entry.compress_size for entry in archive.infolist() if _EXAMPLES in entry.filename)
