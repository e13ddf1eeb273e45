"""`modelserver convert`: from one form of a model to another, verified, as a model directory that serves."""

from __future__ import annotations

import enum
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from modelserver.config.pbtxt import config_text
from modelserver.config.schema import ModelConfig, ModelDynamicBatching
from modelserver.errors import InvalidArgumentError, ServerError, UnsupportedError
from modelserver.repository.layout import CONFIG_FILENAME
from modelserver.toolkit.comparison import Comparison, Difference, compare
from modelserver.toolkit.loaded_model import LoadedModel, define
from modelserver.toolkit.model_directory import check_target, model_bytes, new_model_directory
from modelserver.toolkit.onnx_file import read_onnx, readable_names, to_float16, write_onnx
from modelserver.toolkit.sample_files import SampleOptions
from modelserver.toolkit.source import Source, SourceKind, open_source
from modelserver.toolkit.tensor_spec import ModuleOptions
from modelserver.toolkit.torch_module import write_package
from modelserver.toolkit.torch_onnx import program_to_onnx, torchscript_to_onnx

# Share of whole-number outputs, such as classes, that may differ: two classes may be as likely as one another.
MAX_DISAGREEMENT = 0.1
Progress = Callable[[str], None]
# The error of AOTInductor packages for unsupported batches, and the option that allows their native code.
_TOO_LARGE = re.compile(r"dim value is too large at 0, expected to be <= (\d+)")
_TOO_SMALL = re.compile(r"dim value is too small at 0, expected it to be >= (\d+)")
_NATIVE = "torch_aoti"


class Target(enum.Enum):
    """The target of a conversion."""

    ONNX = "onnx"
    FP16 = "fp16"
    PT2 = "pt2"
    AOTI = "aoti"


# Relative to an output's largest value. FP16 has eleven bits.
TOLERANCES = {Target.ONNX: 1e-3, Target.PT2: 1e-3, Target.AOTI: 1e-3, Target.FP16: 2e-2}


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """One conversion. `tolerance` None is that of the target."""

    source: str
    output: Path
    target: Target
    version: int | None = None
    module: ModuleOptions = field(default_factory=ModuleOptions)
    samples: SampleOptions = field(default_factory=SampleOptions)
    tolerance: float | None = None
    keep_ops: tuple[str, ...] = ()
    opset: int | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """A new model, where it lies and how it compares with the one that it was made of."""

    output: Path
    config: ModelConfig
    comparison: Comparison
    notes: tuple[str, ...] = ()


def convert(options: ConversionOptions, progress: Progress) -> Outcome:
    """Convert, compare, and only then put the new model in its place. Raises ServerError; then nothing is written."""
    check_target(options.output, force=options.force)
    with tempfile.TemporaryDirectory(prefix="modelserver-") as workspace, readable_names(options.source):
        progress("reading the model")
        source = open_source(options.source, Path(workspace), options.module, version=options.version)
        # By the backend's own way, which refuses files that would run code when they are loaded.
        before = define(source.directory)
        notes: tuple[str, ...] = ()
        with new_model_directory(options.output, force=options.force, source=source.origin) as made:
            progress(f"converting to {options.target.value}")
            notes = _write_version(source, before.config, options, made / "1")
            platform = _NATIVE if options.target is Target.AOTI else ""
            write_config(made, source, before.config, backend=_backend(options.target), platform=platform)
            copy_files(made, source)
            progress("comparing")
            if options.target is Target.AOTI:
                comparison, bounds = _compare_compiled(source, made, options, before.config)
                notes = (*notes, *bounds)
            else:
                comparison = compare_models(source, made, options.samples)
            check_tolerance(comparison.differences, _tolerance(options))
            config = define(made).config
    return Outcome(options.output, config, comparison, notes)


def _backend(target: Target) -> str:
    return "onnxruntime" if target in (Target.ONNX, Target.FP16) else "pytorch"


def _tolerance(options: ConversionOptions) -> float:
    return TOLERANCES[options.target] if options.tolerance is None else options.tolerance


def _write_version(source: Source, config: ModelConfig, options: ConversionOptions, directory: Path) -> tuple[str, ...]:
    """Write the model file; returns notes about it. Raises ServerError."""
    directory.mkdir()
    target = options.target
    if target is Target.FP16:
        model = read_onnx(source.path) if source.kind is SourceKind.ONNX else _to_onnx(source, config, options)
        converted, notes = to_float16(model, keep=options.keep_ops)
        write_onnx(converted, directory)
        return notes
    if options.keep_ops:
        raise InvalidArgumentError(f"--keep-op is for --to fp16, not for --to {target.value}")
    if source.kind is SourceKind.ONNX:
        raise InvalidArgumentError(
            f"'{options.source}' is an ONNX model: it can become fp16 (--to fp16), but not PyTorch again"
        )
    if target is Target.ONNX:
        write_onnx(_to_onnx(source, config, options), directory)
        return ()
    if source.kind is SourceKind.TORCHSCRIPT:
        raise InvalidArgumentError(
            f"'{options.source}' is TorchScript, which torch.export cannot trace: convert the module that it was "
            "made of (FILE.py:NAME), or convert it to ONNX (--to onnx)"
        )
    if target is Target.PT2:
        shutil.copyfile(source.path, directory / "model.pt2")
    else:
        write_package(source.path, directory / "model.pt2", shown=options.source)
    return ()


