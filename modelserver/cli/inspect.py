"""`modelserver inspect`: describes a model file, without a server and without a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from modelserver.backend import BackendContext
from modelserver.backend.discovery import find_backend
from modelserver.cli.output import AsJson, print_json, print_line, print_table
from modelserver.config.schema import ModelConfig
from modelserver.errors import InvalidArgumentError, NotFoundError, ServerError

_ENGINES = "modelserver_backends.tensorrt.commands"
_ENGINE_MAGICS = (b"ftrt", b"vtrt")
_CHECKPOINTS, _GGUF_MAGIC = "modelserver_backends.llm.description", b"GGUF"
# Facts that are printed one per line, if a file has them.
_FACTS = (
    "built_with",
    "architectures",
    "opset",
    "producer",
    "external_files",
    "files",
    "max_batch_size",
    "name",
    "architecture",
    "model_type",
    "quantization",
    "parameters",
    "context_length",
    "tokenizer",
    "has_chat_template",
)
_TORCH_SUFFIXES = (".pt", ".pt2", ".pth")


def inspect(
    file: Annotated[
        Path,
        typer.Argument(help="A TensorRT engine (.plan), .onnx, .pt2, .pt or .gguf, or a directory with config.json."),
    ],
    as_json: AsJson = False,
) -> None:
    """Describe a model file: its kind, its inputs and outputs, and how it was built."""
    document = describe(file)
    if as_json:
        print_json(document)
    else:
        _print(file, document)


def describe(file: Path) -> dict[str, Any]:
    """The description as JSON. Raises ServerError for a missing file or an unknown kind of file."""
    if (file / "config.json").is_file():
        return {"file": str(file), **importlib.import_module(_CHECKPOINTS).describe_directory(file)}
    try:
        with file.open("rb") as opened:
            magic = opened.read(4)
    except IsADirectoryError:
        raise InvalidArgumentError(
            f"{file} is a directory: name a file in it, or look at a repository with 'modelserver check'"
        ) from None
    except OSError as error:
        raise NotFoundError(f"{file}: {error.strerror}") from None
    found: dict[str, Any]
    if magic in _ENGINE_MAGICS or file.suffix in (".plan", ".engine"):
        found = importlib.import_module(_ENGINES).describe_plan(file)
    elif file.suffix == ".onnx":
        found = importlib.import_module(_ENGINES).describe_onnx(file)
    elif magic == _GGUF_MAGIC or file.suffix == ".gguf":
        found = importlib.import_module(_CHECKPOINTS).describe_gguf(file)
    elif file.suffix in _TORCH_SUFFIXES:
        found = _describe_torch(file)
    else:
        raise InvalidArgumentError(
            f"{file}: expected a file .plan, .onnx, .gguf, {', '.join(_TORCH_SUFFIXES)}, or an engine"
        )
    return {"file": str(file), **found}


def _describe_torch(file: Path) -> dict[str, Any]:
    """The config that the file's backend would complete, or the reason why it cannot."""
    config = ModelConfig(name=file.stem, backend="pytorch", default_model_filename=file.name)
    context = BackendContext(file.stem, 1, config, file.parent, file.parent)
    document: dict[str, Any] = {"kind": "PyTorch model", "bytes": file.stat().st_size}
    try:
        completed = find_backend("pytorch").complete_config(context)
    except ServerError as error:
        return {**document, "note": error.message}
    lead = ["batch"] if completed.max_batch_size else []
    for kind, specs in (("inputs", completed.input), ("outputs", completed.output)):
        document[kind] = [
            {
                "name": spec.name,
                "datatype": spec.data_type.value if spec.data_type is not None else None,
                "shape": [*lead, *spec.dims],
            }
            for spec in specs
        ]
    return {**document, "max_batch_size": completed.max_batch_size}


def _print(file: Path, document: dict[str, Any]) -> None:
    print_line(f"{file}: {document['kind']}, {document['bytes']} bytes")
    for key in _FACTS:
        value = document.get(key)
        if value:
            print_line(f"{key.replace('_', ' ')}: {_shown(value)}")
    for kind in ("inputs", "outputs"):
        if document.get(kind):
            print_line("")
            rows = [
                (
                    tensor["name"],
                    tensor["datatype"] or "?",
                    "?" if tensor["shape"] is None else "[" + ", ".join(map(str, tensor["shape"])) + "]",
                )
                for tensor in document[kind]
            ]
            print_table((kind[:-1], "datatype", "shape"), rows)
    if types := document.get("types"):
        print_line("")
        print_table(
            ("type", "tensors", "bytes"), [(each["type"], str(each["tensors"]), str(each["bytes"])) for each in types]
        )
    if kinds := document.get("kinds"):
        print_line("")
        shown = [(each["kind"], each["form"], str(each["layers"]), str(each["bytes"])) for each in kinds]
        print_table(("layer", "form", "layers", "bytes"), shown)
    for number, text in enumerate(document.get("profiles", [])):
        print_line(f"profile {number}: {text}")
    for key, value in document.get("built", {}).items():
        if key in ("flavour", "version", "architectures"):
            continue  # as the header says above
        print_line(f"built {key.replace('_', ' ')}: {_shown(value)}")
    if "note" in document:
        print_line("")
        print_line(f"note: {document['note']}")


def _shown(value: Any) -> str:
    """Text for people: the options that are set, by name."""
    if isinstance(value, dict):
        parts = ((name, part) for name, part in value.items() if part is not False and part not in ("", [], None))
        return ", ".join(f"{name.replace('_', ' ')} {_shown(part)}" for name, part in parts)
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
