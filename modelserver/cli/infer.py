"""`modelserver infer`: one request to a running server, from the command line."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from modelserver.cli.output import AsJson, Url, print_json, print_line, print_table
from modelserver.client.infer_answer import http_outputs
from modelserver.client.server_client import DEFAULT_URL, ServerClient
from modelserver.core.datatype import Datatype
from modelserver.core.spelling import nearest_hint
from modelserver.core.tensor import Tensor, tensor_to_bytes
from modelserver.errors import InvalidArgumentError, ServerError

Array = np.ndarray[Any, Any]

PICTURES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp"})


@dataclass(frozen=True, slots=True)
class InputSpec:
    """An input as the model's metadata shows it: -1 is any size, the first one often the batch."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]

    @classmethod
    def from_metadata(cls, entry: dict[str, Any]) -> InputSpec:
        return cls(entry["name"], Datatype(entry["datatype"]), tuple(int(size) for size in entry["shape"]))


def parse_tensor(argument: str, specs: dict[str, InputSpec]) -> Tensor:
    """The tensor that `name=value` writes.

    `value` is JSON (`[1, 2]`, `3`), text for a BYTES input, `@file` or `@-` (standard input). A file is a .npy
    array, JSON, a picture (decoded for a numeric input, sent as it is for BYTES), or raw bytes for BYTES.
    Raises InvalidArgumentError that names the input, the expected form and the given value.
    """
    name, equals, value = argument.partition("=")
    if not equals:
        raise InvalidArgumentError(f"--input expects <name>=<value> or <name>=@<file>, got '{argument}'")
    if name not in specs:
        raise InvalidArgumentError(
            f"the model has no input '{name}'{nearest_hint(name, specs)} (it has {', '.join(sorted(specs))})"
        )
    spec = specs[name]
    array = _from_file(spec, value[1:]) if value.startswith("@") else _from_text(spec, value)
    return Tensor(name, spec.datatype, _fit(spec, array))


def _from_file(spec: InputSpec, name: str) -> Array:
    path = Path(name)
    try:
        content = sys.stdin.buffer.read() if name == "-" else path.read_bytes()
    except OSError as error:
        raise ServerError(f"input '{spec.name}': cannot read '{name}': {error.strerror}") from None
    suffix = path.suffix.lower()
    if suffix == ".npy":
        return _convert(spec, _load_npy(spec, path))
    if spec.datatype is Datatype.BYTES and suffix != ".json":
        return _bytes_array([content])
    if suffix in PICTURES:
        return _convert(spec, _load_picture(spec, path))
    return _from_text(spec, content.decode(errors="replace"))


def _from_text(spec: InputSpec, text: str) -> Array:
    try:
        document = json.loads(text)
    except ValueError:
        if spec.datatype is Datatype.BYTES:
            return _bytes_array([text.encode()])
        raise InvalidArgumentError(
            f"input '{spec.name}' is {spec.datatype.value}: expected JSON numbers such as [1, 2] or @file, "
            f"got '{text[:60]}'"
        ) from None
    if spec.datatype is Datatype.BYTES:
        return _bytes_from_json(document, text)
    try:
        return _convert(spec, np.asarray(document))
    except ValueError as error:
        raise InvalidArgumentError(f"input '{spec.name}': not an array: {error}") from None


def _bytes_from_json(document: object, text: str) -> Array:
    """Strings of a JSON list; anything else is the text itself."""
    if isinstance(document, str):
        return _bytes_array([document.encode()])
    if not isinstance(document, list):
        return _bytes_array([text.encode()])
    array = np.array(document, dtype=object)
    flat = [element if isinstance(element, str) else json.dumps(element) for element in array.ravel()]
    return _bytes_array([element.encode() for element in flat]).reshape(array.shape)


def _bytes_array(elements: list[bytes]) -> Array:
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array


def _load_npy(spec: InputSpec, path: Path) -> Array:
    try:
        loaded: Array = np.load(path, allow_pickle=False)
    except ValueError as error:
        raise InvalidArgumentError(f"input '{spec.name}': '{path}' is not a .npy array: {error}") from None
    return loaded


def _load_picture(spec: InputSpec, path: Path) -> Array:
    """Pixels at the model's size: greyscale for [.., h, w], colour for [.., 3, h, w] and [.., h, w, 3].

    Floating-point inputs get 0 to 1, integers 0 to 255.
    """
    try:
        from PIL import Image
    except ImportError:
        raise ServerError("decoding a picture needs Pillow: pip install 'modelserver-py[images]'") from None
    sizes = spec.shape
    is_planar = len(sizes) >= 3 and sizes[-3] == 3
    is_interleaved = len(sizes) >= 3 and sizes[-1] == 3
    height, width = sizes[-3:-1] if is_interleaved else sizes[-2:] if len(sizes) >= 2 else (-1, -1)
    with Image.open(path) as picture:
        pixels = picture.convert("RGB" if is_planar or is_interleaved else "L")
        if height > 0 and width > 0:
            pixels = pixels.resize((width, height))
        array: Array = np.asarray(pixels)
    if is_planar:
        array = array.transpose(2, 0, 1)
    return array / 255.0 if spec.datatype.numpy.kind == "f" or spec.datatype is Datatype.BF16 else array


