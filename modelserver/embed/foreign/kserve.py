"""KServe's `Model` and `ModelServer`, for programs that were written for them.

A model gets the documents of the first protocol as they are, `{"instances": [...]}`, and requests of the second as
`InferRequest`; it answers by a document or an `InferResponse`. It declares no tensors. Hooks run on an event loop of
the model's instance, as they run on KServe's: a hook that is no coroutine holds up the model's other requests.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import logging as _logging
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from modelserver import backend
from modelserver.backend import (
    Array,
    InternalError,
    InvalidArgumentError,
    Placement,
    UnavailableError,
    UnsupportedError,
)
from modelserver.config.signature import ANSWER, DOCUMENT, V1
from modelserver.embed.backend import Served
from modelserver.embed.foreign import program
from modelserver.embed.foreign.program import translation
from modelserver.embed.foreign.wire_tensor import WireTensor, datatype_of, tensors_of_document
from modelserver.embed.server import Server
from modelserver.embed.signature import Signature

logger = _logging.getLogger("kserve")
# Flags of KServe's server that programs read; others have no effect.
parser = argparse.ArgumentParser(add_help=False)
parser.add_argument("--model_name", default="model")
parser.add_argument("--http_port", default=8080, type=int)
parser.add_argument("--grpc_port", default=8081, type=int)
parser.add_argument("--workers", default=1, type=int)
parser.add_argument("--predictor_host", default=None)
parser.add_argument("--configure_logging", default=True, type=lambda text: text.lower() == "true")
parser.add_argument("--log_config_file", default=None)


class InvalidInput(InvalidArgumentError):
    """The client's request is wrong: 400."""


class InferenceError(InternalError):
    """The model failed: 500."""


class ModelNotReady(UnavailableError):
    """The model is not loaded: 503."""

    def __init__(self, model_name: str, detail: str | None = None) -> None:
        super().__init__(f"model '{model_name}' is not ready" + (f": {detail}" if detail else ""))


class InferInput(WireTensor):
    """An input of a request, or an output of a response."""

    @property
    def data(self) -> Any:
        return self.elements()

    def as_numpy(self) -> Array:
        return self.array

    def as_string(self) -> list[str]:
        if self.datatype != "BYTES":
            raise InvalidInput(f"'{self.name}' is {self.datatype}, expected BYTES")
        return self.elements()

    def set_shape(self, shape: Sequence[int]) -> None:
        self.shape = list(shape)

    def set_data_from_numpy(self, input_tensor: Array, binary_data: bool = True) -> None:  # noqa: ARG002
        array = np.asarray(input_tensor)
        self.shape, self.datatype, self._data = list(array.shape), datatype_of(array), array


class InferOutput(InferInput):
    """An output of a response."""


class InferRequest:
    """A request of the second protocol."""

    def __init__(
        self,
        model_name: str,
        infer_inputs: Sequence[InferInput],
        request_id: str | None = None,
        raw_inputs: Any = None,  # noqa: ARG002  # the inputs have their elements
        from_grpc: bool = False,
        parameters: Mapping[str, Any] | None = None,
        request_outputs: Any = None,
        model_version: str | None = None,
    ) -> None:
        self.id = request_id
        self.model_name = model_name
        self.model_version = model_version
        self.inputs = list(infer_inputs)
        self.parameters = dict(parameters or {})
        self.from_grpc = from_grpc
        self.request_outputs = request_outputs

    def get_input_by_name(self, name: str) -> InferInput | None:
        return next((each for each in self.inputs if each.name == name), None)

    def as_dataframe(self) -> Any:
        pandas = importlib.import_module("pandas")

        return pandas.DataFrame({each.name: each.elements() for each in self.inputs})

    def to_rest(self) -> dict[str, Any]:
        return {"id": self.id, "inputs": [each.document() for each in self.inputs], "parameters": self.parameters}


class InferResponse:
    """A response of the second protocol."""

    def __init__(
        self,
        response_id: str,
        model_name: str,
        infer_outputs: Sequence[InferOutput],
        model_version: str | None = None,
        raw_outputs: Any = None,  # noqa: ARG002  # the outputs have their elements
        from_grpc: bool = False,
        parameters: Mapping[str, Any] | None = None,
        use_binary_outputs: bool = False,  # noqa: ARG002  # as the client asked
        requested_outputs: Any = None,  # noqa: ARG002  # the server selects them
    ) -> None:
        self.id = response_id
        self.model_name = model_name
        self.model_version = model_version
        self.outputs = list(infer_outputs)
        self.parameters = dict(parameters or {})
        self.from_grpc = from_grpc

    def get_output_by_name(self, name: str) -> InferOutput | None:
        return next((each for each in self.outputs if each.name == name), None)

    def to_rest(self) -> dict[str, Any]:
        return {"id": self.id, "model_name": self.model_name, "outputs": [each.document() for each in self.outputs]}


class Model:
    """What a request goes through: preprocess, predict, postprocess, each a function or a coroutine."""

    def __init__(self, name: str, *_without_effect: Any, **_named_without_effect: Any) -> None:
        self.name = name
        self.ready = False

    def load(self) -> bool:
        self.ready = True
        return self.ready

    def start(self) -> None:
        """Nothing to start before."""

    def stop(self) -> None:
        """Free what `load` took."""

    async def preprocess(self, payload: Any, headers: Any = None) -> Any:  # noqa: ARG002  # subclasses read them
        return payload

    async def postprocess(self, result: Any, headers: Any = None, *_: Any) -> Any:  # noqa: ARG002
        return result

    async def predict(self, payload: Any, headers: Any = None, response_headers: Any = None) -> Any:  # noqa: ARG002
        raise UnsupportedError(f"model '{self.name}' has no method predict; requests are not sent on to a predictor")


