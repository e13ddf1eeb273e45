"""`--input name=value` as tensors: JSON, text, arrays, pictures, and what is said about mistakes."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from modelserver.cli.infer import InputSpec, parse_tensor
from modelserver.core.datatype import Datatype
from modelserver.errors import InvalidArgumentError, ServerError


def parsed(value: str, datatype: str = "FP32", shape: tuple[int, ...] = (-1, 2)) -> np.ndarray[Any, Any]:
    spec = InputSpec("x", Datatype(datatype), shape)
    tensor = parse_tensor(f"x={value}", {"x": spec})
    assert tensor.data.dtype == spec.datatype.numpy
    return tensor.data


@pytest.mark.parametrize(
    ("value", "shape", "expected"),
    [
        ("[[1, 2], [3, 4]]", (-1, 2), [[1, 2], [3, 4]]),
        ("[1, 2]", (-1, 2), [[1, 2]]),
        ("[1, 2, 3, 4]", (-1, 2), [[1, 2], [3, 4]]),
        ("[1, 2, 3, 4]", (2, 2), [[1, 2], [3, 4]]),
        ("7", (1,), [7]),
        ("7", (-1, 1), [[7]]),
        ("[1.5]", (-1,), [1.5]),
    ],
)
def test_json_takes_the_shape_of_the_input(value: str, shape: tuple[int, ...], expected: list[Any]) -> None:
    assert parsed(value, shape=shape).tolist() == expected


@pytest.mark.parametrize(
    ("value", "shape", "expected"),
    [
        ("hello", (1,), [b"hello"]),
        ('"quoted"', (1,), [b"quoted"]),
        ('["a", "b"]', (-1, 2), [[b"a", b"b"]]),
        ("42", (1,), [b"42"]),
        ("a=b", (1,), [b"a=b"]),
    ],
)
def test_bytes_take_text_or_a_list_of_strings(value: str, shape: tuple[int, ...], expected: list[Any]) -> None:
    assert parsed(value, "BYTES", shape).tolist() == expected


@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT64", "FP16", "FP64"])
def test_numbers_become_the_datatype_of_the_input(datatype: str) -> None:
    assert parsed("[1, 0]", datatype).tolist() == [[1, 0]]


def test_bf16_is_the_upper_half_of_the_bits() -> None:
    assert parsed("[1.0, -2.0]", "BF16").tolist() == [[0x3F80, 0xC000]]


def test_a_npy_file_is_read(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([[1, 2]], dtype=np.int32))
    assert parsed(f"@{tmp_path / 'x.npy'}").tolist() == [[1.0, 2.0]]


def test_a_pickle_in_a_npy_file_is_not_loaded(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(InvalidArgumentError, match=r"'x'.*not a \.npy array"):
        parsed(f"@{tmp_path / 'x.npy'}")


def test_a_json_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps([1, 2]))
    assert parsed(f"@{tmp_path / 'x.json'}").tolist() == [[1.0, 2.0]]


def test_standard_input_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"[3, 4]")))
    assert parsed("@-").tolist() == [[3.0, 4.0]]


def test_a_picture_is_sent_as_it_is_for_bytes_and_as_pixels_for_numbers(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    Image.fromarray(np.array([[0, 255], [255, 0]], dtype=np.uint8)).save(path)
    assert parsed(f"@{path}", "BYTES", (-1, 1)).tolist() == [[path.read_bytes()]]
    assert parsed(f"@{path}", "FP32", (-1, 2, 2)).tolist() == [[[0.0, 1.0], [1.0, 0.0]]]
    assert parsed(f"@{path}", "UINT8", (2, 2, 3)).shape == (2, 2, 3)
    assert parsed(f"@{path}", "UINT8", (-1, 3, 4, 4)).shape == (1, 3, 4, 4)


@pytest.mark.parametrize(
    ("argument", "part"),
    [
        ("x", "--input expects <name>=<value>"),
        ("imagee=1", "did you mean 'image'?"),
        ("image=many", "expected JSON numbers"),
        ("image=[1, 2, 3]", "expected shape [-1, 2], got [3]"),
        ("image=[[1], [2, 3]]", "not an array"),
        ('image=["a", "b"]', "expected numbers"),
    ],
)
def test_mistakes_name_the_input_and_what_was_expected(argument: str, part: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_tensor(argument, {"image": InputSpec("image", Datatype.FP32, (-1, 2))})
    assert part in caught.value.message


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ServerError, match=r"cannot read '/nonexistent\.npy': No such file"):
        parsed("@/nonexistent.npy")
