"""A model of a Python program: what it serves, and its config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from modelserver.backend import InvalidArgumentError, ModelConfig
from modelserver.config.message import config_from_json
from modelserver.config.pbtxt import config_text
from modelserver.config.signature import OPEN_SIGNATURE
from modelserver.embed.backend import Served, recipe_of

PLACES = ("thread", "loop", "process")


@dataclass(frozen=True, slots=True)
class Added:
    """A model that was added. `recipe` says where another process finds what it serves."""

    served: Served
    config: ModelConfig
    recipe: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        name: str,
        target: Any,
        *,
        max_batch_size: int = 0,
        max_delay_ms: float = 0.0,
        instances: int = 1,
        place: str = "thread",
        inputs: Mapping[str, Any] | None = None,
        outputs: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Self:
        """As `Server.add`, which explains the arguments. `target` may also be a `Served`."""
        if isinstance(target, Served):
            served = target
        else:
            served = Served.of(target, inputs=inputs, outputs=outputs)
            if max_batch_size:
                _check_batches(name, served)
        recipe = recipe_of(served.target, inputs=inputs, outputs=outputs) if place == "process" else {}
        written = _config(name, served, max_batch_size, max_delay_ms, instances, place)
        return cls(
            served, config_from_json(json.dumps(_merged(written, config or {})), source=f"model '{name}'"), recipe
        )


@dataclass(frozen=True, slots=True)
class FileModel:
    """A model's file or directory that is served under a name of the program's."""

    path: Path
    config: ModelConfig

    def write(self, directory: Path) -> None:
        """The model's directory, which refers to the file. What is there stays."""
        if directory.exists():
            return
        version = directory / "1"
        if self.path.is_dir():
            directory.mkdir(parents=True)
            version.symlink_to(self.path)
        else:
            version.mkdir(parents=True)
            (version / self.path.name).symlink_to(self.path)
        (directory / "config.pbtxt").write_text(config_text(self.config))


def _check_batches(name: str, served: Served) -> None:
    """Raise InvalidArgumentError for a function that cannot have its requests in batches."""
    signature = served.signature
    if signature.is_stream or signature.is_async or signature.request_name:
        raise InvalidArgumentError(
            f"model '{name}': max_batch_size is for functions that are called with whole batches; generators, "
            "coroutines and functions that take the request are called once for each"
        )
    single = [value.name for value in (*signature.inputs, *signature.outputs) if not value.is_array]
    if single:
        raise InvalidArgumentError(
            f"model '{name}': with max_batch_size '{single[0]}' must be a Tensor, whose first dimension is the batch, "
            "for example Tensor['BYTES', 1] for texts"
        )


def _config(
    name: str, served: Served, max_batch_size: int, max_delay_ms: float, instances: int, place: str
) -> dict[str, Any]:
    """The model's config in its JSON form."""
    device, _, number = place.partition(":")
    if place not in PLACES and (device != "cuda" or not number.isdecimal()):
        raise InvalidArgumentError(f"model '{name}': place '{place}' is none of {', '.join(PLACES)}, cuda:0, cuda:1, …")
    group = {"count": instances, "kind": "KIND_CPU"}
    if device == "cuda":
        group |= {"kind": "KIND_GPU", "gpus": [int(number)]}
    parameters = {}
    if place == "process":
        parameters["instance_in_process"] = {"string_value": "true"}
    parameters["inline_execution"] = {"string_value": "always" if place == "loop" else "never"}
    signature = served.signature
    if signature.is_open:
        parameters[OPEN_SIGNATURE] = {"string_value": "true"}
    document: dict[str, Any] = {
        "name": name,
        "backend": "function",
        "version_policy": {"all": {}},
        "max_batch_size": max_batch_size,
        "instance_group": [group],
        "parameters": parameters,
    }
    for kind, values in (("input", signature.inputs), ("output", signature.outputs)):
        document[kind] = [
            {"name": value.name, "data_type": value.datatype.config_name, "dims": list(value.dims)}
            | ({"optional": True} if value.is_optional else {})
            for value in values
        ]
    if max_batch_size:
        document["dynamic_batching"] = {"max_queue_delay_microseconds": round(1000 * max_delay_ms)}
    if signature.is_stream:
        document["model_transaction_policy"] = {"decoupled": True}
    return document


def _merged(document: dict[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings are merged, everything else is replaced."""
    merged = dict(document)
    for name, value in further.items():
        known = merged.get(name)
        merged[name] = {**known, **value} if isinstance(known, dict) and isinstance(value, Mapping) else value
    return merged
