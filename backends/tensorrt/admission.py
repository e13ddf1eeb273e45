"""Whether a model may be loaded here at all: its devices, and whose word there is for code that it brings."""

from __future__ import annotations

from pathlib import Path

from modelserver.backend import BackendContext, ConfigError, InstanceGroupKind, UnsupportedError

# As the PyTorch backend calls it.
ALLOW_NATIVE = "allow-native-code"
# Triton's, for one engine on several GPUs.
_MULTI_DEVICE = "enable_multi_device"


def check_trust(context: BackendContext, plan: Path) -> None:
    """Raise UnsupportedError for an engine that a client brought, unless the operator vouches for those."""
    if context.is_uploaded and not is_on(context, ALLOW_NATIVE):
        raise UnsupportedError(
            f"model '{context.model_name}': {plan.name} came with the request to load it, and an engine is code that "
            "runs on this machine: bring the ONNX file, from which one is built, put the engine into the model "
            "repository, or vouch for whoever may load models with "
            f"--backend-config=tensorrt,{ALLOW_NATIVE}=true"
        )


def check_devices(context: BackendContext) -> None:
    """Raise ConfigError for devices that engines here do not run on."""
    model = f"model '{context.model_name}'"
    for group in context.config.instance_group:
        for device in group.secondary_devices:
            raise ConfigError(
                f"{model}: instance group '{group.name}': secondary device {device.kind.name} {device.device_id}: "
                "engines are run by GPUs alone here, not by DLA cores; remove secondary_devices, and serve an engine "
                "that was built for the GPU"
            )
    if context.bool_parameter(_MULTI_DEVICE):
        raise ConfigError(
            f"{model}: parameter {_MULTI_DEVICE}: an engine is run by one GPU here; remove it, and say "
            "instance_group [ { kind: KIND_GPU gpus: [ 0, 1 ] } ] for an engine on each"
        )


def check_kinds(context: BackendContext) -> None:
    """Raise ConfigError for instances that are not on a GPU."""
    for group in context.config.instance_group:
        if group.kind in (InstanceGroupKind.KIND_CPU, InstanceGroupKind.KIND_MODEL):
            raise ConfigError(
                f"unable to load model '{context.model_name}', TensorRT backend supports only GPU device: instance "
                f"group '{group.name}' is {group.kind.name}; say kind: KIND_GPU"
            )


def plugin_paths(context: BackendContext) -> tuple[str, ...]:
    """Plugin libraries of `--backend-config=tensorrt,plugins=a.so;b.so`. Raises ConfigError if one is missing."""
    paths = tuple(path for path in context.options.get("plugins", "").split(";") if path)
    for path in paths:
        if not Path(path).is_file():
            raise ConfigError(f"--backend-config=tensorrt,plugins: expected files of libraries, found none at '{path}'")
    return paths


def is_on(context: BackendContext, option: str) -> bool:
    """Whether a setting of `--backend-config` says yes."""
    return context.options.get(option, "").lower() in ("true", "1", "yes", "on")
