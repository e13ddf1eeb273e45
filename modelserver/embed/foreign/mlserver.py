"""MLServer's `MLModel` with `model-settings.json`, for models that were written for it, with its types.

`serve_directory` serves every model-settings.json below a directory: a class of its own (`implementation:
models.MyRuntime`) on an event loop of its instance, and a file of MLServer's runtimes by the backend of its kind.
Codecs are in `mlserver_codecs`. A model declares no tensors.
"""

from __future__ import annotations

import importlib
import json
import logging as _logging
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from modelserver import backend
from modelserver.backend import InternalError, InvalidArgumentError, NotFoundError, Placement, UnsupportedError
from modelserver.backend.discovery import find_source, import_source
from modelserver.config.signature import V1
from modelserver.embed.backend import Served
from modelserver.embed.foreign import program
from modelserver.embed.foreign.mlserver_codecs import (  # noqa: F401  # models import all of them
    Base64Codec,
    DatetimeCodec,
    InferenceRequest,
    InferenceResponse,
    NumpyCodec,
    NumpyRequestCodec,
    PandasCodec,
    Parameters,
    Record,
    RequestInput,
    RequestOutput,
    ResponseOutput,
    StringCodec,
    StringRequestCodec,
    TensorData,
    codec_named,
    codec_of,
    decode_args,
    decode_inference_request,
)
from modelserver.embed.foreign.program import translation
from modelserver.embed.server import Server
from modelserver.embed.signature import Signature
from modelserver.options.sources import resolve_options

logger = _logging.getLogger("mlserver")
SETTINGS = "model-settings.json"
_SERVER_SETTINGS = "settings.json"
# The backends of MLServer's own runtimes.
_RUNTIMES = {
    "mlserver_sklearn.SKLearnModel": "sklearn",
    "mlserver_xgboost.XGBoostModel": "xgboost",
    "mlserver_lightgbm.LightGBMModel": "lightgbm",
    "mlserver_catboost.CatboostModel": "catboost",
    "mlserver_mlflow.MLflowRuntime": "mlflow",
    "mlserver_onnx.OnnxModel": "onnxruntime",
    "mlserver_huggingface.HuggingFaceRuntime": "transformers",
}


class MLServerError(backend.ServerError):
    """An error with a status of HTTP."""

    def __init__(self, msg: str, status_code: int = 500) -> None:
        super().__init__(msg)
        self.status_code = status_code
        self.detail = msg


class InferenceError(InvalidArgumentError):
    """The request is not one of the model's: 400."""


class ModelParameters(Record):
    """`parameters` of the settings; further ones are kept."""

    uri: str | None = None
    version: str | None = None
    format: str | None = None
    content_type: str | None = None
    extra: Mapping[str, Any] | None = None


class ModelSettings(Record):
    """The document of a model-settings.json."""

    name: str = ""
    implementation: Any = None
    parameters: Any = None
    platform: str = ""
    versions: Sequence[str] = ()
    inputs: Sequence[Any] = ()
    outputs: Sequence[Any] = ()
    max_batch_size: int = 0
    max_batch_time: float = 0.0
    parallel_workers: int | None = None

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        if isinstance(self.parameters, Mapping):
            self.parameters = ModelParameters(**self.parameters)
        self.folder = Path()


async def get_model_uri(settings: ModelSettings, wellknown_filenames: Sequence[str] = ()) -> str:
    """The path of the model's file or directory. Raises NotFoundError."""
    uri = settings.parameters.uri if settings.parameters is not None else None
    path = settings.folder / (uri or "").removeprefix("file://")
    if path.is_dir():
        path = next((path / name for name in wellknown_filenames if (path / name).exists()), path)
    if not path.exists():
        raise NotFoundError(f"model '{settings.name}': there is nothing at {path}, which is its uri")
    return str(path)


class MLModel:
    """A model: `load`, `predict` and `unload` are coroutines."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = self.settings = settings
        self.ready = False
        self.inputs = list(settings.inputs)
        self.outputs = list(settings.outputs)

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def version(self) -> str | None:
        return self.settings.parameters.version if self.settings.parameters is not None else None

    async def load(self) -> bool:
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        # As MLServer: a subclass defines it, and one without it answers each request with this.
        raise NotImplementedError(f"model '{self.name}' has no method predict")

    async def unload(self) -> bool:
        return True

    def decode(self, request_input: RequestInput, default_codec: Any = None) -> Any:
        """The elements of an input, by its content type, by that of the settings, or by the codec."""
        return codec_of(request_input, self._content_type(request_input.name), default_codec).decode_input(
            request_input
        )

    def decode_request(self, inference_request: InferenceRequest, default_codec: Any = None) -> Any:
        parameters = self.settings.parameters
        usual = parameters.content_type if parameters is not None else None
        return decode_inference_request(inference_request, usual, default_codec)

    def encode(self, payload: Any, request_output: Any, default_codec: Any = None) -> ResponseOutput:
        codec = default_codec or codec_named(payload)
        output: ResponseOutput = codec.encode_output(request_output.name, payload)
        return output

    def encode_response(self, payload: Any, default_codec: Any = None) -> InferenceResponse:
        codec = default_codec or codec_named(payload)
        response: InferenceResponse = codec.encode_response(self.name, payload, self.version)
        return response

    def _content_type(self, name: str) -> str | None:
        for each in self.inputs:
            if each.get("name") == name:
                return (each.get("parameters") or {}).get("content_type")
        return None


def register(name: str, description: str) -> None:
    """Values of `log` need no registration."""


def log(**values: float) -> None:
    """Goes to the server's log."""
    logger.info("%s", ", ".join(f"{name}: {value}" for name, value in values.items()))


