"""Errors of configs begin with Triton's sentence for the mistake: scripts and golden files match it."""

from __future__ import annotations

import pytest

from modelserver.config.defaults import normalise
from modelserver.config.ensemble_models import check_models
from modelserver.config.pbtxt import parse_pbtxt
from modelserver.config.problem import error_of
from modelserver.config.schema import EnsembleStep, ModelConfig
from modelserver.config.validate import validate

X = 'input { name: "x" data_type: TYPE_FP32 dims: 4 %s }'
Y = 'output { name: "y" data_type: TYPE_FP32 dims: 4 %s }'
CONTROL = 'sequence_batching { control_input { name: "s" control { kind: CONTROL_SEQUENCE_%s } } %s }'
START = 'control_input { name: "%s" control { kind: CONTROL_SEQUENCE_START bool_false_true: [ false, true ] } }'
RESHAPED = "has different size for dims and reshape for m"
SIZES = "must be integer >= 1, or -1 to indicate a variable-size dimension for m"
STEP = 'ensemble_scheduling { step { model_name: "a" %s } }'
MAPS = 'input_map { key: "i" value: "x" } output_map { key: "o" value: "y" }'


def error_text(text: str, **known: object) -> str:
    parsed = parse_pbtxt(text, "config.pbtxt")
    config = normalise(parsed.config, model_name="m")
    problems = validate(config, locations=parsed.locations, model_name="m", **known)  # type: ignore[arg-type]
    assert problems, "the config has no mistake"
    return error_of(problems, "config.pbtxt").message


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("max_batch_size: -1", "'max_batch_size' must be non-negative value for m"),
        ('name: "other"', "unexpected directory name 'm' for model 'other', directory name must equal model name"),
        ('platform: "no_such"', "unexpected platform type 'no_such' for m"),
        (
            'platform: "onnxruntime_onnx" backend: "python"',
            "unexpected 'platform' and 'backend' pair, got:onnxruntime_",
        ),
        ("input { dims: 1 data_type: TYPE_FP32 }", "model input must specify 'name' for m"),
        ('input { name: "x" dims: 1 }', "model input 'x' must specify 'data_type' for m"),
        ('output { name: "y" data_type: TYPE_FP32 }', "model output 'y' must specify 'dims' for m"),
        ('input { name: "x" data_type: TYPE_FP32 dims: 0 }', f"model input 'x' dimension {SIZES}"),
        (Y % "reshape { shape: 0 }", f"model output 'y' reshape dimensions {SIZES}"),
        (X % "reshape { shape: 5 }", f"model input 'x' {RESHAPED}"),
        (X % "reshape { shape: -1 }", f"model input 'x' {RESHAPED}"),
        (X % "reshape { }", "model input 'x' cannot have empty reshape for non-batching model as scalar tensors are"),
        (X % "format: FORMAT_NHWC", "model input NHWC/NCHW require 3 dims for m"),
        (X % "is_shape_tensor: true", "shape tensors are only supported for TensorRT platform for m"),
        (
            'input { name: "x" data_type: TYPE_FP32 dims: [ -1, -1 ] reshape { shape: -1 } }',
            "model input 'x' has different number of variable-size dimensions for dims and reshape for m",
        ),
        (
            "batch_input { kind: BATCH_MAX_ELEMENT_COUNT_AS_SHAPE target_name: 'b' data_type: TYPE_FP32 }",
            "batch input kind 'BATCH_MAX_ELEMENT_COUNT_AS_SHAPE' expects 1 source input, got 0 for m",
        ),
        (
            "batch_input { target_name: 'b' data_type: TYPE_FP32 source_input: 'z' }",
            "unknown source input name 'z' for m",
        ),
        (X % "" + "batch_output { target_name: 'z' source_input: 'x' }", "unknown target output name 'z' for m"),
        (
            "max_batch_size: 4 dynamic_batching { preferred_batch_size: 0 }",
            "dynamic batching preferred size must be pos",
        ),
        (
            "max_batch_size: 4 dynamic_batching { preferred_batch_size: 8 }",
            "dynamic batching preferred size must be <= max batch size for m",
        ),
        (
            "dynamic_batching { priority_levels: 3 default_priority_level: 5 }",
            "default priority level must be in range [1, 3] for m",
        ),
        (
            "dynamic_batching { priority_levels: 3 default_priority_level: 1 priority_queue_policy { key: 9 } }",
            "priority queue policy must have priority level in range [1, 3] for m",
        ),
        (
            "dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }",
            "Only one priority level is allowed when 'preserve_ordering' is true for m",
        ),
        (
            "sequence_batching { direct { minimum_slot_utilization: 2 } }",
            "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
        ),
        (
            CONTROL % ("READY", ""),
            "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
            "CONTROL_SEQUENCE_READY for m",
        ),
        (
            CONTROL % ("CORRID data_type: TYPE_FP32", ""),
            "unexpected data type for control CONTROL_SEQUENCE_CORRID for m",
        ),
        (
            CONTROL % ("START int32_false_true: 0", ""),
            "sequence batching control 'int32_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_START for m",
        ),
        (
            f"sequence_batching {{ {START % 'a'} {START % 'b'} }}",
            "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m",
        ),
        (
            "sequence_batching { } response_cache { enable: true }",
            "Response Cache does not currently support model m with sequence batching scheduler. Please disable the",
        ),
        (
            "model_transaction_policy { decoupled: true } response_cache { enable: true }",
            "Response Cache does not currently support model m with 'decoupled' transaction policy. Please disable the",
        ),
        (
            "instance_group { kind: KIND_CPU gpus: 0 }",
            "instance group m_0 of model m has kind KIND_CPU but specifies one or",
        ),
        (
            "model_metrics { metric_control { histogram_options { buckets: 1 } } }",
            "metric control must specify 'metric_identifier'",
        ),
        (
            "model_metrics { metric_control { metric_identifier { } histogram_options { buckets: 1 } } }",
            "metric identifier must specify non-empty 'family'",
        ),
        (
            'model_metrics { metric_control { metric_identifier { family: "f" } } }',
            "metric control must specify 'histogram_options'",
        ),
        (
            'model_metrics { metric_control { metric_identifier { family: "f" } histogram_options { } } }',
            "histogram options must specify non-empty 'buckets'",
        ),
    ],
)
def test_mistakes_of_a_model(text: str, sentence: str) -> None:
    if "platform" not in text:
        text += ' backend: "identity"'
    assert error_text(text).startswith(sentence)


