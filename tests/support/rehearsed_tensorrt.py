"""TensorRT and TensorRT for RTX on a machine without a GPU, for a rehearsal of the steps of `tests/gpu`.

Their plans hold the ONNX file, and their engines run it by ONNX Runtime, on the device of `support.fake_torch_cuda`. So
the numbers are right only if every call came in order, and whatever was queued was waited for. What TensorRT refuses is
refused: a file of the other library, a variable size without a profile, weights of another type, a context too many.
"""

from __future__ import annotations

import base64
import ctypes
import enum
import gc
import json
import os
import struct
import sys
import weakref
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import onnx
import torch
from modelserver_backends.tensorrt import device, driver
from modelserver_backends.tensorrt.engine_info import DATATYPES, EngineInfo, IoTensor, Range
from support.cpu_tensorrt import Context, Engine, torch_of
from support.fake_torch_cuda import FakeGpu

from modelserver.telemetry import gpu

_PACKAGES = Path(__file__).with_name("rehearsed_packages")
_HEAD = struct.Struct("<4sIQQ4B")
_VERSIONS = {"tensorrt": (b"ftrt", (11, 4, 0, 106)), "tensorrt_rtx": (b"vtrt", (1, 7, 1, 116))}
_TYPES = {
    onnx.TensorProto.FLOAT: "FLOAT",
    onnx.TensorProto.FLOAT16: "HALF",
    onnx.TensorProto.INT8: "INT8",
    onnx.TensorProto.INT32: "INT32",
    onnx.TensorProto.INT64: "INT64",
    onnx.TensorProto.BOOL: "BOOL",
}
_FREE_BYTES, _OBJECT_BYTES = 2 << 30, 16 << 20
GPU = FakeGpu()
# Engines and contexts, whose memory is not given back before they are gone.
_ALIVE: weakref.WeakSet[Any] = weakref.WeakSet()
_device_files: list[TemporaryDirectory[str]] = []


def install() -> None:
    """For the rest of this process, and for those that it starts."""
    if str(_PACKAGES) not in sys.path:
        paths = [str(_PACKAGES), str(_PACKAGES.parents[1])]
        sys.path[:0] = paths
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    libraries = SimpleNamespace(**{name: getattr(ctypes, name) for name in ("byref", "c_char_p", "c_int")})
    libraries.CDLL = lambda _name: _Driver()
    fake = torch_of(GPU)
    fake.cuda.mem_get_info = _memory
    vars(driver)["ctypes"] = libraries
    vars(device)["_torch"] = lambda: fake
    torch.cuda.mem_get_info = _memory
    if not _device_files:
        _device_files.append(TemporaryDirectory(prefix="modelserver-dev-"))
        Path(_device_files[0].name, "nvidia0").touch()
    gpu.DEVICE_FILES = Path(_device_files[0].name)


def _memory(_device: int = 0) -> tuple[int, int]:
    gc.collect()
    return _FREE_BYTES - _OBJECT_BYTES * len(_ALIVE), _FREE_BYTES


class _Driver:
    def cuInit(self, _flags: int) -> int:  # noqa: N802 - the driver's names
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 1
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = 13000
        return 0


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class Base:
    """Of what our side derives from."""


DataType = enum.Enum("DataType", list(DATATYPES))
TensorIOMode = enum.Enum("TensorIOMode", ["INPUT", "OUTPUT"])
TensorLocation = enum.Enum("TensorLocation", ["DEVICE", "HOST"])
TensorFormat = enum.Enum("TensorFormat", ["LINEAR", "CHW32"])
Strategy = enum.Enum("Strategy", ["STATIC", "ON_PROFILE_CHANGE", "USER_MANAGED"])
BuilderFlag = enum.Enum(
    "BuilderFlag", ["TF32", "VERSION_COMPATIBLE", "SPARSE_WEIGHTS", "STRIP_PLAN", "REFIT", "WEIGHT_STREAMING"]
)


