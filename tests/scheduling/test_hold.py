from __future__ import annotations

import pytest
from support.batching import batching_config, request
from support.manual_loop import ManualLoop

from modelserver.config.schema import ModelDynamicBatching
from modelserver.scheduling.batch import form_batch
from modelserver.scheduling.batcher import Batcher
from modelserver.scheduling.hold import Hold, held_form, hold_from
from modelserver.scheduling.parked_workers import WaitingThread
from modelserver.telemetry.statistics import ModelStatistics
from tests.support.manual_clock import ManualClock


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"TRITONSERVER_DELAY_SCHEDULER": "0"}, None),
        ({"TRITONSERVER_DELAY_SCHEDULER": "soon"}, None),
        ({"TRITONSERVER_DELAY_SCHEDULER": "8"}, Hold(8)),
        ({"TRITONSERVER_DELAY_SCHEDULER": "8", "TRITONSERVER_BACKLOG_DELAY_SCHEDULER": "2"}, Hold(8, 2)),
        ({"TRITONSERVER_BACKLOG_DELAY_SCHEDULER": "2"}, Hold(0, 2)),
    ],
)
def test_the_environment_asks_for_a_hold(environ: dict[str, str], expected: Hold | None) -> None:
    assert hold_from(environ) == expected


def test_nothing_is_taken_until_so_many_wait_and_then_as_ever() -> None:
    clock = ManualClock()
    config = batching_config(4, dynamic_batching=ModelDynamicBatching())
    batcher = Batcher(
        config,
        loop=ManualLoop(clock),
        statistics=ModelStatistics(),
        clock=clock,
        form=held_form(Hold(3), form_batch),
    )
    worker = WaitingThread()
    taken = []
    for _ in range(3):
        assert batcher.try_take(worker) == (None, None)
        batcher.submit(request())
        assert worker.is_woken, "each request is looked at"
    for _ in range(2):
        batch, _ = batcher.try_take(worker)
        assert batch is not None
        taken.append(batch.rows)
        batcher.submit(request())
    assert taken == [3, 1]
