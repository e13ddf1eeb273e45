from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from modelserver.frontends.http.documents import index_document, statistics_document
from modelserver.repository.state import IndexEntry, ModelState
from modelserver.telemetry.host import MemoryUsage
from modelserver.telemetry.statistics import BatchTiming, ModelStatistics
from modelserver.telemetry.statistics_snapshot import FailureReason


def test_index_rows_leave_out_what_is_unknown() -> None:
    rows = index_document(
        [
            IndexEntry("a", 2, ModelState.READY),
            IndexEntry("b", 1, ModelState.UNAVAILABLE, "unloaded"),
            IndexEntry("c", None, ModelState.UNKNOWN),
        ]
    )
    assert rows == [
        {"name": "a", "version": "2", "state": "READY"},
        {"name": "b", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"},
        {"name": "c"},
    ]


def test_statistics_have_every_field_of_the_extension() -> None:
    statistics = ModelStatistics()
    statistics.record_batch(4, BatchTiming(10, 20, 30), queue_ns=[1, 2], request_ns=[100, 200])
    statistics.record_failures(FailureReason.BACKEND, [7])
    document = statistics_document(
        [
            (
                cast("Any", SimpleNamespace(name="m", version=3, memory_usage=lambda: [MemoryUsage("CPU", 0, 5)])),
                statistics.snapshot(),
            )
        ]
    )
    (model,) = document["model_stats"]
    assert model.pop("last_inference") > 1_600_000_000_000
    assert model == {
        "name": "m",
        "version": "3",
        "inference_count": 4,
        "execution_count": 1,
        "inference_stats": {
            "success": {"count": 2, "ns": 300},
            "fail": {"count": 1, "ns": 7},
            "queue": {"count": 2, "ns": 3},
            "compute_input": {"count": 2, "ns": 20},
            "compute_infer": {"count": 2, "ns": 40},
            "compute_output": {"count": 2, "ns": 60},
            "cache_hit": {"count": 0, "ns": 0},
            "cache_miss": {"count": 0, "ns": 0},
        },
        "response_stats": {},
        "batch_stats": [
            {
                "batch_size": 4,
                "compute_input": {"count": 1, "ns": 10},
                "compute_infer": {"count": 1, "ns": 20},
                "compute_output": {"count": 1, "ns": 30},
            }
        ],
        "memory_usage": [{"type": "CPU", "id": 0, "byte_size": 5}],
    }
