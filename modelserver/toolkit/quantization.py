"""`modelserver quantize`: a model in smaller numbers, compared with its source, in a directory that serves."""

from __future__ import annotations

import enum
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from modelserver.config.schema import ModelConfig
from modelserver.errors import InvalidArgumentError, ServerError
from modelserver.toolkit.comparison import Comparison
from modelserver.toolkit.conversion import (
    Outcome,
    Progress,
    compare_models,
    copy_files,
    write_config,
)
from modelserver.toolkit.loaded_model import define
from modelserver.toolkit.model_directory import check_target, new_model_directory
from modelserver.toolkit.onnx_file import readable_names, write_onnx
from modelserver.toolkit.onnx_quantize import OnnxQuantizeOptions, quantize_onnx
from modelserver.toolkit.sample_files import SampleOptions, read_requests, read_samples
from modelserver.toolkit.samples import Samples
from modelserver.toolkit.source import Source, SourceKind, open_source
from modelserver.toolkit.tensor_spec import ModuleOptions
from modelserver.toolkit.torch_module import save_program
from modelserver.toolkit.torch_quantize import quantize_program


class Method(enum.Enum):
    """How numbers become smaller. STATIC and DYNAMIC compute in int8; INT8 and INT4 only store weights so."""

    STATIC = "static"
    DYNAMIC = "dynamic"
    INT8 = "int8"
    INT4 = "int4"


@dataclass(frozen=True, slots=True)
class QuantizationOptions:
    """One quantization. `method` None: static for ONNX with calibration data, dynamic without, int8 for PyTorch.

    `max_accuracy_drop` is in points of a hundred; None allows any.
    """

    source: str
    output: Path
    method: Method | None = None
    version: int | None = None
    module: ModuleOptions = field(default_factory=ModuleOptions)
    calibration: Path | None = None
    requests: Path | None = None
    num_calibration: int = 512
    onnx: OnnxQuantizeOptions = field(default_factory=OnnxQuantizeOptions)
    samples: SampleOptions = field(default_factory=SampleOptions)
    max_accuracy_drop: float | None = None
    force: bool = False


def quantize(options: QuantizationOptions, progress: Progress) -> Outcome:
    """Quantize, compare, and only then put the new model in its place. Raises ServerError; then nothing is written."""
    check_target(options.output, force=options.force)
    with tempfile.TemporaryDirectory(prefix="modelserver-") as workspace, readable_names(options.source):
        progress("reading the model")
        source = open_source(options.source, Path(workspace), options.module, version=options.version)
        # By the backend's own way, which refuses files that would run code when they are loaded.
        config = define(source.directory).config
        calibration = _calibration(options, config)
        method = _method(options, source, calibration)
        with new_model_directory(options.output, force=options.force, source=source.origin) as made:
            progress(f"quantizing ({method.value})")
            notes = _write_version(source, config, options, method, calibration, made / "1")
            write_config(made, source, config, backend=config.backend)
            copy_files(made, source)
            progress("comparing")
            comparison = compare_models(source, made, _samples(options))
            _check_accuracy(comparison, options)
            result = define(made).config
    return Outcome(options.output, result, comparison, notes)


def _calibration(options: QuantizationOptions, config: ModelConfig) -> Samples | None:
    if options.calibration is not None and options.requests is not None:
        raise InvalidArgumentError("--calibration and --from-requests cannot be used together: give one")
    if options.calibration is not None:
        return read_samples(options.calibration, config).head(options.num_calibration)
    if options.requests is not None:
        return read_requests(options.requests, config).head(options.num_calibration)
    return None


def _samples(options: QuantizationOptions) -> SampleOptions:
    """The samples of the comparison: labelled data if given, else the calibration data, else made-up samples."""
    samples = options.samples
    if samples.path is None and options.calibration is not None:
        return SampleOptions(options.calibration, samples.shapes, samples.label_output, samples.measure_s)
    return samples


def _method(options: QuantizationOptions, source: Source, calibration: Samples | None) -> Method:
    """Raises InvalidArgumentError for a method that this source does not support."""
    is_onnx = source.kind is SourceKind.ONNX
    if source.kind is SourceKind.TORCHSCRIPT:
        raise InvalidArgumentError(
            f"'{options.source}' is TorchScript: convert it to ONNX first (modelserver convert --to onnx), "
            "and quantize that"
        )
    default = (Method.STATIC if calibration is not None else Method.DYNAMIC) if is_onnx else Method.INT8
    method = options.method or default
    allowed = (Method.STATIC, Method.DYNAMIC) if is_onnx else (Method.INT8, Method.INT4, Method.DYNAMIC)
    if method not in allowed:
        raise InvalidArgumentError(
            f"--method {method.value} is not for a {source.kind.value}: expected "
            f"{' or '.join(one.value for one in allowed)}"
        )
    if method is Method.STATIC and calibration is None:
        raise InvalidArgumentError(
            "static quantization needs to see real inputs: --calibration FILE.npz (an array for each input), or "
            "--from-requests FILE (a trace of a server, or bench data); without any there is --method dynamic"
        )
    if method is not Method.STATIC and calibration is not None and options.samples.path is not None:
        raise InvalidArgumentError(f"--calibration is for --method static, not for {method.value}")
    return method


def _write_version(
    source: Source,
    config: ModelConfig,
    options: QuantizationOptions,
    method: Method,
    calibration: Samples | None,
    directory: Path,
) -> tuple[str, ...]:
    directory.mkdir()
    if source.kind is SourceKind.ONNX:
        model, notes = quantize_onnx(source.path, config, options.onnx, calibration, shown=options.source)
        write_onnx(model, directory)
        return notes
    if options.onnx.ops or options.onnx.exclude_ops:
        raise InvalidArgumentError("--op and --exclude-op are for ONNX models; --exclude names a layer")
    program, notes = quantize_program(
        source.path, method.value, shown=options.source, exclude=options.onnx.exclude_nodes
    )
    save_program(program, directory / "model.pt2")
    return notes


def _check_accuracy(comparison: Comparison, options: QuantizationOptions) -> None:
    """Raise ServerError when accuracy fell further than it may."""
    if options.max_accuracy_drop is None:
        return
    if comparison.accuracy_before is None or comparison.accuracy_after is None:
        raise InvalidArgumentError("--max-accuracy-drop needs labelled samples: --data FILE.npz with an array 'labels'")
    drop = (comparison.accuracy_before - comparison.accuracy_after) * 100
    if drop > options.max_accuracy_drop:
        raise ServerError(
            f"accuracy falls from {comparison.accuracy_before:.2%} to {comparison.accuracy_after:.2%}, by {drop:.2f} "
            f"points; --max-accuracy-drop allows {options.max_accuracy_drop:g}. Nothing was written"
        )
