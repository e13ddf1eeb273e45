"""`modelserver convert`: converts a model, compares it with its source, and writes a directory ready to serve."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modelserver.cli.output import Steps, print_json, print_line, print_table
from modelserver.errors import InvalidArgumentError

if TYPE_CHECKING:
    from modelserver.toolkit.conversion import Outcome
    from modelserver.toolkit.language_models import LanguageModelOutcome
    from modelserver.toolkit.sample_files import SampleOptions
    from modelserver.toolkit.tensor_spec import ModuleOptions


class To(enum.StrEnum):
    """Target formats."""

    ONNX = "onnx"
    FP16 = "fp16"
    PT2 = "pt2"
    AOTI = "aoti"
    GGUF = "gguf"
    SAFETENSORS = "safetensors"


Force = Annotated[bool, typer.Option("--force", help="Replace an existing model.")]
Version = Annotated[int | None, typer.Option("--version", help="Version of the source; the newest without it.")]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME:DATATYPE:DIMS",
        help="An argument of a module or TorchScript file, without the batch: image:FP32:3,224,224. In order.",
    ),
]
Outputs = Annotated[list[str] | None, typer.Option("--output", metavar="NAME", help="Names for a module's outputs.")]
MaxBatch = Annotated[int, typer.Option("--max-batch-size", min=0, help="Of a module or TorchScript file; 0: none.")]
Weights = Annotated[
    Path | None, typer.Option("--weights", help="Of a module: its state_dict, a .pt, .pth or .safetensors file.")
]
Shapes = Annotated[
    list[str] | None, typer.Option("--shape", metavar="NAME:DIMS", help="Variable sizes of made-up samples: ids:128.")
]
Data = Annotated[
    Path | None,
    typer.Option("--data", help="Samples to compare with: .npz of an array per input, with 'labels' for accuracy."),
]
LabelOutput = Annotated[str, typer.Option("--label-output", help="The output that labels are compared with.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def convert(
    source: Annotated[str, typer.Argument(help="Model directory, .onnx, .pt2, .pt or .gguf file, or FILE.py:NAME.")],
    directory: Annotated[Path, typer.Argument(help="The new model's directory: REPOSITORY/NAME.")],
    to: Annotated[
        To,
        typer.Option(
            "--to",
            help="onnx, fp16 (ONNX in half precision), pt2, or aoti (compiled). Language models: gguf, safetensors.",
        ),
    ],
    model_version: Version = None,
    inputs: Inputs = None,
    outputs: Outputs = None,
    max_batch_size: MaxBatch = 64,
    weights: Weights = None,
    data: Data = None,
    shape: Shapes = None,
    label_output: LabelOutput = "",
    tolerance: Annotated[
        float | None, typer.Option(min=0.0, help="Tolerated error of outputs, relative to their largest value.")
    ] = None,
    keep_op: Annotated[
        list[str] | None, typer.Option("--keep-op", metavar="OPERATOR", help="With fp16: leave it in FP32. Repeatable.")
    ] = None,
    opset: Annotated[int | None, typer.Option(min=13, help="Of the ONNX model.")] = None,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Language models: a text to compare before and after on.")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Convert PyTorch to ONNX, torch.export or compiled code, ONNX to FP16, and language models to and from GGUF.

    The result is ready to serve.
    """
    # Here, because the other commands need none of it and should answer at once.
    from modelserver.toolkit.conversion import ConversionOptions, Target
    from modelserver.toolkit.conversion import convert as run
    from modelserver.toolkit.language_models import convert_language_model, is_language_model

    if to in (To.GGUF, To.SAFETENSORS):
        with Steps() as steps:
            made = convert_language_model(
                source, directory, to.value, steps.show, text=text, version=model_version, force=force
            )
        print_language_model(made, as_json=as_json)
        return
    if is_language_model(source, model_version):
        raise InvalidArgumentError(f"'{source}' is a language model: it can become gguf or safetensors, not {to.value}")
    if text is not None:
        raise InvalidArgumentError(f"--text is for language models, and '{source}' is none")
    options = ConversionOptions(
        source=source,
        output=directory,
        target=Target(to.value),
        version=model_version,
        module=module_options(inputs, outputs, max_batch_size, weights),
        samples=sample_options(data, shape, label_output),
        tolerance=tolerance,
        keep_ops=tuple(keep_op or ()),
        opset=opset,
        force=force,
    )
    with Steps() as steps:
        outcome = run(options, steps.show)
    print_outcome(outcome, as_json=as_json)


def module_options(
    inputs: list[str] | None, outputs: list[str] | None, max_batch_size: int, weights: Path | None = None
) -> ModuleOptions:
    """The description of a module from the flags. Raises InvalidArgumentError."""
    from modelserver.toolkit.tensor_spec import ModuleOptions, parse_tensor_spec

    specs = tuple(parse_tensor_spec(text) for text in inputs or ())
    return ModuleOptions(specs, tuple(outputs or ()), max_batch_size, weights)


def sample_options(data: Path | None, shapes: list[str] | None, label_output: str) -> SampleOptions:
    """The source of samples. Raises InvalidArgumentError."""
    from modelserver.toolkit.sample_files import SampleOptions
    from modelserver.toolkit.tensor_spec import parse_shape

    return SampleOptions(data, dict(parse_shape(text) for text in shapes or ()), label_output)


def print_outcome(outcome: Outcome, *, as_json: bool) -> None:
    """The comparison, and the new model's directory."""
    from modelserver.toolkit.comparison import comparison_document, difference_rows, summary_rows

    if as_json:
        document = comparison_document(outcome.comparison)
        print_json({"directory": str(outcome.output), **document, "notes": list(outcome.notes)})
        return
    print_table(("", "before", "after", "change"), summary_rows(outcome.comparison))
    print_line("")
    print_table(("output", "max abs", "max rel", "mean abs", "same answer"), difference_rows(outcome.comparison))
    for note in outcome.notes:
        print_line(f"note: {note}")
    print_line("")
    print_line(f"{outcome.output} is ready: modelserver serve {outcome.output.parent or '.'}")


def print_language_model(outcome: LanguageModelOutcome, *, as_json: bool) -> None:
    """The sizes, what a text says of both, and the new model's directory."""
    if as_json:
        document = {"directory": str(outcome.output), **outcome.figures, "notes": list(outcome.notes)}
        print_json(document)
        return
    rows = [
        (name.replace("_", " "), f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}")
        for name, value in outcome.figures.items()
    ]
    print_table(("", ""), rows)
    for note in outcome.notes:
        print_line(f"note: {note}")
    print_line("")
    print_line(f"{outcome.output} is ready: modelserver serve {outcome.output.parent or '.'}")
