"""Config parameters -> session options and execution providers."""

from __future__ import annotations

import logging
from pathlib import Path

import onnxruntime
import pytest
from modelserver_backends.onnxruntime.options import providers, run_options, session_options
from support.contexts import context_of

from modelserver.backend import ConfigError, DeviceKind, ModelConfig, Placement
from modelserver.config.schema import (
    Accelerator,
    ExecutionAccelerators,
    ModelOptimizationPolicy,
    OptimizationGraph,
)

SHRINKAGE = "memory.enable_memory_arena_shrinkage"
CPU = Placement("cpu")
GPU = Placement("gpu", DeviceKind.GPU, 1)


def context(options: dict[str, str] | None = None, *, optimization=None, **parameters: str):
    config = ModelConfig(parameters=parameters, optimization=optimization)
    return context_of(Path("/models/m"), config=config, options=options)


def accelerated(kind: str, name: str, **parameters: str):
    accelerators = ExecutionAccelerators(**{f"{kind}_execution_accelerator": (Accelerator(name, parameters),)})
    return context(optimization=ModelOptimizationPolicy(execution_accelerators=accelerators))


def test_parameters_set_the_session() -> None:
    options = session_options(
        context(
            intra_op_thread_count="3",
            inter_op_thread_count="2",
            execution_mode="1",
            enable_mem_arena="0",
            enable_mem_pattern="false",
            **{"session.intra_op.allow_spinning": "0"},
        )
    )
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 2)
    assert options.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
    assert (options.enable_cpu_mem_arena, options.enable_mem_pattern) == (False, False)
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_the_backends_options_are_the_default_of_threads() -> None:
    given = {"intra_op_thread_count": "2"}
    assert session_options(context(given)).intra_op_num_threads == 2
    assert session_options(context(given, intra_op_thread_count="1")).intra_op_num_threads == 1
    with pytest.raises(ConfigError, match="intra_op_thread_count: expected a whole number of 0 or more, got '-1'"):
        session_options(context({"intra_op_thread_count": "-1"}))


def test_what_onnx_runtime_reads_per_run_is_no_entry_of_the_session() -> None:
    given = context(**{SHRINKAGE: "cpu:0", "memory.other": "1"})
    assert run_options(given).get_run_config_entry(SHRINKAGE) == "cpu:0"
    options = session_options(given)
    assert options.get_session_config_entry("memory.other") == "1"
    with pytest.raises(RuntimeError):
        options.get_session_config_entry(SHRINKAGE)
    assert run_options(context()) is None


@pytest.mark.parametrize("text", ["cpu", "cpu:x", "tpu:0", "cpu:0,gpu:0", ""])
def test_a_list_of_arenas_that_every_run_would_refuse_fails_the_load(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"{SHRINKAGE}: expected devices such as cpu:0;gpu:0, got '{text}'"):
        run_options(context(**{SHRINKAGE: text}))


def test_an_arena_that_is_switched_off_cannot_shrink() -> None:
    with pytest.raises(ConfigError, match=f"{SHRINKAGE}: expected enable_mem_arena to be on for cpu:0"):
        run_options(context(enable_mem_arena="0", **{SHRINKAGE: "cpu:0"}))


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("intra_op_thread_count", "two", "expected a whole number, got 'two'"),
        ("inter_op_thread_count", "-1", "expected 0 or more, got -1"),
        ("execution_mode", "2", r"expected 0 \(sequential\) or 1 \(parallel\), got 2"),
        ("enable_mem_arena", "maybe", "expected true or false, got 'maybe'"),
    ],
)
def test_a_bad_parameter_is_named(key: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"model 'm': parameter {key}: {message}"):
        session_options(context(**{key: text}))


@pytest.mark.parametrize(
    ("level", "name"), [(-1, "DISABLE_ALL"), (0, "ENABLE_ALL"), (1, "ENABLE_BASIC"), (2, "ENABLE_EXTENDED")]
)
def test_graph_levels_are_tritons(level: int, name: str) -> None:
    options = session_options(context(optimization=ModelOptimizationPolicy(graph=OptimizationGraph(level))))
    assert options.graph_optimization_level == getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{name}")


def test_a_cpu_runs_on_the_cpu() -> None:
    assert providers(context(), CPU) == [("CPUExecutionProvider", {})]


def test_a_gpu_prefers_cuda_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    chosen = providers(context(gpu_mem_limit="1000", cudnn_conv_algo_search="1", arena_extend_strategy="1"), GPU)
    assert chosen == [
        (
            "CUDAExecutionProvider",
            {
                "gpu_mem_limit": "1000",
                "cudnn_conv_algo_search": "HEURISTIC",
                "arena_extend_strategy": "kSameAsRequested",
                "device_id": "1",
            },
        ),
        ("CPUExecutionProvider", {}),
    ]


def test_tensorrt_comes_before_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = ["TensorrtExecutionProvider", "CUDAExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: installed)
    chosen = providers(accelerated("gpu", "tensorrt", precision_mode="FP16", max_workspace_size_bytes="5"), GPU)
    assert [name for name, _ in chosen] == [*installed, "CPUExecutionProvider"]
    assert chosen[0][1] == {"trt_max_workspace_size": "5", "trt_fp16_enable": "1", "device_id": "1"}


def test_an_accelerator_that_is_not_installed_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert providers(accelerated("cpu", "openvino"), CPU) == [("CPUExecutionProvider", {})]
    assert "OpenVINOExecutionProvider is not in this build of ONNX Runtime" in caplog.text


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_an_unknown_accelerator_is_an_error_wherever_it_would_run(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"expected one of cuda, tensorrt, .*, got 'turbo'"):
        providers(accelerated(kind, "turbo"), CPU)
