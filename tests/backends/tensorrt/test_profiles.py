from __future__ import annotations

from pathlib import Path

import pytest
from modelserver_backends.tensorrt.engine_info import Range
from modelserver_backends.tensorrt.onnx_file import OnnxFile, OnnxTensor
from modelserver_backends.tensorrt.profiles import (
    check_profile,
    default_sizes,
    derive_profile,
    parse_profile,
    parse_sizes,
    profile_text,
)

from modelserver.backend import ConfigError, Datatype, InvalidArgumentError


def onnx(*inputs: tuple[str, tuple[int | str | None, ...] | None], datatype: Datatype = Datatype.FP32) -> OnnxFile:
    tensors = tuple(OnnxTensor(name, datatype, dims) for name, dims in inputs)
    return OnnxFile(Path("model.onnx"), tensors, ())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x:1x3/8x3/32x3", {"x": Range((1, 3), (8, 3), (32, 3))}),
        ("x:1x3/8x3", {"x": Range((1, 3), (8, 3), (8, 3))}),
        ("x:4", {"x": Range((4,), (4,), (4,))}),
        (" a:1/2/3 , in:0:7 ", {"a": Range((1,), (2,), (3,)), "in:0": Range((7,), (7,), (7,))}),
        ("scope/name:1x2", {"scope/name": Range((1, 2), (1, 2), (1, 2))}),
    ],
)
def test_profiles_are_read_and_written(text: str, expected: dict[str, Range]) -> None:
    assert parse_profile(text, "--profile") == expected
    assert parse_profile(profile_text(expected), "--profile") == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected input:MIN/OPT/MAX"),
        ("x", "got 'x'"),
        ("x:", "got 'x:'"),
        ("x:1x/2", "got 'x:1x/2'"),
        ("x:1/2/3/4", "got 'x:1/2/3/4'"),
        ("x:1,x:2", "got 'x' twice"),
        ("x:-1", "got 'x:-1'"),
        ("x:4x4/2x4/8x4", "expected MIN <= OPT <= MAX, got 4/2/8 at place 0"),
        ("x:1/2x2/3", "got 1, 2 and 1 sizes"),
        ("x:1;y:2", "got 'x:1;y:2'"),
    ],
)
def test_wrong_profiles_are_named(text: str, said: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        parse_profile(text, "--profile")
    assert said in raised.value.message
    assert raised.value.message.startswith("--profile")


def test_sizes_of_one_dimension() -> None:
    assert parse_sizes("1/8/32", "--batch") == (1, 8, 32)
    assert parse_sizes("8", "--batch") == (8, 8, 8)
    assert default_sizes(1) == (1, 1, 1)
    assert default_sizes(64) == (1, 32, 64)
    for text in ("", "a", "1/2/3/4", "8/4/2", "-1"):
        with pytest.raises(InvalidArgumentError, match="--batch"):
            parse_sizes(text, "--batch")


def test_a_profile_from_sizes_of_dimensions() -> None:
    model = onnx(("ids", ("n", "seq")), ("mask", ("n", "seq")), ("scale", (3,)))
    profile = derive_profile(model, batch=(1, 4, 8), sizes={"seq": (1, 64, 512)})
    assert profile["ids"] == profile["mask"] == Range((1, 1), (4, 64), (8, 512))
    assert profile["scale"] == Range((3,), (3,), (3,))


def test_what_nobody_says_is_listed_with_a_line_to_copy() -> None:
    model = onnx(("ids", ("n", "seq")), ("image", ("n", 3, None)))
    with pytest.raises(ConfigError) as raised:
        derive_profile(model, batch=(1, 4, 8), sizes={})
    message = raised.value.message
    assert "'ids' dimension 1 (seq), 'image' dimension 2." in message
    assert 'string_value: "ids:1x1/4x128/8x512,image:1x3x1/4x3x128/8x3x512"' in message
    # What is proposed works.
    proposed = message.split('string_value: "')[1].split('"')[0]
    check_profile(parse_profile(proposed, "it"), model, "it")
    with pytest.raises(ConfigError, match=r"expected symbolic dimensions of its inputs \(n, seq\), got 'sequence'"):
        derive_profile(model, batch=None, sizes={"sequence": (1, 1, 1)})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ids:1x8/2x8/4x8", "'mask' has variable sizes and is missing"),
        ("ids:1x8,mask:1x8,x:1", "no input 'x' in the model, only ids, mask"),
        ("ids:1x8x2,mask:1x8", "'ids' has 2 dimensions, the profile gives 3"),
        ("ids:1x8/1x9/1x10,mask:1x8", "dimension 'seq' is 8/9/10 in 'ids' and 8/8/8 in 'mask'"),
        ("ids:1x9999999999,mask:1x8", "'ids' has a size over 2147483647"),
    ],
)
def test_profiles_that_do_not_fit_the_model(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_profile(parse_profile(text, "p"), onnx(("ids", ("n", "seq")), ("mask", ("n", "seq"))), "profile.0")
    assert said in raised.value.message


def test_fixed_dimensions_are_the_models() -> None:
    with pytest.raises(ConfigError, match="dimension 1 is 3 in the model, the profile says 4/4/4"):
        check_profile(parse_profile("x:1x4", "p"), onnx(("x", ("n", 3))), "p")


def test_the_range_of_a_shape_tensor_is_one_of_values() -> None:
    model = onnx(("shape", (2,)), datatype=Datatype.INT64)
    check_profile(parse_profile("shape:1x16/4x64/8x256", "p"), model, "p")
