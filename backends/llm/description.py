"""What `modelserver inspect` says of a checkpoint: how its layers are stored, and whether it can be served.

Only the headers of its files are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelserver.backend import ServerError

from .checkpoint import Checkpoint, GgufCheckpoint, HfCheckpoint
from .checkpoint.gguf_file import GgufFile
from .checkpoint.safetensors_header import read_headers

# Fields of a quantization config that are shown, where it has them.
_QUANTIZATION_FIELDS = ("bits", "w_bit", "group_size", "q_group_size", "format", "quant_algo", "weight_block_size")


@dataclass(frozen=True, slots=True)
class _Described:
    """A tensor as its file describes it."""

    name: str
    kind: str
    shape: tuple[int, ...]
    num_bytes: int

    @property
    def layer(self) -> str:
        """What the tensor is a part of; `NAME.weight.absmax` is one of what `NAME.weight` is."""
        outer, is_inner, _ = self.name.partition(".weight.")
        return outer if is_inner else self.name.rpartition(".")[0] or self.name


def describe_gguf(path: Path) -> dict[str, Any]:
    """A JSON document. Raises ServerError for a file whose header is broken; one that cannot be served has a note."""
    file, checkpoint = GgufFile(path), GgufCheckpoint(path)
    try:
        files, note = checkpoint.files, None
    except ServerError as error:
        files, note = [file], error.message
    architecture = file.text("general.architecture")
    tensors = [
        _Described(name, place.kind.name, place.shape, place.num_bytes)
        for each in files
        for name, place in each.tensors.items()
    ]
    document: dict[str, Any] = {
        "kind": "GGUF model",
        "bytes": sum(each.path.stat().st_size for each in files),
        "files": [each.path.name for each in files] if len(files) > 1 else [],
        "name": file.text("general.name"),
        "architecture": architecture,
        "parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "context_length": file.integer(f"{architecture}.context_length"),
        "tokenizer": _tokenizer(file),
        "has_chat_template": "tokenizer.chat_template" in file,
        **_stored(tensors, ""),
    }
    if note is None:
        try:
            checkpoint.names()
            document["model_type"] = checkpoint.config["model_type"]
            _check(checkpoint)
        except ServerError as error:
            note = error.message
    if note is not None:
        document["note"] = f"it cannot be served: {note}"
    return document


def describe_directory(directory: Path) -> dict[str, Any]:
    """The same of a directory in the layout of Hugging Face."""
    checkpoint = HfCheckpoint(directory)
    config = checkpoint.config
    tensors = [
        _Described(name, tensor.dtype, tensor.shape, tensor.num_bytes)
        for name, (_, tensor) in read_headers(directory).items()
    ]
    found = config.get("quantization_config")
    quantization: Mapping[str, Any] = found if isinstance(found, dict) else {}
    method = str(quantization.get("quant_method", "unnamed")) if quantization else ""
    document: dict[str, Any] = {
        "kind": "checkpoint",
        "bytes": checkpoint.num_bytes,
        "model_type": config["model_type"],
        "context_length": config.get("max_position_embeddings"),
        "quantization": {"method": method, **{key: quantization.get(key) for key in _QUANTIZATION_FIELDS}},
        **_stored(tensors, method),
    }
    try:
        document["has_chat_template"] = bool(checkpoint.chat_templates)
        document["tokenizer"] = checkpoint.tokenizer.path.name
        _check(checkpoint)
    except ServerError as error:
        document["note"] = f"it cannot be served: {error.message}"
    return document


def _check(checkpoint: Checkpoint) -> None:
    """ServerError for a layer that a load would refuse. Without torch, layers are not looked at."""
    try:
        from .models.load import check_checkpoint
    except ModuleNotFoundError:
        return
    with checkpoint:
        check_checkpoint(checkpoint)


def _stored(tensors: Sequence[_Described], method: str) -> dict[str, Any]:
    """How much is stored in which types, and in which forms each layer, each kind of layer and each tensor is."""
    parts: dict[str, list[_Described]] = {}
    for tensor in tensors:
        parts.setdefault(tensor.layer, []).append(tensor)
    layers: list[dict[str, Any]] = [
        {"name": name, "form": _form(name, found, method), "bytes": sum(tensor.num_bytes for tensor in found)}
        for name, found in parts.items()
    ]
    types: dict[str, dict[str, Any]] = {}
    for tensor in tensors:
        entry = types.setdefault(tensor.kind, {"type": tensor.kind, "tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += tensor.num_bytes
    kinds: dict[tuple[str, str], dict[str, Any]] = {}
    for layer in layers:
        kind, form = _kind(layer["name"]), layer["form"]
        entry = kinds.setdefault((kind, form), {"kind": kind, "form": form, "layers": 0, "bytes": 0})
        entry["layers"] += 1
        entry["bytes"] += layer["bytes"]
    return {
        "types": sorted(types.values(), key=lambda entry: -entry["bytes"]),
        "kinds": sorted(kinds.values(), key=lambda entry: -entry["bytes"]),
        "layers": layers,
        "tensors": [
            {"name": tensor.name, "type": tensor.kind, "shape": list(tensor.shape), "bytes": tensor.num_bytes}
            for tensor in tensors
        ],
    }


def _form(name: str, tensors: Sequence[_Described], method: str) -> str:
    """The types of its tensors but for biases, those of most bytes first; behind the method, if it is quantized."""
    values = [tensor for tensor in tensors if tensor.name != f"{name}.bias"] or tensors
    types = dict.fromkeys(tensor.kind for tensor in sorted(values, key=lambda tensor: -tensor.num_bytes))
    is_quantized = method and any(tensor.name != f"{name}.weight" for tensor in values)
    return f"{method}: {', '.join(types)}" if is_quantized else ", ".join(types)


def _kind(layer: str) -> str:
    """What it has in common with the same layer elsewhere: the last part of its name that is not a number."""
    return next((part for part in reversed(layer.split(".")) if not part.isdecimal()), layer)


def _tokenizer(file: GgufFile) -> str | None:
    kind, split = file.text("tokenizer.ggml.model"), file.text("tokenizer.ggml.pre")
    return f"{kind} ({split})" if kind and split else kind
