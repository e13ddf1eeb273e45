"""A new model directory, from a file or a directory of any kind: filled under a temporary name, and moved into place
atomically."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from modelserver.backend.discovery import BUNDLED
from modelserver.backend.model_files import backend_for_model_file, backend_for_model_files, checkpoint_of
from modelserver.config.pbtxt import config_text
from modelserver.config.schema import ModelConfig
from modelserver.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError, ServerError
from modelserver.repository.layout import CONFIG_FILENAME, looks_like_model
from modelserver.repository.options import DefinitionOptions
from modelserver.store.draft import companions
from modelserver.toolkit.loaded_model import define
from modelserver.toolkit.source import SourceKind, file_kind, link_or_copy
from modelserver.toolkit.tensor_spec import ModuleOptions

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


def create_model(
    source: Path, target: Path, module: ModuleOptions, *, allow_pickle: bool = False, force: bool = False
) -> ModelConfig:
    """Write the model's directory `target`, and return its config.

    `module` describes a TorchScript file, which does not do so itself. Raises NotFoundError if there is nothing at
    `source`, and ServerError for what cannot be served: nothing is written then.
    """
    if not source.exists():
        raise NotFoundError(f"there is no file and no directory '{source}'")
    source = checkpoint_of(source) or source if source.is_file() else source
    with new_model_directory(target, force=force, source=source) as made:
        if source.is_dir() and looks_like_model(source):
            shutil.copytree(source, made, dirs_exist_ok=True)
        else:
            for title, path in _files_of(source).items():
                link_or_copy(path, made / "1" / title)
        if source.is_file() and source.suffix in (".pt", ".ts") and file_kind(source) is SourceKind.TORCHSCRIPT:
            from modelserver.toolkit.torch_module import describe_torchscript  # takes torch

            (made / CONFIG_FILENAME).write_text(config_text(describe_torchscript(source, module)))
        settings = {"": {"allow-pickle": "true"}} if allow_pickle else {}
        try:
            config = define(made, options=DefinitionOptions(backend_config=settings)).config
        except ServerError as error:
            error.message = error.message.replace(str(made), str(target))
            raise
        if not (made / CONFIG_FILENAME).exists():
            groups = tuple(replace(group, name="") for group in config.instance_group)
            # Without the name, so that the directory may be renamed.
            (made / CONFIG_FILENAME).write_text(config_text(replace(config, name="", instance_group=groups)))
    return config


def _files_of(source: Path) -> Mapping[str, Path]:
    """The files of a version by the names under which a backend finds them. Raises InvalidArgumentError."""
    if source.is_file():
        kind = source.suffix.lower()
        names = BUNDLED[backend_for_model_file(source)].filenames
        name = next((each for each in names if Path(each).suffix == kind and "*" not in each), "")
        return companions(source, name or f"model{kind}")
    if backend_for_model_files(source) is None:
        held = ", ".join(sorted(path.name for path in source.iterdir())[:5]) or "nothing"
        raise InvalidArgumentError(
            f"'{source}' is no model that a backend recognises (it holds {held}); name the file of the model in it"
        )
    files = (path for path in sorted(source.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(source)): path
        for path in files
        if not any(part.startswith(".") for part in path.relative_to(source).parts)
    }
