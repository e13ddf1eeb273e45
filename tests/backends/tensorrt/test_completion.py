"""Triton's rules of autofill and validation, over descriptions of engines in place of plans.

The cases are those of Triton's qa/L0_model_config/autofill_noplatform(_success)/tensorrt, described anew.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from modelserver_backends.tensorrt.completion import check_against_engine, complete_from_engine, complete_from_onnx
from modelserver_backends.tensorrt.engine_info import EngineInfo
from modelserver_backends.tensorrt.onnx_file import OnnxFile, OnnxTensor
from support.engines import batching_engine, context_with, engine, tensor

from modelserver.backend import BackendContext, ConfigError, Datatype, ModelConfig, UnsupportedError

SHAPED = engine(
    tensor("in", -1, -1),
    tensor("in_shape", 3, kind="INT32", is_shape=True),
    tensor("out", -1, -1, -1),
    tensor("out_shape", 3, kind="INT64", is_shape=True),
    profiles=[{"in": ((1, 1), (4, 8), (8, 16)), "in_shape": ((1, 1, 1), (4, 4, 4), (8, 32, 32))}],
)
STATIC = engine(tensor("in", 8, 16), tensor("out", 8, 16))
TWO_PROFILES = engine(
    tensor("in", -1, 16),
    tensor("out", -1, 16),
    profiles=[{"in": ((1, 16), (2, 16), (4, 16))}, {"in": ((1, 16), (8, 16), (32, 16))}],
)


def completed(info: EngineInfo, text: str = "", profiles: tuple[int, ...] = (0,)) -> ModelConfig:
    return complete_from_engine(context_with(text), info, profiles)


def listed(config: ModelConfig) -> list[tuple[str, tuple[int, ...], bool]]:
    return [(spec.name, spec.dims, spec.is_shape_tensor) for spec in (*config.input, *config.output)]


def test_nothing_is_needed() -> None:
    config = completed(batching_engine(8))
    assert config.max_batch_size == 8
    assert config.dynamic_batching is not None
    assert listed(config) == [("in", (16,), False), ("out", (16,), False)]
    assert config.input[0].data_type is Datatype.FP32


@pytest.mark.parametrize(
    ("info", "text", "max_batch_size", "dims"),
    [
        # The dims of any tensor say whether there is a batch.
        (batching_engine(), 'input [ { name: "in" dims: [ 16 ] } ]', 8, (16,)),
        (batching_engine(), 'output [ { name: "out" dims: [ 16 ] } ]', 8, (16,)),
        (batching_engine(), 'input [ { name: "in" dims: [ -1, 16 ] } ]', 0, (-1, 16)),
        (batching_engine(), 'max_batch_size: 4 input [ { name: "in" dims: [ -1, 16 ] } ]', 0, (-1, 16)),
        (batching_engine(), "max_batch_size: 4", 4, (16,)),
        # A fixed first dimension is a batch only for who says so.
        (STATIC, "", 0, (8, 16)),
        (STATIC, 'input [ { name: "in" dims: [ 16 ] } ]', 8, (16,)),
        (STATIC, "max_batch_size: 8", 8, (16,)),
        (STATIC, 'input [ { name: "in" dims: [ 8, 16 ] } ]', 0, (8, 16)),
        # What the client sends may be reshaped for the engine.
        (batching_engine(), 'input [ { name: "in" dims: [ 4, 4 ] reshape { shape: [ 16 ] } } ]', 8, (4, 4)),
        (engine(tensor("in", 3), tensor("out")), "", 0, (3,)),
    ],
)
def test_batching_is_read_from_dims(info: EngineInfo, text: str, max_batch_size: int, dims: tuple[int, ...]) -> None:
    config = completed(info, text)
    assert (config.max_batch_size, config.input[0].dims) == (max_batch_size, dims)


VARIABLE = engine(
    tensor("in", -1, -1),
    tensor("out", -1, -1),
    profiles=[{"in": ((1, 4), (4, 16), (8, 32))}, {"in": ((1, 32), (4, 64), (8, 128))}],
)


@pytest.mark.parametrize(("size", "profiles"), [(4, (0,)), (32, (0,)), (100, (0, 1)), (-1, (0,))])
def test_a_size_is_one_that_a_profile_takes(size: int, profiles: tuple[int, ...]) -> None:
    assert completed(VARIABLE, f'input [ {{ name: "in" dims: [ {size} ] }} ]', profiles).input[0].dims == (size,)


@pytest.mark.parametrize(("size", "profiles"), [(3, (0,)), (33, (0,)), (129, (0, 1)), (31, (1,))])
def test_a_size_that_none_takes_is_refused_in_tritons_words(size: int, profiles: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        completed(VARIABLE, f'input [ {{ name: "in" dims: [ {size} ] }} ]', profiles)
    assert raised.value.message.startswith("model configuration specified invalid shape for input 'in' for model m. ")
    assert f"but received {size}" in raised.value.message


def test_a_written_size_gets_a_batcher_too() -> None:
    assert completed(batching_engine(8), "max_batch_size: 8").dynamic_batching is not None
    assert completed(batching_engine(8), "max_batch_size: 1").dynamic_batching is None
    written = completed(batching_engine(8), "max_batch_size: 8 sequence_batching { }")
    assert written.dynamic_batching is None


def test_the_largest_batch_is_that_of_the_profiles_in_use() -> None:
    assert completed(TWO_PROFILES).max_batch_size == 4
    assert completed(TWO_PROFILES, profiles=(0, 1)).max_batch_size == 32


def test_a_row_of_one_has_no_batcher() -> None:
    config = completed(batching_engine(1))
    assert (config.max_batch_size, config.dynamic_batching) == (1, None)


def test_shape_tensors_lose_the_batch_too() -> None:
    config = completed(SHAPED)
    assert config.max_batch_size == 8
    assert listed(config) == [
        ("in", (-1,), False),
        ("in_shape", (2,), True),
        ("out", (-1, -1), False),
        ("out_shape", (2,), True),
    ]
    whole = completed(SHAPED, 'input [ { name: "in_shape" dims: [ 3 ] is_shape_tensor: true } ]')
    assert whole.max_batch_size == 0
    assert ("in_shape", (3,), True) in listed(whole)


@pytest.mark.parametrize(
    ("info", "text", "said"),
    [
        (batching_engine(), "max_batch_size: 9", "expected at most 8, as the file allows, got 9"),
        (TWO_PROFILES, "max_batch_size: 32", "expected at most 4"),
        (batching_engine(), 'input [ { name: "IN" dims: [ 16 ] } ]', "expected one of the file's inputs in, got 'IN'"),
        (batching_engine(), 'output [ { name: "x" dims: [ 16 ] } ]', "expected one of the file's outputs out, got 'x'"),
        (
            batching_engine(),
            'input [ { name: "in" data_type: TYPE_INT32 }]',
            "expected TYPE_FP32 for 'in', got TYPE_INT32",
        ),
        (batching_engine(), 'input [ { name: "in" dims: [ 15 ] } ]', "expected [16] for 'in'"),
        (batching_engine(), 'output [ { name: "out" dims: [ 17 ] } ]', "expected [16] for 'out'"),
        (batching_engine(), 'input [ { name: "in" dims: [ 16 ] }, { name: "b" dims: [ 1 ] } ]', "got 'b'"),
        (
            batching_engine(),
            'input [ { name: "in" dims: [ 16 ] } ] output [ { name: "out" dims: [ -1, 16 ] } ]',
            "contradicting each other in terms of whether batching is supported",
        ),
        (
            SHAPED,
            'input [ { name: "in" dims: [ -1 ] }, { name: "in_shape" dims: [ 3 ] is_shape_tensor: true } ]',
            "contradicting each other",
        ),
        (
            batching_engine(),
            'input [ { name: "in" dims: [ 16 ] is_shape_tensor: true } ]',
            "'in' is incorrectly specified as a shape tensor",
        ),
        (
            batching_engine(),
            'input [ { name: "in" dims: [ 16 ] is_non_linear_format_io: true } ]',
            "'in' uses a linear IO format",
        ),
        (engine(tensor("in"), tensor("out")), "max_batch_size: 4", "no dimension that could be a batch"),
    ],
)
def test_contradictions_are_errors(info: EngineInfo, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        completed(info, text)
    assert said in raised.value.message


def test_vectorised_formats_are_refused() -> None:
    info = batching_engine()
    vectorised = replace(info, tensors=(replace(info.tensors[0], is_linear=False), info.tensors[1]))
    with pytest.raises(UnsupportedError, match="'in' has a vectorised format"):
        completed(vectorised)


def test_a_complete_config_is_compared_with_the_engine() -> None:
    for info, text in ((batching_engine(), ""), (SHAPED, ""), (STATIC, ""), (STATIC, "max_batch_size: 8")):
        config = completed(info, text)
        check_against_engine(replace(context_with(), config=config), info, (0,))
    shaped = replace(context_with(), config=completed(SHAPED))
    unflagged = tuple(replace(spec, is_shape_tensor=False) for spec in shaped.config.input)
    with pytest.raises(ConfigError, match="'in_shape' is incorrectly specified"):
        check_against_engine(replace(shaped, config=replace(shaped.config, input=unflagged)), SHAPED, (0,))


def onnx_context(text: str) -> tuple[BackendContext, OnnxFile]:
    tensors = tuple(OnnxTensor(name, Datatype.FP32, ("n", 4)) for name in ("x", "y"))
    return context_with(text), OnnxFile(Path("model.onnx"), tensors[:1], tensors[1:])


def test_an_onnx_file_completes_as_its_engine_will() -> None:
    context, onnx = onnx_context("")
    config = complete_from_onnx(context, onnx, 16)
    assert (config.max_batch_size, listed(config)) == (16, [("x", (4,), False), ("y", (4,), False)])
    with pytest.raises(ConfigError, match="expected at most 16"):
        complete_from_onnx(onnx_context("max_batch_size: 32")[0], onnx, 16)
    written = onnx_context('input [ { name: "s" dims: [ 2 ] is_shape_tensor: true } ]')[0]
    assert complete_from_onnx(written, onnx, 16) == written.config
    strange = OnnxFile(Path("model.onnx"), (OnnxTensor("x", None, None),), onnx.outputs)
    with pytest.raises(UnsupportedError, match="input 'x' is of a type that no KServe tensor can carry"):
        complete_from_onnx(context, strange, None)
