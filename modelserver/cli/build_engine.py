"""`modelserver build-engine`: builds a TensorRT engine and its description from an ONNX file.

Exit codes: 0 done, 2 misused, 3 TensorRT does not support some nodes, 4 the build failed, 5 no TensorRT.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from modelserver.cli.output import AsJson, print_error, print_json, print_line, print_table
from modelserver.errors import ErrorCode, InvalidArgumentError, ServerError, UnavailableError

MISUSED, UNSUPPORTED, FAILED, NO_LIBRARY = 2, 3, 4, 5
_PACKAGE = "modelserver_backends.tensorrt"


def build_engine(
    onnx: Annotated[Path, typer.Argument(help="The ONNX file.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Engine file; default: model.plan beside ONNX.")
    ] = None,
    runtime: Annotated[str, typer.Option(help="auto, tensorrt or tensorrt-rtx.")] = "auto",
    profile: Annotated[
        list[str] | None,
        typer.Option(metavar="INPUT:MIN/OPT/MAX", help="As x:1x3x224x224/8x3x224x224/32x3x224x224. Repeatable."),
    ] = None,
    batch: Annotated[str, typer.Option(metavar="MIN/OPT/MAX", help="First dimension of every input, as 1/8/32.")] = "",
    dim: Annotated[
        list[str] | None, typer.Option(metavar="NAME=MIN/OPT/MAX", help="A symbolic dimension, as seq=1/64/512.")
    ] = None,
    precision: Annotated[str, typer.Option(help="keep, or convert the ONNX file first: fp16 or bf16.")] = "keep",
    target: Annotated[str, typer.Option(help="TensorRT for RTX: any, current, or as sm86,sm120.")] = "any",
    hardware_compat: Annotated[str, typer.Option(help="TensorRT: none, same-cc or ampere+.")] = "none",
    version_compatible: Annotated[bool, typer.Option(help="Let newer TensorRT versions run it.")] = False,
    workspace: Annotated[str, typer.Option(help="Most memory to work in, as 4GiB.")] = "0",
    opt_level: Annotated[int, typer.Option(help="0 to 5: how long to look for fast kernels.")] = 3,
    tf32: Annotated[bool, typer.Option(help="Let FP32 be computed in TF32.")] = True,
    sparse: Annotated[bool, typer.Option(help="Use sparse kernels for sparse weights.")] = False,
    strip: Annotated[bool, typer.Option(help="Leave the weights out; load them from the ONNX file.")] = False,
    refit: Annotated[bool, typer.Option(help="Let the weights be replaced.")] = False,
    weight_streaming: Annotated[bool, typer.Option(help="Let weights stay in host memory.")] = False,
    plugins: Annotated[list[Path] | None, typer.Option(help="Library of plugins. Repeatable.")] = None,
    timing_cache: Annotated[Path | None, typer.Option(help="TensorRT: measurements to use and to keep.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds; 0 for no limit.")] = 0.0,
    verify: Annotated[int, typer.Option(help="Compare with ONNX Runtime on this many random inputs.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Build a TensorRT engine from an ONNX file, in a process of its own, and describe it in a .json file beside it."""
    commands = importlib.import_module(f"{_PACKAGE}.commands")
    try:
        command = commands.BuildCommand(
            onnx,
            output or onnx.with_name("model.plan"),
            _options(
                runtime=runtime.replace("-", "_"),
                precision=precision,
                opt_level=opt_level,
                workspace=workspace,
                hardware_compatibility=hardware_compat,
                version_compatible=version_compatible,
                tf32=tf32,
                sparse=sparse,
                weights=_weights(strip=strip, refit=refit),
                weight_streaming=weight_streaming,
                targets=_targets(target),
                plugins=tuple(str(path) for path in plugins or ()),
                timing_cache=str(timing_cache or ""),
            ),
            tuple(profile or ()),
            batch,
            _sizes(dim or []),
            timeout or None,
        )
        request = commands.plan_build(command)
    except ServerError as error:
        print_error(error.message)
        raise typer.Exit(NO_LIBRARY if isinstance(error, UnavailableError) else MISUSED) from None
    with _progress(is_shown=not as_json) as tell:
        built = _built(commands, command, request, tell)
    differences = _verified(command, built, verify)
    if as_json:
        print_json(_document(built, commands, differences))
    else:
        _print(built, commands, differences)
        if verify > 0 and not differences:
            print_line("not verified: without a GPU, only the effect of --precision can be compared")


