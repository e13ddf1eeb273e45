"""Instance groups of a config -> placements of instances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from modelserver.backend import DeviceKind, Placement
from modelserver.config.schema import InstanceGroupKind, ModelConfig, ModelInstanceGroup
from modelserver.errors import ConfigError

# A config that was not normalised may still say AUTO, which then means a CPU.
_DEVICE_KINDS = {
    InstanceGroupKind.KIND_AUTO: DeviceKind.CPU,
    InstanceGroupKind.KIND_CPU: DeviceKind.CPU,
    InstanceGroupKind.KIND_GPU: DeviceKind.GPU,
    InstanceGroupKind.KIND_MODEL: DeviceKind.MODEL,
}


@dataclass(frozen=True, slots=True)
class InstancePlan:
    """One instance that a config asks for. Equal plans mean that an instance can stay as it is.

    `group` is its group without the fields that only decide the number of instances.
    """

    placement: Placement
    group: ModelInstanceGroup

    @property
    def is_passive(self) -> bool:
        return self.group.passive

    @property
    def description(self) -> tuple[DeviceKind, int, ModelInstanceGroup]:
        """The part that matters to an instance: everything but its name, and its number in the group."""
        return self.placement.kind, self.placement.device_id, replace(self.group, name="")


def reuse(plans: Sequence[InstancePlan], existing: Sequence[InstancePlan]) -> list[InstancePlan | None]:
    """For each plan the existing one whose instance can stay for it: the same plan, or one of the same description.

    None for plans that need a new instance. No existing plan is used twice.
    """
    left = dict.fromkeys(existing)
    found: list[InstancePlan | None] = []
    for plan in plans:
        found.append(plan if plan in left else None)
        left.pop(plan, None)
    by_description: dict[object, list[InstancePlan]] = {}
    for plan in left:
        by_description.setdefault(plan.description, []).append(plan)
    for position, plan in enumerate(plans):
        if found[position] is None and (alike := by_description.get(plan.description)):
            found[position] = alike.pop(0)
    return found


def plan_instances(config: ModelConfig) -> tuple[InstancePlan, ...]:
    """Every instance of the config, named `<group>_<index>`, on a GPU `<group>_<index>_<device>`.

    Raises ConfigError when a group wants a GPU and names none, or when no instance would take requests.
    """
    groups = config.instance_group or (ModelInstanceGroup(config.name),)
    plans: list[InstancePlan] = []
    for number, group in enumerate(groups):
        name = group.name or f"{config.name}_{number}"
        kept = replace(group, name=name, count=0, gpus=())
        plans += [InstancePlan(placement, kept) for placement in _placements(config.name, name, group)]
    if all(plan.is_passive for plan in plans):
        raise ConfigError(
            f"model '{config.name}': every instance group is passive, so nothing would answer requests; "
            "let at least one group be active"
        )
    return tuple(plans)


def _placements(model_name: str, group_name: str, group: ModelInstanceGroup) -> list[Placement]:
    kind = _DEVICE_KINDS[group.kind]
    indices = range(max(1, group.count))
    if kind is not DeviceKind.GPU:
        return [Placement(f"{group_name}_{index}", kind, 0, index) for index in indices]
    if not group.gpus:
        raise ConfigError(
            f"model '{model_name}': instance group '{group_name}' is KIND_GPU, but no GPU is visible to the server; "
            "use KIND_CPU, or make a GPU visible (nvidia-smi, CUDA_VISIBLE_DEVICES)"
        )
    return [Placement(f"{group_name}_{index}_{gpu}", kind, gpu, index) for gpu in group.gpus for index in indices]
