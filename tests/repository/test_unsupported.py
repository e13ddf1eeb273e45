import pytest

from modelserver.config.pbtxt import parse_pbtxt
from modelserver.repository.unsupported import ignored_warnings, unsupported_problems


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("input [ { is_shape_tensor: true } ]", "input[0].is_shape_tensor"),
        ("output [ { }, { is_non_linear_format_io: true } ]", "output[1].is_non_linear_format_io"),
    ],
)
def test_what_would_change_answers_is_refused_by_name(text: str, field: str) -> None:
    (problem,) = unsupported_problems(parse_pbtxt(text).config, "config.pbtxt")
    assert problem.field == field
    assert "this version does not execute" in problem.message


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("model_operations { op_library_filename: 'a.so' }", "model_operations.op_library_filename"),
        ("cc_model_filenames [ { key: '8.0' value: 'm' } ]", "cc_model_filenames"),
        ("model_warmup [ { name: 'a' } ]", "model_warmup[0]"),
        ("input [ { name: 'a', allow_ragged_batch: true } ]", "input[0].allow_ragged_batch"),
        (
            "max_batch_size: 2 dynamic_batching { default_priority_level: 1 }",
            "dynamic_batching.default_priority_level",
        ),
        (
            "max_batch_size: 2 dynamic_batching { priority_queue_policy { key: 4 value { } } }",
            "dynamic_batching.priority_queue_policy[4]",
        ),
        ("sequence_batching { control_input [ { name: 'C' } ] }", "sequence_batching.control_input[0]"),
        (
            "sequence_batching { control_input [ { name: 'C' control [ { }, { kind: CONTROL_SEQUENCE_END } ] } ] }",
            "sequence_batching.control_input[0].control[0]",
        ),
        ("instance_group [ { secondary_devices [ { device_id: 1 } ] } ]", "instance_group[0].secondary_devices"),
        ("instance_group [ { profile: '1' } ]", "instance_group[0].profile"),
        ("instance_group [ { kind: KIND_MODEL profile: '1' } ]", "instance_group[0].profile"),
        ("optimization { cuda { graphs: true } }", "optimization.cuda"),
        ("optimization { eager_batching: true }", "optimization.eager_batching"),
        ("optimization { priority: PRIORITY_MAX }", "optimization.priority"),
        ("optimization { input_pinned_memory { enable: false } }", "optimization.input_pinned_memory"),
        ("optimization { output_pinned_memory { enable: true } }", "optimization.output_pinned_memory"),
        ("optimization { gather_kernel_buffer_threshold: 4 }", "optimization.gather_kernel_buffer_threshold"),
        ("optimization { graph { level: 1 } }", "optimization.graph"),
        (
            "optimization { execution_accelerators { cpu_execution_accelerator [ { name: 'openvino' } ] } }",
            "optimization.execution_accelerators",
        ),
        ("model_metrics { metric_control [ { } ] }", "model_metrics"),
        (
            "model_metrics { metric_control [ { metric_identifier { family: 'nv_inference_count' } } ] }",
            "model_metrics",
        ),
    ],
)
def test_what_only_tunes_is_a_warning(text: str, field: str) -> None:
    config = parse_pbtxt(text).config
    assert unsupported_problems(config, "config.pbtxt") == ()
    (warning,) = ignored_warnings(config, "config.pbtxt")
    assert warning.field == field


def test_what_the_backend_carries_out_is_no_warning() -> None:
    config = parse_pbtxt("optimization { graph { level: 1 } cuda { } } instance_group [ { }, { profile: '1' } ]").config
    warned = {warning.field for warning in ignored_warnings(config, "config.pbtxt", {"optimization.graph"})}
    assert warned == {"optimization.cuda", "instance_group[1].profile"}
    acts_on = {"optimization.graph", "optimization.cuda", "instance_group.profile"}
    assert ignored_warnings(config, "config.pbtxt", acts_on) == ()


@pytest.mark.parametrize(
    "text",
    [
        "optimization { }",
        "optimization { priority: PRIORITY_DEFAULT }",
        "model_transaction_policy { decoupled: false }",
        "response_cache { enable: false }",
        "max_batch_size: 1 dynamic_batching { }",
        "instance_group [ { count: 2 kind: KIND_CPU } ]",
        "model_metrics { metric_control [ { metric_identifier { "
        "family: 'nv_inference_first_response_histogram_ms' } histogram_options { buckets: [ 1, 2 ] } } ] }",
        "max_batch_size: 1 input [ { allow_ragged_batch: true } ]",
        "model_warmup [ { inputs { key: 'a' value { } } } ]",
    ],
)
def test_what_is_off_or_carried_out_is_no_finding(text: str) -> None:
    config = parse_pbtxt(text).config
    assert unsupported_problems(config, "config.pbtxt") == ()
    assert ignored_warnings(config, "config.pbtxt") == ()


def test_dynamic_batching_without_batches_is_a_warning() -> None:
    config = parse_pbtxt("dynamic_batching { }").config
    assert unsupported_problems(config, "config.pbtxt") == ()
    (warning,) = ignored_warnings(config, "config.pbtxt")
    assert (warning.field, "each request is executed alone" in warning.message) == ("dynamic_batching", True)
