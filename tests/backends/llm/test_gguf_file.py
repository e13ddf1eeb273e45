"""GGUF files, written by the `gguf` package, and by hand where it would not write what is wrong."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
from modelserver_backends.llm.checkpoint.gguf_file import GgufFile

from modelserver.errors import InvalidArgumentError, ServerError, UnsupportedError


def text(content: str | bytes) -> bytes:
    data = content.encode() if isinstance(content, str) else content
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, dims: Sequence[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file_of(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    num_entries: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(entries) if num_entries is None else num_entries,
    )
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def read(tmp_path: Path, content: bytes) -> GgufFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return GgufFile(path)


def test_all_metadata_and_tensors_of_a_foreign_writer(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    for bits in (8, 16, 32, 64):
        getattr(writer, f"add_uint{bits}")(f"u{bits}", 2**bits - 1)
        getattr(writer, f"add_int{bits}")(f"i{bits}", -(2 ** (bits - 1)))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "grüße")
    writer.add_array("texts", ["a", "", "ß" * 1000])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.5])
    writer.add_array("flags", [True, False])
    first, second = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(5, dtype=np.float16)
    packed = np.random.default_rng(0).integers(0, 256, (3, 2, 2 * 144), dtype=np.uint8)
    writer.add_tensor("first", first)
    writer.add_tensor("second", second)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GgufFile(path)
    for bits in (8, 16, 32, 64):
        assert file.integer(f"u{bits}") == 2**bits - 1
        assert file.integer(f"i{bits}") == -(2 ** (bits - 1))
    assert (file.number("f32"), file.number("f64"), file.number("u8")) == (0.5, 0.1, 255.0)
    assert (file.flag("yes"), file.text("text"), file.texts("texts")) == (True, "grüße", ["a", "", "ß" * 1000])
    for key, expected in (("numbers", [1, -2, 3]), ("floats", [0.5, -1.5]), ("flags", [1, 0])):
        numbers = file.numbers(key)
        assert numbers is not None
        assert numbers.tolist() == expected
    assert file.integer("absent") is None
    assert file.text("general.architecture") == "llama"
    assert {name: (place.kind.name, place.shape) for name, place in file.tensors.items()} == {
        "first": ("F32", (2, 3)),
        "second": ("F16", (5,)),
        "packed": ("Q4_K", (3, 2, 512)),
    }
    np.testing.assert_array_equal(file.rows("first").view(np.float32), first)
    np.testing.assert_array_equal(file.rows("second").view(np.float16)[0], second)
    np.testing.assert_array_equal(file.rows("packed"), packed.reshape(6, -1))
    np.testing.assert_array_equal(file.rows("packed", 2, 3), packed.reshape(6, -1)[2:5])
    file.close()


def test_the_version_before(tmp_path: Path) -> None:
    file = read(tmp_path, file_of([entry("a", 4, struct.pack("<I", 7))], version=2))
    assert (file.version, file.integer("a")) == (2, 7)


def test_arrays_in_arrays_are_passed_over(tmp_path: Path) -> None:
    inner = struct.pack("<IQ", 8, 2) + text("a") + text("b")
    outer = struct.pack("<IQ", 9, 2) + inner + struct.pack("<IQ", 0, 3) + b"abc"
    file = read(tmp_path, file_of([entry("nested", 9, outer), entry("after", 4, struct.pack("<I", 7))]))
    assert file.integer("after") == 7
    with pytest.raises(InvalidArgumentError, match="'nested' are 2 of array: expected an array of strings"):
        file.texts("nested")


HUGE = 1 << 60
ROW = np.zeros(8, np.float32).tobytes()
WRONG = {
    "no GGUF": (b"GGML" + bytes(40), "not a GGUF file: it begins with b'GGML'"),
    "empty": (b"", "its first four bytes, at byte 0"),
    "cut in the head": (file_of()[:10], "the number of tensors, at byte 8"),
    "huge string": (
        file_of([text("key") + struct.pack("<IQ", 8, HUGE)]),
        "the metadata 'key', at byte 47, would end at",
    ),
    "huge key": (file_of([struct.pack("<Q", HUGE) + bytes(40)]), "the name of metadata 0, at byte 32, would end"),
    "huge array": (
        file_of([entry("key", 9, struct.pack("<IQ", 8, HUGE))]),
        f"the length of the metadata 'key', at byte 43, is {HUGE}",
    ),
    "huge array of bytes": (file_of([entry("key", 9, struct.pack("<IQ", 0, HUGE))]), f"at byte 43, is {HUGE}"),
    "too many metadata": (file_of(num_entries=HUGE), "the number of metadata, at byte 16"),
    "too many tensors": (file_of(num_tensors=HUGE), "the number of tensors, at byte 8"),
    "strings beyond the end": (
        file_of([entry("key", 9, struct.pack("<IQ", 8, 2) + text("a") + struct.pack("<Q", 1 << 40))]),
        "the metadata 'key', at byte 68",
    ),
    "nested too deeply": (file_of([entry("key", 9, struct.pack("<IQ", 9, 1) * 8)]), "too deep"),
    "unknown kind of value": (file_of([entry("key", 13, b"")]), "'key' are of the unknown type 13, at byte 35"),
    "the same key": (file_of([entry("key", 0, b"a")] * 2), "'key' occur twice, again at byte 40"),
    "a key in no UTF-8": (file_of([text(b"\xff") + struct.pack("<I", 0) + b"a"]), "is not UTF-8"),
    "the same tensor": (
        file_of([], [tensor("a", [8], 0, 0), tensor("a", [8], 0, 32)], ROW * 2),
        "tensor 'a' occurs twice, again at byte 57",
    ),
    "a tensor without a name": (file_of([], [tensor("", [8], 0, 0)], ROW), "tensor 0, at byte 24, has no name"),
    "no dimensions": (file_of([], [tensor("a", [], 0, 0)], ROW), "'a', at byte 24, has 0 dimensions"),
    "five dimensions": (file_of([], [tensor("a", [1] * 5, 0, 0)], ROW), "'a', at byte 24, has 5 dimensions"),
    "an empty dimension": (file_of([], [tensor("a", [8, 0], 0, 0)], ROW), "has the shape [0, 8]"),
    "overflowing dimensions": (
        file_of([], [tensor("a", [1 << 32, 1 << 32, 1 << 32], 0, 0)], ROW),
        "'a', at byte 24, has the shape [4294967296, 4294967296, 4294967296]",
    ),
    "a part of a block": (file_of([], [tensor("a", [40], 2, 0)], ROW * 2), "multiples of 32"),
    "an unknown type": (file_of([], [tensor("a", [8], 99, 0)], ROW), "'a', at byte 24, is of the unknown type 99"),
    "a removed type": (file_of([], [tensor("a", [32], 31, 0)], ROW), "31 (Q4_0_4_4, which files no longer have)"),
    "beyond the end": (file_of([], [tensor("a", [9], 0, 0)], ROW), "'a' ends at byte 100 of a file of 96"),
    "far beyond the end": (file_of([], [tensor("a", [8], 0, HUGE)], ROW), f"'a' ends at byte {HUGE + 96}"),
    "not aligned": (file_of([], [tensor("a", [1], 0, 4)], ROW), "'a' has the offset 4, not a multiple of 32"),
    "overlapping": (
        file_of([], [tensor("a", [16], 0, 0), tensor("b", [8], 0, 32)], ROW * 2),
        "tensor 'b' begins at byte 128, within 'a'",
    ),
    "no alignment": (file_of([entry("general.alignment", 4, struct.pack("<I", 24))]), "expected a power of two"),
    "an alignment in letters": (file_of([entry("general.alignment", 8, text("32"))]), "expected a power of two"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, name: str) -> None:
    content, message = WRONG[name]
    with pytest.raises(InvalidArgumentError) as caught:
        read(tmp_path, content)
    assert str(tmp_path / "model.gguf") in caught.value.message
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("version", "message"), [(1, "of version 1: expected 2 or 3"), (3 << 24, "for big-endian machines")]
)
def test_versions_that_are_not_read(tmp_path: Path, version: int, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read(tmp_path, file_of(version=version))


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    content = file_of(
        [entry("a", 8, text("abc")), entry("b", 9, struct.pack("<IQ", 8, 2) + text("x") + text("yz"))],
        [tensor("t", [8], 0, 0)],
        ROW,
    )
    read(tmp_path, content)
    for end in range(len(content)):
        with pytest.raises(ServerError):
            read(tmp_path, content[:end])


def test_values_of_another_type_than_expected(tmp_path: Path) -> None:
    file = read(tmp_path, file_of([entry("a", 8, text(b"\xff")), entry("b", 7, b"\1"), entry("c", 6, bytes(4))]))
    with pytest.raises(InvalidArgumentError, match="'a' at byte 45 are not UTF-8"):
        file.text("a")
    with pytest.raises(InvalidArgumentError, match="'a' are string: expected an integer"):
        file.integer("a")
    with pytest.raises(InvalidArgumentError, match="'b' are bool: expected a number"):
        file.number("b")
    with pytest.raises(InvalidArgumentError, match="'c' are float32: expected an integer"):
        file.integer("c")
    with pytest.raises(InvalidArgumentError, match="'c' are float32: expected true or false"):
        file.flag("c")
    with pytest.raises(InvalidArgumentError, match="'c' are float32: expected an array of numbers"):
        file.numbers("c")


def test_a_file_that_changes_is_not_read_on(tmp_path: Path) -> None:
    content = file_of([], [tensor("t", [8], 0, 0)], ROW)
    file = read(tmp_path, content)
    (tmp_path / "model.gguf").write_bytes(content[:-4])
    with pytest.raises(InvalidArgumentError, match="has changed since its header was read"):
        file.rows("t")
    file = read(tmp_path, content)
    file.rows("t")
    (tmp_path / "model.gguf").write_bytes(content[:-4])
    with pytest.raises(InvalidArgumentError, match="within the tensor t"):
        file.rows("t")
    file.close()


def test_a_directory_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        GgufFile(tmp_path)
