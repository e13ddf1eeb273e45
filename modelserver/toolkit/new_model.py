"""A model's directory from a file or a directory of any kind: its files, and a config that is complete."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from modelserver.backend.discovery import BUNDLED
from modelserver.backend.model_files import backend_for_model_file, backend_for_model_files, checkpoint_of
from modelserver.config.pbtxt import config_text
from modelserver.config.schema import ModelConfig
from modelserver.errors import InvalidArgumentError, NotFoundError, ServerError
from modelserver.repository.layout import CONFIG_FILENAME, looks_like_model
from modelserver.repository.options import DefinitionOptions
from modelserver.store.draft import companions
from modelserver.toolkit.loaded_model import define
from modelserver.toolkit.model_directory import new_model_directory
from modelserver.toolkit.source import SourceKind, file_kind, link_or_copy
from modelserver.toolkit.tensor_spec import ModuleOptions


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
            from modelserver.toolkit.torchscript import describe_torchscript  # takes torch

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
