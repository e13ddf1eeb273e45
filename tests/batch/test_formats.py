"""Rows of the four formats: cut into pieces, read, and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from modelserver.batch.formats import FORMATS, format_of
from modelserver.errors import InvalidArgumentError

ROWS: list[dict[str, Any]] = [{"id": str(number), "text": f'a "{number}",\nb' * (number % 3)} for number in range(23)]


def read(name: str, path: Path, num_rows: int) -> list[list[Any]]:
    form = FORMATS[name]
    return [list(form.rows(path, piece)) for piece in form.pieces(path, num_rows)]


@pytest.mark.parametrize("name", FORMATS)
def test_rows_come_back_from_their_pieces(tmp_path: Path, name: str) -> None:
    """Line ends and quotes within a text do not cut it."""
    form = FORMATS[name]
    path = tmp_path / f"rows{form.suffix}"
    if name == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=5)
    elif name == "arrow":
        table = pa.Table.from_pylist(ROWS)
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    else:
        path.write_bytes(form.encode(ROWS, {}))
    pieces = read(name, path, 5)
    assert [len(piece) for piece in pieces] == [5, 5, 5, 5, 3]
    assert all(row.index == index and not row.problem for piece in pieces for index, row in enumerate(piece))
    assert [row.columns for piece in pieces for row in piece] == ROWS
    assert [len(piece) for piece in read(name, path, 10)] == [10, 10, 3]
    assert format_of(path.name) == name


@pytest.mark.parametrize("name", FORMATS)
def test_outputs_keep_their_digits_and_types(tmp_path: Path, name: str) -> None:
    types = {"y": np.dtype(np.float32), "v": np.dtype(np.float32), "t": str}
    rows = [{"id": 1, "y": np.array(0.1, "f4"), "v": np.array([0.2, 3], "f4"), "t": "ü"}]
    path = tmp_path / f"part{FORMATS[name].suffix}"
    path.write_bytes(FORMATS[name].encode(rows, types))
    if name == "jsonl":
        assert path.read_text() == '{"id":1,"y":0.1,"v":[0.2,3.0],"t":"ü"}\n'
    elif name == "csv":
        assert path.read_text() == 'id,y,v,t\n1,0.1,"[0.2,3.0]",ü\n'
    else:
        table = pq.read_table(path) if name == "parquet" else pa.ipc.open_file(path).read_all()
        assert table.schema.field("y").type == pa.float32()
        assert table.schema.field("v").type == pa.list_(pa.float32())
        assert table["v"].to_pylist() == [[np.float32(0.2), 3.0]]
    empty = tmp_path / f"empty{FORMATS[name].suffix}"
    empty.write_bytes(FORMATS[name].encode([], types))
    assert read(name, empty, 5) == []


def test_a_bad_line_is_a_problem_of_its_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n\nnonsense\n[1]\n{"x": 2}')
    (rows,) = read("jsonl", tmp_path / "a.jsonl", 10)
    assert [bool(row.problem) for row in rows] == [False, True, True, False]
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3\n")
    (rows,) = read("csv", tmp_path / "a.csv", 10)
    assert [row.problem for row in rows] == ["", "expected 2 columns, got 1"]


def test_files_of_other_formats_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(b"text")
    with pytest.raises(InvalidArgumentError, match="is not a Parquet file"):
        list(FORMATS["parquet"].pieces(path, 5))
    (tmp_path / "x.csv").write_text("a,a\n")
    with pytest.raises(InvalidArgumentError, match="needs a first line of names"):
        list(FORMATS["csv"].pieces(tmp_path / "x.csv", 5))
    with pytest.raises(InvalidArgumentError, match="has none of the suffixes"):
        format_of("rows.txt")
