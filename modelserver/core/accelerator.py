"""The optional part in C (`_accelerator.c`): tensors in JSON, BYTES tensors, HTTP/2's usual frames, gRPC answers, and
guards of memory that other processes may truncate.

It is present if a compiler was available at installation. It does nothing that Python could not do: without it, or with
MODELSERVER_PURE_PYTHON=1 in the environment, the functions are None and their callers do the same work in Python.
`load_extension` decides so for every optional C module: one is used if it was built, is wanted, and was built from the
sources beside it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

# An environment variable, because child processes inherit it, and because modules decide this
# when they are imported: once, so that no request asks.
VARIABLE = "MODELSERVER_PURE_PYTHON"
_OFF = frozenset({"", "0", "false", "no", "off"})

logger = logging.getLogger(__name__)


def is_wanted(environment: Mapping[str, str]) -> bool:
    return environment.get(VARIABLE, "").lower() in _OFF


def load_extension(name: str, environment: Mapping[str, str]) -> ModuleType | None:
    """The C module of that name; None if it was not built, is not wanted, or was built from other sources.

    A stale binary remains when a checkout is updated without installing again; using it would fail requests.
    """
    if not is_wanted(environment):
        return None
    try:
        module = import_module(name)
    except ImportError:
        return None
    if _is_stale(module):
        logger.warning(
            "%s was built from other sources than those beside it and is ignored: Python does its work, more slowly; "
            "install again (pip install --editable .)",
            module.__file__,
        )
        return None
    return module


def _is_stale(module: ModuleType) -> bool:
    """Whether its sources are here and it was built from others. A build without setup.py may not record them."""
    built_of = getattr(module, "SOURCE_DIGEST", None)
    here = source_digest(Path(module.__file__ or "").parent)
    return built_of is not None and here is not None and built_of != here


def source_digest(directory: Path) -> str | None:
    """The hash that setup.py gives to the compiler; None without sources, as in an installed wheel."""
    sources = sorted(directory.glob("*.[ch]"))
    if not sources:
        return None
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


_MODULE = "modelserver.core._accelerator"
_MAX_DIMS = 32

# Of a text and a kind: the elements of the text's one array, as the bytes of a tensor; None for any other text, and for
# one that is left to Python.
ReadArray = Callable[[object, bytes], bytes | None]
# Of a body, texts and kinds, one fewer than texts: the elements of each array, if the body consists of the texts with
# arrays of these kinds between them; None as above.
ReadCall = Callable[[bytes, tuple[bytes, ...], tuple[bytes, ...]], tuple[bytes, ...] | None]
# Of an array: its elements as flat JSON; None for one that is not contiguous, or neither float32 nor integers.
WriteArray = Callable[[object], bytes | None]
# Of a stream's id, the parts of a message, and two frames whose own ids do not count: the first frame, the message in a
# DATA frame and the last frame, all with the stream's id; None for unusual messages.
JoinAnswer = Callable[[int, tuple[object, ...], bytes, bytes], bytes | None]
# Of data, a position in it, where it ends, and the size of the largest DATA: the kind of the frame there, its stream,
# its payload and where the next one begins; None for an unusual or incomplete frame. The twin is
# `wire/http2/frame.py: read_in_python`.
ReadFrame = Callable[[bytes | bytearray, int, int, int], tuple[int, int, Any, int] | None]
# Of a mapped file that others may make smaller: a number for its guard; None when there are too many guards. From then
# on, reading bytes that the file has lost gives zeros, which `is_broken` reports, instead of killing the process.
Guard = Callable[[object], int | None]
# Of data, an offset and a count: the BYTES elements there, all or a slice of them, and where they end; None when one is
# incomplete.
SplitElements = Callable[[object, int, int], tuple[list[bytes], int] | None]
# Of a text and the most levels: a state, and how many values it can have at most.
MeasureJson = Callable[[object, int], tuple[int, int]]
# Of an infer request's text, the most levels, the most values and the most bytes that may be left of it: a state, the
# text with "[0]", "[1]" and so on in place of the inputs' `data`, and where these are: pairs of int64.
CutData = Callable[[object, int, int, int], tuple[int, bytes, bytes]]
# Of an array, the size of a piece, and memory of the array's size, which gets the array with a space for each bracket:
# the array's sizes as int64 (one, of all its elements, when its rows differ), and the pieces' ends, as pairs of a place
# and the number of elements before it; or the place where the text stops being an array.
FlatArray = Callable[[object, int, memoryview], tuple[bytes, bytes] | int]
# Of an array or object and the size of a piece: where members end, as int64; None for an incomplete one.
CutMembers = Callable[[object, int], bytes | None]
# Of data and two offsets: the end of the first protobuf field from the first offset on that ends at or after the second
# offset, or else the end of the last field; None when one is incomplete.
PassFields = Callable[[object, int, int], int | None]
# Of a list of BYTES elements: their wire form; None when one is not `bytes`.
JoinElements = Callable[[list[Any]], bytes | None]

# The states of `MeasureJson` and `CutData`.
WHOLE, TOO_DEEP, TOO_MANY, NOT_WHOLE, ESCAPED = range(5)


def load(environment: Mapping[str, str]) -> ModuleType | None:
    """The C module, ready for use; None where Python does its work."""
    module = load_extension(_MODULE, environment)
    if module is not None:
        module.set_powers(_powers_of_ten(module.MAX_POWER))
    return module


def description() -> str:
    """Says for the log whether C or Python is used."""
    if _MODULE_IN_C is not None:
        return "the accelerator in C"
    return f"Python only ({'the accelerator was not built' if is_wanted(os.environ) else f'{VARIABLE} is set'})"


def array_kind(letter: str, dims: Sequence[int]) -> bytes | None:
    """The facts that the C functions need of an array: `struct`'s letter of its elements, and the sizes of its levels.

    None for arrays that they do not read: empty or too deeply nested ones.
    """
    if not dims or len(dims) > _MAX_DIMS or min(dims) < 1 or max(dims) >= 1 << 62:
        return None
    return struct.pack(f"=c{len(dims)}q", letter.encode(), *dims)


def _powers_of_ten(max_power: int) -> bytes:
    """For each q from -max_power to max_power the first 128 bits of 10^q, rounded as the published proof requires.

    Rounded down, but rounded up where 5^-q has at most 64 bits, so that finite quotients are recognised as finite.
    """
    table: list[int] = []
    for q in range(-max_power, max_power + 1):
        power = 5 ** abs(q)
        if q >= 0:
            excess = power.bit_length() - 128
            bits = power >> excess if excess > 0 else power << -excess
        else:
            bits = (1 << (127 + power.bit_length())) // power + (power.bit_length() <= 64)
        table += (bits >> 64, bits & (1 << 64) - 1)
    return struct.pack(f"={len(table)}Q", *table)


_MODULE_IN_C = load(os.environ)
read_array: ReadArray | None = None if _MODULE_IN_C is None else _MODULE_IN_C.read_array
read_call: ReadCall | None = None if _MODULE_IN_C is None else _MODULE_IN_C.read_call
write_array: WriteArray | None = None if _MODULE_IN_C is None else _MODULE_IN_C.write_array
join_answer: JoinAnswer | None = None if _MODULE_IN_C is None else _MODULE_IN_C.join_answer
guard: Guard | None = None if _MODULE_IN_C is None else _MODULE_IN_C.guard
is_broken: Callable[[int], bool] | None = None if _MODULE_IN_C is None else _MODULE_IN_C.is_broken
unguard: Callable[[int], None] | None = None if _MODULE_IN_C is None else _MODULE_IN_C.unguard
read_frame: ReadFrame | None = None if _MODULE_IN_C is None else _MODULE_IN_C.read_frame
split_elements: SplitElements | None = None if _MODULE_IN_C is None else _MODULE_IN_C.split_elements
join_elements: JoinElements | None = None if _MODULE_IN_C is None else _MODULE_IN_C.join_elements
measure_json: MeasureJson | None = None if _MODULE_IN_C is None else _MODULE_IN_C.measure_json
cut_data: CutData | None = None if _MODULE_IN_C is None else _MODULE_IN_C.cut_data
flat_array: FlatArray | None = None if _MODULE_IN_C is None else _MODULE_IN_C.flat_array
cut_members: CutMembers | None = None if _MODULE_IN_C is None else _MODULE_IN_C.cut_members
pass_fields: PassFields | None = None if _MODULE_IN_C is None else _MODULE_IN_C.pass_fields
