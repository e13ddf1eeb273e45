"""Restarts of the processes of a model's instances, as a family of the metrics."""

from __future__ import annotations

from modelserver.telemetry.measurement import ProcessRestarts, RestartReason, restart_family
from tests.support.metrics_pages import render_text


def test_restarts_are_counted_by_reason_from_zero_on() -> None:
    without, restarts = ProcessRestarts(), ProcessRestarts()
    for _ in range(2):
        restarts.expect()  # a model has several instances
        restarts.record(RestartReason.HUNG)
    family = restart_family([({"model": "here"}, without), ({"model": "m"}, restarts)])
    lines = render_text([family]).decode().splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == [
        f'modelserver_model_process_restarts_total{{model="m",reason="{reason}"}} {count}'
        for reason, count in (("exited", 0), ("killed", 0), ("hung", 2), ("not_started", 0))
    ]
