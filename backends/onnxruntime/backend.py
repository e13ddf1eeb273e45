"""ONNX models: one session per device, shared by the instances on it.

ONNX Runtime executes one session from many threads at once and releases the GIL meanwhile. Its thread
pool belongs to the session and has a thread per physical core, so that one instance (our default; Triton's
is two) keeps the machine busy; a second one only overlaps the copying around large tensors.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from modelserver.backend import (
    Backend,
    BackendContext,
    DeviceKind,
    FileSignature,
    Finding,
    InvalidArgumentError,
    ModelConfig,
    NotFoundError,
    Placement,
    Reservation,
    UnavailableError,
    UnsupportedError,
    device_memory,
    free_gpu_bytes,
    model_outputs,
    visible_gpus,
)

from .device_run import BoundRun, GraphRun, captures, host_inputs
from .diagnosis import diagnose_distributions, diagnose_providers
from .external_data import check_external_data
from .instance import OnnxInstance
from .options import (
    ENABLE_CUDA_GRAPH,
    bare_options,
    has_own_threads,
    quiet_run,
    run_options,
    session_options,
    wants_graphs,
)
from .pinned import Staging, allocate_pinned
from .providers import (
    CPU,
    CUDA,
    TENSORRT,
    Provider,
    add_plugin,
    available_providers,
    check_gpu_wish,
    check_session,
    may_fall_back,
    no_provider,
    nodes_by_provider,
    plugin_providers,
    preload_libraries,
    unused_accelerators,
    wanted_providers,
)
from .signature import session_signature

log = logging.getLogger(__name__)

_FILENAME = "model.onnx"
_SHARE_SESSION = "share_session"
_MEMORY_BYTES = "memory_bytes"
# In what ONNX Runtime says of a graph that it cannot capture, as some nodes are not CUDA's.
_NO_CAPTURE = "graph capture"
# In what it says when it cannot load TensorRT, before it looks at the file.
_NO_TENSORRT = "install TensorRT libraries"
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
    native.EPFail,
    RuntimeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class _Session:
    """A session on a device, the signature of its file, and the device memory reserved for it."""

    session: Any
    signature: FileSignature
    on_gpu: bool
    reservation: Reservation | None
    has_graphs: bool


class OnnxBackend(Backend):
    """One version of an ONNX model."""

    model_filenames = (_FILENAME,)
    extra = "onnx"
    option_names = frozenset({"intra_op_thread_count", "inter_op_thread_count", "enable-global-threadpool"})
    acts_on = frozenset(
        {
            "optimization.graph",
            "optimization.execution_accelerators",
            "optimization.cuda",
            "optimization.input_pinned_memory",
        }
    )
    can_run_inline = True
    supports_gpu = CUDA in onnxruntime.get_available_providers()

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._lock = threading.Lock()  # guards _sessions: instances may be created at once
        # Those that instances share, by device, and those that belong to one.
        self._sessions: dict[tuple[DeviceKind, int], _Session] = {}
        self._own_sessions: list[_Session] = []
        self._path = context.version_directory

    @classmethod
    def check_written(cls, context: BackendContext) -> None:
        check_gpu_wish(context, has_gpu=cls.supports_gpu and bool(context.gpu_ids))

    @classmethod
    def complete_config(cls, context: BackendContext) -> ModelConfig:
        options = bare_options(context)
        # Only the signature is wanted: no time for optimizing what is thrown away.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        if has_own_threads(options):
            options.intra_op_num_threads = 1
        path = _model_path(context)
        session = _loaded(context, path, lambda: _new_session(path, options, [(CPU, {})]))
        return context.complete_config(_signature(context, session))

    @classmethod
    def diagnose(cls) -> Sequence[Finding]:
        distribution = diagnose_distributions()
        return (distribution, *diagnose_providers(distribution, bool(visible_gpus())))

    def load(self) -> None:
        self._path = _model_path(self.context)
        session_options(self.context, self._path)  # raises what each instance would
        run_options(self.context)
        unused = unused_accelerators(self.context)
        if unused:
            log.warning(
                "model '%s': no instance is on a GPU, so its GPU accelerators have no effect: %s",
                self.context.model_name,
                ", ".join(unused),
            )

    def create_instance(self, placement: Placement) -> OnnxInstance:
        has_own = wants_graphs(self.context) and placement.kind is DeviceKind.GPU
        is_shared = self.context.bool_parameter(_SHARE_SESSION, True) and not has_own
        with self._lock:
            if is_shared:
                key = (placement.kind, placement.device_id)
                if key not in self._sessions:
                    self._sessions[key] = self._open_session(placement)
                held = self._sessions[key]
            else:
                held = self._open_session(placement)
                self._own_sessions.append(held)
        return OnnxInstance(
            held.session,
            self.context.config,
            held.signature.scalars,
            run_options=run_options(self.context),
            bound=self._bound_run(held, placement) if held.on_gpu else None,
        )

    def unload(self) -> None:
        for held in [*self._sessions.values(), *self._own_sessions]:
            if held.reservation is not None:
                held.reservation.release()
        self._sessions.clear()
        self._own_sessions.clear()

    def _bound_run(self, held: _Session, placement: Placement) -> BoundRun | GraphRun:
        """How the runs of an instance on a GPU go."""
        config = self.context.config
        names = [spec.name for spec in model_outputs(config)]
        device = "cuda", placement.device_id
        if held.has_graphs:
            on_host = host_inputs(held.session)
            if on_host is not None:
                return GraphRun(held.session, names, device, has_ids=True, on_host=on_host, new_options=quiet_run)
            self._warn_of_graphs(f"ONNX Runtime {onnxruntime.__version__} cannot say where inputs lie, 1.23 can")
        pinned = config.optimization.input_pinned_memory if config.optimization is not None else None
        is_pinned = pinned is None or pinned.enable
        staging = Staging(partial(allocate_pinned, device_id=placement.device_id)) if is_pinned else None
        return BoundRun(held.session, names, staging, device)

    def _warn_of_graphs(self, reason: object) -> None:
        log.warning("model '%s': its batches are run without CUDA graphs: %s", self.context.model_name, reason)

    def _open_session(self, placement: Placement) -> _Session:
        """A session on the placement. Raises UnavailableError when it has not got what the config asks for."""
        context = self.context
        wanted = wanted_providers(context, placement)
        there = [*onnxruntime.get_available_providers(), *plugin_providers(wanted)]
        asked = available_providers(context, wanted, there, onnxruntime.__version__)
        on_gpu = placement.kind is DeviceKind.GPU
        reservation = self._reserve(placement) if on_gpu and len(asked) > 1 else None
        missing = preload_libraries() if any(name in (CUDA, TENSORRT) for name, _ in asked) else ""
        try:
            with captures.excluded() if on_gpu else nullcontext():
                session, asked = _loaded(context, self._path, lambda: self._create(asked))
            signature = _signature(context, session)
            context.check_config(signature)
            got = session.get_providers()
            problem = check_session(context, asked, got, missing)
        except BaseException:
            if reservation is not None:
                reservation.release()
            raise
        if problem is not None:
            log.warning("%s; its config allows that", problem)
        if reservation is not None:
            reservation.settle()
        if got != [CPU]:
            _log_assignment(context, placement, session)
        return _Session(session, signature, on_gpu and CUDA in got, reservation, _asks_for_graphs(asked))

    def _create(self, asked: Sequence[Provider]) -> tuple[Any, Sequence[Provider]]:
        """The session, and the providers that it was made with."""
        try:
            return self._new_session(asked), asked
        except (*_LOAD_ERRORS, UnavailableError) as error:
            if _asks_for_graphs(asked) and _NO_CAPTURE in str(error):
                self._warn_of_graphs(error)
                return self._create(
                    [
                        (name, {**settings, ENABLE_CUDA_GRAPH: "0"} if name == CUDA else settings)
                        for name, settings in asked
                    ]
                )
            if not may_fall_back(self.context) or len(asked) == 1:
                if _NO_TENSORRT in str(error):
                    raise no_provider(self.context, TENSORRT, str(error)) from error
                raise
            log.warning(
                "model '%s': no session with %s; its config allows the CPU",
                self.context.model_name,
                asked[0][0],
                exc_info=True,
            )
            return self._new_session([(CPU, {})]), asked

    def _new_session(self, asked: Sequence[Provider]) -> Any:
        options = session_options(self.context, self._path)
        return _new_session(self._path, options, None if add_plugin(options, asked) else asked)

    def _reserve(self, placement: Placement) -> Reservation:
        """The GPU memory that the session will take: from the config, or the size of its weights on disk."""
        context = self.context
        config_bytes = context.int_parameter(_MEMORY_BYTES)
        num_bytes = config_bytes or sum(file.stat().st_size for file in self._path.parent.glob("*") if file.is_file())
        return device_memory(f"cuda:{placement.device_id}").reserve(
            num_bytes,
            available=free_gpu_bytes(placement.device_id),
            least=num_bytes,
            what=f"model '{context.model_name}'",
            purpose=f" on GPU {placement.device_id}",
        )


def _asks_for_graphs(asked: Sequence[Provider]) -> bool:
    return any(name == CUDA and settings.get(ENABLE_CUDA_GRAPH) == "1" for name, settings in asked)


def _new_session(path: Path, options: Any, asked: Sequence[Provider] | None) -> Any:
    """A session with the requested providers only: ONNX Runtime's own fallback is switched off.

    Without a list the options have the providers.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # missing providers are reported before or after this
        return onnxruntime.InferenceSession(path, options, asked and list(asked), enable_fallback=0)


