"""`:predict` for every model: rows of JSON in, predictions out.

`instances` are rows: values of the model's input, or objects of its inputs by name. `inputs` are whole tensors. Rows
beyond the model's `max_batch_size` go to it as several requests.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from modelserver.api import ApiContext, Call
from modelserver.auth.access import ApiGroup
from modelserver.config.schema import ModelConfig, ModelInput
from modelserver.config.signature import ANSWER, DOCUMENT, V1, is_open
from modelserver.core.datatype import Datatype
from modelserver.core.long_work import Slices, long_work
from modelserver.core.tensor import Tensor
from modelserver.errors import InternalError, InvalidArgumentError, LoadOnDemandError
from modelserver.frontends.http.generate import tensor_slices_of
from modelserver.frontends.http.json_tensor import flat_values, tensor_to_json
from modelserver.planes.authorized import AnyControlPlane, AnyDataPlane
from modelserver.protocol.api import Api, Route, RouteSchema
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import PLAIN_ERRORS

Array = np.ndarray[Any, Any]

_SCHEMA = RouteSchema("Predictions for rows of JSON", body="Rows", answer="Predictions")
# The requests that one call has in the model's queue at the same time.
_MAX_REQUESTS = 16


class Predict:
    """The handler of the routes."""

    def __init__(self, dataplane: AnyDataPlane, controlplane: AnyControlPlane, limits: HttpLimits) -> None:
        self._dataplane = dataplane
        self._limits = limits
        self._context = ApiContext("predict", dataplane, controlplane, limits)

    def api(self) -> Api:
        handler = self._context.handler(self.predict, PLAIN_ERRORS)
        patterns = ("/v1/models/{id}:predict", "/v1/models/{id}/versions/{version}:predict")
        routes = [Route("POST", each, handler, ApiGroup.INFERENCE, model="id", schema=_SCHEMA) for each in patterns]
        types = {
            "Error": "{error: string}",
            "Rows": "{instances?: [any] 1.., inputs?: any, signature_name?: string, *: any}",
            "Predictions": "{predictions?: [any], outputs?: any}",
        }
        return Api("predict", tuple(routes), PLAIN_ERRORS, types=types)

    async def predict(self, call: Call) -> None:
        """Raises as the model does, and InvalidArgumentError for rows that are not the model's."""
        name, version = call.arguments["id"], _version(call.arguments.get("version"))
        document = await call.json()
        config = await self._config(name, version)
        if is_open(config):
            call.answer(orjson.Fragment(await self._answer_of(call, config, version, document)))
            return
        inputs = await long_work().run(_inputs(config, document, self._limits))
        outputs = await self._ask(call, config, version, {each.name: each.data for each in inputs})
        if "instances" not in document:
            written = {key: orjson.Fragment(_json(config, key, data)) for key, data in outputs.items()}
            call.answer({"outputs": next(iter(written.values())) if len(written) == 1 else written})
            return
        call.answer({"predictions": _predictions(config, outputs, len(document["instances"]))})

    async def _answer_of(
        self, call: Call, config: ModelConfig, version: int | None, document: Mapping[str, Any]
    ) -> bytes:
        """The answer of a model that reads whole documents."""
        inputs = {DOCUMENT: np.array([orjson.dumps(document)], object)}
        outputs = await call.infer(config.name, inputs, version=version, parameters={V1: True})
        if ANSWER not in outputs:
            raise InternalError(f"model '{config.name}' did not answer the document by one")
        return bytes(outputs[ANSWER].reshape(-1)[0])

    async def _config(self, name: str, version: int | None) -> ModelConfig:
        try:
            return self._dataplane.model_config(name, version)
        except LoadOnDemandError as unloaded:
            await unloaded.load()
            return self._dataplane.model_config(name, version)

    async def _ask(
        self, call: Call, config: ModelConfig, version: int | None, inputs: Mapping[str, Array]
    ) -> dict[str, Array]:
        """The outputs, in as many requests as the model's largest batch asks for."""
        most = config.max_batch_size
        rows = len(next(iter(inputs.values()))) if inputs and most else 0
        if rows <= most:
            return await call.infer(config.name, inputs, version=version)
        room = asyncio.Semaphore(_MAX_REQUESTS)

        async def part(start: int) -> dict[str, Array]:
            async with room:
                own = {name: data[start : start + most] for name, data in inputs.items()}
                return await call.infer(config.name, own, version=version)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(part(start)) for start in range(0, rows, most)]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        parts = [task.result() for task in tasks]
        return {name: np.concatenate([each[name] for each in parts]) for name in parts[0]}


