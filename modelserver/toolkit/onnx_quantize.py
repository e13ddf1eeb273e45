"""ONNX models with 8-bit integers, by ONNX Runtime's quantizer. Needs onnx and onnxruntime."""

from __future__ import annotations

import enum
import logging
import platform
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelserver.config.schema import ModelConfig
from modelserver.core.spelling import nearest_hint
from modelserver.errors import InvalidArgumentError, ServerError, UnsupportedError
from modelserver.telemetry.host import cpu_flags
from modelserver.toolkit import require
from modelserver.toolkit.onnx_file import MAX_INLINE_BYTES, count_ops, read_onnx, strip_origin
from modelserver.toolkit.samples import Samples

# Operators that dynamic quantization turns into integers. Convolutions are excluded: on a CPU they would be slower.
DYNAMIC_OPS = ("MatMul", "Gemm", "Attention", "LSTM", "Gather", "EmbedLayerNormalization")
# Operators that TensorRT supports in integers; other operators and biases stay unchanged.
TENSORRT_OPS = ("Conv", "MatMul", "Gemm")
_PURPOSE = "quantizing ONNX models"
_MARKS = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")
_CALIBRATION_ROWS = 16


class Calibration(enum.Enum):
    """How the range of an activation is chosen from the calibration values."""

    MINMAX = "minmax"
    ENTROPY = "entropy"
    PERCENTILE = "percentile"


@dataclass(frozen=True, slots=True)
class OnnxQuantizeOptions:
    """`ops` empty: every supported operator. `for_tensorrt`: symmetric, biases as they are, TENSORRT_OPS alone.

    `reduce_range`: weights in 7 bits, so that sums of products never saturate. None: where this CPU's would.
    """

    is_static: bool = True
    calibration: Calibration = Calibration.MINMAX
    per_channel: bool = True
    ops: tuple[str, ...] = ()
    exclude_nodes: tuple[str, ...] = ()
    exclude_ops: tuple[str, ...] = ()
    for_tensorrt: bool = False
    reduce_range: bool | None = None


# Flags of x86 CPUs that add four 8-bit products in 32 bits.
_WIDE_SUMS = frozenset(("avx512_vnni", "avx_vnni", "avx_vnni_int8"))
_X86 = frozenset(("x86_64", "amd64", "i386", "i686", "x86"))


def products_saturate(machine: str, flags: Collection[str]) -> bool:
    """Whether ONNX Runtime loses sums of 8-bit products on a CPU of this kind.

    On x86 without VNNI it adds two products in 16 bits (VPMADDUBSW), which 255 * 127 + 255 * 127 exceeds. Other
    architectures have wider sums. An x86 CPU with unknown flags counts as one without VNNI.
    """
    return machine.lower() in _X86 and _WIDE_SUMS.isdisjoint(flags)


def quantize_onnx(
    path: Path, config: ModelConfig, options: OnnxQuantizeOptions, samples: Samples | None, *, shown: str
) -> tuple[Any, tuple[str, ...]]:
    """The quantized model, and notes. Static quantization needs `samples`.

    Raises InvalidArgumentError for operators and nodes that are not there, UnsupportedError when nothing could be
    quantized, naming what the model consists of.
    """
    library = require("onnxruntime.quantization", extra="quantize", purpose=_PURPOSE)
    original = read_onnx(path)
    _check_names(original, options)
    if original.ByteSize() > MAX_INLINE_BYTES:
        raise UnsupportedError(
            f"'{shown}' is larger than {MAX_INLINE_BYTES / 1e9:g} GB: too large to be quantized here"
        )
    if any(operator in _MARKS for operator in count_ops(original)):
        raise UnsupportedError(f"'{shown}' is quantized already")
    saturates = products_saturate(platform.machine(), cpu_flags())
    is_reduced = saturates if options.reduce_range is None else options.reduce_range
    with tempfile.TemporaryDirectory(prefix="modelserver-") as directory, _quiet():
        prepared, made = Path(directory, "prepared.onnx"), Path(directory, "made.onnx")
        _prepare(path, original, prepared)
        try:
            if options.is_static:
                assert samples is not None, "static quantization is called with samples"
                _quantize_static(library, prepared, made, config, replace(options, reduce_range=is_reduced), samples)
            else:
                _quantize_dynamic(library, prepared, made, replace(options, reduce_range=is_reduced))
        except ServerError:
            raise
        except Exception as error:  # the quantizer raises whatever it meets
            reason = str(error).strip().partition("\n")[0]
            raise UnsupportedError(
                f"ONNX Runtime cannot quantize '{shown}': {type(error).__name__}: {reason}"
            ) from error
        model = read_onnx(made)
    strip_origin(model)
    return model, (*_notes(shown, original, model), *_range_notes(is_reduced=is_reduced, saturates=saturates))


