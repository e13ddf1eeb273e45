"""Bodies and headers that only HTTP has: JSON as people write it, binary data, compression, generate."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from support.differential.facts import Case, http_facts
from support.differential.target import LENGTH, Target

_ONE = '{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,2],"data":[1,2]}]}'
_BINARY = {
    "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}],
    "outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": True}}],
}
_BLOB = b"\0\0\x80\x3f\0\0\0\x40"


def one(data: Any, *, datatype: str = "FP32", shape: Any = (1, 2), name: str = "INPUT0", **fields: Any) -> str:
    tensor: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
    if data is not None:
        tensor["data"] = data
    return json.dumps({"inputs": [tensor], **fields})


@dataclass(frozen=True)
class Row:
    name: str
    body: bytes | str | Mapping[str, Any] | None
    path: str = "/v2/models/echo/infer"
    headers: Mapping[str, str] = field(default_factory=dict)
    says: tuple[str, ...] = ()
    deadly: str = ""


def binary(document: Any, blob: bytes, length: int | str | None = None) -> dict[str, Any]:
    head = json.dumps(document).encode()
    return {"body": head + blob, "headers": {LENGTH: str(len(head) if length is None else length)}}


def _sized(size: Any) -> dict[str, Any]:
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": size}}
    return {"inputs": [tensor]}


def _generate(name: str, model: str, document: Any, **details: Any) -> list[Row]:
    body = document if isinstance(document, str) else json.dumps(document)
    return [
        Row(f"{verb}: {name}", body, f"/v2/models/{model}/{verb}", **details)
        for verb in ("generate", "generate_stream")
    ]


_TEXTS = "/v2/models/echo_text/infer"
_TYPES = "/v2/models/echo_types/infer"

ROWS: tuple[Row, ...] = (
    # JSON.
    Row("nested data", one([[1, 2]])),
    Row("nested too deep", one([[[1, 2]]])),
    Row("half nested", one([[1], 2])),
    Row("integers for floats", one([1, 2])),
    Row("a text for a float", one(["1", 2])),
    Row("a truth for a float", one([True, 2])),
    Row("null for a float", one([None, 2])),
    Row("a fraction for an integer", one([1.5], datatype="INT32", shape=[1], name="INPUT_INT32"), _TYPES),
    Row("an integer beyond its type", one([300], datatype="INT8", shape=[1], name="INPUT_INT8"), _TYPES),
    Row("a negative unsigned", one([-1], datatype="UINT8", shape=[1], name="INPUT_UINT8"), _TYPES),
    Row("a number for a truth", one([1], datatype="BOOL", shape=[1], name="INPUT_BOOL"), _TYPES),
    Row("a number for a text", one([1], datatype="BYTES", shape=[1]), _TEXTS),
    Row("a huge float", one([1e300, 1])),
    Row("half precision", one([1.0], datatype="FP16", shape=[1]), "/v2/models/echo_half/infer"),
    Row("data is a number", one(1)),
    Row("data is an object", one({})),
    Row("no data", one(None)),
    Row("empty data", one([])),
    Row("spaces", f" \n{_ONE}\n "),
    Row("no body", b""),
    Row("not JSON", "nothing"),
    Row("half of JSON", _ONE[:40]),
    Row("more after JSON", _ONE + "x"),
    Row("an array", "[]"),
    Row("a number", "1"),
    Row("no inputs", "{}", says=("inputs",)),
    Row("inputs is an object", '{"inputs":{}}', says=("inputs",)),
    Row("an input is a number", '{"inputs":[1]}'),
    Row("an input without a name", '{"inputs":[{"datatype":"FP32","shape":[1,2],"data":[1,2]}]}', says=("name",)),
    Row("an input without a datatype", '{"inputs":[{"name":"INPUT0","shape":[1,2],"data":[1,2]}]}', says=("datatype",)),
    Row("an input without a shape", '{"inputs":[{"name":"INPUT0","datatype":"FP32","data":[1,2]}]}', says=("shape",)),
    Row("a shape that is a number", one([1, 2], shape=2), says=("shape",)),
    Row("a shape of texts", one([1, 2], shape=["1", "2"]), says=("shape",)),
    Row("a shape of fractions", one([1, 2], shape=[1.0, 2.0]), says=("shape",)),
    Row("an id that is a number", one([1, 2], id=7)),
    Row("parameters that are a list", one([1, 2], parameters=[])),
    Row("a parameter that is a list", one([1, 2], parameters={"a": [1]}), says=("a",)),
    Row("a parameter that is null", one([1, 2], parameters={"a": None})),
    Row("unknown keys", one([1, 2], something={"else": 1})),
    Row("outputs that are an object", one([1, 2], outputs={}), says=("outputs",)),
    Row("an output without a name", one([1, 2], outputs=[{}]), says=("name",)),
    Row("a text", one(["a"], datatype="BYTES", shape=[1]), _TEXTS),
    Row(
        "a text with escapes",
        '{"inputs":[{"name":"INPUT0","datatype":"BYTES","shape":[1],"data":["\\u00fc\\ud83d\\ude00\\n"]}]}',
        _TEXTS,
    ),
    Row(
        "a text with half a pair",
        '{"inputs":[{"name":"INPUT0","datatype":"BYTES","shape":[1],"data":["\\ud83d"]}]}',
        _TEXTS,
    ),
    Row("nested texts", one([["a"], ["b"]], datatype="BYTES", shape=[2]), _TEXTS),
    Row(
        "bytes that are no text",
        **binary(
            {"inputs": [{"name": "INPUT0", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 6}}]},
            b"\2\0\0\0\xff\xfe",
        ),
        path=_TEXTS,
    ),
    Row("a content type of its own", _ONE, headers={"Content-Type": "text/plain"}),
    # Binary data.
    Row("binary in and out", **binary(_BINARY, _BLOB)),
    Row("binary in", **binary(_sized(8), _BLOB)),
    Row("binary out by default", one([1, 2], parameters={"binary_data_output": True})),
    Row(
        "binary out by default but one",
        one(
            [1, 2],
            parameters={"binary_data_output": True},
            outputs=[{"name": "OUTPUT0", "parameters": {"binary_data": False}}],
        ),
    ),
    Row(
        "binary out by default and listed",
        one([1, 2], parameters={"binary_data_output": True}, outputs=[{"name": "OUTPUT0"}]),
    ),
    Row("binary out by default, a number", one([1, 2], parameters={"binary_data_output": 1})),
    Row(
        "an output twice, the last time binary",
        one([1, 2], outputs=[{"name": "OUTPUT0"}, {"name": "OUTPUT0", "parameters": {"binary_data": True}}]),
    ),
    Row(
        "an output twice, the first time binary",
        one([1, 2], outputs=[{"name": "OUTPUT0", "parameters": {"binary_data": True}}, {"name": "OUTPUT0"}]),
    ),
    Row("binary data that is a number", one([1, 2], outputs=[{"name": "OUTPUT0", "parameters": {"binary_data": 1}}])),
    Row("binary too short", **binary(_sized(8), _BLOB[:4]), says=("INPUT0",)),
    Row("binary too long", **binary(_sized(8), _BLOB + b"x")),
    Row("binary size too small", **binary(_sized(4), _BLOB[:4]), says=("INPUT0",)),
    Row("binary size that is a text", **binary(_sized("8"), _BLOB)),
    Row("binary size that is negative", **binary(_sized(-8), _BLOB)),
    Row(
        "binary size and data", **binary({"inputs": [_sized(8)["inputs"][0] | {"data": [1, 2]}]}, _BLOB), says=("data",)
    ),
    Row("binary without a length", body=json.dumps(_BINARY).encode() + _BLOB),
    Row("a length that is no number", **binary(_BINARY, _BLOB, "x")),
    Row("a negative length", **binary(_BINARY, _BLOB, -1)),
    Row("a length beyond the body", **binary(_BINARY, _BLOB, 10_000)),
    Row("a length too short", **binary(_BINARY, _BLOB, 10)),
    Row("a length of JSON alone", _ONE, headers={LENGTH: str(len(_ONE))}),
    # The whole body is the input.
    Row("raw", _BLOB, headers={LENGTH: "0"}),
    Row("raw of three", _BLOB + _BLOB[:4], headers={LENGTH: "0"}),
    Row("raw and not whole", _BLOB[:3], headers={LENGTH: "0"}),
    Row("raw and empty", b"", headers={LENGTH: "0"}),
    Row("raw text", b"text", _TEXTS, headers={LENGTH: "0"}),
    Row("raw for two inputs", _BLOB, "/v2/models/add_sub/infer", headers={LENGTH: "0"}, says=("input",)),
    Row("raw for optional inputs", _BLOB, _TYPES, headers={LENGTH: "0"}),
    # Compression of requests.
    Row("gzip", gzip.compress(_ONE.encode()), headers={"Content-Encoding": "gzip"}),
    Row("deflate", zlib.compress(_ONE.encode()), headers={"Content-Encoding": "deflate"}),
    Row("identity", _ONE, headers={"Content-Encoding": "identity"}),
    Row("an unknown encoding", _ONE, headers={"Content-Encoding": "br"}),
    Row("two encodings", gzip.compress(_ONE.encode()), headers={"Content-Encoding": "gzip, gzip"}),
    Row("gzip that is none", _ONE, headers={"Content-Encoding": "gzip"}),
    Row("half of gzip", gzip.compress(_ONE.encode())[:-12], headers={"Content-Encoding": "gzip"}),
    # Generate.
    *_generate("a scalar", "echo_text", {"INPUT0": "a"}),
    *_generate("an array", "echo_text", {"INPUT0": ["a", "b"]}),
    *_generate("an id", "echo_text", {"INPUT0": "a", "id": "r"}),
    *_generate("parameters", "told", {"INPUT0": 1, "temperature": 0.5, "max": 7, "yes": True, "who": "me"}),
    *_generate("nested parameters", "told", {"INPUT0": 1, "parameters": {"a": 1}}),
    *_generate("another type", "told", {"INPUT0": "x"}),
    *_generate("a fraction", "told", {"INPUT0": 1.5}),
    *_generate("a batch", "echo", {"INPUT0": [1, 2]}),
    *_generate("two inputs", "add_sub", {"INPUT0": [1, 2, 3, 4], "INPUT1": [4, 3, 2, 1]}),
    *_generate("too few elements", "add_sub", {"INPUT0": [1, 2], "INPUT1": [4, 3, 2, 1]}),
    *_generate("nested arrays", "echo", {"INPUT0": [[1, 2]]}),
    *_generate("no input", "echo_text", {}),
    *_generate("an object", "echo_text", {"INPUT0": {"a": 1}}),
    *_generate("null", "echo_text", {"INPUT0": None}),
    *_generate("not JSON", "echo_text", "nothing"),
    *_generate("a list", "echo_text", "[]"),
    *_generate("no such model", "nothing", {"INPUT0": "a"}),
    *_generate("no body", "echo_text", ""),
    *_generate("one response", "repeat", {"IN": 1}),
    *_generate("three responses", "repeat", {"IN": 3}),
    *_generate("no response", "repeat", {"IN": 0}),
    *_generate("an error after two", "repeat", {"IN": -2}),
    *_generate("a failure", "failing", {"INPUT0": "raise"}),
    *_generate("a failure with a code", "failing", {"INPUT0": "NOT_FOUND"}),
    *_generate("an ensemble", "ensemble", {"A": [1, 2, 3, 4], "B": [1, 1, 1, 1]}),
    *_generate("a decoupled ensemble", "ensemble_repeat", {"N": 2}),
)


def _ask(row: Row, target: Target) -> Any:
    reply = target.http("POST", row.path, row.body, row.headers)
    facts = http_facts(reply, *row.says)
    if reply.headers.get("content-type", "").startswith("text/event-stream"):
        return {"status": reply.status, "events": _events(reply.body.decode())}
    return facts


def _events(text: str) -> list[Any]:
    frames = [frame.removeprefix("data: ") for frame in text.split("\n\n") if frame]
    return [_without_trace(json.loads(frame)) for frame in frames]


def _without_trace(document: Any) -> Any:
    """Errors as one word: their texts have paths and lines."""
    return {"error": "(some)"} if "error" in document else document


def _ask_compressed(accepted: str, target: Target) -> Any:
    body = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 500], "data": [0] * 500}]})
    reply = target.http("POST", "/v2/models/echo/infer", body, {"Accept-Encoding": accepted})
    encoding = reply.headers.get("content-encoding", "")
    plain = {"gzip": gzip.decompress, "deflate": zlib.decompress}.get(encoding, bytes)(reply.body)
    return {"status": reply.status, "encoding": encoding, "outputs": len(json.loads(plain)["outputs"][0]["data"])}


CASES = [
    *(Case(f"http: {row.name}", partial(_ask, row), row.deadly) for row in ROWS),
    *(
        Case(f"http: accepts {accepted!r}", partial(_ask_compressed, accepted))
        for accepted in (
            "gzip",
            "deflate",
            "identity",
            "",
            "br",
            "gzip, deflate",
            "deflate;q=0.5, gzip;q=0.1",
            "gzip;q=0",
            "*",
        )
    ),
]
