"""OpenVINO on CPUs: its own files (IR), and those of TensorFlow Lite, TensorFlow and Paddle, which it also reads."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from modelserver.backend import (
    Array,
    Backend,
    BackendContext,
    ConfigError,
    Datatype,
    FileSignature,
    FileTensor,
    InternalError,
    InvalidArgumentError,
    ModelConfig,
    NotFoundError,
    Placement,
    TensorInstance,
    UnsupportedError,
    missing_package,
    model_inputs,
    model_outputs,
)

_SAVED_MODEL = "saved_model.pb"
_FILENAMES = ("model.xml", "model.tflite", _SAVED_MODEL, "model.savedmodel", "model.pdmodel")
_DATATYPES = {
    "boolean": Datatype.BOOL,
    "u8": Datatype.UINT8,
    "u16": Datatype.UINT16,
    "u32": Datatype.UINT32,
    "u64": Datatype.UINT64,
    "i8": Datatype.INT8,
    "i16": Datatype.INT16,
    "i32": Datatype.INT32,
    "i64": Datatype.INT64,
    "f16": Datatype.FP16,
    "f32": Datatype.FP32,
    "f64": Datatype.FP64,
}
# OpenVINO's own properties, under the names that they have in Triton's configs.
_PROPERTIES = ("INFERENCE_NUM_THREADS", "NUM_STREAMS", "PERFORMANCE_HINT", "INFERENCE_PRECISION_HINT")


class OpenvinoInstance(TensorInstance):
    """One infer request of the compiled model. `scalars` are tensors without dimensions in the file."""

    def __init__(self, compiled: Any, config: ModelConfig, scalars: frozenset[str]) -> None:
        self._request = compiled.create_infer_request()
        self._scalar_inputs = [spec.name for spec in model_inputs(config) if spec.name in scalars]
        ports = {name_of(port): port for port in compiled.outputs}
        self._outputs = [(spec.name, ports[spec.name], spec.name in scalars) for spec in model_outputs(config)]

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        feeds = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        for name in self._scalar_inputs:
            feeds[name] = feeds[name].reshape(())
        try:
            found = self._request.infer(feeds)
        except RuntimeError as error:
            raise InternalError(f"OpenVINO failed: {last_line(error)}") from error
        # The next run writes into the same memory.
        return {
            name: np.array(found[port]).reshape(1) if is_scalar else np.array(found[port])
            for name, port, is_scalar in self._outputs
        }


class OpenvinoBackend(Backend):
    """One version of a model. Its instances share the compiled model, and each has an infer request.

    Parameters: `INFERENCE_NUM_THREADS`, `NUM_STREAMS`, `PERFORMANCE_HINT`, `INFERENCE_PRECISION_HINT` of OpenVINO;
    without the first an instance uses one thread.
    """

    model_filenames = _FILENAMES
    extra = "openvino"
    option_names = frozenset[str]()

    @classmethod
    def complete_config(cls, context: BackendContext) -> ModelConfig:
        return context.complete_config(_signature(_read(context)))

    def load(self) -> None:
        model = _read(self.context)
        signature = _signature(model)
        self.context.check_config(signature)
        self._scalars = signature.scalars
        properties = {"INFERENCE_NUM_THREADS": "1", "PERFORMANCE_HINT": "LATENCY"}
        properties |= {name: value for name in _PROPERTIES if (value := self.context.parameter(name))}
        try:
            self._compiled = _library().Core().compile_model(model, "CPU", properties)
        except RuntimeError as error:
            raise ConfigError(
                f"model '{self.context.model_name}' version {self.context.version}: OpenVINO cannot compile it with "
                f"{properties}: {last_line(error)}"
            ) from error

    def create_instance(self, placement: Placement) -> OpenvinoInstance:  # noqa: ARG002  # they are all alike
        return OpenvinoInstance(self._compiled, self.context.config, self._scalars)


def name_of(port: Any) -> str:
    """The name of an input or output: of several, the one without a place in the graph (`x:0`)."""
    names = sorted(port.get_names(), key=lambda name: (":" in name, len(name), name))
    return names[0] if names else str(port.get_node().get_friendly_name())


def last_line(error: BaseException) -> str:
    """The reason in OpenVINO's long errors, which begin with places in its sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


def _library() -> Any:
    try:
        return importlib.import_module("openvino")
    except ModuleNotFoundError as error:
        raise missing_package(error.name, "openvino", "backend 'openvino'") from error


def _path_of(context: BackendContext) -> Path:
    named = context.config.default_model_filename
    for name in (named,) if named else _FILENAMES:
        path = context.version_directory / name
        if path.exists():
            return path.parent if path.name == _SAVED_MODEL else path
    raise NotFoundError(
        f"model '{context.model_name}' version {context.version}: none of the files {named or ', '.join(_FILENAMES)} "
        f"is in {context.version_directory}"
    )


def _read(context: BackendContext) -> Any:
    path = _path_of(context)
    try:
        return _library().Core().read_model(path)
    except RuntimeError as error:
        raise InvalidArgumentError(
            f"model '{context.model_name}' version {context.version}: OpenVINO cannot read {path}: {last_line(error)}"
        ) from error


def _signature(model: Any) -> FileSignature:
    return FileSignature(tuple(map(_tensor, model.inputs)), tuple(map(_tensor, model.outputs)))


def _tensor(port: Any) -> FileTensor:
    kind = port.get_element_type().get_type_name()
    if kind not in _DATATYPES:
        raise UnsupportedError(f"'{name_of(port)}' is a tensor of {kind}, which is not served by OpenVINO")
    shape = port.get_partial_shape()
    sizes = None if shape.rank.is_dynamic else tuple(size.get_length() if size.is_static else -1 for size in shape)
    return FileTensor(name_of(port), _DATATYPES[kind], sizes)


BACKEND = OpenvinoBackend