def _range_notes(*, is_reduced: bool, saturates: bool) -> tuple[str, ...]:
    """Why weights have 7 bits, or the cost of 8 bits on this CPU."""
    if is_reduced and saturates:
        return (
            "weights in 7 bits: this CPU has no VNNI, and sums of 8-bit products would saturate on it; "
            "--no-reduce-range keeps 8 bits, for a model that is served elsewhere",
        )
    if is_reduced:
        return ("weights in 7 bits, as --reduce-range says: no sums of products saturate on CPUs without VNNI",)
    if saturates:
        return (
            "weights in 8 bits, as --no-reduce-range says: this CPU has no VNNI, and sums of products saturate on it, "
            "so the answers that were compared are worse than those of a CPU with VNNI or of a GPU",
        )
    return ("weights in 8 bits: on x86 CPUs without VNNI, sums of products may saturate; --reduce-range prevents it",)


def _check_names(model: Any, options: OnnxQuantizeOptions) -> None:
    counts = count_ops(model)
    for flag, operators in (("--op", options.ops), ("--exclude-op", options.exclude_ops)):
        for operator in operators:
            if operator not in counts:
                known = ", ".join(sorted(counts))
                hint = nearest_hint(operator, list(counts))
                raise InvalidArgumentError(f"{flag}: the model has no {operator}{hint} (it has {known})")
    names = [node.name for node in model.graph.node if node.name]
    for name in options.exclude_nodes:
        if name not in names:
            advice = "" if names else "; the nodes of this model have no names, so exclude operators (--exclude-op)"
            raise InvalidArgumentError(f"--exclude: the model has no node '{name}'{nearest_hint(name, names)}{advice}")
    if not options.is_static and "Conv" in options.ops:
        raise InvalidArgumentError(
            "--op Conv: convolutions are quantized statically: --method static with --calibration"
        )


def _prepare(path: Path, model: Any, prepared: Path) -> None:
    """Infer shapes and fuse operators: both help the quantizer. If that fails, the model stays unchanged."""
    shape_inference = require("onnxruntime.quantization.shape_inference", extra="quantize", purpose=_PURPOSE)
    try:
        # Symbolic inference wants sympy, and adds nothing for the operators that are quantized.
        shape_inference.quant_pre_process(str(path), str(prepared), skip_symbolic_shape=True)
    except Exception:  # a best effort of a library that raises whatever it meets
        logging.getLogger(__name__).debug("the model is quantized as it is", exc_info=True)
        prepared.write_bytes(model.SerializeToString())
    _forget_weight_shapes(prepared)


def _forget_weight_shapes(path: Path) -> None:
    """Take away what is said twice: the quantizer transposes the weights of a Gemm, and not the shapes beside them,
    and then finds that the two differ.
    """
    model = read_onnx(path)
    weights = {weight.name for weight in model.graph.initializer}
    kept = [value for value in model.graph.value_info if value.name not in weights]
    if len(kept) < len(model.graph.value_info):
        del model.graph.value_info[:]
        model.graph.value_info.extend(kept)
        path.write_bytes(model.SerializeToString())


