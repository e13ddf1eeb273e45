import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.config_strategies import configs

from modelserver.config.defaults import normalise
from modelserver.config.pbtxt import parse_pbtxt
from modelserver.config.schema import InstanceGroupKind, ModelConfig, ModelInstanceGroup, VersionPolicyLatest

KINDS = InstanceGroupKind


def normalised(text: str, **options) -> ModelConfig:
    return normalise(parse_pbtxt(text).config, model_name="m", **options)


@given(
    config=configs(),
    cpu_instances=st.integers(1, 3),
    supports_gpu=st.booleans(),
    gpu_ids=st.lists(st.integers(0, 3), unique=True, max_size=2).map(tuple),
)
def test_normalising_again_changes_nothing(
    config: ModelConfig, cpu_instances: int, supports_gpu: bool, gpu_ids: tuple[int, ...]
) -> None:
    options = {"default_cpu_instances": cpu_instances, "supports_gpu": supports_gpu, "gpu_ids": gpu_ids}
    once = normalise(config, model_name="m", **options)
    assert normalise(once, model_name="m", **options) == once


def test_an_empty_config_gets_all_defaults() -> None:
    config = normalised("")
    assert config.name == "m"
    assert config.version_policy.latest == VersionPolicyLatest(1)
    assert config.instance_group == (ModelInstanceGroup("m", KINDS.KIND_CPU, 1),)
    assert config.optimization.input_pinned_memory.enable
    assert config.optimization.output_pinned_memory.enable
    assert config.dynamic_batching is None


def test_what_is_given_stays() -> None:
    text = (
        'name: "n" backend: "b" version_policy { specific { versions: 2 } } max_batch_size: 8 '
        'dynamic_batching { preferred_batch_size: 4 } instance_group { name: "g" kind: KIND_CPU count: 3 } '
        "optimization { input_pinned_memory { enable: false } output_pinned_memory { } }"
    )
    assert normalised(text, default_cpu_instances=2, supports_gpu=True, gpu_ids=(0,)) == parse_pbtxt(text).config


@pytest.mark.parametrize(
    ("platform", "backend"),
    [
        ("onnxruntime_onnx", "onnxruntime"),
        ("pytorch_libtorch", "pytorch"),
        ("torch_aoti", "pytorch"),
        ("tensorrt_plan", "tensorrt"),
        ("something_else", ""),
    ],
)
def test_platforms_mean_backends(platform: str, backend: str) -> None:
    assert normalised(f'platform: "{platform}"').backend == backend


@pytest.mark.parametrize(("text", "sizes"), [("", ()), ("max_batch_size: 8", (8,))])
def test_preferred_batch_size_is_the_largest(text: str, sizes: tuple[int, ...]) -> None:
    assert normalised(f"{text} dynamic_batching {{ }}").dynamic_batching.preferred_batch_size == sizes
    assert (
        normalised(f"{text} sequence_batching {{ oldest {{ }} }}").sequence_batching.oldest.preferred_batch_size
        == sizes
    )


def test_latest_without_a_number_is_one_version() -> None:
    assert normalised("version_policy { latest { } }").version_policy.latest == VersionPolicyLatest(1)
    assert normalised("version_policy { }").version_policy.latest == VersionPolicyLatest(1)


def test_sequence_batching_is_direct_and_idles_for_a_second() -> None:
    batching = normalised("sequence_batching { }").sequence_batching
    assert batching.direct is not None
    assert batching.max_sequence_idle_microseconds == 1_000_000


@pytest.mark.parametrize(("max_batch_size", "candidates"), [(0, 1), (8, 8)])
def test_candidates_of_the_oldest_strategy(max_batch_size: int, candidates: int) -> None:
    config = normalised(f"max_batch_size: {max_batch_size} sequence_batching {{ oldest {{ }} }}")
    assert config.sequence_batching.oldest.max_candidate_sequences == candidates
    assert config.sequence_batching.direct is None


@pytest.mark.parametrize(
    ("group", "supports_gpu", "gpu_ids", "kind", "count", "gpus"),
    [
        ("", False, (), KINDS.KIND_CPU, 2, ()),
        ("", True, (), KINDS.KIND_CPU, 2, ()),
        ("", False, (0, 1), KINDS.KIND_CPU, 2, ()),
        ("", True, (0, 1), KINDS.KIND_GPU, 1, (0, 1)),
        ("gpus: [ 1 ]", True, (0, 1), KINDS.KIND_GPU, 1, (1,)),
        ("gpus: [ 7 ]", False, (), KINDS.KIND_GPU, 1, (7,)),
        ("kind: KIND_GPU count: 3", True, (0, 1), KINDS.KIND_GPU, 3, (0, 1)),
        ("kind: KIND_CPU", True, (0, 1), KINDS.KIND_CPU, 2, ()),
        ("kind: KIND_MODEL", True, (0, 1), KINDS.KIND_MODEL, 1, ()),
        ("count: -1", False, (), KINDS.KIND_CPU, -1, ()),
    ],
)
def test_instance_groups_are_resolved(
    group: str,
    supports_gpu: bool,
    gpu_ids: tuple[int, ...],
    kind: InstanceGroupKind,
    count: int,
    gpus: tuple[int, ...],
) -> None:
    config = normalised(
        f"instance_group {{ {group} }}", default_cpu_instances=2, supports_gpu=supports_gpu, gpu_ids=gpu_ids
    )
    assert config.instance_group == (ModelInstanceGroup("m_0", kind, count, gpus=gpus),)


def test_groups_are_named_by_their_index() -> None:
    config = normalised('instance_group [ { }, { name: "mine" }, { rate_limiter { } } ]')
    assert [group.name for group in config.instance_group] == ["m_0", "mine", "m_2"]
    assert config.instance_group[2].rate_limiter.priority == 1


def test_an_ensemble_gets_no_instances() -> None:
    config = normalised("ensemble_scheduling { }")
    assert config.platform == "ensemble"
    assert config.instance_group == ()
    assert config.optimization is None
    assert normalised('platform: "ensemble"').instance_group == ()