def test_a_gpu_that_is_not_there() -> None:
    text = 'backend: "identity" instance_group { name: "g" kind: KIND_GPU gpus: 42 }'
    assert error_text(text, gpu_ids=[0]).startswith(
        "instance group g of model m specifies invalid or unsupported gpu id 42"
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "ensemble scheduling must be set for ensemble m whose platform is ensemble"),
        ("ensemble_scheduling { }", "must specify 'step' for ensemble 'm'"),
        (STEP % "", "must specify 'input_map' in step 0 of ensemble 'm'"),
        (STEP % MAPS + ' backend: "python"', "Ensemble model 'm' must have platform type 'ensemble' and empty backend"),
        (STEP % MAPS + " instance_group { }", "instance group should not be specified for ensemble 'm'"),
        (STEP % MAPS + ' input { name: "z" }', "ensemble input 'z' for ensemble m' is not used"),
        (STEP % MAPS + ' output { name: "z" }', "ensemble output 'z' for ensemble m' is not used"),
        (
            STEP % 'input_map { key: "i" value: "x" } output_map { key: "o" value: "z" }',
            "ensemble output 'y' for ensemble m' is not used",
        ),
        (
            STEP % 'input_map { key: "i" value: "lost" } output_map { key: "o" value: "y" }',
            "output 'y' for ensemble 'm' is not written: at least one of its depending tensors, 'lost', is not",
        ),
        (
            STEP % ('output_map { key: "p" value: "y" }' + MAPS),
            "ensemble tensor 'y' can appear in an output map only once for ensemble 'm' step 0",
        ),
        (
            STEP % ('output_map { key: "p" value: "unread" }' + MAPS),
            "ensemble tensor 'unread' is unused in ensemble 'm'",
        ),
    ],
)
def test_mistakes_of_an_ensemble(text: str, sentence: str) -> None:
    assert sentence in error_text(f'platform: "ensemble" {X % ""} {Y % ""} {text}').partition(": config.pbtxt")[0]


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("lost", "ensemble m contains models that are not available or ambiguous: a"),
        (
            'input { name: "j" } output { name: "o" }',
            "in ensemble m, ensemble tensor x is mapping to non-existing input i",
        ),
        (
            'input { name: "i" } output { name: "p" }',
            "in ensemble m, ensemble tensor y is mapped from non-existing output",
        ),
        (
            'input { name: "i" } input { name: "j" } output { name: "o" }',
            "in ensemble m, input j in model a is not mapped to any ensemble tensors",
        ),
        (
            'input { name: "i" data_type: TYPE_INT8 dims: 4 } output { name: "o" data_type: TYPE_FP32 dims: 4 }',
            "in ensemble m, ensemble tensor x: inconsistent data type: TYPE_FP32 is inferred from model m while "
            "TYPE_INT8 is inferred from model a",
        ),
        (
            'input { name: "i" data_type: TYPE_FP32 dims: 4 } output { name: "o" data_type: TYPE_FP32 dims: [ 4, 1 ] }',
            "in ensemble m, ensemble tensor y: inconsistent shape: [4] is inferred from model m while [4,1] "
            "is inferred from model a",
        ),
    ],
)
def test_ensembles_that_do_not_fit_their_models(model: str, sentence: str) -> None:
    ensemble = parse_pbtxt(f'name: "m" platform: "ensemble" {X % ""} {Y % ""} {STEP % MAPS}').config

    def find(_: EnsembleStep) -> ModelConfig | str:
        return "there is no model 'a'" if model == "lost" else parse_pbtxt(f'name: "a" {model}').config

    assert error_of(check_models(ensemble, find), "config.pbtxt").message.startswith(sentence)


def test_several_mistakes_are_all_told_behind_the_sentences_of_the_first() -> None:
    text = error_text('max_batch_size: -1 backend: "identity" input { name: "x" dims: 0 }')
    first, _, rest = text.partition(": config.pbtxt")
    assert first.startswith(
        "'max_batch_size' must be non-negative value for m: model input 'x' must specify 'data_type'"
    )
    assert rest.startswith(": 3 problems\n  config.pbtxt:1:1: max_batch_size: expected")
