"""The engine's options from config.pbtxt and model.json."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

import pytest
from modelserver_backends.llm.options import CONVERTERS, EngineOptions

from modelserver.backend import InvalidArgumentError


def test_every_option_has_a_converter() -> None:
    assert CONVERTERS.keys() == {field.name for field in fields(EngineOptions)} - {"by_device", "nodes"}


def test_strings_as_config_pbtxt_has_them_and_values_as_model_json_has_them() -> None:
    strings = {
        "max_model_len": "512",
        "enable_prefix_caching": "false",
        "gpu_memory_utilization": "0.5",
        "dtype": "bfloat16",
    }
    values = {"max_model_len": 512, "enable_prefix_caching": False, "gpu_memory_utilization": 0.5, "dtype": "bfloat16"}
    assert EngineOptions.from_parameters(strings) == EngineOptions.from_parameters(values)
    assert EngineOptions.from_parameters(values).max_model_len == 512


def test_auto_and_null_are_the_default() -> None:
    given = {"max_model_len": "auto", "block_size": "", "num_threads": None, "dtype": "auto", "max_num_seqs": None}
    assert EngineOptions.from_parameters(given) == EngineOptions()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_model_length": 5}, "unknown parameter 'max_model_length'; did you mean 'max_model_len'?"),
        ({"tool_parsr": "x"}, "did you mean 'tool_parser'?"),
        ({"max_model_len": 1}, "'max_model_len' must be at least 2"),
        ({"max_model_len": "many"}, "'max_model_len' must be an integer"),
        ({"block_size": 0}, "'block_size' must be from 1 to 4096"),
        ({"max_num_seqs": 0}, "'max_num_seqs' must be at least 1"),
        ({"max_num_seqs": 4096}, "'max_num_batched_tokens' must be at least max_num_seqs (4096)"),
        ({"num_gpu_blocks_override": 1}, "'num_gpu_blocks_override' must be at least 2"),
        ({"kv_cache_memory_bytes": 0}, "'kv_cache_memory_bytes' must be at least 1"),
        ({"gpu_memory_utilization": 1.5}, "'gpu_memory_utilization' must be above 0 and at most 1"),
        ({"scheduling_policy": "lifo"}, "'scheduling_policy' must be fcfs or priority"),
        ({"enable_prefix_caching": "perhaps"}, "'enable_prefix_caching' must be true or false"),
        ({"tensor_parallel_size": 0}, "'tensor_parallel_size' must be at least 1"),
        ({"max_logprobs": -1}, "'max_logprobs' must be at least 0"),
        ({"num_threads": 0}, "'num_threads' must be at least 1"),
        ({"seed": 2**63}, "'seed' must be an integer of 64 bits"),
        ({"dtype": 5}, "'dtype' must be a string"),
        ({"lora_modules": [{"name": "a"}]}, "'lora_modules' must be an object of paths by names"),
        ({"max_loras": 0}, "'max_loras' must be from 1 to 1024"),
        (
            {"kv_cache_dtype": "fp8_e5m2"},
            "'kv_cache_dtype' must be one of auto, int8, int8_per_token_head, fp8, fp8_e4m3",
        ),
        ({"worker_cls": "evil.Worker"}, "'worker_cls' must be \"auto\" or absent"),
        ({"invalid_attribute": True}, "unknown parameter 'invalid_attribute'"),
        (
            {"enable_chunked_prefill": False, "max_model_len": 4096},
            "'max_num_batched_tokens' must be at least the model's length (4096) when enable_chunked_prefill is false",
        ),
    ],
)
def test_what_is_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        EngineOptions.from_parameters(given, others=("tool_parser", "reasoning_parser"))
    assert expected in raised.value.message


def test_others_and_what_means_nothing_here_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    given = {"tool_parser": "hermes", "disable_log_requests": True, "seed": "3", "kv_cache_dtype": "auto"}
    assert EngineOptions.from_parameters(given, others=("tool_parser",)) == EngineOptions(seed=3)
    assert [record.getMessage() for record in caplog.records if "disable_log_requests" in record.getMessage()]
