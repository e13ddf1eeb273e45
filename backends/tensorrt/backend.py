"""TensorRT models: one engine per device, shared by the instances on it.

Nothing here imports TensorRT or torch before a GPU has been seen: a machine without one refuses the model, and goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from modelserver.backend import (
    Backend,
    BackendContext,
    DeviceKind,
    Finding,
    InstanceGroupKind,
    InvalidArgumentError,
    ModelConfig,
    ModelInstanceGroup,
    Placement,
    Reservation,
    UnavailableError,
    UnsupportedError,
    device_memory,
)

from .admission import ALLOW_NATIVE, check_devices, check_kinds, check_trust, is_on, plugin_paths
from .completion import check_against_engine, complete_from_engine, complete_from_onnx
from .device import Device
from .driver import find_problem, require_gpu
from .engine import EngineSettings, LoadedEngine, load_engine
from .engine_info import EngineInfo
from .findings import find_state
from .graph_rules import graph_shapes
from .instance import TensorRTInstance
from .instance_settings import InstanceSettings, instance_settings
from .model_build import PreparedEngine, prepare_engine
from .plan import read_header
from .profile_choice import listed_profiles
from .runtime_cache import RuntimeCache
from .sidecar import read_sidecar
from .source import ModelSource, build_source, find_source

log = logging.getLogger(__name__)

_STRIPPED = "strip"


class TensorRTBackend(Backend):
    """One version of a TensorRT model."""

    model_filenames = ("model.plan",)
    extra = "tensorrt"
    supports_gpu = True
    option_names = frozenset(
        {
            "plugins",
            "version-compatible",
            "engine-cache-dir",
            "engine-cache-bytes",
            "build-timeout-s",
            ALLOW_NATIVE,
            # Triton's, which change how its scheduler feeds instances: ours has a thread for each of them.
            "execution-policy",
            "coalesce-request-input",
        }
    )
    acts_on = frozenset(
        {
            "cc_model_filenames",
            "input.is_shape_tensor",
            "output.is_shape_tensor",
            "instance_group.profile",
            "instance_group.secondary_devices",
            "optimization.cuda",
            "optimization.priority",
            "optimization.input_pinned_memory",
            "optimization.output_pinned_memory",
        }
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._lock = threading.Lock()  # guards the three below: instances may be created at once
        self._engines: dict[int, LoadedEngine] = {}
        self._kernels: dict[int, RuntimeCache] = {}
        self._reservations: list[Reservation] = []

    @classmethod
    def complete_config(cls, context: BackendContext) -> ModelConfig:
        has_gpu = not find_problem()
        source = find_source(context, _first_capability(context) if has_gpu else "")
        if source.plan is None:
            assert source.onnx_path is not None, "one of the two was found"
            onnx = build_source(context, source.onnx_path, plugin_paths(context))
            return complete_from_onnx(context, onnx.onnx, onnx.largest_batch)
        check_trust(context, source.plan)
        read_header(source.plan)
        info = _known_info(context, source.plan, has_gpu=has_gpu)
        if info is None:
            return context.config
        return complete_from_engine(context, info, _all_profiles(context.config, info))

    @classmethod
    def diagnose(cls) -> Sequence[Finding]:
        return find_state()

    def load(self) -> None:
        context = self.context
        if not context.config.cc_model_filenames:
            # Problems of the files are reported first, because they exist on every machine.
            source = find_source(context)
            if source.plan is not None:
                check_trust(context, source.plan)
                read_header(source.plan)
            elif source.onnx_path is not None:
                build_source(context, source.onnx_path, plugin_paths(context))
        check_devices(context)
        require_gpu(context.model_name)
        check_kinds(context)

    def create_instance(self, placement: Placement) -> TensorRTInstance:
        if placement.kind is not DeviceKind.GPU:
            raise UnsupportedError(
                f"unable to load model '{self.context.model_name}', TensorRT backend supports only GPU device: "
                f"instance '{placement.name}' is {placement.kind.value}"
            )
        with self._lock:
            loaded = self._engines.get(placement.device_id) or self._load_engine(placement.device_id)
            kernels = self._kernels[placement.device_id]
        group = _group_of(self.context.config, placement)
        profiles = listed_profiles(group.profile, len(loaded.info.profiles), f"'{placement.name}'")
        graphs, warnings = graph_shapes(self.context.config, loaded.info)
        for warning in warnings:
            log.warning("model '%s': %s", self.context.model_name, warning)
        settings: InstanceSettings = instance_settings(self.context, profiles, graphs)
        return TensorRTInstance(loaded, self.context.config, settings, kernels, name=placement.name)

    def unload(self) -> None:
        for device_id, loaded in self._engines.items():
            with loaded.device.activate():
                self._kernels[device_id].save()
            loaded.close()
        for reservation in self._reservations:
            reservation.release()
        self._kernels.clear()
        self._engines.clear()
        self._reservations.clear()

    def _load_engine(self, device_id: int) -> LoadedEngine:
        """The engine for a device; hold `_lock`."""
        context = self.context
        device = Device(device_id)
        source = find_source(context, device.compute_capability)
        prepared = self._prepare(source, device)
        loaded = self._deserialize(prepared.plan, device, source)
        if loaded is None:
            # The cached engine does not run: build it again.
            prepared.forget()
            prepared = self._prepare(source, device)
            loaded = self._deserialize(prepared.plan, device, source, is_last=True)
            assert loaded is not None, "the last attempt gives an engine or raises"
        check_against_engine(context, loaded.info, _all_profiles(context.config, loaded.info))
        self._engines[device_id] = loaded
        self._kernels[device_id] = RuntimeCache(prepared.kernels)
        return loaded

    def _prepare(self, source: ModelSource, device: Device) -> PreparedEngine:
        if source.plan is not None:
            check_trust(self.context, source.plan)
            return PreparedEngine(source.plan)
        assert source.onnx_path is not None, "one of the two was found"
        build = build_source(self.context, source.onnx_path, plugin_paths(self.context))
        return prepare_engine(self.context, build, device)

    def _deserialize(
        self, plan: Path, device: Device, source: ModelSource, *, is_last: bool = False
    ) -> LoadedEngine | None:
        """The engine, or None if a plan that we built ourselves does not load and may be built again."""
        context = self.context
        num_bytes, settings = plan.stat().st_size, _engine_settings(context, source)
        if settings.weight_streaming_bytes is not None:
            num_bytes = min(num_bytes, settings.weight_streaming_bytes)  # the other weights stay with the host
        reservation = device_memory(device.name).reserve(
            num_bytes,
            available=device.free_bytes(),
            least=num_bytes,
            what=f"model '{context.model_name}' on {device.name}",
            purpose=" for its engine",
        )
        try:
            loaded = load_engine(plan, device, settings, name=context.model_name)
        except InvalidArgumentError as error:
            reservation.release()
            if is_last or source.plan is not None:
                raise
            log.warning("%s does not load and is built again: %s", plan, error.message)
            return None
        except BaseException:
            reservation.release()
            raise
        reservation.settle()
        self._reservations.append(reservation)
        return loaded


def _engine_settings(context: BackendContext, source: ModelSource) -> EngineSettings:
    budget = context.parameter("weight_streaming_budget")
    return EngineSettings(
        plugin_paths(context),
        is_on(context, "version-compatible"),
        context.int_parameter("weight_streaming_budget") if budget else None,
        source.onnx_path if context.parameter("weights") == _STRIPPED else None,
        context.parameter("precision", "keep"),
    )


def _known_info(context: BackendContext, plan: Path, *, has_gpu: bool) -> EngineInfo | None:
    """The description of a plan, from its sidecar, or read on a GPU; None without either if the config is complete."""
    sidecar = read_sidecar(plan)
    if sidecar is not None:
        return sidecar.info
    config = context.config
    if has_gpu and not _is_cpu_only(config):
        loaded = load_engine(
            plan, Device(_first_gpu(config)), _engine_settings(context, ModelSource(plan)), name=context.model_name
        )
        try:
            return loaded.info
        finally:
            loaded.close()
    if config.input and config.output:
        return None
    raise UnavailableError(
        f"model '{context.model_name}': {plan} tells its inputs and outputs on a GPU only "
        f"({find_problem() or 'KIND_CPU'}): list them in config.pbtxt, or put the .json file of modelserver "
        "build-engine beside the plan"
    )


def _all_profiles(config: ModelConfig, info: EngineInfo) -> tuple[int, ...]:
    """The profiles that any instance group uses."""
    found: list[int] = []
    for group in config.instance_group or (ModelInstanceGroup(),):
        found += listed_profiles(group.profile, len(info.profiles), f"'{group.name or config.name}'")
    return tuple(dict.fromkeys(found))


def _group_of(config: ModelConfig, placement: Placement) -> ModelInstanceGroup:
    """The group that a placement is of, by its name `<group>_<index>_<device>`."""
    suffix = f"_{placement.index}_{placement.device_id}"
    name = placement.name.removesuffix(suffix)
    return next((group for group in config.instance_group if group.name == name), ModelInstanceGroup())


def _is_cpu_only(config: ModelConfig) -> bool:
    groups = config.instance_group
    return bool(groups) and groups[0].kind is InstanceGroupKind.KIND_CPU


def _first_gpu(config: ModelConfig) -> int:
    return next((gpu for group in config.instance_group for gpu in group.gpus), 0)


def _first_capability(context: BackendContext) -> str:
    """The compute capability of the first GPU, if the config chooses files by it."""
    if not context.config.cc_model_filenames:
        return ""
    return Device(_first_gpu(context.config)).compute_capability