def find_settings(path: Path) -> list[Path]:
    """The model-settings.json of a directory and of those below it."""
    return sorted(path.rglob(SETTINGS)) if path.is_dir() else [path] if path.name == SETTINGS else []


def serve_directory(path: Path, words: Sequence[str]) -> None:
    """Serve the models of a directory until stopped; `words` are flags of `modelserver serve`.

    Raises InvalidArgumentError for settings that are wrong, and what the models' modules raise.
    """
    server = server_of(path)
    server.run(resolve_options(list(words), os.environ, server.options).options)


def server_of(path: Path, **options: Any) -> Server:
    """A server of the models of a directory, not started."""
    program.stand_in("mlserver")
    found = _read(path / _SERVER_SETTINGS) if (path / _SERVER_SETTINGS).is_file() else {}
    usual = {"http_port": 8080, "grpc_port": 8081, "metrics_port": 8082}
    given = {name: found.get(name, port) for name, port in usual.items()}
    server = Server(**{**given, **({"host": found["host"]} if "host" in found else {}), **options})
    for file in find_settings(path):
        _add(server, file)
    return server


def _add(server: Server, file: Path) -> None:
    settings = ModelSettings(**_read(file))
    settings.folder = file.resolve().parent
    settings.name = settings.name or settings.folder.name
    place = settings.implementation
    if not isinstance(place, str) or "." not in place:
        raise InvalidArgumentError(f"{file}: expected 'implementation' to be MODULE.CLASS, got {place!r}")
    if place in _RUNTIMES:
        uri = settings.parameters.uri if settings.parameters is not None else None
        if uri and "://" in uri.removeprefix("file://"):
            raise UnsupportedError(f"{file}: expected a path as 'uri', got '{uri}'")
        server.add_file(settings.name, settings.folder / (uri or "").removeprefix("file://"), backend=_RUNTIMES[place])
        return
    module, _, name = place.rpartition(".")
    if module.partition(".")[0].startswith("mlserver"):
        known = ", ".join(_RUNTIMES)
        raise UnsupportedError(f"{file}: modelserver has no runtime '{place}', only {known} and classes of your own")
    model = getattr(_module(module, settings.folder), name, None)
    if not isinstance(model, type):
        raise InvalidArgumentError(f"{file}: there is no class {name} in the module {module}")
    signature = Signature(
        (), (), returns_value=False, is_stream=False, is_async=True, request_name="request", is_open=True
    )
    workers = settings.parallel_workers or 1
    text = settings.parameters.version if settings.parameters is not None else None
    server.add(
        settings.name,
        Served(partial(_Worker, model, settings), signature, is_factory=True),
        version=int(text) if text and text.isdecimal() and int(text) else 1,
        instances=max(1, workers),
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{file}: {error}") from None
    if not isinstance(document, dict):
        raise InvalidArgumentError(f"{file}: expected an object")
    return document


def _module(name: str, folder: Path) -> Any:
    """A module of the model's folder, which other models may also have under this name; or any other."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    source = find_source(folder, name)
    return importlib.import_module(name) if source is None else import_source(name, source)


class _Worker:
    """One instance of a class."""

    def __init__(self, model: type[MLModel], settings: ModelSettings) -> None:
        self._model = model(settings)

    async def load(self, placement: Placement) -> None:  # noqa: ARG002  # the model has chosen the device
        self._model.ready = await self._model.load() is not False

    async def unload(self) -> None:
        await self._model.unload()

    async def predict(self, request: backend.InferRequest) -> backend.InferResponse:
        if request.parameters.get(V1) is True:
            raise UnsupportedError(
                f"model '{request.model_name}' is MLServer's: ask /v2/models/{request.model_name}/infer"
            )
        try:
            response = await self._model.predict(InferenceRequest.of(request))
        except Exception as error:
            answer = translation(error)
            if answer is error:
                raise
            raise answer from error
        if not isinstance(response, InferenceResponse):
            raise InternalError(f"expected an InferenceResponse, predict returned {type(response).__name__}")
        return backend.InferResponse([each.tensor() for each in response.outputs])
