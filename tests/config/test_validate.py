import pytest
from hypothesis import given
from support.config_strategies import configs

from modelserver.config.pbtxt import parse_pbtxt
from modelserver.config.schema import (
    ModelConfig,
    ModelDynamicBatching,
    ModelSequenceBatching,
    ModelVersionPolicy,
    VersionPolicyAll,
    VersionPolicyLatest,
)
from modelserver.config.validate import validate

GOOD = {
    "plain": 'input { name: "a" data_type: TYPE_FP32 dims: [ -1, 3 ] } '
    'output { name: "b" data_type: TYPE_STRING dims: 1 }',
    "scalars": 'max_batch_size: 2 input { name: "a" data_type: TYPE_FP32 dims: 1 reshape { shape: [ ] } }',
    "reshape": 'input { name: "a" data_type: TYPE_FP32 dims: [ 2, -1, 6 ] reshape { shape: [ 2, -1, 3, 2 ] } }',
    "dynamic batching": "max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 2, 8 ] }",
    "priorities": "max_batch_size: 8 dynamic_batching { priority_levels: 3 default_priority_level: 3 "
    "priority_queue_policy { key: 1 value { timeout_action: DELAY } } }",
    "ordering": "max_batch_size: 8 dynamic_batching { preserve_ordering: true "
    "priority_levels: 1 default_priority_level: 1 }",
    "sequence": 'sequence_batching { control_input { name: "S" control { kind: CONTROL_SEQUENCE_START fp32_false_true: '
    '[ 0, 1 ] } } control_input { name: "I" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } } '
    'state { input_name: "i" output_name: "o" data_type: TYPE_FP32 dims: -1 initial_state { name: "z" data_type: '
    "TYPE_FP32 dims: 1 zero_data: true } } }",
    "ragged": 'max_batch_size: 4 input { name: "a" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true } '
    'output { name: "o" data_type: TYPE_FP32 dims: -1 } '
    'batch_input { kind: BATCH_ITEM_SHAPE target_name: "n" data_type: TYPE_INT32 source_input: "a" } '
    'batch_output { target_name: "o" source_input: "a" }',
    "instances": "instance_group [ { kind: KIND_CPU count: 2 }, { kind: KIND_GPU gpus: [ 0, 1 ] }, "
    "{ kind: KIND_MODEL } ]",
    "warmup": 'max_batch_size: 4 input { name: "a" data_type: TYPE_FP32 dims: [ -1, 2 ] } model_warmup { name: "w" '
    'batch_size: 4 inputs { key: "a" value { data_type: TYPE_FP32 dims: [ 9, 2 ] input_data_file: "a/b" } } }',
    "warmup of a sequence": 'max_batch_size: 4 input { name: "a" data_type: TYPE_FP32 dims: 1 } '
    'sequence_batching { control_input { name: "S" control { kind: CONTROL_SEQUENCE_START '
    "int32_false_true: [ 0, 1 ] } } } "
    'model_warmup { name: "w" batch_size: 4 inputs { key: "a" value { data_type: TYPE_FP32 dims: 1 zero_data: true } } '
    'inputs { key: "S" value { data_type: TYPE_INT32 dims: 1 zero_data: true } } }',
    "cache": "response_cache { enable: true }",
    "uncached decoupled": "response_cache { } model_transaction_policy { decoupled: true }",
    "versions": "version_policy { specific { versions: [ 3, 1 ] } }",
    "metrics": 'model_metrics { metric_control { metric_identifier { family: "f" } '
    "histogram_options { buckets: [ 1, 2.5 ] } } }",
}
ENSEMBLE = """
name: "e"
platform: "ensemble"
input { name: "IN" data_type: TYPE_FP32 dims: 1 }
output { name: "OUT" data_type: TYPE_FP32 dims: 1 }
ensemble_scheduling {
  step [
    { model_name: "last" model_version: -1
      input_map [ { key: "x" value: "left" }, { key: "y" value: "right" } ] output_map { key: "z" value: "OUT" } },
    { model_name: "first" input_map { key: "x" value: "IN" }
      output_map [ { key: "y" value: "left" }, { key: "z" value: "right" } ] }
  ]
}
"""


@pytest.mark.parametrize("text", GOOD.values(), ids=list(GOOD))
def test_good_configs_have_no_problems(text: str) -> None:
    assert validate(parse_pbtxt(f'name: "m" backend: "identity" {text}').config) == ()


def test_good_ensemble_has_no_problems_in_any_order_of_its_steps() -> None:
    assert validate(parse_pbtxt(ENSEMBLE).config) == ()


def test_platform_stands_for_a_backend() -> None:
    assert validate(ModelConfig(name="m", platform="onnxruntime_onnx")) == ()
    assert validate(ModelConfig(name="m", platform="pytorch_libtorch", backend="pytorch")) == ()


def test_name_must_be_the_directory_or_absent() -> None:
    parsed = parse_pbtxt('backend: "identity"\nname: "a"')
    assert validate(parsed.config, locations=parsed.locations, model_name="a") == ()
    (problem,) = validate(parsed.config, locations=parsed.locations, model_name="b", source="m/config.pbtxt")
    assert str(problem) == "m/config.pbtxt:2:1: name: expected 'b', the name of the model's directory, got 'a'"
    assert validate(ModelConfig(backend="identity"), model_name="b") == ()


@pytest.mark.parametrize(
    ("group", "gpu_ids", "problems"),
    [
        (
            "{ kind: KIND_GPU gpus: [ 0, 3 ] }",
            (0, 1),
            ["instance_group[0].gpus[1]: expected a usable GPU id (0, 1), got 3"],
        ),
        ("{ kind: KIND_AUTO gpus: [ 0 ] }", (), ["instance_group[0].gpus[0]: expected a usable GPU id (none), got 0"]),
        (
            "{ kind: KIND_GPU }",
            (),
            ["instance_group[0].kind: KIND_GPU needs a usable GPU, none is available; use kind: KIND_AUTO or KIND_CPU"],
        ),
        ("{ kind: KIND_GPU }", (0,), []),
        ("{ kind: KIND_MODEL }", (), []),
        ("{ kind: KIND_CPU }", (), []),
    ],
)
def test_gpus_must_be_usable(group: str, gpu_ids: tuple[int, ...], problems: list[str]) -> None:
    config = parse_pbtxt(f'name: "m" backend: "identity" instance_group {group}').config
    lines = [str(problem).removeprefix("config.pbtxt: ") for problem in validate(config, gpu_ids=gpu_ids)]
    assert lines == problems
    assert validate(config) == ()


def test_one_scheduler_and_one_version_policy() -> None:
    config = ModelConfig(
        name="m",
        backend="identity",
        max_batch_size=2,
        dynamic_batching=ModelDynamicBatching(),
        sequence_batching=ModelSequenceBatching(),
        version_policy=ModelVersionPolicy(latest=VersionPolicyLatest(1), all=VersionPolicyAll()),
    )
    assert [problem.field for problem in validate(config)] == ["version_policy.all", "sequence_batching"]


@given(config=configs())
def test_any_config_can_be_judged(config: ModelConfig) -> None:
    for problem in validate(config, model_name="m", gpu_ids=(0,)):
        assert problem.field
        assert problem.message


def test_problems_come_in_the_order_of_the_file() -> None:
    parsed = parse_pbtxt('name: "m"\nmax_batch_size: -1\noutput { }\nbackend: "a/b"')
    problems = validate(parsed.config, locations=parsed.locations)
    assert [problem.line for problem in problems] == [2, 3, 3, 3, 4]
