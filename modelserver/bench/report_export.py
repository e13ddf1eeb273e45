"""Times of every request, in the form of perf_analyzer's --profile-export-file."""

from __future__ import annotations

import json
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from modelserver.bench.fleet import Harvest
from modelserver.bench.options import Mode
from modelserver.bench.report_files import write_file
from modelserver.bench.results import LevelResult, Results
from modelserver.bench.window import END, START


def export_document(results: Results, wall_offset_ns: int) -> dict[str, Any]:
    """The document; `wall_offset_ns` converts the monotonic clock to the time since 1970."""
    return {
        "experiments": [_experiment(results, level, wall_offset_ns) for level in results.levels],
        "version": metadata.version("modelserver"),
        "service_kind": "triton",
        "endpoint": "",
    }


def _experiment(results: Results, level: LevelResult, offset_ns: int) -> dict[str, Any]:
    mode = "concurrency" if results.mode in (Mode.CONCURRENCY, Mode.PERIODIC) else "request_rate"
    boundaries = [window.begin_ns + offset_ns for window in level.windows]
    boundaries.append(level.windows[-1].end_ns + offset_ns)
    value: float = int(level.value) if level.value == int(level.value) else level.value
    return {
        "experiment": {"mode": mode, "value": value},
        "requests": _requests(level.harvest, offset_ns) if level.harvest is not None else [],
        "window_boundaries": boundaries,
    }


def _requests(harvest: Harvest, offset_ns: int) -> list[dict[str, Any]]:
    starts = (harvest.times[:, START] + offset_ns).tolist()
    if len(harvest.num_responses) == len(starts):
        cuts = np.cumsum(harvest.num_responses)[:-1]
        pieces = np.split(harvest.response_times + offset_ns, cuts) if starts else []
        responses = [piece.tolist() for piece in pieces]
    else:
        responses = [[end] for end in (harvest.times[:, END] + offset_ns).tolist()]
    return [{"timestamp": start, "response_timestamps": times} for start, times in zip(starts, responses, strict=True)]


def write_export(results: Results, path: Path) -> None:
    """Raises ServerError."""
    document = export_document(results, time.time_ns() - time.monotonic_ns())
    write_file(path, json.dumps(document, separators=(",", ":")), "--profile-export-file")
