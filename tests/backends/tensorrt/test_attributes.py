"""Every name of TensorRT's that the backend uses exists in TensorRT 10, TensorRT 11 and TensorRT for RTX.

What is used is read from the source; what exists, from the libraries' own bindings. Those of TensorRT import over empty
libraries, which is enough to ask a class for its methods: docs/contributing.md says how to get them.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.tools import tool

ROOT = Path(__file__).parents[3] / "backends" / "tensorrt"

# The class of a variable, by file: what is called on it is looked for in that class.
VARIABLES = {
    "network_build.py": {
        "builder": "Builder",
        "network": "INetworkDefinition",
        "parser": "OnnxParser",
        "config": "IBuilderConfig",
        "profile": "IOptimizationProfile",
        "error": "ParserError",
    },
    "engine.py": {
        "runtime": "Runtime",
        "engine": "ICudaEngine",
        "refitter": "Refitter",
        "refit_parser": "OnnxParserRefitter",
    },
    "context_memory.py": {"engine": "ICudaEngine"},
    "engine_info.py": {"engine": "ICudaEngine"},
    "execution.py": {
        "_context": "IExecutionContext",
        "context": "IExecutionContext",
        "engine": "ICudaEngine",
        "config": "IRuntimeConfig",
    },
    "graphs.py": {"context": "IExecutionContext", "engine": "ICudaEngine"},
    "runtime_cache.py": {"engine": "ICudaEngine", "_cache": "IRuntimeCache"},
}
# What is named by a string, or on an expression.
ALSO = {
    "ITensor.name",
    "ITensor.dtype",
    "ITensor.shape",
    "ITensor.is_shape_tensor",
    "ITensor.is_network_input",
    "IPluginRegistry.load_library",
    "ICudaEngine.create_runtime_config",
    "IRuntimeConfig.create_runtime_cache",
    "ExecutionContextAllocationStrategy.STATIC",
    "ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE",
    "ExecutionContextAllocationStrategy.USER_MANAGED",
    "HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY",
    "HardwareCompatibilityLevel.AMPERE_PLUS",
    "BuilderFlag.VERSION_COMPATIBLE",
    "BuilderFlag.SPARSE_WEIGHTS",
    "BuilderFlag.STRIP_PLAN",
    "BuilderFlag.REFIT",
    "BuilderFlag.WEIGHT_STREAMING",
    "DataType.FLOAT",
    "DataType.HALF",
    "DataType.BF16",
    "DataType.INT8",
    "DataType.UINT8",
    "DataType.INT32",
    "DataType.INT64",
    "DataType.BOOL",
}
# Behind a hasattr in the source: only TensorRT for RTX has them, or none of these is needed.
ONLY_RTX = {
    "ComputeCapability",
    "CudaGraphStrategy",
    "CudaGraphStrategy.WHOLE_GRAPH_CAPTURE",
    "EngineValidity",
    "EngineValidity.INVALID",
    "IBuilderConfig.num_compute_capabilities",
    "IBuilderConfig.set_compute_capability",
    "IRuntimeCache.deserialize",
    "IRuntimeCache.serialize",
    "IRuntimeConfig.create_runtime_cache",
    "IRuntimeConfig.cuda_graph_strategy",
    "IRuntimeConfig.set_runtime_cache",
    "Runtime.engine_header_size",
    "Runtime.get_engine_validity",
}
NOT_THEIRS = {"ILogger.__init__", "IOutputAllocator.__init__", "IProgressMonitor.__init__", "ParserError.message"}
NEVER_RTX = {"init_libnvinfer_plugins"}

# What the bindings link to.
FUNCTIONS = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
)

PROBE = """
import importlib, json, sys
module = importlib.import_module(sys.argv[1])
missing = []
for name in json.loads(sys.argv[2]):
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            missing.append(name)
            break
print(json.dumps(missing))
"""


def used() -> set[str]:
    """Names such as `BuilderFlag.TF32` and `ICudaEngine.get_tensor_name`."""
    found = set(ALSO)
    for path in ROOT.glob("*.py"):
        variables = VARIABLES.get(path.name, {})
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute):
                continue
            owner = node.value
            if isinstance(owner, ast.Attribute) and isinstance(owner.value, ast.Name) and owner.value.id == "trt":
                found.add(f"{owner.attr}.{node.attr}")
            elif isinstance(owner, ast.Name) and owner.id == "trt":
                found.add(node.attr)
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if name in variables:
                found.add(f"{variables[name]}.{node.attr}")
    # Of modules every one has these.
    return {name for name in found if not name.startswith("__")} - NOT_THEIRS


def used_by_the_lean_runtime() -> set[str]:
    """It builds nothing, and what is asked of it behind a hasattr, or to refit, it may lack."""
    builders = {
        "Builder",
        "BuilderFlag",
        "HardwareCompatibilityLevel",
        "IBuilderConfig",
        "INetworkDefinition",
        "IOptimizationProfile",
        "IProgressMonitor",
        "ITensor",
        "MemoryPoolType",
        "NetworkDefinitionCreationFlag",
        "OnnxParser",
        "OnnxParserRefitter",
        "ParserError",
        "ProfilingVerbosity",
        "TensorFormat",
    }
    return {name for name in used() - ONLY_RTX - NEVER_RTX if name.split(".")[0] not in builders}


def missing_in(module: str, names: set[str], environment: dict[str, str]) -> list[str]:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE, module, json.dumps(sorted(names))],
        capture_output=True,
        timeout=60,
        env=environment,
    )
    assert ended.returncode == 0, ended.stderr.decode()
    missing: list[str] = json.loads(ended.stdout)
    return missing


def test_the_source_is_read() -> None:
    names = used()
    assert len(names) > 90
    assert {"ICudaEngine.get_tensor_profile_values", "IExecutionContext.execute_async_v3", "BuilderFlag.TF32"} <= names
    assert names >= ONLY_RTX
    assert not any(name.split(".")[0] == "BuilderFlag" and name.endswith(("FP16", "INT8")) for name in names)


@pytest.mark.tool("tensorrt_rtx")
def test_tensorrt_for_rtx_has_them() -> None:
    assert missing_in("tensorrt_rtx", used() - NEVER_RTX, dict(os.environ)) == []


@pytest.mark.tool("tensorrt-bindings", "gcc")
def test_every_tensorrt_has_them(tmp_path: Path) -> None:
    """Over libraries whose functions do nothing: to be imported, Python's side of the bindings calls none of them."""
    versions = sorted(Path(tool("tensorrt-bindings")).glob("*/tensorrt*_bindings"))
    gcc = shutil.which("gcc")
    assert gcc is not None, "the mark says so"
    functions = tmp_path / "functions.c"
    functions.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in FUNCTIONS))
    for major in (10, 11):
        for library in ("nvinfer", "nvinfer_lean", "nvinfer_plugin", "nvonnxparser"):
            name = f"lib{library}.so.{major}"
            subprocess.run(
                [gcc, "-shared", "-fPIC", "-o", str(tmp_path / name), f"-Wl,-soname,{name}", str(functions)], check=True
            )
    for version in versions:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(version.parent)}
        names = used_by_the_lean_runtime() if "lean" in version.name else used() - ONLY_RTX
        assert missing_in(version.name, names, environment) == [], version
