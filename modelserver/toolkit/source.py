"""Sources of conversions: a model directory, a lone model file, or a PyTorch module in Python code."""

from __future__ import annotations

import enum
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from modelserver.config.pbtxt import config_text, parse_pbtxt
from modelserver.config.schema import ModelConfig
from modelserver.errors import InvalidArgumentError, NotFoundError, UnsupportedError
from modelserver.repository.layout import CONFIG_FILENAME, looks_like_model, scan_model
from modelserver.toolkit.loaded_model import define
from modelserver.toolkit.onnx_file import external_files
from modelserver.toolkit.tensor_spec import ModuleOptions

_PICKLE = b"\x80"
_MODEL_FILES = ("model.onnx", "model.pt2", "model.pt")


class SourceKind(enum.Enum):
    """The kind of a model file, by its content."""

    ONNX = "ONNX model"
    EXPORTED = "torch.export program"
    TORCHSCRIPT = "TorchScript archive"


@dataclass(frozen=True, slots=True)
class Source:
    """A model to convert. `directory` serves it as it is, and may be a temporary one; `config` is what was written
    for it, empty for a lone file; `files` are what lies beside its versions, such as labels.
    """

    kind: SourceKind
    path: Path
    directory: Path
    version: int
    config: ModelConfig
    origin: Path
    files: tuple[Path, ...] = ()


def open_source(text: str, workspace: Path, options: ModuleOptions, *, version: int | None = None) -> Source:
    """The source that `text` names: a model's directory, a .onnx, .pt2 or .pt file, or `FILE.py:NAME`.

    Lone files and modules become a model directory in `workspace`. Raises NotFoundError and InvalidArgumentError
    that say what was expected, and UnsupportedError for a pickle.
    """
    path = Path(text)
    if options.weights is not None and path.exists():
        raise InvalidArgumentError(f"--weights are those of a module: FILE.py:CLASS, and '{text}' has its own")
    if path.is_dir():
        return _from_directory(path, version)
    if path.is_file():
        return _from_file(path, workspace, options)
    code, colon, _ = text.rpartition(":")
    if colon and (code.endswith(".py") or code.replace(".", "").replace("_", "").isalnum()):
        return _from_module(text, workspace, options)
    raise NotFoundError(
        f"there is no model at '{text}'; expected a model's directory, a .onnx, .pt2 or .pt file, or code: FILE.py:NAME"
    )


def _from_directory(directory: Path, version: int | None) -> Source:
    if not looks_like_model(directory):
        raise InvalidArgumentError(
            f"'{directory}' is not a model directory: it has neither {CONFIG_FILENAME} nor versions"
        )
    layout = scan_model(directory, directory.resolve().name)
    if not layout.versions:
        raise NotFoundError(f"model '{layout.name}' has no version directory in '{directory}'")
    chosen = max(layout.versions) if version is None else version
    if chosen not in layout.versions:
        there = ", ".join(map(str, layout.versions))
        raise NotFoundError(f"model '{layout.name}' has no version {chosen}; there are: {there}")
    config = ModelConfig()
    if layout.config_file is not None:
        config = parse_pbtxt(layout.config_file.read_text(), str(layout.config_file)).config
    path = _model_file(layout.versions[chosen], config)
    skip = {CONFIG_FILENAME, *map(str, layout.versions)}
    files = tuple(entry for entry in sorted(directory.iterdir()) if entry.name not in skip and entry.name[0] != ".")
    return Source(file_kind(path), path, directory.resolve(), chosen, config, directory, files)


def _model_file(directory: Path, config: ModelConfig) -> Path:
    """The file that is served. Raises InvalidArgumentError for models of other kinds."""
    names = (config.default_model_filename,) if config.default_model_filename else _MODEL_FILES
    for name in names:
        path = directory / name
        if path.is_dir() and path.name.endswith(".onnx"):
            inner = sorted(path.glob("*.onnx"))
            if len(inner) == 1 or (path / name).is_file():
                return inner[0] if len(inner) == 1 else path / name
        if path.is_file():
            return path
    raise InvalidArgumentError(
        f"'{directory}' holds none of {', '.join(names)}: only ONNX and PyTorch models are converted"
    )