def _version(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise InvalidArgumentError(f"the version '{text:.40}' is not a number")
    return int(text)


def _inputs(config: ModelConfig, document: Mapping[str, Any], limits: HttpLimits) -> Slices[list[Tensor]]:
    """The tensors of a call. Raises InvalidArgumentError."""
    specs = {spec.name: spec for spec in config.input}
    if ("instances" in document) == ("inputs" in document):
        raise InvalidArgumentError("a prediction needs either 'instances', a list of rows, or 'inputs', whole tensors")
    columns = _columns(specs, document) if "instances" in document else _tensors(specs, document["inputs"])
    is_batched = config.max_batch_size > 0
    found = []
    for name, value in columns.items():
        if specs[name].data_type is Datatype.BYTES:
            found.append(Tensor(name, Datatype.BYTES, _texts(specs[name], value, is_batched=is_batched)))
        else:
            found.append((yield from tensor_slices_of(specs[name], value, limits, is_batched=is_batched)))
    return found


def _columns(specs: Mapping[str, ModelInput], document: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The rows of `instances`, by input."""
    rows = document["instances"]
    if not isinstance(rows, list) or not rows:
        raise InvalidArgumentError("'instances' must be a list of at least one row")
    if not all(isinstance(row, dict) and row.keys() <= specs.keys() for row in rows):
        return {_only(specs): rows}
    names = rows[0].keys()
    if any(row.keys() != names for row in rows):
        raise InvalidArgumentError("all objects in 'instances' must have the same inputs")
    return {name: [row[name] for row in rows] for name in names}


def _tensors(specs: Mapping[str, ModelInput], inputs: Any) -> dict[str, Any]:
    if not isinstance(inputs, dict) or inputs.keys() == {"b64"}:
        return {_only(specs): inputs}
    if unknown := next((name for name in inputs if name not in specs), None):
        raise InvalidArgumentError(f"unexpected input '{unknown:.100}', expected one of {', '.join(specs)}")
    return inputs


def _only(specs: Mapping[str, ModelInput]) -> str:
    """The only input of a model, which rows need not name."""
    names = [name for name, spec in specs.items() if not spec.optional] or list(specs)
    if len(names) != 1:
        raise InvalidArgumentError(f"a row must be an object of the inputs {', '.join(specs)}")
    return names[0]


def _texts(spec: ModelInput, value: Any, *, is_batched: bool) -> Array:
    """Strings, and bytes as `{"b64": ...}`."""
    values = value if isinstance(value, list) else [value]
    elements = [_bytes(spec.name, one) for one in flat_values(values)]
    array = np.empty(len(elements), object)
    array[:] = elements
    shape: list[int] = []
    level: Any = values
    while isinstance(level, list):
        shape.append(len(level))
        level = level[0] if level else None
    rank = len(spec.dims) + is_batched
    shape += [1] * (rank - len(shape))
    try:
        return array.reshape(shape)
    except ValueError:
        raise InvalidArgumentError(f"input '{spec.name}': the lists of one level must have the same length") from None


def _bytes(name: str, value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    try:
        return base64.b64decode(value["b64"], validate=True)
    except (TypeError, KeyError, ValueError):
        raise InvalidArgumentError(f"input '{name}': expected a string, or bytes as {{'b64': base64}}") from None


def _json(config: ModelConfig, name: str, data: Array) -> bytes:
    """An output as nested lists. Rows of one value each are values, as KServe's servers write them."""
    spec = next((each for each in config.output if each.name == name), None)
    if config.max_batch_size > 0 and spec is not None and list(spec.dims) == [1]:
        data = data.reshape(-1)
    datatype = spec.data_type if spec is not None else None
    return tensor_to_json(Tensor(name, datatype or Datatype.from_numpy(data.dtype), data), is_nested=True)


def _predictions(config: ModelConfig, outputs: Mapping[str, Array], num_rows: int) -> Any:
    """A value for each row: that of the only output, or an object of all."""
    if len(outputs) == 1:
        ((name, data),) = outputs.items()
        written = _json(config, name, data)
        return orjson.Fragment(written if len(data) == num_rows else b"[%b]" % written)
    columns = {name: orjson.loads(_json(config, name, data)) for name, data in outputs.items()}
    if any(len(column) != num_rows for column in columns.values()):
        return [columns]
    return [{name: column[row] for name, column in columns.items()} for row in range(num_rows)]