def _log_assignment(context: BackendContext, placement: Placement, session: Any) -> None:
    """Say which provider executes how many nodes, where the library tells."""
    if hasattr(session, "get_provider_graph_assignment_info"):
        counts = nodes_by_provider(session.get_provider_graph_assignment_info())
        shown = ", ".join(f"{provider} {count} nodes" for provider, count in counts.items())
        log.info("model '%s': instance '%s' is executed by %s", context.model_name, placement.name, shown)


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
    check_external_data(path, context.version_directory)
    try:
        return load()
    except UnavailableError:
        raise
    except _LOAD_ERRORS as error:
        num_bytes = path.stat().st_size
        reason = f"ONNX Runtime cannot load {path} ({num_bytes} bytes): {error}"
        if "INVALID_PROTOBUF" in str(error):
            reason = f"{path} ({num_bytes} bytes) is not an ONNX file, or only a part of one: copy or export it again"
        raise InvalidArgumentError(f"model '{context.model_name}' version {context.version}: {reason}") from error


def _wanted_outputs(config: ModelConfig) -> tuple[str, ...]:
    """The outputs to look at; empty for all, when the config leaves it to the file."""
    return tuple(spec.name for spec in model_outputs(config)) if config.output else ()


def _signature(context: BackendContext, session: Any) -> FileSignature:
    try:
        inputs = [spec.name for spec in context.config.input]
        return session_signature(session, inputs, _wanted_outputs(context.config))
    except UnsupportedError as error:
        raise UnsupportedError(f"model '{context.model_name}' version {context.version}: {error}") from error