def file_kind(path: Path) -> SourceKind:
    """By content, not by name. Raises InvalidArgumentError for other files, UnsupportedError for pickles."""
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            start = file.read(4)
        if start[:1] == _PICKLE:
            raise UnsupportedError(_pickle_text(path))
        if start[:2] == b"PK":
            raise InvalidArgumentError(f"'{path}' is a truncated archive: copy it again")
        if not start:
            raise InvalidArgumentError(f"'{path}' is empty: expected an ONNX or PyTorch model")
        return SourceKind.ONNX  # whose reader reports the problem otherwise
    with zipfile.ZipFile(path) as archive:
        inner = {name.partition("/")[2] for name in archive.namelist()} | set(archive.namelist())
    if "serialized_exported_program.json" in inner or any(name.startswith("models/") for name in inner):
        return SourceKind.EXPORTED
    if any(name.startswith("data/aotinductor/") for name in inner):
        raise UnsupportedError(
            f"'{path}' is an AOTInductor package, compiled for one machine: convert its source model"
        )
    if "constants.pkl" in inner:
        return SourceKind.TORCHSCRIPT
    if "data.pkl" in inner:
        raise UnsupportedError(_pickle_text(path))
    raise InvalidArgumentError(f"'{path}' is a zip archive, but neither TorchScript nor torch.export wrote it")


def _pickle_text(path: Path) -> str:
    return (
        f"'{path}' is a pickle (torch.save), which can run any code when it is loaded, and holds no model without the "
        "code of its class: name the code that builds the model (FILE.py:CLASS), and the file by --weights"
    )


def _from_file(path: Path, workspace: Path, options: ModuleOptions) -> Source:
    if path.suffix == ".py":
        raise InvalidArgumentError(f"'{path}' is Python code: say which module or function of it, such as {path}:build")
    kind = file_kind(path)
    name = path.stem if path.stem != "model" else path.resolve().parent.name
    directory = workspace / (name.lstrip(".") or "model")
    filename = {SourceKind.ONNX: "model.onnx", SourceKind.EXPORTED: "model.pt2"}.get(kind, "model.pt")
    made = directory / "1" / filename
    made.parent.mkdir(parents=True)
    link_or_copy(path, made)
    if kind is SourceKind.ONNX:
        for file in external_files(path):
            link_or_copy(path.parent / file, made.parent / file)
    if kind is SourceKind.TORCHSCRIPT:
        # Here, because only these need torch.
        from modelserver.toolkit.torch_module import describe_torchscript

        _write_config(directory, describe_torchscript(path, options))
    return Source(kind, made, directory, 1, ModelConfig(), path)


def _from_module(text: str, workspace: Path, options: ModuleOptions) -> Source:
    # Here, because only these need torch.
    from modelserver.toolkit.torch_module import export_module, load_module, load_weights, save_program

    module = load_module(text)
    if options.weights is not None:
        load_weights(module, options.weights)
    program = export_module(module, options, text)
    name = text.rpartition(":")[2].lower()
    directory = workspace / name
    path = directory / "1" / "model.pt2"
    path.parent.mkdir(parents=True)
    save_program(program, path)
    config = define(directory).config
    if not options.max_batch_size and config.max_batch_size:
        # The file cannot express that its first dimension is not a batch.
        config = _without_batch(config)
        _write_config(directory, config)
        return Source(SourceKind.EXPORTED, path, directory, 1, config, Path(text))
    return Source(SourceKind.EXPORTED, path, directory, 1, ModelConfig(), Path(text))


def _without_batch(config: ModelConfig) -> ModelConfig:
    return ModelConfig(
        backend=config.backend,
        input=tuple(replace(spec, dims=(-1, *spec.dims)) for spec in config.input),
        output=tuple(replace(spec, dims=(-1, *spec.dims)) for spec in config.output),
    )


def _write_config(directory: Path, config: ModelConfig) -> None:
    (directory / CONFIG_FILENAME).write_text(config_text(config))


def link_or_copy(source: Path, target: Path) -> None:
    """One file in a second place: without a copy where the file system can. Raises InvalidArgumentError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    ways: tuple[Callable[[Path, Path], object], ...] = (os.link, shutil.copyfile)
    for way in ways:
        try:
            way(source.resolve(), target)
            return
        except OSError as error:
            reason = error.strerror
    raise InvalidArgumentError(f"cannot read '{source}': {reason}")
