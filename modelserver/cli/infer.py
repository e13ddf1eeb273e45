"""`modelserver infer`: one request to a running server, from the command line."""

from __future__ import annotations

import json
from typing import Annotated, Any

import numpy as np
import typer

from modelserver.cli.models import AsJson, Url
from modelserver.cli.output import print_json, print_line, print_table
from modelserver.cli.tensor_argument import InputSpec, parse_tensor
from modelserver.client.infer_answer import http_outputs
from modelserver.client.server_client import DEFAULT_URL, ServerClient
from modelserver.core.datatype import Datatype
from modelserver.core.tensor import Tensor, tensor_to_bytes
from modelserver.errors import InvalidArgumentError

# How many values of a tensor a table shows.
MAX_SHOWN = 16


def register(app: typer.Typer) -> None:
    app.command()(infer)


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
    specs = [InputSpec.from_metadata(entry) for entry in client.model_metadata(model, model_version)["inputs"]]
    tensors = [parse_tensor(value, {spec.name: spec for spec in specs}) for value in values]
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
