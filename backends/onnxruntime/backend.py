"""ONNX models: one session per device, shared by the instances on it.

ONNX Runtime executes one session from many threads at once and releases the GIL meanwhile. Its thread
pool belongs to the session and has a thread per physical core, so that one instance (our default; Triton's
is two) keeps the machine busy; a second one only overlaps the copying around large tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from modelserver.backend import (
    Backend,
    BackendContext,
    DeviceKind,
    FileSignature,
    InvalidArgumentError,
    ModelConfig,
    NotFoundError,
    Placement,
    UnsupportedError,
    model_outputs,
)

from .instance import OnnxInstance
from .options import providers, run_options, session_options
from .signature import session_signature

_FILENAME = "model.onnx"
# Everything that ONNX Runtime raises about a file: its classes have no common base but Exception.
_LOAD_ERRORS = (
    native.Fail,
    native.InvalidArgument,
    native.InvalidGraph,
    native.InvalidProtobuf,
    native.NoModel,
    native.NoSuchFile,
    native.NotImplemented,
    native.RuntimeException,
    RuntimeError,
    ValueError,
)


class OnnxBackend(Backend):
    """One version of an ONNX model."""

    model_filenames = (_FILENAME,)
    extra = "onnx"
    option_names = frozenset({"intra_op_thread_count", "inter_op_thread_count"})
    acts_on = frozenset({"optimization.graph", "optimization.execution_accelerators"})
    can_run_inline = True
    supports_gpu = "CUDAExecutionProvider" in onnxruntime.get_available_providers()

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._lock = threading.Lock()  # guards _sessions: instances may be created at once
        self._sessions: dict[tuple[DeviceKind, int], tuple[Any, FileSignature]] = {}
        self._path = context.version_directory
        self._options: Any = None
        self._run_options: Any = None

    @classmethod
    def complete_config(cls, context: BackendContext) -> ModelConfig:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        # Only the signature is wanted: no time for optimizing what is thrown away.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        path = _model_path(context)
        session = _loaded(context, path, lambda: onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"]))
        return context.complete_config(_signature(context, session))

    def load(self) -> None:
        self._path = _model_path(self.context)
        self._options = session_options(self.context)
        self._run_options = run_options(self.context)

    def create_instance(self, placement: Placement) -> OnnxInstance:
        with self._lock:
            key = (placement.kind, placement.device_id)
            if key not in self._sessions:
                self._sessions[key] = self._new_session(placement)
            session, signature = self._sessions[key]
        return OnnxInstance(session, self.context.config, signature.scalars, run_options=self._run_options)

    def unload(self) -> None:
        self._sessions.clear()

    def _new_session(self, placement: Placement) -> tuple[Any, FileSignature]:
        chosen = providers(self.context, placement)
        session = _loaded(
            self.context, self._path, lambda: onnxruntime.InferenceSession(self._path, self._options, chosen)
        )
        signature = _signature(self.context, session)
        self.context.check_config(signature)
        return session, signature


def _model_path(context: BackendContext) -> Path:
    """The ONNX file; of a directory, the one `.onnx` file in it (weights in other files lie beside it)."""
    path = context.model_file(_FILENAME)
    if not path.is_dir():
        return path
    if (path / _FILENAME).is_file():
        return path / _FILENAME
    files = sorted(path.glob("*.onnx"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise NotFoundError(
            f"model '{context.model_name}' version {context.version}: expected {_FILENAME} or a single .onnx file in "
            f"directory {path}, found {found}"
        )
    return files[0]


def _loaded(context: BackendContext, path: Path, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except _LOAD_ERRORS as error:
        raise InvalidArgumentError(
            f"model '{context.model_name}' version {context.version}: ONNX Runtime cannot load {path} "
            f"({path.stat().st_size} bytes): {error}"
        ) from error


def _wanted_outputs(config: ModelConfig) -> tuple[str, ...]:
    """The outputs to look at; empty for all, when the config leaves it to the file."""
    return tuple(spec.name for spec in model_outputs(config)) if config.output else ()


def _signature(context: BackendContext, session: Any) -> FileSignature:
    try:
        return session_signature(session, _wanted_outputs(context.config))
    except UnsupportedError as error:
        raise UnsupportedError(f"model '{context.model_name}' version {context.version}: {error}") from error
