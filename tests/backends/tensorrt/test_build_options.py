from __future__ import annotations

import json

import pytest
from modelserver_backends.tensorrt.build_options import BuildOptions, BuildRequest, parse_bytes
from modelserver_backends.tensorrt.engine_info import Range
from modelserver_backends.tensorrt.plan import Flavour

from modelserver.backend import InvalidArgumentError


def test_a_request_survives_the_pipe() -> None:
    options = BuildOptions(precision="fp16", targets=("sm86", "sm120"), plugins=(__file__,), workspace_bytes=7)
    request = BuildRequest("m.onnx", "m.plan", Flavour.RTX, ({"x": Range((1,), (2,), (3,))},), options)
    assert BuildRequest.from_json(json.loads(json.dumps(request.to_json()))) == request


@pytest.mark.parametrize(
    ("text", "expected"), [("0", 0), ("17", 17), ("4GiB", 4 * 2**30), ("512MiB", 512 * 2**20), ("2GB", 2 * 10**9)]
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text, "--workspace") == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.5GiB", "4 GiB", "4gib", "4TiB", "four"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="--workspace: expected a size"):
        parse_bytes(text, "--workspace")


@pytest.mark.parametrize(
    "fields",
    [
        {"runtime": "onnx"},
        {"precision": "int4"},
        {"hardware_compatibility": "all"},
        {"weights": "none"},
        {"targets": ("sm12",)},
        {"opt_level": 6},
        {"plugins": ("/nowhere/plugin.so",)},
    ],
)
def test_values_that_nobody_knows(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError, match="expected"):
        BuildOptions(**fields)  # type: ignore[arg-type]