class Tensor:
    def __init__(self, info: Any, *, is_input: bool, is_shape: bool) -> None:
        self.name = info.name
        self.dtype = DataType[_TYPES[info.type.tensor_type.elem_type]]
        dims = info.type.tensor_type.shape.dim
        self.shape = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in dims)
        self.is_network_input = is_input
        self.is_shape_tensor = is_shape


class Network:
    def __init__(self, flags: int) -> None:
        assert flags == 1, "precision is the file's"
        self.model: Any = None

    def tensors(self, *, is_input: bool) -> list[Tensor]:
        if self.model is None:
            return []
        graph = self.model.graph
        shapes = {node.input[1] for node in graph.node if node.op_type in ("Reshape", "Expand")}
        listed = graph.input if is_input else graph.output
        return [Tensor(one, is_input=is_input, is_shape=is_input and one.name in shapes) for one in listed]

    @property
    def num_inputs(self) -> int:
        return len(self.tensors(is_input=True))

    @property
    def num_outputs(self) -> int:
        return len(self.tensors(is_input=False))

    def get_input(self, index: int) -> Tensor:
        return self.tensors(is_input=True)[index]

    def get_output(self, index: int) -> Tensor:
        return self.tensors(is_input=False)[index]


class OnnxParser:
    num_errors = 0

    def __init__(self, network: Network, _logger: Any) -> None:
        self._network = network

    def parse_from_file(self, path: str) -> bool:
        self._network.model = onnx.load(path)
        return True


class Profile:
    def __init__(self) -> None:
        self.bounds: dict[str, Any] = {}

    def set_shape(self, name: str, low: Any, best: Any, high: Any) -> None:
        self.bounds[name] = [list(low), list(best), list(high)]

    set_shape_input = set_shape


class Config:
    __slots__ = (
        "builder_optimization_level",
        "flags",
        "num_compute_capabilities",
        "plugins_to_serialize",
        "profiles",
        "profiling_verbosity",
        "progress_monitor",
        "timing_cache",
    )

    def __init__(self) -> None:
        self.flags = {BuilderFlag.TF32}
        self.profiles: list[Profile] = []
        self.progress_monitor: Any = None

    def set_flag(self, flag: Any) -> None:
        self.flags.add(BuilderFlag(flag))

    def clear_flag(self, flag: Any) -> None:
        self.flags.discard(BuilderFlag(flag))

    def create_timing_cache(self, content: bytes) -> Any:
        return SimpleNamespace(serialize=lambda: b"timings") if content in (b"", b"timings") else None

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        assert cache is not None, "the binding takes a reference"
        self.timing_cache = cache
        return not ignore_mismatch

    def get_timing_cache(self) -> Any:
        return self.timing_cache

    def add_optimization_profile(self, profile: Profile) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1


class Builder:
    name = ""  # of the library

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def create_network(self, flags: int) -> Network:
        return Network(flags)

    def create_builder_config(self) -> Config:
        return Config()

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Network, config: Config) -> bytes | None:
        inputs = network.tensors(is_input=True)
        for tensor in inputs:
            if -1 in tensor.shape and not all(
                tensor.name in profile.bounds for profile in config.profiles or [Profile()]
            ):
                self._logger.log(ILogger.ERROR, f"input {tensor.name} is missing dimensions in a profile")
                return None
        config.progress_monitor.phase_start("Building", None, 1)
        config.progress_monitor.step_complete("Building", 0)
        config.progress_monitor.phase_finish("Building")
        content = {
            "onnx": base64.b64encode(network.model.SerializeToString()).decode(),
            "profiles": [profile.bounds for profile in config.profiles],
            "flags": [flag.name for flag in config.flags],
        }
        body = json.dumps(content).encode()
        magic, version = _VERSIONS[self.name]
        return _HEAD.pack(magic, 0, 1, _HEAD.size + len(body), *version) + body


