from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.twins import TWINS, using

from modelserver.core import accelerator
from modelserver.core.accelerator import VARIABLE, array_kind, load
from modelserver.core.datatype import Datatype
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.http.json_tensor import struct_letter, tensor_from_json
from modelserver.wire.http2 import grpc_call
from modelserver.wire.http2.frame import read_in_python

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = [datatype for datatype in Datatype if struct_letter(datatype) is not None]
# What Python makes of a text: None stands for an error.
Twin = Callable[[Datatype, tuple[int, ...], bytes], bytes | None]


def _python(datatype: Datatype, shape: tuple[int, ...], text: bytes) -> bytes | None:
    with using("python"):
        try:
            tensor = tensor_from_json("x", datatype, shape, int(np.prod(shape)), msgspec.Raw(text))
        except InvalidArgumentError:
            return None
    return tensor.data.tobytes()


def _c(datatype: Datatype, shape: tuple[int, ...], text: bytes) -> bytes | None:
    letter = struct_letter(datatype)
    assert letter is not None
    kind = array_kind(letter, shape)
    assert kind is not None
    assert accelerator.read_array is not None
    return accelerator.read_array(text, kind)


# Numbers as they are and as they may not be, and what is near them.
_DIGITS = st.text("0123456789", min_size=1, max_size=22)
_NUMBER = st.builds(
    "".join,
    st.tuples(
        st.sampled_from(["", "", "-", "+", " -", "--"]),
        st.one_of(_DIGITS, st.just("0"), st.just("")),
        st.one_of(st.just(""), _DIGITS.map(".{}".format), st.just("."), st.just(".5")),
        st.one_of(
            st.just(""),
            st.integers(-400, 400).map("e{}".format),
            st.integers(-30, 30).map("E{:+d}".format),
            st.sampled_from(["e", "E+", "e1.5", "e+05"]),
        ),
    ),
)
_EDGES = st.sampled_from(
    [str(2**bits + step) for bits in (7, 8, 15, 16, 31, 32, 53, 63, 64) for step in (-2, -1, 0, 1)]
    + [str(-(2**bits) + step) for bits in (7, 15, 31, 63) for step in (-1, 0, 1)]
    + ["3.4028234663852886e38", "3.4028235677973366e38", "1e39", "-0", "-0.0", "0e999", "1e-46", "9007199254740993"]
    + ["true", "false", "null", "NaN", "Infinity", '"1"', "[1]", "{}", "01", "1.", "0x1", "1_0", "tru", "\u0661"]
)
_ELEMENT = st.one_of(
    _NUMBER,
    _EDGES,
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(repr),
    st.integers(-300, 300).map(str),
)
_SPACE = st.sampled_from(["", "", "", " ", "\n", "\t \r", "\v"])
_ARRAY = st.builds(
    lambda elements, space, end: "[" + (space + "," + space).join([space + element for element in elements]) + end,
    st.lists(_ELEMENT, min_size=1, max_size=5),
    _SPACE,
    st.sampled_from(["]", "]", "]", " ]\n", "", ",]", "]]", "],1"]),
)


@pytest.mark.parametrize("twin", TWINS)
def test_every_kind_of_number_is_read(twin: str) -> None:
    for datatype in NUMBERS:
        values: list[Any] = [True, False] if datatype is Datatype.BOOL else [0, 7]
        if datatype.numpy.kind == "i":
            values += [-1, int(np.iinfo(datatype.numpy).min)]
        if datatype.numpy.kind in "iu":
            values += [int(np.iinfo(datatype.numpy).max)]
        if datatype.numpy.kind == "f":
            values += [-0.5, 1e-20, 123456.789, 0.1]
        shape = (1, len(values), 1)
        nested = json.dumps(np.array(values, object).reshape(shape).tolist()).encode()
        for text in (json.dumps(values).encode(), nested):
            with using(twin):
                tensor = tensor_from_json("x", datatype, shape, len(values), msgspec.Raw(text))
            assert tensor.data.dtype == datatype.numpy
            assert tensor.data.tobytes() == np.array(values, datatype.numpy).tobytes()
            assert tensor.data.shape == shape