def _convert(spec: InputSpec, array: Array) -> Array:
    """`array` in the input's datatype. BF16 is the upper half of the FP32 bits."""
    if spec.datatype is Datatype.BYTES:
        elements = [item if isinstance(item, bytes) else str(item).encode() for item in array.ravel().tolist()]
        return _bytes_array(elements).reshape(array.shape)
    if array.dtype.kind not in "biuf":
        raise InvalidArgumentError(f"input '{spec.name}' is {spec.datatype.value}: expected numbers")
    if spec.datatype is Datatype.BF16:
        bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
        upper: Array = (bits >> np.uint32(16)).astype(np.uint16)
        return upper
    return array.astype(spec.datatype.numpy)


def _fit(spec: InputSpec, array: Array) -> Array:
    """`array` in the shape of the input; missing dimensions of size 1 are added."""
    shape = spec.shape
    if _matches(array.shape, shape):
        return array
    if array.ndim < len(shape):
        padded = (1,) * (len(shape) - array.ndim) + array.shape
        if _matches(padded, shape):
            return array.reshape(padded)
    known = math.prod(size for size in shape if size >= 0)
    if shape.count(-1) <= 1 and known and array.size % known == 0 and (-1 in shape or array.size == known):
        return array.reshape(shape)
    raise InvalidArgumentError(f"input '{spec.name}': expected shape {list(shape)}, got {list(array.shape)}")


def _matches(actual: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    return len(actual) == len(expected) and all(
        wanted in (-1, size) for size, wanted in zip(actual, expected, strict=True)
    )


# How many values of a tensor a table shows.
MAX_SHOWN = 16


def infer(
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    values: Annotated[
        list[str],
        typer.Option("--input", "-i", help="name=JSON, name=text, name=@file.npy|.png|.json or name=@- . Repeatable."),
    ],
    output: Annotated[list[str] | None, typer.Option(help="Output to request; default: all. Repeatable.")] = None,
    model_version: Annotated[str, typer.Option("--version", help="Version; default: the newest ready one.")] = "",
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Send one request. Datatypes and shapes come from the model's metadata."""
    client = ServerClient(url)
    ask(client, model, read_specs(client, model, model_version), values, output, model_version, as_json=as_json)


def read_specs(client: ServerClient, model: str, model_version: str = "") -> dict[str, InputSpec]:
    """The model's inputs by name."""
    found = [InputSpec.from_metadata(entry) for entry in client.model_metadata(model, model_version)["inputs"]]
    return {spec.name: spec for spec in found}


def ask(
    client: ServerClient,
    model: str,
    specs: dict[str, InputSpec],
    values: Sequence[str],
    output: list[str] | None = None,
    model_version: str = "",
    *,
    as_json: bool = False,
) -> None:
    """Send one request and print its answer."""
    tensors = [parse_tensor(value, specs) for value in values]
    names = [tensor.name for tensor in tensors]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgumentError(f"--input gives '{name}' more than once")
    body, header_len = _encode(tensors, output)
    reply = client.infer(model, model_version, body, header_len)
    answer, found = http_outputs(reply.body, reply.json_len)
    outputs = [output.tensor() for output in found]
    if as_json:
        answer["outputs"] = [_document(tensor) for tensor in outputs]
        print_json(answer)
    else:
        _print(answer, outputs)


def _encode(tensors: list[Tensor], outputs: list[str] | None) -> tuple[bytes, int]:
    """The body of the request, and the length of its JSON; binary tensors follow the JSON."""
    raws = [bytes(tensor_to_bytes(tensor)) for tensor in tensors]
    head: dict[str, Any] = {
        "inputs": [
            {
                "name": tensor.name,
                "datatype": tensor.datatype.value,
                "shape": list(tensor.shape),
                "parameters": {"binary_data_size": len(raw)},
            }
            for tensor, raw in zip(tensors, raws, strict=True)
        ]
    }
    if outputs:
        head["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    else:
        head["parameters"] = {"binary_data_output": True}
    encoded = json.dumps(head).encode()
    return b"".join([encoded, *raws]), len(encoded)


def _document(tensor: Tensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "datatype": tensor.datatype.value,
        "shape": list(tensor.shape),
        "data": [_scalar(value) for value in _readable(tensor).ravel().tolist()],
    }


def _print(answer: dict[str, Any], tensors: list[Tensor]) -> None:
    print_line(f"{answer['model_name']}, version {answer.get('model_version', '?')}")
    rows = []
    for tensor in tensors:
        flat = _readable(tensor).ravel()[: MAX_SHOWN + 1].tolist()
        shown = " ".join(_short(_scalar(value)) for value in flat[:MAX_SHOWN])
        rows.append(
            (tensor.name, tensor.datatype.value, str(list(tensor.shape)), shown + " ..." * (len(flat) > MAX_SHOWN))
        )
    print_table(("output", "datatype", "shape", "values"), rows)


def _readable(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The tensor's values; BF16 bit patterns as the numbers they mean."""
    if tensor.datatype is not Datatype.BF16:
        return tensor.data
    return (tensor.data.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _scalar(value: object) -> object:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