class Runtime:
    engine_host_code_allowed = False

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def deserialize_cuda_engine(self, plan: bytes) -> Any:
        assert GPU.is_active, "the device is not this thread's current one"
        magic, version = _VERSIONS[self.name]
        if _HEAD.unpack_from(plan)[0] != magic or _HEAD.unpack_from(plan)[4:] != version:
            self.logger.log(ILogger.ERROR, "Serialization assertion header.magicTag == kEXPECTED_MAGIC_TAG failed.")
            return None
        return PlanEngine(json.loads(plan[_HEAD.size :]), self, has_own_graphs=self.name == "tensorrt_rtx")

    name = ""  # of the library


class RtxRuntime(Runtime):
    engine_header_size = 64

    def get_engine_validity(self, head: bytes) -> tuple[str, int]:
        assert len(head) == self.engine_header_size
        return "valid", 0


class PlanContext(Context):
    def __init__(self, engine: PlanEngine, strategy: Any) -> None:
        super().__init__(engine, brings_memory=strategy is Strategy.USER_MANAGED)
        _ALIVE.add(self)
        engine.contexts.add(self)

    def infer_shapes(self) -> list[str]:
        try:
            return super().infer_shapes()
        except Exception as error:  # ONNX Runtime's, in place of TensorRT's
            self._refuse(str(error))
            raise RuntimeError("infer_shapes error code: -1") from error

    def execute_async_v3(self, stream: int) -> bool:
        assert isinstance(self._engine, PlanEngine)
        if self._engine.lacks_weights:
            return self._refuse("the engine has no weights: refit it first")
        return super().execute_async_v3(stream)


class PlanEngine(Engine):
    """As the bindings show one. `session` runs it."""

    device_memory_size_v2 = 4096

    def __init__(self, content: Any, runtime: Runtime, *, has_own_graphs: bool) -> None:
        import onnxruntime

        self.runtime = runtime  # the binding keeps it
        self.model = onnx.load_from_string(base64.b64decode(content["onnx"]))
        self.contexts: weakref.WeakSet[Any] = weakref.WeakSet()
        self.lacks_weights = "STRIP_PLAN" in content["flags"]
        self.has_own_graphs = has_own_graphs
        network = Network(1)
        network.model = self.model
        tensors = [*network.tensors(is_input=True), *network.tensors(is_input=False)]
        found = tuple(
            IoTensor(one.name, one.is_network_input, DATATYPES[one.dtype.name], one.shape, one.is_shape_tensor)
            for one in tensors
        )
        profiles = tuple(
            {one.name: Range(*map(tuple, bounds.get(one.name, [one.dims] * 3))) for one in found if one.is_input}
            for bounds in content["profiles"] or [{}]
        )
        growing = frozenset(name for node in self.model.graph.node if node.op_type == "NonZero" for name in node.output)
        session = onnxruntime.InferenceSession(self.model.SerializeToString(), providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        super().__init__(
            EngineInfo(found, profiles),
            lambda inputs: dict(zip(names, session.run(names, dict(inputs)), strict=True)),
            GPU,
            growing,
            lambda reason: runtime.logger.log(ILogger.ERROR, reason),
        )
        sizes = [len(one.raw_data) for one in self.model.graph.initializer]
        self.streamable_weights_size = sum(sizes) if "WEIGHT_STREAMING" in content["flags"] else 0
        self._budget = self.streamable_weights_size
        self.num_io_tensors, self.num_optimization_profiles = len(found), len(profiles)
        _ALIVE.add(self)

    @property
    def weight_streaming_budget_v2(self) -> int:
        return self._budget

    @weight_streaming_budget_v2.setter
    def weight_streaming_budget_v2(self, num_bytes: int) -> None:
        if self.contexts or num_bytes < 0:  # a refusal is only in the log
            self.tell("the weight streaming budget cannot be set")
            return
        self._budget = num_bytes
        self.streams_weights = num_bytes < self.streamable_weights_size

    def get_tensor_name(self, index: int) -> str:
        return self.info.tensors[index].name

    def get_tensor_mode(self, name: str) -> Any:
        return TensorIOMode.INPUT if self._tensor(name).is_input else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return next(one for one in DataType if DATATYPES[one.name] is self._tensor(name).datatype)

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).dims

    def is_shape_inference_io(self, name: str) -> bool:
        return self._tensor(name).is_shape_tensor

    def get_tensor_location(self, name: str) -> Any:
        return TensorLocation.HOST if self._tensor(name).is_shape_tensor else TensorLocation.DEVICE

    def get_tensor_format(self, _name: str) -> Any:
        return TensorFormat.LINEAR

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        bounds = self.info.profiles[profile][name]
        return [bounds.min, bounds.opt, bounds.max]

    def get_tensor_profile_values(self, profile: int, name: str) -> list[tuple[int, ...]]:
        assert self.is_shape_inference_io(name)
        return self.get_tensor_profile_shape(name, profile)

    def create_runtime_config(self) -> RuntimeConfig:
        assert self.has_own_graphs, "only TensorRT for RTX is configured so"
        return RuntimeConfig()

    def create_execution_context(self, wanted: Any) -> Context:
        if self.has_own_graphs:
            assert isinstance(wanted, RuntimeConfig)
            return PlanContext(self, wanted.strategy)
        return PlanContext(self, Strategy(wanted))

    def _tensor(self, name: str) -> IoTensor:
        return next(one for one in self.info.tensors if one.name == name)