if "c" in TWINS:

    def write(array: object) -> bytes | None:
        assert accelerator.write_array is not None
        return accelerator.write_array(array)

    @settings(max_examples=1500)
    @given(datatype=st.sampled_from(NUMBERS), text=_ARRAY, count=st.integers(1, 5), data=st.data())
    @example(Datatype.FP32, "[1e-320]", 1, None)
    @example(Datatype.FP64, "[0.1]" + " " * 40, 1, None)
    def test_c_says_what_python_says_or_nothing(datatype: Datatype, text: str, count: int, data: Any) -> None:
        if data is not None:
            count = data.draw(st.sampled_from([count, text.count(",") + 1]))
        raw = text.encode()
        found = _c(datatype, (count,), raw)
        assert found in (None, _python(datatype, (count,), raw))

    @settings(max_examples=300)
    @given(
        datatype=st.sampled_from(NUMBERS),
        shape=st.lists(st.integers(1, 3), min_size=2, max_size=4),
        damage=st.tuples(st.integers(0, 200), st.sampled_from([b"", b"[", b"]", b",", b"1", b" ", b"[[", b"}"])),
    )
    def test_c_reads_nested_arrays_or_leaves_them(datatype: Datatype, shape: list[int], damage: Any) -> None:
        dims = tuple(shape)
        whole = json.dumps(np.ones(dims, datatype.numpy).tolist()).encode()
        assert _c(datatype, dims, whole) == np.ones(dims, datatype.numpy).tobytes()
        at = damage[0] % (len(whole) + 1)
        for damaged in (whole[:at] + damage[1] + whole[at:], whole[:at] + damage[1] + whole[at + 1 :], whole[:at]):
            assert _c(datatype, dims, damaged) in (None, _python(datatype, dims, damaged))

    @settings(max_examples=400)
    @given(mantissa=st.integers(0, 2**64 - 10), power=st.integers(-64, 64))
    def test_c_rounds_as_float_does(mantissa: int, power: int) -> None:
        # Just between two doubles too: of 54 bits, odd, times a power of ten that is exact.
        for number in (mantissa, (mantissa >> 10) | 1, mantissa >> 11 << 1 | 1):
            text = f"{number}e{power}"
            assert _c(Datatype.FP64, (1,), f"[{text}]".encode()) == struct.pack("d", float(text))

    def test_c_rounds_halves_to_even() -> None:
        for number in range(2**53 + 1, 2**53 + 200, 2):
            for divisor in range(5):
                text = f"{number * 5**divisor}e-{divisor}"
                assert _c(Datatype.FP64, (1,), f"[{text}]".encode()) == struct.pack("d", float(text))

    @settings(max_examples=400)
    @given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
    @example([0, 1 << 31, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0xFF7FFFFF])
    @example([exponent << 23 | mantissa for exponent in range(255) for mantissa in (0, 1, 0x7FFFFF)])
    def test_c_writes_the_shortest_text_of_a_float(bits: list[int]) -> None:
        floats = np.array(bits, np.uint32).view(np.float32)
        text = write(floats)
        assert text is not None
        read = np.array(json.loads(text), np.float32)
        assert np.array_equal(read, floats, equal_nan=True)
        assert np.array_equal(np.signbit(read), np.signbit(floats) & ~np.isnan(floats))
        for written, number in zip(text[1:-1].decode().split(","), floats, strict=True):
            if np.isfinite(number):
                shortest = np.format_float_scientific(number, trim="-")
                assert float(written) == float(shortest)

    def test_c_writes_bare_words_for_what_is_not_finite() -> None:
        assert write(np.array([np.nan, np.inf, -np.inf, -np.nan], np.float32)) == b"[NaN,Infinity,-Infinity,NaN]"

    @pytest.mark.parametrize("datatype", [datatype for datatype in NUMBERS if datatype.numpy.kind in "iu"])
    def test_c_writes_integers(datatype: Datatype) -> None:
        info = np.iinfo(datatype.numpy)
        powers = [sign * 10**power + step for power in range(20) for step in (-1, 0, 1) for sign in (-1, 1)]
        values = [int(info.min), int(info.max)] + [value for value in powers if info.min <= value <= info.max]
        for count in (1, 127, 128, 1000):
            integers = np.resize(np.array(values, datatype.numpy), count)
            assert write(integers) == json.dumps(integers.tolist(), separators=(",", ":")).encode()

    def test_c_writes_arrays_of_any_shape_flat_and_leaves_the_rest() -> None:
        ones = np.ones((2, 3), np.float32)
        assert write(ones) == b"[1.0,1.0,1.0,1.0,1.0,1.0]"
        assert write(ones[0, 0].reshape(())) == b"[1.0]"
        assert write(ones[:0]) == b"[]"
        others = (
            ones[:, 1],
            ones.T,
            ones.astype(float),
            ones > 0,
            ones.astype(">i4"),
            ones.astype(object),
        )
        for other in (*others, ones.astype([("x", "f4")]), "text", None):
            assert write(other) is None

    def test_c_allocates_nothing_that_the_text_cannot_hold() -> None:
        assert _c(Datatype.FP64, (1 << 60,), b"[1]") is None
        assert _c(Datatype.FP64, (1 << 31, 1 << 31), b"[[1]]") is None

    @pytest.mark.parametrize("kind", [b"", b"f", b"f1234567", b"x" + bytes(8), b"f" + bytes(9), b"f" + bytes(8 * 33)])
    def test_a_kind_that_is_none_is_refused(kind: bytes) -> None:
        assert accelerator.read_array is not None
        assert accelerator.read_call is not None
        with pytest.raises(ValueError, match="kind"):
            accelerator.read_array(b"[1]", kind)
        with pytest.raises(ValueError, match="kind"):
            accelerator.read_call(b"a[1]b", (b"a", b"b"), (kind,))

    def test_wrong_arguments_are_refused() -> None:
        kind = array_kind("f", (1,))
        arrays: Any = accelerator.read_array
        calls: Any = accelerator.read_call
        for function, arguments in (
            (arrays, ()),
            (arrays, ("[1]", kind)),
            (arrays, (b"[1]", "f")),
            (calls, (b"", (b"",))),
            (calls, (b"", [b""], ())),
            (calls, (bytearray(), (b"",), ())),
            (calls, (b"", (1,), ())),
            (calls, (b"", (), ())),
            (calls, (b"a[1]", (b"a", 1), (kind,))),
            (calls, (b"a[1]", (b"a", b""), (1,))),
        ):
            with pytest.raises((TypeError, ValueError)):
                function(*arguments)

    def test_a_call_is_its_texts_and_arrays() -> None:
        read = accelerator.read_call
        assert read is not None
        one, two = array_kind("B", (2,)), array_kind("?", (1, 1))
        assert one is not None
        assert two is not None
        texts = (b"{a:", b",b:", b"}")
        assert read(b"{a:[1,2],b:[[true]]}", texts, (one, two)) == (b"\1\2", b"\1")
        assert read(b"{}", (b"{}",), ()) == ()
        whole = b"{a:[1,2],b:[[true]]}"
        for at in range(len(whole)):
            assert read(whole[:at], texts, (one, two)) is None
            assert read(whole[:at] + b"x" + whole[at:], texts, (one, two)) is None
        assert read(whole + b"}", texts, (one, two)) is None