def _to_onnx(source: Source, config: ModelConfig, options: ConversionOptions) -> Any:
    if source.kind is SourceKind.TORCHSCRIPT:
        return torchscript_to_onnx(source.path, config, shown=options.source, opset=options.opset)
    return program_to_onnx(source.path, config, shown=options.source, opset=options.opset)


def write_config(directory: Path, source: Source, completed: ModelConfig, *, backend: str, platform: str = "") -> None:
    """The new model's config.pbtxt: the source's, with everything written out that its file no longer says.

    Settings of a backend that changes are left behind.
    """
    written = source.config
    is_same = completed.backend == backend
    batching = written.dynamic_batching
    if batching is None and written.sequence_batching is None and source.config == ModelConfig():
        batching = ModelDynamicBatching() if completed.max_batch_size > 1 else None
    if batching is not None:
        sizes = tuple(size for size in batching.preferred_batch_size if size <= completed.max_batch_size)
        batching = replace(batching, preferred_batch_size=sizes)
    config = replace(
        written,
        name="",
        backend=backend,
        platform=platform,
        default_model_filename="",
        cc_model_filenames={},
        # An agent may hold checksums of the source's files.
        model_repository_agents=None,
        version_policy=None,
        max_batch_size=completed.max_batch_size,
        input=completed.input,
        output=completed.output,
        dynamic_batching=batching,
        parameters=written.parameters if is_same else {},
        optimization=written.optimization if is_same else None,
    )
    comment = f"Made from {source.origin.name or source.origin} by modelserver."
    (directory / CONFIG_FILENAME).write_text(config_text(config, comments=(comment,)))


def _compare_compiled(
    source: Source, made: Path, options: ConversionOptions, config: ModelConfig
) -> tuple[Comparison, tuple[str, ...]]:
    """As `compare_models`; torch's compiler may have bound the batch below what was exported: then the config follows.

    Raises UnsupportedError when it has bound it from below: a server needs batches of one.
    """
    try:
        return compare_models(source, made, options.samples), ()
    except ServerError as error:
        most = _TOO_LARGE.search(error.message)
        if most is None:
            raise _bound_from_below(error) from error
    bound = int(most.group(1))
    write_config(made, source, replace(config, max_batch_size=bound), backend="pytorch", platform=_NATIVE)
    try:
        comparison = compare_models(source, made, options.samples)
    except ServerError as error:
        raise _bound_from_below(error) from error
    return comparison, (f"torch's compiler has bound the batch: max_batch_size is {bound}",)


def _bound_from_below(error: ServerError) -> ServerError:
    least = _TOO_SMALL.search(error.message)
    if least is None:
        return error
    return UnsupportedError(
        f"torch's compiler has bound the batch: the package takes no fewer than {least.group(1)} rows, and cannot be "
        "served. Nothing was written; --to onnx has no such bounds"
    )


def copy_files(directory: Path, source: Source) -> None:
    """Copy the files beside the source's versions, such as labels, to the new model."""
    for file in source.files:
        if file.is_dir():
            shutil.copytree(file, directory / file.name)
        else:
            shutil.copyfile(file, directory / file.name)


def compare_models(source: Source, made: Path, options: SampleOptions) -> Comparison:
    """The source beside the new model in `made`. Raises ServerError, also when one of them does not load or answer."""
    with LoadedModel.open(source.directory, version=source.version) as before:
        samples = options.samples(before.config)
        sizes = (model_bytes(source.directory / str(source.version)), model_bytes(made / "1"))
        with LoadedModel.open(made) as after:
            return compare(
                before, after, samples, sizes=sizes, output=options.label_output, measure_s=options.measure_s
            )


def check_tolerance(differences: tuple[Difference, ...], tolerance: float) -> None:
    """Raise ServerError when an output is further off than it may be."""
    for one in differences:
        if one.max_rel <= tolerance or (one.is_discrete and one.agreement >= 1 - MAX_DISAGREEMENT):
            continue
        raise ServerError(
            f"output '{one.output}' of the new model is off by {one.max_abs:.3g}, {one.max_rel:.3g} of its largest "
            f"value, and {one.agreement:.1%} of the answers agree; allowed is {tolerance:g}. Nothing was written; "
            "--tolerance allows more"
        )
