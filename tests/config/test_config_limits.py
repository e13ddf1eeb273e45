"""Bounds on what a config multiplies: each is refused with its field, its limit and what raises it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.model_files import write_model

from modelserver.config.config_limits import ConfigLimits, parse_config_limits
from modelserver.errors import ConfigError, InvalidArgumentError
from modelserver.repository.definition import read_definition
from modelserver.repository.layout import scan_model
from modelserver.repository.options import DefinitionOptions

TENSORS = """
max_batch_size: {max_batch_size}
input [ {{ name: "IN" data_type: TYPE_FP32 dims: [ {dims} ] }} ]
output [ {{ name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }} ]
"""
STATE = 'state [ { input_name: "a" output_name: "b" data_type: TYPE_FP32 dims: [ 1000000, 1000 ] } ]'
SAMPLE = 'inputs { key: "IN" value { data_type: TYPE_FP32 dims: [ %d ] zero_data: true } }'


def _read(root: Path, text: str, limits: ConfigLimits, *, max_batch_size: int = 8, dims: str = "-1") -> None:
    config = 'backend: "identity"' + TENSORS.format(max_batch_size=max_batch_size, dims=dims) + text
    directory = write_model(root, "m", config)
    read_definition(scan_model(directory, "m"), DefinitionOptions(limits=limits))


CASES = [
    ("instance_group [ { kind: KIND_CPU count: 1000000000 } ]", "instance_group[0].count", "instances", 10**9),
    (
        "instance_group [ { kind: KIND_CPU count: 200 }, { kind: KIND_CPU count: 100 } ]",
        "instance_group[1].count",
        "instances",
        300,
    ),
    (
        'model_warmup [ { name: "w" batch_size: 1 count: 4000000000 ' + SAMPLE % 1 + " } ]",
        "model_warmup[0].count",
        "warmup_requests",
        4_000_000_000,
    ),
    (
        'model_warmup [ { name: "w" batch_size: 8 ' + SAMPLE % 10**9 + " } ]",
        "model_warmup[0].inputs",
        "warmup_bytes",
        32 * 10**9,
    ),
    (
        'parameters { key: "auto_warmup" value { string_value: "1-1000000000" } }',
        'parameters["auto_warmup"]',
        "warmup_bytes",
        32 * 10**9,
    ),
    (
        "sequence_batching { oldest { max_candidate_sequences: 2000000000 } }",
        "sequence_batching.oldest.max_candidate_sequences",
        "sequence_slots",
        2 * 10**9,
    ),
    (
        "sequence_batching { direct { } } instance_group [ { kind: KIND_CPU count: 100 } ]",
        "max_batch_size",
        "sequence_slots",
        200_000_000,
    ),
    ("sequence_batching { " + STATE + " }", "sequence_batching.state", "state_bytes", 4 * 10**9),
    (
        "dynamic_batching { preferred_batch_size: [ " + ", ".join(["1"] * 2000) + " ] }",
        "dynamic_batching.preferred_batch_size",
        "preferred_sizes",
        2000,
    ),
    (
        "version_policy { specific { versions: [ " + ", ".join(map(str, range(1, 202))) + " ] } }",
        "version_policy.specific.versions",
        "versions",
        201,
    ),
    (
        'model_metrics { metric_control { metric_identifier { family: "f" } histogram_options { buckets: [ '
        + ", ".join(map(str, range(2000)))
        + " ] } } }",
        "model_metrics.metric_control[0].histogram_options.buckets",
        "histogram_buckets",
        2000,
    ),
]


@pytest.mark.parametrize(("text", "field", "name", "count"), CASES, ids=[case[1] for case in CASES])
def test_what_is_too_much_is_refused_at_once(tmp_path: Path, text: str, field: str, name: str, count: int) -> None:
    size = 2_000_000 if field == "max_batch_size" else 8
    with pytest.raises(ConfigError) as refused:
        _read(tmp_path, text, ConfigLimits(), max_batch_size=size)
    [problem] = [each for each in str(refused.value).splitlines() if "--config-limits" in each]
    limit = getattr(ConfigLimits(), name)
    assert field in problem
    assert f"expected at most {limit} " in problem
    assert f"got {count}" in problem
    assert f"--config-limits={name}={count} allows it" in problem


@pytest.mark.parametrize(("text", "field", "name", "count"), CASES, ids=[case[1] for case in CASES])
def test_the_flag_allows_it(tmp_path: Path, text: str, field: str, name: str, count: int) -> None:
    size = 2_000_000 if field == "max_batch_size" else 8
    _read(tmp_path, text, parse_config_limits(f"{name}={count}"), max_batch_size=size)


def test_priority_levels_are_bounded_by_the_flag_alone(tmp_path: Path) -> None:
    text = f"dynamic_batching {{ priority_levels: {2**64 - 1} default_priority_level: {2**32} }}"
    _read(tmp_path, text, ConfigLimits())
    with pytest.raises(ConfigError, match="priority_levels: expected at most 9 levels"):
        _read(tmp_path, text, parse_config_limits("priority_levels=9"))


def test_versions_on_disk_are_counted(tmp_path: Path) -> None:
    for version in range(1, 12):
        (tmp_path / "m" / str(version)).mkdir(parents=True)
    with pytest.raises(ConfigError, match="version_policy: expected at most 9 versions to serve, got 11"):
        _read(tmp_path, "version_policy { all { } }", ConfigLimits(versions=9))


def test_steps_of_an_ensemble_are_counted(tmp_path: Path) -> None:
    step = '{{ model_name: "x" input_map {{ key: "a" value: "t{}" }} output_map {{ key: "b" value: "t{}" }} }}'
    steps = ", ".join(step.format(number, number + 1) for number in range(300))
    text = 'platform: "ensemble" input [ { name: "t0" data_type: TYPE_FP32 dims: [ 1 ] } ] output [ { name: "t300"'
    text += " data_type: TYPE_FP32 dims: [ 1 ] } ] ensemble_scheduling { step [ " + steps + " ] }"
    directory = write_model(tmp_path, "e", text)
    with pytest.raises(ConfigError, match="expected at most 256 steps, got 300"):
        read_definition(scan_model(directory, "e"), DefinitionOptions())


@pytest.mark.parametrize("text", ["instance=3", "instances", "instances=0", "instances=-1", "instances=1e3", "a=b=c"])
def test_flags_that_say_nothing_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="--config-limits expects NAME=NUMBER"):
        parse_config_limits(text)


def test_a_limit_is_given_once() -> None:
    with pytest.raises(InvalidArgumentError, match="'versions' is given twice"):
        parse_config_limits("versions=3,versions=4")
    assert parse_config_limits("versions=3, instances=4") == ConfigLimits(versions=3, instances=4)
