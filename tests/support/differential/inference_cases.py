"""Inferences that both protocols can say, each in every form that has words for it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from support.differential.facts import Case
from support.differential.inference import FORMS, Inference, Input, Output
from support.differential.models import SOURCES

# Values that say something of each datatype, and its limits.
_VALUES: dict[str, tuple[Any, ...]] = {
    "BOOL": (True, False),
    "UINT8": (0, 255),
    "UINT16": (0, 65535),
    "UINT32": (0, 2**32 - 1),
    "UINT64": (0, 2**64 - 1),
    "INT8": (-128, 127),
    "INT16": (-32768, 32767),
    "INT32": (-(2**31), 2**31 - 1),
    "INT64": (-(2**63), 2**63 - 1),
    "FP16": (1.5, -2.0),
    "FP32": (1.5, -2.25),
    "FP64": (1e300, -0.1),
    "BYTES": ("", "ü€😀", 'a"b\\c\n'),
}


@dataclass(frozen=True)
class Row:
    """A request, and the phrases that both errors should have."""

    name: str
    request: Inference
    says: tuple[str, ...] = ()
    forms: tuple[str, ...] = FORMS
    deadly: str = ""


def floats(name: str, *values: float, shape: tuple[int, ...] | None = None, **details: Any) -> Input:
    return Input(name, "FP32", shape or (len(values),), values, **details)


def echo(*inputs: Input, model: str = "echo", **details: Any) -> Inference:
    return Inference(model, inputs, **details)


def text(name: str, *values: str) -> Input:
    return Input(name, "BYTES", (len(values),), values)


ONE = floats("INPUT0", 1, 2, shape=(1, 2))
FOUR = floats("INPUT0", 1, 2, 3, 4)
OTHER_FOUR = floats("INPUT1", 4, 3, 2, 1)
NUMBER = Input("INPUT0", "INT32", (1,), (1,))


# Of pb_utils: what ends Triton or its stub.
_DEADLY_PARTS = {
    "from numpy dlpack": "its stub ends",
    **dict.fromkeys(("counter", "gauge", "histogram", "wrong metric"), "metrics of models end it now and then"),
}


def _called(**way: Any) -> Inference:
    return Inference("calling", (Input("WAY", "BYTES", (1,), (json.dumps(way),)),))


_PAIR = {"INPUT0": ("float32", [1, 2, 3, 4]), "INPUT1": ("float32", [4, 3, 2, 1])}
_SUMS = ["OUTPUT0", "OUTPUT1"]


def _fails(way: str, *says: str, deadly: str = "") -> Row:
    return Row(f"failing: {way}", Inference("failing", (text("INPUT0", way),)), says, deadly=deadly)


ROWS: tuple[Row, ...] = (
    # Answers.
    Row("one", echo(ONE)),
    Row("an id", echo(ONE, id="r-1 ü")),
    Row("a version", echo(ONE, version="1")),
    Row("eight rows", echo(floats("INPUT0", *range(16), shape=(8, 2)))),
    Row("no elements", echo(Input("INPUT0", "FP32", (1, 0), ()))),
    Row("no rows", echo(Input("INPUT0", "FP32", (0, 2), ()))),
    Row("requested", echo(ONE, outputs=(Output("OUTPUT0"),))),
    Row("no output requested", echo(ONE, outputs=())),
    Row("one of two outputs", Inference("add_sub", (FOUR, OTHER_FOUR), (Output("OUTPUT1"),))),
    Row("outputs in another order", Inference("add_sub", (FOUR, OTHER_FOUR), (Output("OUTPUT1"), Output("OUTPUT0")))),
    Row("inputs in another order", Inference("add_sub", (OTHER_FOUR, FOUR))),
    Row("not a number", echo(floats("INPUT0", float("nan"), float("inf"), float("-inf"), shape=(1, 3)))),
    *(
        Row(
            f"{name}", Inference("echo_types", (Input(f"INPUT_{name.replace('BYTES', 'STRING')}", name, (n,), values),))
        )
        for name, values in _VALUES.items()
        for n in (len(values),)
    ),
    Row(
        "two optional inputs of many",
        Inference("echo_types", (Input("INPUT_INT8", "INT8", (1,), (1,)), Input("INPUT_BOOL", "BOOL", (1,), (True,)))),
    ),
    Row("an optional input left out", Inference("add_sub_optional", (floats("INPUT0", 1),), (Output("OUTPUT0"),))),
    Row("an optional input", Inference("add_sub_optional", (floats("INPUT0", 1), floats("INPUT1", 2)))),
    Row("no texts", Inference("echo_text", (Input("INPUT0", "BYTES", (0,), ()),))),
    Row("reshaped", Inference("echo_reshaped", (floats("INPUT0", *range(8), shape=(2, 4)),))),
    Row(
        "completed",
        Inference(
            "completed", (floats("INPUT0", 1, 2, 3, 4, shape=(1, 4)), floats("INPUT1", 1, 1, 1, 1, shape=(1, 4)))
        ),
    ),
    *(
        Row(f"{model} {version or 'without version'}", Inference(model, (NUMBER,), version=version), ("version",))
        for model in ("many_versions", "latest_two", "specific", "odd_directories")
        for version in ("", "1", "2", "3", "10", "9")
    ),
    *(Row(f"version {version!r}", echo(ONE, version=version)) for version in ("0", "-1", "x", "1.0", "01")),
    Row("in the batcher", Inference("batching", (ONE,))),
    Row("a priority", Inference("priorities", (ONE,), parameters={"priority": 1})),
    Row("a priority beyond the levels", Inference("priorities", (ONE,), parameters={"priority": 9})),
    Row("a timeout", Inference("priorities", (ONE,), parameters={"timeout": 3_000_000})),
    # What the model is told.
    Row("told", Inference("told", (NUMBER,))),
    Row("told of an id", Inference("told", (NUMBER,), id="some id")),
    Row("told of parameters", Inference("told", (NUMBER,), parameters={"a": 1, "b": "x", "c": True, "d": -5})),
    Row("told of a fraction", Inference("told", (NUMBER,), parameters={"half": 0.5})),
    Row(
        "told of a timeout and a priority",
        Inference("told", (NUMBER,), parameters={"timeout": 5_000_000, "priority": 1}),
    ),
    Row(
        "told of a sequence",
        Inference("told", (NUMBER,), parameters={"sequence_id": 7, "sequence_start": True, "sequence_end": True}),
    ),
    Row(
        "told of a sequence by name",
        Inference("told", (NUMBER,), parameters={"sequence_id": "seven", "sequence_start": True}),
    ),
    Row("told of outputs", Inference("told", (NUMBER,), (Output("TOLD"),))),
    Row("told of a parameter of an input", Inference("told", (Input("INPUT0", "INT32", (1,), (1,), {"mine": 1}),))),
    # Refusals.
    Row("no such model", Inference("nothing", (ONE,)), ("nothing", "unknown|not found")),
    Row("a model that is not loaded", Inference("never", (FOUR,)), ("never", "unknown|not found")),
    Row("no such version", echo(ONE, version="7"), ("echo", "7|version")),
    Row("too many rows", echo(floats("INPUT0", *range(18), shape=(9, 2))), ("8", "echo", "batch")),
    Row("no inputs", echo(), ("INPUT0|expected 1|1 input", "echo")),
    Row("an input too few", Inference("add_sub", (FOUR,)), ("INPUT1", "add_sub")),
    Row("an input too many", echo(ONE, floats("INPUT1", 1, 2, shape=(1, 2))), ("INPUT1|got 2", "echo")),
    Row("an unknown input", echo(floats("OTHER", 1, 2, shape=(1, 2))), ("OTHER", "echo")),
    Row("an input twice", Inference("add_sub", (FOUR, FOUR)), ("INPUT0",)),
    Row("no optional input at all", Inference("echo_types", ())),
    Row("an unknown output", echo(ONE, outputs=(Output("OTHER"),)), ("OTHER", "echo")),
    Row("an output twice", echo(ONE, outputs=(Output("OUTPUT0"), Output("OUTPUT0"))), ("OUTPUT0",)),
    Row("another datatype", echo(Input("INPUT0", "INT32", (1, 2), (1, 2))), ("INPUT0", "INT32", "FP32", "echo")),
    Row("an unknown datatype", echo(Input("INPUT0", "FP99", (1, 2), (1, 2))), ("FP99|INPUT0",)),
    Row("no datatype", echo(Input("INPUT0", "", (1, 2), (1, 2))), ("INPUT0|datatype",)),
    Row(
        "another shape",
        Inference("add_sub", (floats("INPUT0", 1, 2, 3, 4, shape=(2, 2)), OTHER_FOUR)),
        ("INPUT0", "4", "2, ?2"),
    ),
    Row(
        "another shape in a batch",
        Inference("echo_fixed", (floats("INPUT0", *range(6), shape=(1, 2, 3)),)),
        ("INPUT0", "2, ?3"),
    ),
    Row("no batch dimension", Inference("echo_fixed", (floats("INPUT0", *range(4), shape=(2, 2)),)), ("INPUT0",)),
    Row("no shape", echo(Input("INPUT0", "FP32", (), (1.0,))), ("INPUT0|shape",)),
    Row("a negative dimension", echo(Input("INPUT0", "FP32", (1, -2), (1.0, 2.0))), ("INPUT0|shape",)),
    Row(
        "a huge shape",
        echo(Input("INPUT0", "FP32", (1, 2**62), (1.0, 2.0))),
        ("INPUT0|overflow|shape",),
        deadly="it ends with a failed allocation",
    ),
    Row("data too short", echo(floats("INPUT0", 1, shape=(1, 2))), ("INPUT0",)),
    Row("data too long", echo(floats("INPUT0", 1, 2, 3, shape=(1, 2))), ("INPUT0",)),
    Row("no data", echo(Input("INPUT0", "FP32", (1, 2), None)), ("INPUT0",)),
    Row("too few texts", Inference("echo_text", (Input("INPUT0", "BYTES", (2,), ("a",)),)), ("INPUT0",)),
    Row("too many texts", Inference("echo_text", (Input("INPUT0", "BYTES", (1,), ("a", "b")),)), ("INPUT0",)),
    Row("a reserved parameter", echo(ONE, parameters={"triton_mine": 1}), ("triton_",)),
    Row("a priority that is a text", echo(ONE, parameters={"priority": "high"}), ("priority",)),
    Row("a negative priority", echo(ONE, parameters={"priority": -1}), ("priority",)),
    Row("a timeout that is a text", echo(ONE, parameters={"timeout": "long"}), ("timeout",)),
    Row("a start that is a number", echo(ONE, parameters={"sequence_id": 1, "sequence_start": 1}), ("sequence_start",)),
    Row("a sequence of a truth", echo(ONE, parameters={"sequence_id": True}), ("sequence_id",)),
    Row("a decoupled model", Inference("repeat", (Input("IN", "INT32", (1,), (1,)),)), ("decoupled",)),
    # Failures of the model.
    _fails("fine"),
    _fails("raise", "own words", "failing"),
    _fails("raise model exception", "an exception of pb_utils"),
    _fails("no list", "list"),
    _fails("none", deadly="it never answers"),
    _fails("too few", "0", "1"),
    _fails("too many", "2", "1"),
    _fails("no response", "InferenceResponse"),
    *(
        _fails(code, f"with code {code}")
        for code in (
            "UNKNOWN",
            "INTERNAL",
            "NOT_FOUND",
            "INVALID_ARG",
            "UNAVAILABLE",
            "UNSUPPORTED",
            "ALREADY_EXISTS",
            "CANCELLED",
        )
    ),
    _fails("error", "an error without a code"),
    _fails("no output", "OUTPUT0"),
    _fails("other output", "OTHER"),
    _fails("other datatype", "OUTPUT0"),
    _fails("other shape"),
    _fails("bad tensor"),
    _fails("bad parameters", "list"),
    _fails("float parameter", "float"),
    # Classes.
    Row(
        "classes",
        Inference(
            "classes",
            (floats("INPUT0", 0.1, 0.4, 0.3, 0.2, shape=(1, 4)),),
            (Output("OUTPUT0", {"classification": 2}),),
        ),
    ),
    Row(
        "all classes",
        Inference("classes", (floats("INPUT0", *range(8), shape=(2, 4)),), (Output("OUTPUT0", {"classification": 9}),)),
    ),
    Row("classes without labels", echo(ONE, outputs=(Output("OUTPUT0", {"classification": 1}),))),
    Row(
        "no classes",
        Inference("classes", (floats("INPUT0", *range(4), shape=(1, 4)),), (Output("OUTPUT0", {"classification": 0}),)),
    ),
    Row(
        "classes of texts",
        Inference("echo_text", (text("INPUT0", "a"),), (Output("OUTPUT0", {"classification": 1}),)),
        deadly="it ends: its answer has an unknown error",
    ),
    Row("classes that are a text", echo(ONE, outputs=(Output("OUTPUT0", {"classification": "x"}),))),
    Row("classes that are negative", echo(ONE, outputs=(Output("OUTPUT0", {"classification": -1}),))),
    # Shared memory that is not there.
    Row(
        "no such region for an input",
        echo(Input("INPUT0", "FP32", (1, 2), None, {"shared_memory_region": "r", "shared_memory_byte_size": 8})),
        ("r",),
    ),
    Row(
        "no such region for an output",
        echo(ONE, outputs=(Output("OUTPUT0", {"shared_memory_region": "r", "shared_memory_byte_size": 8}),)),
        ("r",),
    ),
    Row(
        "a region and data",
        echo(
            floats("INPUT0", 1, 2, shape=(1, 2), parameters={"shared_memory_region": "r", "shared_memory_byte_size": 8})
        ),
        ("INPUT0|shared",),
    ),
    # Ensembles.
    Row("an ensemble", Inference("ensemble", (floats("A", 1, 2, 3, 4), floats("B", 5, 6, 7, 8)), id="e")),
    Row(
        "one output of an ensemble",
        Inference("ensemble", (floats("A", 1, 2, 3, 4), floats("B", 5, 6, 7, 8)), (Output("TWICE_B"),)),
    ),
    Row("an ensemble without an input", Inference("ensemble", (floats("A", 1, 2, 3, 4),)), ("B", "ensemble")),
    Row("another shape for an ensemble", Inference("ensemble", (floats("A", 1, 2), floats("B", 5, 6, 7, 8))), ("A",)),
    *(
        Row(f"a step that fails: {way}", Inference("ensemble_failing", (text("WAY", way),)))
        for way in ("fine", "raise", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "no output", "error")
    ),
    Row("a decoupled ensemble", Inference("ensemble_repeat", (Input("N", "INT32", (1,), (1,)),)), ("decoupled",)),
    # Sequences, each step on its own: what is refused.
    Row("no sequence id", Inference("sequence", (Input("INPUT", "INT32", (1, 1), (1,)),)), ("sequence|correlation",)),
    Row(
        "no start",
        Inference("sequence", (Input("INPUT", "INT32", (1, 1), (1,)),), parameters={"sequence_id": 5}),
        ("start", "5"),
    ),
    Row(
        "no start by name",
        Inference("sequence", (Input("INPUT", "INT32", (1, 1), (1,)),), parameters={"sequence_id": "five"}),
        (),
    ),
    Row(
        "two rows of a sequence",
        Inference(
            "sequence",
            (Input("INPUT", "INT32", (2, 1), (1, 2)),),
            parameters={"sequence_id": 6, "sequence_start": True},
        ),
        ("batch",),
    ),
    Row(
        "a control from outside",
        Inference(
            "sequence",
            (Input("INPUT", "INT32", (1, 1), (1,)), Input("START", "INT32", (1, 1), (1,))),
            parameters={"sequence_id": 6, "sequence_start": True},
        ),
        ("START|2",),
    ),
    Row(
        "a sequence of one",
        Inference(
            "sequence",
            (Input("INPUT", "INT32", (1, 1), (3,)),),
            parameters={"sequence_id": 8, "sequence_start": True, "sequence_end": True},
        ),
    ),
    Row(
        "a sequence of one, oldest",
        Inference(
            "sequence_oldest",
            (Input("INPUT", "INT32", (1, 1), (3,)),),
            parameters={"sequence_id": 8, "sequence_start": True, "sequence_end": True},
        ),
    ),
    Row(
        "a sequence of one with state",
        Inference(
            "sequence_state",
            (Input("INPUT", "INT32", (1, 1), (3,)),),
            parameters={"sequence_id": 8, "sequence_start": True, "sequence_end": True},
        ),
    ),
    # BLS.
    Row("a call", _called(model="add_sub", inputs=_PAIR, outputs=_SUMS)),
    Row("a call for one output", _called(model="add_sub", inputs=_PAIR, outputs=["OUTPUT1"])),
    Row("an async call", _called(model="add_sub", inputs=_PAIR, outputs=_SUMS, **{"async": True})),
    Row("calls together", _called(model="add_sub", inputs=_PAIR, outputs=_SUMS, times=3)),
    Row(
        "a call of an ensemble",
        _called(model="ensemble", inputs={"A": _PAIR["INPUT0"], "B": _PAIR["INPUT1"]}, outputs=["TWICE_A"]),
    ),
    Row(
        "a call with words",
        _called(
            model="told",
            inputs={"INPUT0": ("int32", [1])},
            outputs=["TOLD"],
            id="inner",
            parameters={"a": 1, "b": "x", "c": True},
        ),
    ),
    Row(
        "a call of a version",
        _called(model="many_versions", version=2, inputs={"INPUT0": ("int32", [1])}, outputs=["VERSION"]),
    ),
    Row(
        "a call of no version",
        _called(model="many_versions", version=7, inputs={"INPUT0": ("int32", [1])}, outputs=["VERSION"]),
    ),
    Row("a call of nothing", _called(model="nothing", inputs=_PAIR, outputs=_SUMS)),
    Row(
        "a call of another shape", _called(model="add_sub", inputs={**_PAIR, "INPUT0": ("float32", [1])}, outputs=_SUMS)
    ),
    Row(
        "a call of another datatype",
        _called(model="add_sub", inputs={**_PAIR, "INPUT0": ("int32", [1, 2, 3, 4])}, outputs=_SUMS),
    ),
    Row("a call without an input", _called(model="add_sub", inputs={"INPUT0": _PAIR["INPUT0"]}, outputs=_SUMS)),
    Row("a call for an unknown output", _called(model="add_sub", inputs=_PAIR, outputs=["Z"])),
    Row(
        "a call of a failing model",
        _called(model="failing", inputs={"INPUT0": ("BYTES", ["raise"])}, outputs=["OUTPUT0"]),
    ),
    Row(
        "a call of a model that answers with a code",
        _called(model="failing", inputs={"INPUT0": ("BYTES", ["NOT_FOUND"])}, outputs=["OUTPUT0"]),
    ),
    Row("a decoupled call", _called(model="repeat", inputs={"IN": ("int32", [3])}, outputs=["OUT"], decoupled=True)),
    Row(
        "a decoupled call of no responses",
        _called(model="repeat", inputs={"IN": ("int32", [0])}, outputs=["OUT"], decoupled=True),
    ),
    Row(
        "a decoupled call that fails",
        _called(model="repeat", inputs={"IN": ("int32", [-2])}, outputs=["OUT"], decoupled=True),
    ),
    Row("a plain call of a decoupled model", _called(model="repeat", inputs={"IN": ("int32", [1])}, outputs=["OUT"])),
    Row("is it ready", _called(ready="echo")),
    Row("is that version ready", _called(ready="echo", version="1")),
    Row("is no version ready", _called(ready="echo", version="5")),
    Row("is nothing ready", _called(ready="nothing")),
    # The surface of pb_utils.
    *(
        Row(
            f"pb_utils: {part}",
            Inference("surface", (text("WAY", part),)),
            forms=("grpc-raw",),
            deadly=_DEADLY_PARTS.get(part, ""),
        )
        for part in re.findall(r'yield "([^"]+)"', (SOURCES / "surface.py").read_text())
    ),
)


CASES = [
    Case(f"{row.name} ({form})", partial(row.request.ask, form=form, wanted=row.says), row.deadly)
    for row in ROWS
    for form in row.forms
    if row.request.can_be(form)
]
