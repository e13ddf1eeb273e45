"""What `modelserver inspect` says of a GGUF file: how its tensors are stored, and whether it can be served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modelserver.backend import ServerError

from .gguf import GgufCheckpoint
from .gguf_file import GgufFile, TensorPlace


def describe_gguf(path: Path) -> dict[str, Any]:
    """A JSON document. Raises ServerError for a file whose header is broken; one that cannot be served has a note."""
    file = GgufFile(path)
    architecture = file.text("general.architecture")
    document: dict[str, Any] = {
        "kind": "GGUF model",
        "bytes": path.stat().st_size,
        "name": file.text("general.name"),
        "architecture": architecture,
        "parameters": sum(_num_values(place) for place in file.tensors.values()),
        "context_length": file.integer(f"{architecture}.context_length"),
        "tokenizer": _tokenizer(file),
        "has_chat_template": "tokenizer.chat_template" in file,
        "types": _types(file),
        "tensors": [
            {"name": name, "type": place.kind.name, "shape": list(place.shape), "bytes": place.num_bytes}
            for name, place in file.tensors.items()
        ],
    }
    try:
        checkpoint = GgufCheckpoint(path)
        checkpoint.names()
        document["model_type"] = checkpoint.config["model_type"]
    except ServerError as error:
        document["note"] = f"it cannot be served: {error.message}"
    return document


def _types(file: GgufFile) -> list[dict[str, Any]]:
    """By the bytes that they take, most first."""
    found: dict[str, dict[str, Any]] = {}
    for place in file.tensors.values():
        entry = found.setdefault(place.kind.name, {"type": place.kind.name, "tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += place.num_bytes
    return sorted(found.values(), key=lambda entry: -entry["bytes"])


def _tokenizer(file: GgufFile) -> str | None:
    kind, split = file.text("tokenizer.ggml.model"), file.text("tokenizer.ggml.pre")
    return f"{kind} ({split})" if kind and split else kind


def _num_values(place: TensorPlace) -> int:
    return place.num_rows * place.shape[-1]
