"""The interface of a model: inputs, outputs, batching, sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelserver.client.control import ControlClient, Document
from modelserver.config.signature import TensorSpec
from modelserver.core.datatype import Datatype
from modelserver.core.spelling import suggest
from modelserver.errors import InvalidArgumentError, ServerError


@dataclass(frozen=True, slots=True)
class Interface:
    """`max_batch_size` is 0 for a model without batching; `composing` names the steps of an ensemble."""

    name: str
    version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int = 0
    is_decoupled: bool = False
    is_sequence: bool = False
    has_cache: bool = False
    composing: tuple[tuple[str, str], ...] = ()

    def check_batch(self, batch_size: int) -> None:
        """Raises InvalidArgumentError for a batch that the model does not take."""
        if batch_size > 1 and not self.max_batch_size:
            raise InvalidArgumentError(f"model '{self.name}' does not batch (max_batch_size 0); use -b 1")
        if batch_size > max(self.max_batch_size, 1):
            raise InvalidArgumentError(
                f"-b {batch_size} is above the max_batch_size {self.max_batch_size} of model '{self.name}'"
            )

    def input(self, name: str) -> TensorSpec:
        """Raises InvalidArgumentError with a suggestion."""
        for spec in self.inputs:
            if spec.name == name:
                return spec
        names = [spec.name for spec in self.inputs]
        nearest = suggest(name, names)
        hint = f"; did you mean '{nearest}'?" if nearest else ""
        raise InvalidArgumentError(f"model '{self.name}' has no input '{name}'{hint} (it has {', '.join(names)})")


def read_interface(control: ControlClient, model: str, version: str) -> Interface:
    """Ask for metadata and config. A server without configs is taken at its metadata. Raises ServerError."""
    metadata = control.model_metadata(model, version)
    try:
        config = control.model_config(model, version)
    except ServerError:
        config = _guess_config(metadata)
    return make_interface(model, version, metadata, config)


def _guess_config(metadata: Document) -> Document:
    """Guess the batching if the server does not report it: every tensor's first dimension is variable."""
    tensors = [*metadata.get("inputs", []), *metadata.get("outputs", [])]
    has_batch = bool(tensors) and all(tensor.get("shape") and int(tensor["shape"][0]) == -1 for tensor in tensors)
    return {"max_batch_size": 2**31 if has_batch else 0}


def make_interface(model: str, version: str, metadata: Document, config: Mapping[str, Any]) -> Interface:
    """The interface that these documents describe."""
    max_batch_size = int(config.get("max_batch_size", 0))
    optional = {entry["name"] for entry in config.get("input", []) if entry.get("optional")}
    versions = sorted((str(number) for number in metadata.get("versions", [])), key=_version_key)
    return Interface(
        name=model,
        version=version or (versions[-1] if versions else ""),
        inputs=tuple(_spec(entry, max_batch_size, optional) for entry in metadata.get("inputs", [])),
        outputs=tuple(_spec(entry, max_batch_size, set()) for entry in metadata.get("outputs", [])),
        max_batch_size=max_batch_size,
        is_decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
        is_sequence="sequence_batching" in config,
        has_cache=bool(config.get("response_cache", {}).get("enable", False)),
        composing=tuple(
            (step["model_name"], "" if int(step.get("model_version", -1)) < 0 else str(step["model_version"]))
            for step in config.get("ensemble_scheduling", {}).get("step", [])
        ),
    )


def _version_key(text: str) -> tuple[int, str]:
    return (int(text), "") if text.isdigit() else (-1, text)


def _spec(entry: Document, max_batch_size: int, optional: set[str]) -> TensorSpec:
    shape = tuple(int(size) for size in entry.get("shape", ()))
    if max_batch_size:
        shape = shape[1:]
    return TensorSpec(entry["name"], Datatype(entry["datatype"]), shape, is_optional=entry["name"] in optional)
