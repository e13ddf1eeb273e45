"""A model directory, loaded in this process as the server loads it, for the comparison with a converted model.

Everything below the data plane is the server's own: config, backend, instances, scheduler. So what answers here
also serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from modelserver.config.schema import ModelConfig
from modelserver.core.loop_thread import LoopThread
from modelserver.core.request import InFlightRequest
from modelserver.core.tensor import Tensor
from modelserver.errors import InvalidArgumentError, NotFoundError, ServerError
from modelserver.execution.model import Model
from modelserver.repository.definition import ModelDefinition, read_definition
from modelserver.repository.layout import scan_model
from modelserver.repository.options import DefinitionOptions

Array = np.ndarray[Any, Any]
# The time limit of a request: a model that hangs must not hang the command.
INFER_TIMEOUT_S = 300.0


def define(directory: Path, *, options: DefinitionOptions | None = None) -> ModelDefinition:
    """The directory's definition, completed as in the server. Raises ServerError with all problems."""
    if not directory.is_dir():
        raise NotFoundError(f"there is no model directory '{directory}'")
    definition = read_definition(scan_model(directory, directory.name), options or DefinitionOptions())
    if definition.config.is_ensemble:
        raise InvalidArgumentError(
            f"model '{directory.name}' is an ensemble: it has no file of its own; name its models"
        )
    return definition


class LoadedModel:
    """Answers from its making until `close`. Use it as a context manager."""

    def __init__(self, definition: ModelDefinition, version: int) -> None:
        self.name = definition.name
        self.config: ModelConfig = definition.config
        self._thread = LoopThread(f"toolkit-{definition.name}")
        try:
            self._model = Model.load(definition.backend_class, definition.context(version), loop=self._thread.loop)
        except BaseException:
            self._thread.stop()
            raise

    @classmethod
    def open(
        cls, directory: Path, *, version: int | None = None, options: DefinitionOptions | None = None
    ) -> LoadedModel:
        """Load `version`, or the newest. Raises ServerError with the reason."""
        definition = define(directory, options=options)
        if not definition.versions:
            raise NotFoundError(f"model '{directory.name}' has no version directory in '{directory}'")
        chosen = max(definition.versions) if version is None else version
        if chosen not in definition.versions:
            there = ", ".join(map(str, definition.versions))
            raise NotFoundError(f"model '{directory.name}' has no version {chosen}; there are: {there}")
        return cls(definition, chosen)

    def infer(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs by name. Raises the model's error."""
        specs = {spec.name: spec.data_type for spec in self.config.input}
        tensors = {}
        for name, array in arrays.items():
            datatype = specs.get(name)
            if datatype is None:
                raise InvalidArgumentError(f"model '{self.name}' has no input '{name}' (it has {', '.join(specs)})")
            tensors[name] = Tensor(name, datatype, np.ascontiguousarray(array, dtype=datatype.numpy))
        request = InFlightRequest(model_name=self.name, version=None, inputs=tensors)
        future = asyncio.run_coroutine_threadsafe(self._ask(request), self._thread.loop)
        try:
            return future.result(INFER_TIMEOUT_S)
        except TimeoutError:
            future.cancel()
            raise ServerError(f"model '{self.name}' did not answer within {INFER_TIMEOUT_S:g} s") from None

    async def _ask(self, request: InFlightRequest) -> dict[str, Array]:
        response = await self._model.infer(request).only()
        return {tensor.name: tensor.data for tensor in response.outputs}

    def close(self) -> None:
        """Unload; safe to repeat."""
        self._model.close()
        self._thread.stop()

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