class RuntimeConfig:
    __slots__ = ("cuda_graph_strategy", "strategy")

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.strategy = Strategy(strategy)

    def create_runtime_cache(self) -> RuntimeCache:
        return RuntimeCache()

    def set_runtime_cache(self, cache: Any) -> bool:
        return isinstance(cache, RuntimeCache)


class RuntimeCache:
    def deserialize(self, content: bytes) -> bool:
        assert GPU.is_active, "a current context is compared with the cache's"
        return content == b"kernels"

    def serialize(self) -> bytes:
        assert GPU.is_active, "the device is not this thread's current one"
        return b"kernels"


class Refitter:
    def __init__(self, engine: PlanEngine, logger: Any) -> None:
        self.engine, self.logger, self.is_complete = engine, logger, False

    def refit_cuda_engine(self) -> bool:
        self.engine.lacks_weights = not self.is_complete
        return self.is_complete


class OnnxParserRefitter:
    def __init__(self, refitter: Refitter, logger: Any) -> None:
        self._refitter, self._logger = refitter, logger

    def refit_from_file(self, path: str) -> bool:
        given = {one.name: one.data_type for one in onnx.load(path).graph.initializer}
        wanted = {one.name: one.data_type for one in self._refitter.engine.model.graph.initializer}
        self._refitter.is_complete = given == wanted
        if given != wanted:
            self._logger.log(ILogger.ERROR, "the refit weights have another type than the engine's")
        return self._refitter.is_complete


def library(name: str) -> dict[str, Any]:
    """The names of a module."""
    is_rtx = name == "tensorrt_rtx"
    found: dict[str, Any] = {
        "__version__": ".".join(map(str, _VERSIONS[name][1])),
        "Builder": type("Builder", (Builder,), {"name": name}),
        "BuilderFlag": BuilderFlag,
        "ExecutionContextAllocationStrategy": Strategy,
        "ILogger": ILogger,
        "IOutputAllocator": Base,
        "IProgressMonitor": Base,
        "NetworkDefinitionCreationFlag": enum.IntEnum("NetworkDefinitionCreationFlag", {"STRONGLY_TYPED": 0}),
        "OnnxParser": OnnxParser,
        "OnnxParserRefitter": OnnxParserRefitter,
        "ProfilingVerbosity": enum.Enum("ProfilingVerbosity", ["DETAILED"]),
        "Refitter": Refitter,
        "Runtime": type("Runtime", (RtxRuntime if is_rtx else Runtime,), {"name": name}),
        "TensorFormat": TensorFormat,
        "TensorIOMode": TensorIOMode,
    }
    if is_rtx:
        found["CudaGraphStrategy"] = enum.Enum("CudaGraphStrategy", ["WHOLE_GRAPH_CAPTURE"])
        found["EngineValidity"] = SimpleNamespace(INVALID="invalid")
    else:
        found["init_libnvinfer_plugins"] = lambda logger, namespace: True
    return found