class ModelServer:
    """Serves models. Options that are about KServe's own processes have no effect."""

    def __init__(
        self,
        http_port: int | None = None,
        grpc_port: int | None = None,
        enable_grpc: bool = True,
        **_without_effect: Any,
    ) -> None:
        arguments, _ = parser.parse_known_args()
        self._server = Server(
            http_port=arguments.http_port if http_port is None else http_port,
            grpc_port=arguments.grpc_port if grpc_port is None else grpc_port,
            allow_grpc=enable_grpc,
        )

    def register_model(self, model: Model, name: str | None = None) -> None:
        if not getattr(model, "name", None) or not hasattr(model, "predict"):
            raise InvalidArgumentError(f"expected a kserve.Model with a name, got {type(model).__name__}")
        signature = Signature(
            (), (), returns_value=False, is_stream=False, is_async=True, request_name="request", is_open=True
        )
        self._server.add(name or model.name, Served(partial(_Worker, model), signature, is_factory=True))

    def start(self, models: Sequence[Model] | Mapping[str, Model] | Model) -> None:
        """Serve until stopped."""
        if isinstance(models, Mapping):
            for name, model in models.items():
                self.register_model(model, name)
        else:
            for model in models if isinstance(models, Sequence) else [models]:
                self.register_model(model)
        program.serve(self._server)


class Storage:
    """Where models lie: on this machine."""

    @staticmethod
    def download(uri: str, out_dir: str | None = None) -> str:  # noqa: ARG004  # it is there already
        path = uri.removeprefix("file://")
        if "://" in path or not Path(path).exists():
            raise UnsupportedError(f"kserve.Storage: expected a path on this machine, got '{uri}'")
        return path


def configure_logging(*_: Any, **_named: Any) -> None:
    """The server has configured its logs."""


def generate_uuid() -> str:
    return str(uuid.uuid4())


def get_predict_input(payload: Any, columns: Sequence[str] | None = None) -> Any:
    """The rows of a request: an array, or a table where they are objects or several inputs."""
    if isinstance(payload, Mapping):
        rows = payload["inputs"] if "inputs" in payload else payload["instances"]
        if not (rows and isinstance(rows[0], Mapping)):
            return np.array(rows)
        pandas = importlib.import_module("pandas")

        return pandas.DataFrame(rows, columns=columns)
    if len(payload.inputs) == 1 and payload.parameters.get("content_type") != "pd":
        return payload.inputs[0].as_numpy()
    return payload.as_dataframe()


def get_predict_response(payload: Any, result: Any, model_name: str) -> Any:
    """The response to `payload`, of the same protocol; of a table an output for each column."""
    is_table = hasattr(result, "columns")
    if isinstance(payload, Mapping):
        rows = (
            result.to_dict(orient="records") if is_table else result.tolist() if hasattr(result, "tolist") else result
        )
        return {"predictions": rows}
    columns = {str(name): result[name].to_numpy() for name in result.columns} if is_table else {"output-0": result}
    outputs = []
    for name, column in columns.items():
        output = InferOutput(name, [], "")
        output.set_data_from_numpy(np.asarray(column))
        outputs.append(output)
    return InferResponse(payload.id or generate_uuid(), model_name, outputs)


class _Worker:
    """The model's only instance. `headers` are the parameters, of which the forwarded headers are."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def load(self, placement: Placement) -> None:  # noqa: ARG002  # the program has chosen the device
        model = self._model
        model.start()
        if not model.ready:
            model.load()
        if not model.ready:
            raise ModelNotReady(model.name, "load() left it so")

    async def predict(self, request: backend.InferRequest) -> backend.InferResponse:
        try:
            return await self._answer(request)
        except Exception as error:
            answer = translation(error)
            if answer is error:
                raise
            raise answer from error

    async def _answer(self, request: backend.InferRequest) -> backend.InferResponse:
        model = self._model
        headers = {name: value for name, value in request.parameters.items() if isinstance(value, str)}
        is_v1 = request.parameters.get(V1) is True and request.inputs.keys() == {DOCUMENT}
        payload: Any = orjson.loads(request.inputs[DOCUMENT].data.item()) if is_v1 else _request(request)
        payload = await _called(model.preprocess, payload, headers)
        result = await _called(model.postprocess, await _called(model.predict, payload, headers), headers)
        if is_v1:
            written = result.to_rest() if isinstance(result, InferResponse) else result
            answer = np.array([orjson.dumps(written, option=orjson.OPT_SERIALIZE_NUMPY)], object)
            return backend.InferResponse([backend.Tensor(ANSWER, backend.Datatype.BYTES, answer)])
        if isinstance(result, InferResponse):
            parameters = {name: value for name, value in result.parameters.items() if value is not None}
            return backend.InferResponse([each.tensor() for each in result.outputs], parameters=parameters)
        if isinstance(result, Mapping):
            return backend.InferResponse(tensors_of_document(result))
        raise InternalError(f"expected an InferResponse or a document, predict returned {type(result).__name__}")


async def _called(hook: Any, value: Any, headers: Mapping[str, str]) -> Any:
    """A hook gets the headers by its parameter of that name, if it has one."""
    known = inspect.signature(hook).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
    named = {"headers": dict(headers), "response_headers": {}}
    result = hook(value, **{name: each for name, each in named.items() if name in known or takes_any})
    return await result if inspect.isawaitable(result) else result


def _request(request: backend.InferRequest) -> InferRequest:
    inputs = []
    for tensor in request.inputs.values():
        made = InferInput(tensor.name, tensor.shape, tensor.datatype.value, parameters={})
        made.take(tensor)
        inputs.append(made)
    return InferRequest(request.model_name, inputs, request.id or generate_uuid(), parameters=request.parameters)
