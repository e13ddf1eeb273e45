from __future__ import annotations

import pytest
from support.batching import batching_config, request

from modelserver.config.schema import ModelDynamicBatching, ModelQueuePolicy, TimeoutAction
from modelserver.core.request import LOWEST_PRIORITY
from modelserver.scheduling.admission import PriorityLevels, QueuePolicy


@pytest.mark.parametrize(
    ("default_ns", "can_override", "asked_us", "expected_ns"),
    [
        (0, False, 0, 0),
        (5000, False, 1, 5000),
        (5000, True, 1, 1000),
        (5000, True, 9, 5000),
        (0, True, 9, 9000),
        (0, False, 9, 0),
        (5000, True, 0, 5000),
    ],
)
def test_timeout(default_ns: int, can_override: bool, asked_us: int, expected_ns: int) -> None:
    policy = QueuePolicy(default_timeout_ns=default_ns, allow_timeout_override=can_override)
    assert policy.timeout_ns(request(timeout_us=asked_us)) == expected_ns


def test_levels_have_their_own_policy_or_the_default_one() -> None:
    batching = ModelDynamicBatching(
        priority_levels=3,
        default_priority_level=2,
        default_queue_policy=ModelQueuePolicy(max_queue_size=5),
        priority_queue_policy={1: ModelQueuePolicy(TimeoutAction.DELAY, 7, True, 9)},
    )
    levels = PriorityLevels(batching_config(dynamic_batching=batching), default_max_queue_size=100)
    assert levels.policy_of(1) == QueuePolicy(9, 7000, True, True)
    assert levels.policy_of(2) == levels.policy_of(3) == QueuePolicy(5)
    assert [levels.level_of(request(priority=priority)) for priority in (0, 1, 3, 4, LOWEST_PRIORITY)] == [
        2,
        1,
        3,
        2,
        3,
    ]


def test_without_levels_all_is_one_queue_with_the_servers_bound() -> None:
    levels = PriorityLevels(batching_config(), default_max_queue_size=100)
    assert [levels.level_of(request(priority=priority)) for priority in (0, 1, 3, LOWEST_PRIORITY)] == [1, 1, 1, 1]
    assert levels.policy_of(1) == QueuePolicy(100, is_servers_bound=True)
