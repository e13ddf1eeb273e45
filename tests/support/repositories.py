"""Small model repositories of identity models on disk, and a repository over them that tests can hold back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from modelserver.backend import Backend, BackendContext
from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Tensor
from modelserver.errors import InternalError
from modelserver.execution.model import Model
from modelserver.repository.options import ControlMode, RepositoryOptions
from modelserver.repository.repository import ModelRepository

IDENTITY_CONFIG = """
backend: "identity"
max_batch_size: 8
input [ { name: "INPUT0", data_type: TYPE_INT32, dims: [ -1 ] } ]
output [ { name: "OUTPUT0", data_type: TYPE_INT32, dims: [ -1 ] } ]
"""

STOP_TIMEOUT_S = 10.0


def write_model(
    root: Path, name: str, *, versions: Sequence[int] = (1,), config: str | None = IDENTITY_CONFIG, extra: str = ""
) -> Path:
    """An identity model with one weights file per version; `extra` is appended to its config."""
    directory = root / name
    directory.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (directory / "config.pbtxt").write_text(config + extra)
    for version in versions:
        (directory / str(version)).mkdir(exist_ok=True)
        (directory / str(version) / "weights").write_text(f"weights of {version}")
    return directory


def identity_request(name: str, value: int = 1, *, version: int | None = None) -> InFlightRequest:
    data = np.full((1, 2), value, dtype=np.int32)
    return InFlightRequest(model_name=name, version=version, inputs={"INPUT0": Tensor("INPUT0", Datatype.INT32, data)})


async def infer(repository: ModelRepository, name: str, value: int = 1, *, version: int | None = None) -> InferResponse:
    """One request as the data plane sends it; asserts that the answer is this request's own."""
    request = identity_request(name, value, version=version)
    model = repository.get(name, version)
    model.signature.check(request)
    response = await model.submit(request).only()
    assert response.outputs[0].data.tolist() == [[value, value]]
    return response


class GatedLoader:
    """Loads real models, and lets a test hold loads back, make them fail, and see what happens."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.loaded: list[Model] = []
        self.closed: list[Model] = []
        self.failures: dict[tuple[str, int], Exception] = {}
        self.num_attempts = 0
        self._gates: dict[str, threading.Event] = {}
        self._reached: dict[str, asyncio.Event] = {}

    def hold(self, name: str) -> None:
        """Loads of this model wait in their thread until `release`."""
        self._gates[name] = threading.Event()
        self._reached[name] = asyncio.Event()

    async def reached(self, name: str) -> None:
        """Return when a load of a held model has come to its gate."""
        async with asyncio.timeout(60):
            await self._reached[name].wait()
        self._reached[name].clear()

    def release(self, name: str) -> None:
        self._gates.pop(name).set()

    def fail(self, name: str, version: int, error: Exception | None = None) -> None:
        self.failures[name, version] = error or InternalError("out of memory")

    def __call__(self, backend_class: type[Backend], context: BackendContext) -> Model:
        self.num_attempts += 1
        gate = self._gates.get(context.model_name)
        if gate is not None:
            self.loop.call_soon_threadsafe(self._reached[context.model_name].set)
            assert gate.wait(20), "the test never released the gate"
        if error := self.failures.get((context.model_name, context.version)):
            raise error
        model = Model.load(backend_class, context, loop=self.loop)
        self.loaded.append(model)
        close = model.close

        def close_and_note(*args: Any) -> None:
            close(*args)
            self.closed.append(model)

        model.close = close_and_note  # type: ignore[method-assign]
        return model


@asynccontextmanager
async def open_repository(
    *roots: Path, loader: GatedLoader | None = None, **options: Any
) -> AsyncIterator[ModelRepository]:
    """A started repository in explicit mode unless told otherwise; asserts that it closes what it loaded."""
    loader = loader or GatedLoader()
    defaults: dict[str, Any] = {"control_mode": ControlMode.EXPLICIT, "is_exit_on_error": False}
    repository = ModelRepository(RepositoryOptions(roots=roots, **(defaults | options)), load_model=loader)
    try:
        await repository.start()
        yield repository
    finally:
        await repository.stop(STOP_TIMEOUT_S)
    assert sorted(map(id, loader.closed)) == sorted(map(id, loader.loaded)), "every model is closed exactly once"
