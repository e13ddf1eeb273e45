"""Limits on the numbers in a config, so that a number cannot use up all memory: `--config-limits`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from modelserver.config.auto_warmup import AUTO_WARMUP, auto_warmup, warmup_rows
from modelserver.config.problem import Report, key_path
from modelserver.config.schema import InstanceGroupKind, ModelConfig
from modelserver.core.datatype import Datatype
from modelserver.errors import InvalidArgumentError

FLAG = "--config-limits"
# The least memory of a TYPE_STRING element: a pointer and an object.
_STRING_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigLimits:
    """The limits of one model's config; `warmup_bytes` is per request, `state_bytes` per sequence."""

    instances: int = 256
    versions: int = 100
    warmup_requests: int = 10_000
    warmup_bytes: int = 1 << 30
    sequence_slots: int = 100_000
    state_bytes: int = 1 << 30
    priority_levels: int = 2**64 - 1
    preferred_sizes: int = 1_000
    ensemble_steps: int = 256
    histogram_buckets: int = 1_000


def parse_config_limits(text: str) -> ConfigLimits:
    """The limits: the defaults, changed by `NAME=NUMBER[,NAME=NUMBER...]`.

    Raises InvalidArgumentError.
    """
    names = [field.name for field in fields(ConfigLimits)]
    values: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = (piece.strip() for piece in part.partition("="))
        if name not in names or not (number.isascii() and number.isdigit()) or len(number) > 18 or int(number) < 1:
            raise InvalidArgumentError(
                f"{FLAG} expects NAME=NUMBER[,NAME=NUMBER...] with numbers from 1 on and names of "
                f"{', '.join(names)}, got '{part:.60}'"
            )
        if name in values:
            raise InvalidArgumentError(f"{FLAG}: '{name}' is given twice; leave one out")
        values[name] = int(number)
    return ConfigLimits(**values)


def check_limits(config: ModelConfig, limits: ConfigLimits, gpu_ids: Sequence[int] | None, report: Report) -> None:
    """Report the numbers that exceed the limits."""
    num_instances = _check_instances(config, limits, gpu_ids, report)
    _check_warmup(config, limits, num_instances, report)
    _check_auto_warmup(config, limits, report)
    _check_sequences(config, limits, num_instances, report)
    preferred = []
    if config.dynamic_batching is not None:
        path = "dynamic_batching"
        levels = config.dynamic_batching.priority_levels
        _check(report, f"{path}.priority_levels", "priority_levels", levels, limits.priority_levels, "levels")
        preferred.append((path, config.dynamic_batching.preferred_batch_size))
    if config.sequence_batching is not None and config.sequence_batching.oldest is not None:
        preferred.append(("sequence_batching.oldest", config.sequence_batching.oldest.preferred_batch_size))
    for path, sizes in preferred:
        where = f"{path}.preferred_batch_size"
        _check(report, where, "preferred_sizes", len(sizes), limits.preferred_sizes, "sizes")
    if config.ensemble_scheduling is not None:
        num_steps = len(config.ensemble_scheduling.step)
        _check(report, "ensemble_scheduling.step", "ensemble_steps", num_steps, limits.ensemble_steps, "steps")
    policy = config.version_policy
    if policy is not None and policy.specific is not None:
        count = len(policy.specific.versions)
        _check(report, "version_policy.specific.versions", "versions", count, limits.versions, "versions")
    for index, control in enumerate(config.model_metrics.metric_control if config.model_metrics else ()):
        if control.histogram_options is not None:
            where = f"model_metrics.metric_control[{index}].histogram_options.buckets"
            count = len(control.histogram_options.buckets)
            _check(report, where, "histogram_buckets", count, limits.histogram_buckets, "buckets")


def _check(report: Report, path: str, name: str, count: int, limit: int, what: str) -> None:
    if count > limit:
        report.add(path, f"expected at most {limit} {what}, got {count}", f"{FLAG}={name}={count} allows it")


def _check_instances(config: ModelConfig, limits: ConfigLimits, gpu_ids: Sequence[int] | None, report: Report) -> int:
    counts = []
    for group in config.instance_group:
        num_gpus = len(gpu_ids or ()) if group.kind is InstanceGroupKind.KIND_GPU else 0
        counts.append(max(1, group.count) * max(1, len(group.gpus) or num_gpus))
    where = f"instance_group[{_first_beyond(counts, limits.instances)}].count"
    _check(report, where, "instances", sum(counts), limits.instances, "instances in all groups")
    return max(1, min(sum(counts), limits.instances))


def _first_beyond(counts: Sequence[int], limit: int) -> int:
    """The index of the count that lifts the sum above the limit; 0 if none does."""
    sums = itertools.accumulate(counts)
    return next((position for position, total in enumerate(sums) if total > limit), 0)


def _check_warmup(config: ModelConfig, limits: ConfigLimits, num_instances: int, report: Report) -> None:
    counts = [max(1, sample.count) * num_instances for sample in config.model_warmup]
    where = f"model_warmup[{_first_beyond(counts, limits.warmup_requests)}].count"
    what = "requests of all samples to all instances"
    _check(report, where, "warmup_requests", sum(counts), limits.warmup_requests, what)
    for index, sample in enumerate(config.model_warmup):
        rows = max(1, sample.batch_size)
        size = rows * sum(_num_bytes(tensor.data_type, tensor.dims) for tensor in sample.inputs.values())
        where = f"model_warmup[{index}].inputs"
        _check(report, where, "warmup_bytes", size, limits.warmup_bytes, "bytes in a request")


def _check_auto_warmup(config: ModelConfig, limits: ConfigLimits, report: Report) -> None:
    try:
        asked = auto_warmup(config)
    except ValueError:
        return  # reported elsewhere
    if asked is None:
        return
    size = 0
    for tensor in config.input:
        largest = iter([high for _, high in asked.ranges(tensor)])
        dims = [next(largest, 1) if dim == -1 else dim for dim in tensor.dims]
        size += _num_bytes(tensor.data_type, dims)
    size *= max(rows or 1 for rows in warmup_rows(config))
    path = key_path("parameters", AUTO_WARMUP)
    _check(report, path, "warmup_bytes", size, limits.warmup_bytes, "bytes in a request")


def _check_sequences(config: ModelConfig, limits: ConfigLimits, num_instances: int, report: Report) -> None:
    batching = config.sequence_batching
    if batching is None:
        return
    path, slots = "max_batch_size", max(1, config.max_batch_size)
    if batching.oldest is not None and batching.oldest.max_candidate_sequences > 0:
        path = "sequence_batching.oldest.max_candidate_sequences"
        slots = batching.oldest.max_candidate_sequences
    what = "sequences in all instances"
    _check(report, path, "sequence_slots", slots * num_instances, limits.sequence_slots, what)
    size = sum(_num_bytes(state.data_type, state.dims) for state in batching.state)
    _check(report, "sequence_batching.state", "state_bytes", size, limits.state_bytes, "bytes of states in a sequence")


def _num_bytes(datatype: Datatype | None, dims: Iterable[int]) -> int:
    """The bytes of a tensor with these dimensions; variable dimensions count as 1."""
    itemsize = (datatype.itemsize or _STRING_BYTES) if datatype is not None else 1
    return math.prod(max(1, dim) for dim in dims) * itemsize
