"""The header of a plan: read without a library, and told apart from everything else."""

from __future__ import annotations

from pathlib import Path

import pytest
from modelserver_backends.tensorrt.plan import Flavour, read_header
from support.engines import plan_bytes

from modelserver.backend import InvalidArgumentError, NotFoundError


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.plan"
    path.write_bytes(content)
    return path


def test_a_plan_of_tensorrt(tmp_path: Path) -> None:
    header = read_header(write(tmp_path, plan_bytes("tensorrt", (11, 4, 0, 106))))
    assert (header.flavour, header.version_text, header.architectures) == (Flavour.TENSORRT, "11.4.0.106", ())


def test_a_plan_of_tensorrt_for_rtx_tells_its_architectures(tmp_path: Path) -> None:
    header = read_header(write(tmp_path, plan_bytes("tensorrt_rtx", (1, 7, 1, 116), mask=0b10010)))
    assert (header.flavour, header.architectures) == (Flavour.RTX, ("sm80", "sm120"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "at least 28 bytes, got 0"),
        (plan_bytes()[:27], "at least 28 bytes, got 27"),
        (plan_bytes()[:200], "expected 256 bytes, as the engine's header says, got 200: the file was cut off"),
        (plan_bytes() + b"x", "got 257: the file has bytes too many"),
        (b"PK\x03\x04" + bytes(60), "a zip archive"),
        (b"version https://git-lfs.github.com/spec/v1", "run 'git lfs pull'"),
        (b"\x08\x08\x12\x04" + bytes(60), "what looks like an ONNX file"),
        (b"\x7fELF" + bytes(60), "got the bytes 7f 45 4c 46"),
    ],
)
def test_what_is_no_whole_plan_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(InvalidArgumentError) as raised:
        read_header(path)
    assert said in raised.value.message
    assert str(path) in raised.value.message


def test_a_plan_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="unable to find"):
        read_header(tmp_path / "model.plan")
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        read_header(tmp_path)
