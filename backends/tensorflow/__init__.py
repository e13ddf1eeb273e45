"""TensorFlow's SavedModels by TensorFlow, and `.tflite` files by LiteRT: in an environment of the model's own, mostly.

The backend `openvino` reads both kinds of files faster and without TensorFlow; this one is for operators that it lacks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from modelserver.backend import (
    Array,
    Backend,
    BackendContext,
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

_LITE = "model.tflite"
_FILENAMES = ("model.savedmodel", "saved_model.pb", _LITE)
_SIGNATURE = "serving_default"
_DATATYPES = {
    "bool": Datatype.BOOL,
    "uint8": Datatype.UINT8,
    "uint16": Datatype.UINT16,
    "uint32": Datatype.UINT32,
    "uint64": Datatype.UINT64,
    "int8": Datatype.INT8,
    "int16": Datatype.INT16,
    "int32": Datatype.INT32,
    "int64": Datatype.INT64,
    "float16": Datatype.FP16,
    "float32": Datatype.FP32,
    "float64": Datatype.FP64,
    "string": Datatype.BYTES,
}

# Takes and returns arrays by name.
Call = Callable[..., Mapping[str, Any]]


class TensorflowInstance(TensorInstance):
    """Calls one signature of the model."""

    def __init__(self, call: Call, config: ModelConfig, scalars: frozenset[str]) -> None:
        self._call = call
        self._scalar_inputs = [spec.name for spec in model_inputs(config) if spec.name in scalars]
        self._outputs = [(spec.name, spec.name in scalars) for spec in model_outputs(config)]

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        feeds = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        for name in self._scalar_inputs:
            feeds[name] = feeds[name].reshape(())
        try:
            found = self._call(**feeds)
        except Exception as error:  # TensorFlow's errors have no base of their own
            raise InternalError(f"TensorFlow failed: {_reason(error)}") from error
        return {
            name: np.asarray(found[name]).reshape(1) if is_scalar else np.asarray(found[name])
            for name, is_scalar in self._outputs
        }


class TensorflowBackend(Backend):
    """One version of a model. Instances share a SavedModel; each has an interpreter of a `.tflite` file.

    Parameters, by Triton's names: `TF_SIGNATURE_DEF` (serving_default), `TF_GRAPH_TAG` (serve), and
    `TF_NUM_INTRA_THREADS` (1), which holds for all SavedModels of a process: the first one's counts.
    """

    # Files are recognised as those of `openvino`: a config names this backend.
    model_filenames = ()
    extra = "tensorflow"
    option_names = frozenset[str]()

    @classmethod
    def complete_config(cls, context: BackendContext) -> ModelConfig:
        return context.complete_config(_Model(context).signature)

    def load(self) -> None:
        self._model = _Model(self.context)
        self.context.check_config(self._model.signature)

    def create_instance(self, placement: Placement) -> TensorflowInstance:  # noqa: ARG002  # they are all alike
        return TensorflowInstance(self._model.make_call(), self.context.config, self._model.signature.scalars)


class _Model:
    """A file of the model: its signature, and how instances call it."""

    def __init__(self, context: BackendContext) -> None:
        self._what = f"model '{context.model_name}' version {context.version}"
        self._path = _path_of(context, self._what)
        self._name = context.parameter("TF_SIGNATURE_DEF") or _SIGNATURE
        self._num_threads = _num_threads(context, self._what)
        self._graph_tag = context.parameter("TF_GRAPH_TAG") or "serve"
        try:
            if self._path.suffix == ".tflite":
                runner = self._lite()
                self.signature = FileSignature(
                    tuple(_lite_tensor(name, each) for name, each in sorted(runner.get_input_details().items())),
                    tuple(_lite_tensor(name, each) for name, each in sorted(runner.get_output_details().items())),
                )
                self.make_call: Callable[[], Call] = self._lite
                return
            call = self._saved()
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise InvalidArgumentError(f"{self._what}: cannot read {self._path}: {_reason(error)}") from error
        self.make_call = lambda: call
        self.signature = FileSignature(
            tuple(_saved_tensor(name, each) for name, each in sorted(call.structured_input_signature[1].items())),
            tuple(_saved_tensor(name, each) for name, each in sorted(call.structured_outputs.items())),
        )

    def _saved(self) -> Any:
        tensorflow = _library("tensorflow", "tensorflow")
        try:
            tensorflow.config.threading.set_intra_op_parallelism_threads(self._num_threads)
            tensorflow.config.threading.set_inter_op_parallelism_threads(1)
        except RuntimeError:  # another model of the process was first
            pass
        loaded = tensorflow.saved_model.load(str(self._path), tags=[self._graph_tag])
        self._check_name(list(loaded.signatures))
        call = loaded.signatures[self._name]
        call.holder = loaded  # its variables live as long as it does
        return call

    def _lite(self) -> Any:
        library = _library("ai_edge_litert.interpreter", "litert")
        interpreter = library.Interpreter(model_path=str(self._path), num_threads=self._num_threads)
        self._check_name(list(interpreter.get_signature_list()))
        return interpreter.get_signature_runner(self._name)

    def _check_name(self, names: list[str]) -> None:
        if self._name not in names:
            raise InvalidArgumentError(
                f"{self._what}: {self._path} has no signature '{self._name}', only {', '.join(names) or 'none'}: "
                "name one in the parameter TF_SIGNATURE_DEF"
            )


def _library(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise missing_package(error.name, extra, "backend 'tensorflow'") from error


def _path_of(context: BackendContext, what: str) -> Path:
    named = context.config.default_model_filename
    for name in (named,) if named else _FILENAMES:
        path = context.version_directory / name
        if path.exists():
            return path.parent if path.name == "saved_model.pb" else path
    raise NotFoundError(f"{what}: none of {named or ', '.join(_FILENAMES)} is in {context.version_directory}")


def _num_threads(context: BackendContext, what: str) -> int:
    text = context.parameter("TF_NUM_INTRA_THREADS") or "1"
    if not text.isdigit() or not 1 <= int(text) <= 1024:
        raise InvalidArgumentError(f"{what}: TF_NUM_INTRA_THREADS expects a number from 1 to 1024, got '{text}'")
    return int(text)


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def _saved_tensor(name: str, spec: Any) -> FileTensor:
    shape = None if spec.shape.rank is None else tuple(-1 if size is None else int(size) for size in spec.shape)
    return FileTensor(name, _datatype(name, spec.dtype.name), shape)


def _lite_tensor(name: str, details: Mapping[str, Any]) -> FileTensor:
    shape = details["shape_signature"] if len(details["shape_signature"]) else details["shape"]
    kind = np.dtype(details["dtype"])
    return FileTensor(name, _datatype(name, "string" if kind.kind in "OS" else kind.name), tuple(map(int, shape)))


def _datatype(name: str, kind: str) -> Datatype:
    if kind not in _DATATYPES:
        raise UnsupportedError(f"'{name}' is a tensor of {kind}, which is not served by TensorFlow")
    return _DATATYPES[kind]


BACKEND = TensorflowBackend
