"""How far an engine, or the file that it was built from, is from the original in full precision."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modelserver.backend import Array, Datatype, UnsupportedError

from .build_options import BuildOptions
from .device import Device
from .driver import find_problem
from .engine import EngineSettings, load_engine
from .engine_info import EngineInfo, Range
from .execution import Execution, Streams, new_context
from .precision import convert, round_weights

_BFLOAT16 = Datatype.BF16


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one output over all samples: largest absolute difference, and cosine of the angle between the two."""

    what: str
    output: str
    max_abs: float
    cosine: float


def verify(
    onnx: Path, plan: Path, info: EngineInfo, *, options: BuildOptions, num_samples: int
) -> tuple[Difference, ...]:
    """Compare with ONNX Runtime on the CPU: the converted ONNX file, where there is one, and on a GPU the engine.

    `options` are those that the plan was built with.

    Inputs are random, of the optimal shape of the first profile. Raises UnsupportedError without ONNX Runtime, and for
    shape tensors, whose values cannot be random.
    """
    if info.has_shape_tensors:
        raise UnsupportedError("--verify: the model has shape tensors, whose values cannot be made up")
    samples = [_sample(info, index) for index in range(num_samples)]
    expected = _run_onnx(onnx, samples)
    found: list[Difference] = []
    if options.precision != "keep":
        with tempfile.TemporaryDirectory(prefix="modelserver-onnx-") as scratch:
            what, converted = _converted(onnx, Path(scratch) / "model.onnx", options.precision)
            found += _compare(what, expected, _run_onnx(converted, samples))
    if not find_problem():
        stripped = onnx if options.weights == "strip" else None
        settings = EngineSettings(options.plugins, options.version_compatible, None, stripped, options.precision)
        found += _compare("engine", expected, _run_engine(plan, settings, samples))
    return tuple(found)


def _converted(onnx: Path, target: Path, precision: str) -> tuple[str, Path]:
    """The form of the converted model that ONNX Runtime can run on a CPU, and its description."""
    if precision == "bf16":  # it has hardly an operator for it
        return "ONNX, weights in bf16", round_weights(onnx, target)
    return f"ONNX {precision}", convert(onnx, target, precision)


def _sample(info: EngineInfo, seed: int) -> dict[str, Array]:
    generator = np.random.default_rng(seed)
    arrays: dict[str, Array] = {}
    for tensor in info.inputs:
        bounds: Range = info.profiles[0][tensor.name]
        dtype = tensor.datatype.numpy
        if tensor.datatype is _BFLOAT16:
            arrays[tensor.name] = (generator.random(bounds.opt, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        elif dtype.kind == "f":
            arrays[tensor.name] = generator.random(bounds.opt).astype(dtype)
        else:
            # Small whole numbers: indices, masks and the like are in range for most models.
            arrays[tensor.name] = generator.integers(0, 2, bounds.opt).astype(dtype)
    return arrays


def _run_onnx(path: Path, samples: list[dict[str, Array]]) -> list[dict[str, Array]]:
    try:
        import onnxruntime
    except ImportError as error:
        raise UnsupportedError(
            f"--verify compares with ONNX Runtime, which is not installed ({error}): pip install onnxruntime"
        ) from error
    session: Any = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return [dict(zip(names, session.run(names, sample), strict=True)) for sample in samples]


def _run_engine(plan: Path, settings: EngineSettings, samples: list[dict[str, Array]]) -> list[dict[str, Array]]:
    device = Device(0)
    loaded = load_engine(plan, device, settings, name=plan.name)
    try:
        with device.activate():
            stream = device.new_stream()
            execution = Execution(
                loaded, 0, Streams(stream, stream, device.new_event()), new_context(loaded, "STATIC", False, None)
            )
            found = [execution.run(sample, {}) for sample in samples]
            execution.close()
        return [{name: np.asarray(array) for name, array in outputs.items()} for outputs in found]
    finally:
        loaded.close()


def _compare(what: str, expected: list[dict[str, Array]], actual: list[dict[str, Array]]) -> list[Difference]:
    return [_difference(what, name, expected, actual) for name in expected[0]]


def _difference(
    what: str, name: str, expected: list[Mapping[str, Array]] | list[dict[str, Array]], actual: list[dict[str, Array]]
) -> Difference:
    ours = np.concatenate([sample[name].astype(np.float64).reshape(-1) for sample in expected])
    theirs = np.concatenate([sample[name].astype(np.float64).reshape(-1) for sample in actual])
    norm = float(np.linalg.norm(ours) * np.linalg.norm(theirs))
    cosine = float(ours @ theirs) / norm if norm else float(np.array_equal(ours, theirs))
    return Difference(what, name, float(np.max(np.abs(ours - theirs), initial=0.0)), cosine)
