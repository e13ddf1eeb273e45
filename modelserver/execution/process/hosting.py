"""Any backend's instance in a child process: the recipe that the server makes, and the instance built from it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from modelserver.backend import (
    Answers,
    Backend,
    BackendContext,
    BatchInstance,
    DeviceKind,
    ModelConfig,
    Placement,
    StepInstance,
    TensorInstance,
    model_outputs,
)
from modelserver.backend.discovery import EXTERNAL_PREFIX, import_source
from modelserver.config.message import config_from_json, config_to_json
from modelserver.config.schema import ModelInput, ModelOutput
from modelserver.config.signature import ModelSignature
from modelserver.core.request import InferRequest, is_in_flight
from modelserver.execution.assemble import Assembler
from modelserver.execution.batch_tensors import BatchTensors
from modelserver.execution.process.calls_to_server import server_connection
from modelserver.execution.process.recipe import Recipe
from modelserver.execution.process.step_host import StepHost

ConfigTensor = TypeVar("ConfigTensor", ModelInput, ModelOutput)


def reference(backend_class: type[Backend]) -> str:
    """The name by which `find_class` finds the class in another process: "module:NAME", or "module:NAME:FILE".

    FILE is the package of a third party, which is imported by its path.
    """
    module = backend_class.__module__
    root = sys.modules[module.partition(".")[0]]
    name = f"{module}:{backend_class.__qualname__}"
    return f"{name}:{root.__file__}" if module.startswith(EXTERNAL_PREFIX) else name


def find_class(named: str) -> type[Backend]:
    """The class that `reference` named. Called in the child."""
    module, name, *source = named.split(":", 2)
    if source:
        own_name, _, _ = module.partition(".")[0].removeprefix(EXTERNAL_PREFIX).rpartition("_")
        import_source(own_name, Path(source[0]))
    found: type[Backend] = getattr(importlib.import_module(module), name)
    return found


def backend_recipe(backend: str, context: BackendContext, placement: Placement) -> Recipe:
    """The recipe for the instance that `backend` (see `reference`) makes for `placement`.

    The whole Backend lives in the child, so instances in several children share nothing.
    """
    arguments: dict[str, Any] = {
        "backend": backend,
        "model_name": context.model_name,
        "version": context.version,
        "config": json.dumps(config_to_json(context.config)),
        "model_directory": str(context.model_directory),
        "version_directory": str(context.version_directory),
        "options": dict(context.options),
        "is_uploaded": context.is_uploaded,
        "placement": [placement.name, placement.kind.value, placement.device_id, placement.index],
    }
    return Recipe(f"{__name__}:create_instance", arguments)


def context_of(described: Mapping[str, Any]) -> BackendContext:
    """The context that a recipe describes. Called in the child."""
    return BackendContext(
        model_name=described["model_name"],
        version=described["version"],
        config=config_from_json(described["config"]),
        model_directory=Path(described["model_directory"]),
        version_directory=Path(described["version_directory"]),
        options=described["options"],
        is_uploaded=described["is_uploaded"],
    )


def create_instance(*, backend: str, placement: list[Any], **described: Any) -> BatchInstance:
    """Called in the child: the loaded backend's instance. Its `close` unloads the backend too."""
    loaded = find_class(backend)(context_of(described))
    loaded.load()
    place_name, kind, device_id, index = placement
    instance = loaded.create_instance(Placement(place_name, DeviceKind(kind), device_id, index))
    if isinstance(instance, StepInstance):
        return StepHost(loaded, instance, server_connection())
    return HostedInstance(loaded, instance)


class HostedInstance(BatchInstance):
    """An instance with its backend. Batches are gathered and scattered here, in the child."""

    def __init__(self, backend: Backend, instance: BatchInstance | TensorInstance) -> None:
        self._backend = backend
        self._instance = instance
        self.answers_later = isinstance(instance, BatchInstance) and instance.answers_later
        config = without_reshapes(backend.context.config)
        # States are returned as outputs, and kept by the server.
        signature = ModelSignature(replace(config, output=model_outputs(config)))
        self._assembler = Assembler(signature, batch_tensors=BatchTensors(config))

    def execute(self, requests: Sequence[InferRequest]) -> Answers:
        assert is_in_flight(requests), "the server calls this"
        if isinstance(self._instance, BatchInstance):
            return self._instance.execute(requests)
        outputs = self._instance.run(self._assembler.gather(requests))
        return self._assembler.scatter(requests, outputs)

    def on_sequence_end(self, correlation_id: int | str, reason: str) -> None:
        self._instance.on_sequence_end(correlation_id, reason)

    def is_ready(self) -> bool:
        return self._instance.is_ready()

    def close(self) -> None:
        self._instance.close()
        self._backend.unload()


def without_reshapes(config: ModelConfig) -> ModelConfig:
    """The config with the shapes that the backend sees, because the server reshapes inputs and outputs."""
    return replace(config, input=tuple(map(_reshaped, config.input)), output=tuple(map(_reshaped, config.output)))


def _reshaped(spec: ConfigTensor) -> ConfigTensor:
    return spec if spec.reshape is None else replace(spec, dims=spec.reshape.shape, reshape=None)
