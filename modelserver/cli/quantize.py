"""`modelserver quantize`: quantizes a model to 8 or 4 bits, and compares it with its source."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from modelserver.cli.convert import (
    AsJson,
    Data,
    Force,
    Inputs,
    LabelOutput,
    MaxBatch,
    Outputs,
    Shapes,
    Version,
    module_options,
    print_language_model,
    print_outcome,
    sample_options,
)
from modelserver.cli.output import Steps
from modelserver.errors import InvalidArgumentError


class HowTo(enum.StrEnum):
    """Quantization methods."""

    STATIC = "static"
    DYNAMIC = "dynamic"
    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"
    AWQ = "awq"
    Q8_0 = "q8_0"
    Q6_K = "q6_k"
    Q4_K_M = "q4_k_m"
    Q4_0 = "q4_0"

    @property
    def is_for_language_models(self) -> bool:
        """And for nothing else."""
        return self not in (HowTo.STATIC, HowTo.DYNAMIC, HowTo.INT8, HowTo.INT4)


class Ranges(enum.StrEnum):
    """Calibration methods."""

    MINMAX = "minmax"
    ENTROPY = "entropy"
    PERCENTILE = "percentile"


Names = list[str] | None


def quantize(
    source: Annotated[
        str,
        typer.Argument(help="Model directory, checkpoint of a language model, .onnx or .pt2 file, or FILE.py:NAME."),
    ],
    directory: Annotated[Path, typer.Argument(help="The new model's directory: REPOSITORY/NAME.")],
    method: Annotated[
        HowTo | None,
        typer.Option(
            help="ONNX: static, dynamic. PyTorch: int8, int4 (weights), dynamic. Language models: int4, int8, fp8, "
            "awq; as GGUF q8_0, q6_k, q4_k_m, q4_0."
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Samples of real inputs for static: .npz, .npy, or a directory of them. "
            "int4 and awq of language models, and GGUF: a text that shows which inputs count."
        ),
    ] = None,
    from_requests: Annotated[
        Path | None, typer.Option(help="Such samples from a server's trace file (level TENSORS) or bench data (JSON).")
    ] = None,
    num_calibration: Annotated[int, typer.Option(min=1, help="Use at most this many samples.")] = 512,
    calibration_method: Annotated[Ranges, typer.Option(help="How ranges are chosen.")] = Ranges.MINMAX,
    per_channel: Annotated[bool, typer.Option(help="A scale for each channel of a weight.")] = True,
    op: Annotated[Names, typer.Option("--op", metavar="OPERATOR", help="Only these operators. Repeatable.")] = None,
    exclude_op: Annotated[Names, typer.Option(metavar="OPERATOR", help="Not these operators. Repeatable.")] = None,
    exclude: Annotated[Names, typer.Option(metavar="NAME", help="Not this node or layer. Repeatable.")] = None,
    for_tensorrt: Annotated[bool, typer.Option("--for-tensorrt", help="In the form that TensorRT takes.")] = False,
    reduce_range: Annotated[
        bool | None,
        typer.Option(
            "--reduce-range/--no-reduce-range",
            help="ONNX: weights in 7 bits, for x86 CPUs without VNNI. Default: on if this CPU is one.",
            show_default=False,
        ),
    ] = None,
    data: Data = None,
    label_output: LabelOutput = "",
    max_accuracy_drop: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="POINTS", help="Write no model if accuracy falls by more than this."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Language models: a text to compare before and after on.")
    ] = None,
    model_version: Version = None,
    inputs: Inputs = None,
    outputs: Outputs = None,
    max_batch_size: MaxBatch = 64,
    shape: Shapes = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Quantize a model to 8 or 4 bits, and report the loss of accuracy. The result is ready to serve."""
    # Here, because the other commands need none of it and should answer at once.
    from modelserver.toolkit.language_models import is_language_model, quantize_language_model
    from modelserver.toolkit.onnx_quantize import Calibration, OnnxQuantizeOptions
    from modelserver.toolkit.quantization import Method, QuantizationOptions
    from modelserver.toolkit.quantization import quantize as run

    if is_language_model(source, model_version):
        how = HowTo.INT4 if method is None else method
        with Steps() as steps:
            made = quantize_language_model(
                source,
                directory,
                how.value,
                steps.show,
                text=text,
                calibration=calibration,
                version=model_version,
                force=force,
            )
        print_language_model(made, as_json=as_json)
        return
    if text is not None or (method is not None and method.is_for_language_models):
        flag = "--text is" if text is not None else f"--method {method} is"
        raise InvalidArgumentError(f"{flag} for language models, and '{source}' is none")
    chosen = Method(method.value) if method is not None else None
    is_static = chosen is Method.STATIC or (chosen is None and (calibration or from_requests) is not None)
    options = QuantizationOptions(
        source=source,
        output=directory,
        method=chosen,
        version=model_version,
        module=module_options(inputs, outputs, max_batch_size),
        calibration=calibration,
        requests=from_requests,
        num_calibration=num_calibration,
        onnx=OnnxQuantizeOptions(
            is_static=is_static,
            calibration=Calibration(calibration_method.value),
            per_channel=per_channel,
            ops=tuple(op or ()),
            exclude_nodes=tuple(exclude or ()),
            exclude_ops=tuple(exclude_op or ()),
            for_tensorrt=for_tensorrt,
            reduce_range=reduce_range,
        ),
        samples=sample_options(data, shape, label_output),
        max_accuracy_drop=max_accuracy_drop,
        force=force,
    )
    with Steps() as steps:
        outcome = run(options, steps.show)
    print_outcome(outcome, as_json=as_json)