def _options(*, workspace: str, **fields: Any) -> Any:
    build_options = importlib.import_module(f"{_PACKAGE}.build_options")
    return build_options.BuildOptions(workspace_bytes=build_options.parse_bytes(workspace, "--workspace"), **fields)


def _weights(*, strip: bool, refit: bool) -> str:
    if strip and refit:
        raise InvalidArgumentError("--strip and --refit: expected one of them, got both; a stripped engine is refitted")
    return "strip" if strip else "refit" if refit else "keep"


def _targets(text: str) -> tuple[str, ...]:
    targets = tuple(part.strip() for part in text.split(",") if part.strip())
    return () if targets == ("any",) else targets


def _sizes(texts: list[str]) -> dict[str, str]:
    sizes = {}
    for text in texts:
        name, equals, bounds = text.partition("=")
        if not equals or name in sizes:
            raise InvalidArgumentError(f"--dim: expected NAME=MIN/OPT/MAX, each name once, got '{text}'")
        sizes[name] = bounds
    return sizes


def _built(commands: Any, command: Any, request: Any, tell: Callable[[str, float], None]) -> Any:
    try:
        return commands.build_plan(command, request, tell=tell)
    except ServerError as error:
        nodes = getattr(error, "nodes", ())
        if nodes:
            sys.stderr.write(f"error: {command.onnx} has nodes that TensorRT does not support:\n")
            print_table(("node", "op", "reason"), [(node.name, node.op, node.reason) for node in nodes])
            raise typer.Exit(UNSUPPORTED) from None
        print_error(error.message)
        is_missing = error.code is ErrorCode.UNAVAILABLE and "not installed" in error.message
        raise typer.Exit(NO_LIBRARY if is_missing else FAILED) from None


def _verified(command: Any, built: Any, num_samples: int) -> tuple[Any, ...]:
    if num_samples <= 0:
        return ()
    module = importlib.import_module(f"{_PACKAGE}.verify")
    try:
        found: tuple[Any, ...] = module.verify(
            command.onnx,
            built.plan,
            built.result.info,
            options=command.options,
            num_samples=num_samples,
        )
    except ServerError as error:
        print_error(error.message)
        raise typer.Exit(FAILED) from None
    return found


@contextlib.contextmanager
def _progress(*, is_shown: bool) -> Iterator[Callable[[str, float], None]]:
    """A bar on a terminal, else nothing."""
    console = Console(stderr=True)
    if not is_shown or not console.is_terminal:
        yield lambda _phase, _fraction: None
        return
    columns = (TextColumn("{task.description:<40.40}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("Starting", total=1.0)
        yield lambda phase, fraction: bar.update(task, description=phase, completed=fraction)


def _document(built: Any, commands: Any, differences: tuple[Any, ...]) -> dict[str, Any]:
    return {
        "plan": str(built.plan),
        "sidecar": str(built.sidecar),
        "flavour": built.header.flavour.value,
        "version": built.header.version_text,
        "architectures": list(built.header.architectures),
        "bytes": built.header.size_bytes,
        "duration_s": round(built.result.duration_s, 3),
        "peak_memory_bytes": built.result.peak_memory_bytes,
        **commands.describe_info(built.result.info),
        "verified": [
            {"what": it.what, "output": it.output, "max_abs": it.max_abs, "cosine": it.cosine} for it in differences
        ],
    }


def _print(built: Any, commands: Any, differences: tuple[Any, ...]) -> None:
    document = commands.describe_info(built.result.info)
    for kind in ("inputs", "outputs"):
        rows = [(tensor["name"], tensor["datatype"], str(tensor["shape"])) for tensor in document[kind]]
        print_table((kind[:-1], "datatype", "shape"), rows)
        print_line("")
    for number, text in enumerate(document["profiles"]):
        print_line(f"profile {number}: {text}")
    runs_on = f" for {', '.join(built.header.architectures)}" if built.header.architectures else ""
    library = f"{built.header.flavour.title} {built.header.version_text}{runs_on}"
    print_line(
        f"{built.plan}: {built.header.size_bytes} bytes, {library}, "
        f"built in {built.result.duration_s:.1f} s with at most {built.result.peak_memory_bytes / 2**20:.0f} MiB"
    )
    if differences:
        print_line("")
        compared = [(it.what, it.output, f"{it.max_abs:.3g}", f"{it.cosine:.6f}") for it in differences]
        print_table(("compared", "output", "largest difference", "cosine"), compared)