def _quantize_dynamic(library: Any, prepared: Path, made: Path, options: OnnxQuantizeOptions) -> None:
    ops = [name for name in options.ops or DYNAMIC_OPS if name not in options.exclude_ops]
    library.quantize_dynamic(
        prepared,
        made,
        op_types_to_quantize=ops,
        per_channel=options.per_channel,
        weight_type=library.QuantType.QInt8,
        reduce_range=bool(options.reduce_range),
        nodes_to_exclude=list(options.exclude_nodes),
    )


def _quantize_static(
    library: Any, prepared: Path, made: Path, config: ModelConfig, options: OnnxQuantizeOptions, samples: Samples
) -> None:
    extra: dict[str, object] = {}
    ops: Sequence[str] = options.ops
    if options.for_tensorrt:
        ops = ops or TENSORRT_OPS
        extra = {"ActivationSymmetric": True, "WeightSymmetric": True, "QuantizeBias": False}
    if options.exclude_ops:
        known = ops or sorted(count_ops(read_onnx(prepared)))
        ops = [name for name in known if name not in options.exclude_ops]
    methods = library.CalibrationMethod
    method = {
        Calibration.MINMAX: methods.MinMax,
        Calibration.ENTROPY: methods.Entropy,
        Calibration.PERCENTILE: methods.Percentile,
    }[options.calibration]
    library.quantize_static(
        prepared,
        made,
        _reader(library, config, samples),
        quant_format=library.QuantFormat.QDQ,
        op_types_to_quantize=list(ops) or None,
        per_channel=options.per_channel,
        activation_type=library.QuantType.QInt8,
        weight_type=library.QuantType.QInt8,
        reduce_range=bool(options.reduce_range),
        nodes_to_exclude=list(options.exclude_nodes),
        calibrate_method=method,
        extra_options=extra,
    )


def _reader(library: Any, config: ModelConfig, samples: Samples) -> Any:
    requests = samples.requests(config, _CALIBRATION_ROWS)

    class Reader(library.CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> Any:
            return next(requests, None)

    return Reader()


def _notes(shown: str, original: Any, model: Any) -> tuple[str, ...]:
    """The quantized and the other operators. Raises UnsupportedError if none was quantized."""
    integers = quantized_ops(model)
    if not integers:
        there = ", ".join(f"{count} {name}" for name, count in sorted(count_ops(original).items()))
        raise UnsupportedError(f"nothing of '{shown}' could be quantized: it consists of {there}")
    rest = count_ops(model)
    rest.subtract(integers)
    left = {name: count for name, count in rest.items() if count > 0 and name not in _HELPERS}
    told = ", ".join(f"{count} {name}" for name, count in sorted(integers.items()))
    notes = [f"in integers: {told}"]
    if left:
        notes.append("in floating point: " + ", ".join(f"{count} {name}" for name, count in sorted(left.items())))
    return tuple(notes)


# Operators that quantization adds, and operators that only move data.
_MOVERS = ("Cast", "Mul", "Add", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity")
_HELPERS = frozenset((*_MARKS, *_MOVERS))
# Operators that ONNX Runtime computes in integers between quantized values.
_COMPUTING = frozenset(
    (
        "Conv",
        "ConvTranspose",
        "Gemm",
        "MatMul",
        "Add",
        "Mul",
        "AveragePool",
        "GlobalAveragePool",
        "MaxPool",
        "Concat",
        "Resize",
    )
)


def quantized_ops(model: Any) -> Counter[str]:
    """How many nodes of each operator compute with integers: between a dequantized input and a quantized weight, or by
    an integer operator.
    """
    dequantized = {name for node in model.graph.node if node.op_type == "DequantizeLinear" for name in node.output}
    found: Counter[str] = Counter()
    for node in model.graph.node:
        is_integer = "Integer" in node.op_type or node.op_type.startswith(("QLinear", "DynamicQuantize"))
        is_between = node.op_type in _COMPUTING and bool(node.input) and node.input[0] in dequantized
        if node.op_type not in _MARKS and (is_integer or is_between):
            found[node.op_type] += 1
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the quantizer's advice: the notes contain the relevant points."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)
