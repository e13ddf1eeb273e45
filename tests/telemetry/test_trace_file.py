"""Files of traces: whole after each one, and in turn."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from modelserver.core.datatype import Datatype
from modelserver.core.tensor import Tensor
from modelserver.core.trace import Trace
from modelserver.telemetry.trace_file import TraceFile, entries


def _trace(number: int) -> Trace:
    trace = Trace(number, has_times=True, has_tensors=True)
    trace.model_name, trace.version = "m", 3
    trace.note("REQUEST_START", 10 * number)
    return trace


def test_a_file_is_whole_after_each_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    file = TraceFile(str(path))
    for number in (1, 2, 3):
        file.write([(_trace(number), 0)])
        rows = json.loads(path.read_text())
        assert [row["id"] for row in rows if "model_name" in row] == list(range(1, number + 1))
    file.close()


def test_a_change_of_the_frequency_begins_another_file(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path / "trace"))
    file.write([(_trace(number), frequency) for number, frequency in enumerate((0, 2, 2, 2, 1), 1)])
    file.close()
    found = {
        path.name: [row["id"] for row in json.loads(path.read_text()) if "model_name" in row]
        for path in tmp_path.iterdir()
    }
    assert found == {"trace": [1], "trace.0": [2, 3], "trace.1": [4], "trace.2": [5]}


def test_a_file_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    TraceFile(str(tmp_path / "missing" / "trace")).write([(_trace(1), 0)])
    assert "traces cannot be written" in caplog.text


@pytest.mark.parametrize(
    ("datatype", "data", "text"),
    [
        (Datatype.FP32, np.array([[1, 0.5]], np.float32), "1,0.5"),
        (Datatype.BOOL, np.array([True, False]), "1,0"),
        (Datatype.INT64, np.array([-(2**63)], np.int64), "-9223372036854775808"),
        (Datatype.BF16, np.array([0x3FC0], np.uint16), "1.5"),
        (Datatype.BYTES, np.array([b"a,b", b"\xff"], object), '"a,b","\ufffd"'),
    ],
)
def test_tensors_are_told_as_text(datatype: Datatype, data: np.ndarray, text: str) -> None:
    trace = _trace(1)
    trace.note_tensors("TENSOR_QUEUE_INPUT", [Tensor("x", datatype, data)])
    row = entries(trace)[-1]
    assert row["activity"] == "TENSOR_QUEUE_INPUT"
    assert row["tensor"]["data"] == text
    assert row["tensor"]["shape"] == ",".join(map(str, data.shape))
