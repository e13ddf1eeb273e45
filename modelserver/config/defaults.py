"""Fills in the defaults of a config, so that the rest of the server reads values instead of rules.

The result is what the config endpoints show. Nothing is checked here; `validate` does that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from modelserver.config.schema import (
    InstanceGroupKind,
    ModelConfig,
    ModelDynamicBatching,
    ModelInstanceGroup,
    ModelOptimizationPolicy,
    ModelSequenceBatching,
    ModelTransactionPolicy,
    ModelVersionPolicy,
    PinnedMemoryBuffer,
    SequenceStrategyDirect,
    SequenceStrategyOldest,
    VersionPolicyLatest,
)

ENSEMBLE = "ensemble"

# The older `platform:` names and their backends.
BACKENDS: Mapping[str, str] = {
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "tensorrt_plan": "tensorrt",
    "torch_aoti": "pytorch",
}


DEFAULT_SEQUENCE_IDLE_US = 1_000_000


@dataclass(frozen=True, slots=True)
class _Devices:
    """The facts needed to resolve instance groups."""

    default_cpu_instances: int
    supports_gpu: bool
    gpu_ids: tuple[int, ...]


def normalise(
    config: ModelConfig,
    *,
    model_name: str,
    default_model_filename: str = "",
    default_cpu_instances: int = 1,
    supports_gpu: bool = False,
    gpu_ids: Sequence[int] = (),
) -> ModelConfig:
    """The config with all defaults filled in; normalising again changes nothing.

    `default_model_filename` ("": the backend has no single one), `default_cpu_instances` and `supports_gpu` are the
    backend's, `gpu_ids` the devices that may be used.
    A group with unavailable GPUs stays unchanged: `validate` reports it.
    """
    config = replace(
        config,
        name=config.name or model_name,
        version_policy=_version_policy(config.version_policy),
        dynamic_batching=_dynamic_batching(config.dynamic_batching, config.max_batch_size),
        sequence_batching=_sequence_batching(config.sequence_batching, config.max_batch_size),
    )
    if config.is_ensemble:
        policy = config.model_transaction_policy or ModelTransactionPolicy()
        platform = config.platform if config.backend else config.platform or ENSEMBLE
        return replace(config, platform=platform, model_transaction_policy=policy)
    devices = _Devices(default_cpu_instances, supports_gpu, tuple(gpu_ids))
    # Triton's naming: a missing name becomes the model's own name.
    groups = config.instance_group or (ModelInstanceGroup(config.name),)
    return replace(
        config,
        backend=config.backend or BACKENDS.get(config.platform, ""),
        default_model_filename=config.default_model_filename or default_model_filename,
        optimization=_optimization(config.optimization or ModelOptimizationPolicy()),
        instance_group=tuple(
            _instance_group(group, f"{config.name}_{index}", devices) for index, group in enumerate(groups)
        ),
    )


def _version_policy(policy: ModelVersionPolicy | None) -> ModelVersionPolicy:
    if policy is not None and (policy.all is not None or policy.specific is not None):
        return policy
    num_versions = policy.latest.num_versions if policy is not None and policy.latest is not None else 0
    return ModelVersionPolicy(latest=VersionPolicyLatest(num_versions or 1))


def _preferred(sizes: tuple[int, ...], max_batch_size: int) -> tuple[int, ...]:
    return sizes or ((max_batch_size,) if max_batch_size > 0 else ())


def _dynamic_batching(batching: ModelDynamicBatching | None, max_batch_size: int) -> ModelDynamicBatching | None:
    if batching is None:
        return None
    return replace(batching, preferred_batch_size=_preferred(batching.preferred_batch_size, max_batch_size))


def _sequence_batching(batching: ModelSequenceBatching | None, max_batch_size: int) -> ModelSequenceBatching | None:
    if batching is None:
        return None
    direct, oldest = batching.direct, batching.oldest
    if direct is None and oldest is None:
        direct = SequenceStrategyDirect()
    return replace(
        batching,
        direct=direct,
        oldest=None if oldest is None else _oldest(oldest, max_batch_size),
        max_sequence_idle_microseconds=batching.max_sequence_idle_microseconds or DEFAULT_SEQUENCE_IDLE_US,
    )


def _oldest(oldest: SequenceStrategyOldest, max_batch_size: int) -> SequenceStrategyOldest:
    return replace(
        oldest,
        max_candidate_sequences=oldest.max_candidate_sequences or max(1, max_batch_size),
        preferred_batch_size=_preferred(oldest.preferred_batch_size, max_batch_size),
    )


def _optimization(policy: ModelOptimizationPolicy) -> ModelOptimizationPolicy:
    enabled = PinnedMemoryBuffer(enable=True)
    return replace(
        policy,
        input_pinned_memory=policy.input_pinned_memory or enabled,
        output_pinned_memory=policy.output_pinned_memory or enabled,
    )


def _instance_group(group: ModelInstanceGroup, name: str, devices: _Devices) -> ModelInstanceGroup:
    kind = group.kind
    if kind is InstanceGroupKind.KIND_AUTO:
        uses_gpu = bool(group.gpus) or (devices.supports_gpu and bool(devices.gpu_ids))
        kind = InstanceGroupKind.KIND_GPU if uses_gpu else InstanceGroupKind.KIND_CPU
    default_count = devices.default_cpu_instances if kind is InstanceGroupKind.KIND_CPU else 1
    gpus = group.gpus
    if kind is InstanceGroupKind.KIND_GPU and not gpus:
        gpus = devices.gpu_ids
    limiter = group.rate_limiter
    if limiter is not None:
        limiter = replace(limiter, priority=limiter.priority or 1)
    return replace(
        group,
        name=group.name or name,
        kind=kind,
        count=group.count or default_count,
        gpus=gpus,
        rate_limiter=limiter,
    )