def test_kinds_that_are_not_read_have_no_name() -> None:
    assert array_kind("f", ()) is None
    assert array_kind("f", (2, 0)) is None
    assert array_kind("f", (1,) * 33) is None
    assert array_kind("f", (1 << 63,)) is None


@pytest.mark.parametrize("word", ["1", "true", "yes"])
def test_an_environment_variable_turns_it_off(word: str) -> None:
    assert load({VARIABLE: word}) is None
    environment = {**os.environ, VARIABLE: word}
    code = "from modelserver.core import accelerator as a; print(a.read_array, a.read_call, a.description())"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == f"None None Python only ({VARIABLE} is set)", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [path for path in (shutil.which("cc"), "/no/compiler") if path])
def test_it_is_built_where_there_is_a_compiler_and_missed_by_nobody(tmp_path: Path, compiler: str) -> None:
    environment = {**os.environ, "CC": compiler, "CFLAGS": "-Wall -Wextra -Werror"}
    command = [sys.executable, "setup.py", "-q", "build_ext", f"--build-lib={tmp_path}", f"--build-temp={tmp_path}/o"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    built = sorted(path.name for path in tmp_path.rglob("*.so"))
    names = [f"{name}.abi3.so" for name in ("_accelerator", "_calls", "_kernels", "_packed_linear")]
    assert built == (names if compiler != "/no/compiler" else []), done.stderr


if "c" in TWINS:

    @given(
        stream_id=st.integers(0, 2**31 - 1),
        parts=st.lists(
            st.binary(max_size=300).flatmap(lambda part: st.sampled_from([part, bytearray(part), memoryview(part)]))
        ),
    )
    @example(2**31 - 1, [bytes(70_000), b"x"])
    @example(1, [b""] * 16)
    def test_c_joins_an_answer_as_python_does(stream_id: int, parts: list[Any]) -> None:
        size = sum(map(len, parts))
        assert accelerator.join_answer is not None
        joined = accelerator.join_answer(stream_id, tuple(parts), grpc_call._HEADERS_FRAME, grpc_call._TRAILERS_FRAME)
        expected = None if len(parts) > 16 else grpc_call._join_answer(stream_id, parts, size)
        assert joined == expected

    def test_an_answer_that_is_unusual_is_left_to_python() -> None:
        join: Any = accelerator.join_answer
        frame = bytes(9)
        assert join(1, (bytes(2**20),), frame, frame) is not None
        assert join(1, (bytes(2**20), b"x"), frame, frame) is None
        assert join(1, (memoryview(bytes(8))[::2],), frame, frame) is None
        assert join(1, ("text",), frame, frame) is None
        for arguments in (
            (),
            (1, [b""], frame, frame),
            (2**31, (), frame, frame),
            (-1, (), frame, frame),
            ("1", (), frame, frame),
            (1, (), bytes(8), frame),
            (1, (), frame, bytes(8)),
            (1, (), frame, bytearray(9)),
        ):
            with pytest.raises((TypeError, ValueError, OverflowError)):
                join(*arguments)

    _FRAME = st.builds(
        lambda size, wrong, kind, flags, stream_id, prefix: (
            (size + len(prefix) + wrong).to_bytes(3, "big")
            + bytes((kind, flags))
            + stream_id.to_bytes(4, "big")
            + prefix
            + bytes(range(size % 256)) * (size > 0)
        ),
        st.sampled_from([0, 1, 4, 5, 60, 255]),
        st.sampled_from([0, 0, 0, 0, 1, 5]),
        st.sampled_from([0, 0, 1, 1, 8, 3, 6]),
        st.sampled_from([0, 1, 4, 5, 8, 0x24]),
        st.sampled_from([0, 1, 2**31 - 1, 2**31 + 1, 2**32 - 1]),
        st.sampled_from([b"", bytes(5), b"\0\0\0\0\4", b"\0\0\0\0\x3c", b"\1\0\0\0\4", b"\0\0\0\0\xff", b"\xff" * 4]),
    )

    @settings(max_examples=1000)
    @given(
        data=st.lists(st.one_of(_FRAME, st.binary(max_size=20)), max_size=3).map(b"".join),
        position=st.integers(0, 300),
        missing=st.integers(0, 20),
        max_data=st.sampled_from([0, 5, 64, 65541]),
    )
    def test_c_reads_frames_as_python_does(data: bytes, position: int, missing: int, max_data: int) -> None:
        read = accelerator.read_frame
        assert read is not None
        for at in (0, position % (len(data) + 1)):
            for end in (len(data), max(at, len(data) - missing)):
                expected = read_in_python(data, at, end, max_data)
                assert read(data, at, end, max_data) == expected
                assert read(bytearray(data), at, end, max_data) == expected

    def test_every_usual_frame_is_read() -> None:
        read = accelerator.read_frame
        assert read is not None
        for frame, seen in (
            (b"\0\0\7\0\1\0\0\0\5\0\0\0\0\2ab", (0, 5, b"ab", 16)),
            (b"\0\0\2\1\4\0\0\0\7\x82\x84", (1, 7, b"\x82\x84", 11)),
            (b"\0\2\0\1\4\0\0\0\7" + bytes(512), (1, 7, bytes(512), 521)),
            (b"\0\2\1\1\4\0\0\0\7" + bytes(513), None),
            (b"\0\0\4\x08\0\0\0\0\0\x80\0\0\1", (8, 0, 1, 13)),
        ):
            assert read_in_python(frame, 0, len(frame), 100) == seen
            assert read(frame, 0, len(frame), 100) == seen
            assert read(frame, 0, len(frame) - 1, 100) is None

    def test_no_byte_is_read_outside_of_the_data() -> None:
        read: Any = accelerator.read_frame
        frame = b"\0\0\2\1\4\0\0\0\7\x82\x84"
        for position, end in ((-1, 11), (0, 12), (12, 11), (2**62, 2**62), (0, -1)):
            assert read(frame, position, end, 100) is None
        for arguments in ((), (frame, 0, 11), ("text", 0, 1, 1), (frame, 2**70, 2**70, 1), (frame, None, 11, 1)):
            with pytest.raises((TypeError, OverflowError)):
                read(*arguments)
