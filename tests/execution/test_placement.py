"""Instance groups -> placements: kinds, several GPUs, names, and what is refused."""

from __future__ import annotations

import re

import pytest

from modelserver.backend import DeviceKind
from modelserver.config.defaults import normalise
from modelserver.config.pbtxt import parse_pbtxt
from modelserver.config.validate import validate
from modelserver.errors import ConfigError
from modelserver.execution.placement import plan_instances

CPU, GPU, MODEL = DeviceKind.CPU, DeviceKind.GPU, DeviceKind.MODEL


def planned(
    groups: str, *, gpu_ids: tuple[int, ...] = (), supports_gpu: bool = True
) -> list[tuple[str, DeviceKind, int]]:
    config = parse_pbtxt(f'name: "m" backend: "b" {groups}', "config.pbtxt").config
    config = normalise(config, model_name="m", supports_gpu=supports_gpu, gpu_ids=gpu_ids, default_cpu_instances=2)
    placements = [plan.placement for plan in plan_instances(config)]
    return [(place.name, place.kind, place.device_id) for place in placements]


@pytest.mark.parametrize(
    ("groups", "gpu_ids", "expected"),
    [
        ("", (), [("m_0", CPU, 0), ("m_1", CPU, 0)]),
        ("", (0, 1), [("m_0_0", GPU, 0), ("m_0_1", GPU, 1)]),
        ("instance_group { kind: KIND_CPU count: 1 }", (0,), [("m_0_0", CPU, 0)]),
        ("instance_group { kind: KIND_AUTO count: 1 }", (), [("m_0_0", CPU, 0)]),
        ("instance_group { kind: KIND_AUTO gpus: [ 1 ] }", (0, 1), [("m_0_0_1", GPU, 1)]),
        (
            "instance_group { kind: KIND_GPU count: 2 gpus: [ 0, 2 ] }",
            (0, 1, 2),
            [("m_0_0_0", GPU, 0), ("m_0_1_0", GPU, 0), ("m_0_0_2", GPU, 2), ("m_0_1_2", GPU, 2)],
        ),
        ("instance_group { kind: KIND_MODEL count: 2 }", (0,), [("m_0_0", MODEL, 0), ("m_0_1", MODEL, 0)]),
        (
            'instance_group [ { name: "big" kind: KIND_GPU gpus: [ 1 ] }, { name: "small" kind: KIND_CPU count: 1 } ]',
            (0, 1),
            [("big_0_1", GPU, 1), ("small_0", CPU, 0)],
        ),
    ],
)
def test_groups_become_placements(
    groups: str, gpu_ids: tuple[int, ...], expected: list[tuple[str, DeviceKind, int]]
) -> None:
    assert planned(groups, gpu_ids=gpu_ids) == expected


def test_a_backend_that_takes_no_gpu_stays_on_the_cpu() -> None:
    assert {kind for _, kind, _ in planned("", gpu_ids=(0,), supports_gpu=False)} == {CPU}


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="is KIND_GPU, but no GPU is visible to the server"):
        planned("instance_group { kind: KIND_GPU }")


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("instance_group { kind: KIND_GPU gpus: [ 3 ] }", r"expected a usable GPU id \(0, 1\), got 3"),
        ("instance_group { kind: KIND_CPU gpus: [ 0 ] }", "instances of KIND_CPU have no GPUs, got 0"),
        ("instance_group { kind: KIND_GPU gpus: [ -1 ] }", "expected a GPU id >= 0, got -1"),
    ],
)
def test_wrong_groups_are_named(groups: str, message: str) -> None:
    config = parse_pbtxt(f'name: "m" backend: "b" {groups}', "config.pbtxt").config
    problems = [problem.message for problem in validate(config, gpu_ids=(0, 1))]
    assert any(re.search(message, problem) for problem in problems), problems


def test_a_model_whose_instances_are_all_passive_is_refused() -> None:
    with pytest.raises(ConfigError, match="every instance group is passive"):
        planned("instance_group { kind: KIND_CPU passive: true }")
