"""Backends on their own: a context, and an instance made from it, without a server around."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelserver.backend import Backend, BackendContext, Datatype, Instance, ModelConfig, Placement
from modelserver.backend.discovery import find_backend
from modelserver.config.pbtxt import parse_pbtxt
from modelserver.config.schema import ModelInput, ModelOutput
from modelserver.core.request import InFlightRequest
from modelserver.core.tensor import Tensor


def context_of(
    model_directory: Path,
    *,
    version: int = 1,
    config: ModelConfig | None = None,
    options: Mapping[str, str] | None = None,
) -> BackendContext:
    """The context of a model directory; its config.pbtxt is read unless `config` is given."""
    if config is None:
        path = model_directory / "config.pbtxt"
        config = parse_pbtxt(path.read_text(), str(path)).config if path.exists() else ModelConfig()
    return BackendContext(
        model_name=model_directory.name,
        version=version,
        config=config,
        model_directory=model_directory,
        version_directory=model_directory / str(version),
        options=options or {},
    )


def loaded(backend_class: type[Backend], context: BackendContext) -> Backend:
    """A backend after completion and load, as the server would have it."""
    backend_class.check_written(context)
    backend = backend_class(replace(context, config=backend_class.complete_config(context)))
    backend.load()
    return backend


def instance_of(backend_name: str, context: BackendContext) -> Any:
    """The first instance of a model."""
    instance = loaded(find_backend(backend_name), context).create_instance(Placement(f"{context.model_name}_0"))
    assert isinstance(instance, Instance)
    return instance


def tensors(kind: type[ModelInput] | type[ModelOutput], **described: tuple[Datatype, tuple[int, ...]]) -> Any:
    """Config inputs or outputs from `name=(datatype, dims)`."""
    return tuple(kind(name=name, data_type=datatype, dims=dims) for name, (datatype, dims) in described.items())


def request_of(**arrays: Any) -> InFlightRequest:
    """A request whose datatypes are those of its arrays."""
    inputs = {name: Tensor(name, Datatype.from_numpy(array.dtype), array) for name, array in arrays.items()}
    return InFlightRequest(model_name="model", version=None, inputs=inputs)
