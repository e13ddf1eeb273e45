"""Config parameters -> session options, run options and thread pools."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest
from modelserver_backends.onnxruntime import options as backend_options
from modelserver_backends.onnxruntime.options import run_options
from support.contexts import context_of

from modelserver.backend import ConfigError, ModelConfig
from modelserver.config.schema import ModelOptimizationPolicy, OptimizationCuda, OptimizationGraph

SHRINKAGE = "memory.enable_memory_arena_shrinkage"


def context(options: dict[str, str] | None = None, *, optimization=None, **parameters: str):
    config = ModelConfig(parameters=parameters, optimization=optimization)
    return context_of(Path("/models/m"), config=config, options=options)


def session_options(given, path: Path = Path(__file__)):
    return backend_options.session_options(given, path)


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


def test_a_small_model_gets_no_threads_beside_the_one_that_asks(tmp_path: Path) -> None:
    """Unless it says so, or has operators whose work its size does not tell."""
    path = tmp_path / "model.onnx"
    contents = {b"Gemm": 1, b"ConvTranspose": 0, b"Gemm" * (16 << 10) + b"x": 0}
    for content, count in contents.items():
        path.write_bytes(content)
        assert session_options(context(), path).intra_op_num_threads == count
    path.write_bytes(b"Gemm")
    assert session_options(context(intra_op_thread_count="2"), path).intra_op_num_threads == 2


def test_what_onnx_runtime_reads_per_run_is_no_entry_of_the_session() -> None:
    given = context(**{SHRINKAGE: "cpu:0", "memory.other": "1"})
    _, shrinking, interval = run_options(given)
    assert (shrinking.get_run_config_entry(SHRINKAGE), interval) == ("cpu:0", 1)
    options = session_options(given)
    assert options.get_session_config_entry("memory.other") == "1"
    with pytest.raises(RuntimeError):
        options.get_session_config_entry(SHRINKAGE)
    assert run_options(context())[1] is None
    assert run_options(context(arena_shrinkage_interval="9", **{SHRINKAGE: "cpu:0"}))[2] == 9
    with pytest.raises(ConfigError, match="arena_shrinkage_interval: expected 1 or more, got 0"):
        run_options(context(arena_shrinkage_interval="0"))


@pytest.mark.parametrize("text", ["cpu", "cpu:x", "tpu:0", "cpu:0,gpu:0", ""])
def test_a_list_of_arenas_that_every_run_would_refuse_fails_the_load(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"{SHRINKAGE}: expected devices such as cpu:0;gpu:0, got '{text}'"):
        run_options(context(**{SHRINKAGE: text}))


def test_an_arena_that_is_switched_off_cannot_shrink() -> None:
    with pytest.raises(ConfigError, match=f"{SHRINKAGE}: expected enable_mem_arena to be on for cpu:0"):
        run_options(context(enable_mem_arena="0", **{SHRINKAGE: "cpu:0"}))


def test_an_arena_of_a_gpu_does_not_shrink_beside_graphs() -> None:
    optimization = ModelOptimizationPolicy(cuda=OptimizationCuda(graphs=True))
    run_options(context(optimization=optimization, **{SHRINKAGE: "cpu:0"}))
    with pytest.raises(
        ConfigError, match=rf"{SHRINKAGE}: expected no gpu beside optimization.cuda.graphs, got 'gpu:0'"
    ):
        run_options(context(optimization=optimization, **{SHRINKAGE: "gpu:0"}))


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


POOLS = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
import psutil
from support.contexts import context_of
from modelserver.backend import Placement
from modelserver.backend.discovery import find_backend

found = find_backend("onnxruntime")
options = {{"enable-global-threadpool": "1", "intra_op_thread_count": "3"}}
instances, counts = [], []
for number in range(3):
    # The last one does not ask for them, and has no choice.
    context = context_of(Path({model!r}), options=options if number < 2 else {{}})
    backend = found(context)
    assert found.complete_config(context) == context.config
    backend.load()
    instances.append(backend.create_instance(Placement("i")))
    counts.append(psutil.Process().num_threads())
print(*counts)
"""


def test_sessions_may_share_the_processs_threads(model_repository: Path) -> None:
    """The pools can be made once in a process, so that is a process of its own."""
    code = POOLS.format(path=sys.path, model=str(model_repository / "digits_onnx"))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    assert not result.stderr
    assert len(set(result.stdout.split())) == 1, "sessions have threads of their own"
