"""PyTorch modules of a user's own code, as torch.export programs, these compiled by AOTInductor, and
TorchScript archives. Needs torch."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from modelserver.config.schema import ModelConfig, ModelDynamicBatching, ModelInput, ModelOutput
from modelserver.config.signature import TensorSpec
from modelserver.core.datatype import Datatype
from modelserver.core.spelling import nearest_hint
from modelserver.errors import InvalidArgumentError, NotFoundError, ServerError, UnavailableError, UnsupportedError
from modelserver.toolkit import require
from modelserver.toolkit.tensor_spec import ModuleOptions

# Sizes of the example that a module is traced with; 0 and 1 would be taken for constants.
_EXAMPLE_ROWS = 2
_EXAMPLE_SIZE = 7
_DTYPES = {
    Datatype.BOOL: "bool",
    Datatype.UINT8: "uint8",
    Datatype.INT8: "int8",
    Datatype.INT16: "int16",
    Datatype.INT32: "int32",
    Datatype.INT64: "int64",
    Datatype.FP16: "float16",
    Datatype.FP32: "float32",
    Datatype.FP64: "float64",
    Datatype.BF16: "bfloat16",
}


def torch_library() -> Any:
    """The torch module. Raises UnavailableError with the pip line."""
    return require("torch", extra="convert", purpose="converting PyTorch models")


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Suppress the exporters' output and warnings: real errors are raised."""
    names = (
        "torch.export",
        "torch.onnx",
        "torch.onnx._internal.exporter._registration",
        "torch.utils._pytree",
        "torchao",
    )
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    _keep_bars_from_threads()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _keep_bars_from_threads() -> None:
    """Progress bars of exporters have a thread that would live on."""
    with suppress(ImportError):
        importlib.import_module("tqdm").tqdm.monitor_interval = 0


def load_module(text: str) -> Any:
    """The module that `FILE.py:NAME` or `PACKAGE.MODULE:NAME` names; if it is a class or function, what it returns.

    Runs the user's code. Raises NotFoundError, InvalidArgumentError, and what the code raises as a ServerError.
    """
    torch = torch_library()
    place, _, name = text.rpartition(":")
    code = _import(place)
    if not hasattr(code, name):
        raise NotFoundError(
            f"'{place}' has no '{name}'{nearest_hint(name, [key for key in vars(code) if key[0] != '_'])}"
        )
    found = getattr(code, name)
    if not isinstance(found, torch.nn.Module):
        if not callable(found):
            raise InvalidArgumentError(
                f"'{text}' is a {type(found).__name__}; expected a torch.nn.Module, or what makes one"
            )
        try:
            found = found()
        except Exception as error:  # the edge to the user's code
            raise ServerError(f"'{text}()' failed: {type(error).__name__}: {error}") from error
    if not isinstance(found, torch.nn.Module):
        raise InvalidArgumentError(f"'{text}' gives a {type(found).__name__}; expected a torch.nn.Module")
    return found.eval()


def load_weights(module: Any, path: Path) -> None:
    """Give a module the weights of a file, which is read without running code.

    Raises InvalidArgumentError if the file holds no weights, or others than the module has.
    """
    torch = torch_library()
    try:
        if path.suffix == ".safetensors":
            weights = require("safetensors.torch", extra="llm", purpose="reading .safetensors files").load_file(path)
        else:
            weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickles and archives of anything
        raise InvalidArgumentError(f"--weights: '{path}' is not a state_dict of torch.save, nor safetensors") from error
    if isinstance(weights, dict) and isinstance(weights.get("state_dict"), dict):
        weights = weights["state_dict"]  # a checkpoint of a training loop
    try:
        module.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise InvalidArgumentError(f"--weights: '{path}' does not fit the module: {' '.join(lines)[:500]}") from error


def _import(place: str) -> Any:
    path = Path(place)
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        if not path.is_file():
            raise NotFoundError(f"there is no file '{place}'")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None, "a .py file has a spec"
        assert spec.loader is not None, "a .py file has a loader"
        module = importlib.util.module_from_spec(spec)
        # So that imports of files beside it work, as with `python FILE.py`.
        sys.path.insert(0, str(path.resolve().parent))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(path.resolve().parent))
        return module
    except ServerError:
        raise
    except Exception as error:  # the edge to the user's code
        raise ServerError(f"cannot import '{place}': {type(error).__name__}: {error}") from error


def export_module(module: Any, options: ModuleOptions, text: str) -> Any:
    """The module as a torch.export program, its batch and the dimensions of -1 variable.

    Raises InvalidArgumentError for inputs that are not those of forward(), UnsupportedError when torch cannot trace it.
    """
    torch = torch_library()
    taken = [name for name in inspect.signature(module.forward).parameters if name not in ("args", "kwargs")]
    names = [spec.name for spec in options.inputs]
    if not names:
        raise InvalidArgumentError(
            f"'{text}' tells no datatypes and shapes: say them for each argument of forward({', '.join(taken)}), such "
            f"as --input {taken[0] if taken else 'x'}:FP32:3,224,224 (without the batch)"
        )
    if names != taken[: len(names)]:
        raise InvalidArgumentError(
            f"--input: expected the arguments of forward({', '.join(taken)}) in order, got {names}"
        )
    example = tuple(example_tensor(torch, spec, options.max_batch_size) for spec in options.inputs)
    shapes = {spec.name: _dynamic(torch, spec, options.max_batch_size) for spec in options.inputs}
    wrapped = _named_outputs(torch, module, options.output_names, names)
    try:
        with quiet_torch(), torch.no_grad():
            return torch.export.export(wrapped, example, dynamic_shapes=tuple(shapes[name] for name in names))
    except Exception as error:  # torch raises whatever the user's code and its own tracer raise
        raise UnsupportedError(f"torch.export cannot trace '{text}': {first_line(error)}") from error


def example_tensor(torch: Any, spec: Any, max_batch_size: int) -> Any:
    """A tensor of ones in the shape of an input; of two rows, if the model batches. Raises UnsupportedError."""
    if spec.datatype not in _DTYPES:
        raise UnsupportedError(f"input '{spec.name}' is {spec.datatype.value}, which PyTorch has no tensors of")
    dims = [_EXAMPLE_SIZE if size < 0 else size for size in spec.dims]
    shape = [_EXAMPLE_ROWS, *dims] if max_batch_size else dims
    return torch.ones(shape, dtype=getattr(torch, _DTYPES[spec.datatype]))


def _dynamic(torch: Any, spec: Any, max_batch_size: int) -> dict[int, Any]:
    offset = 1 if max_batch_size else 0
    shapes: dict[int, Any] = {place + offset: torch.export.Dim.AUTO for place, size in enumerate(spec.dims) if size < 0}
    if max_batch_size > 1:
        shapes[0] = torch.export.Dim("batch", min=1, max=max_batch_size)
    return shapes


def _named_outputs(torch: Any, module: Any, names: tuple[str, ...], inputs: list[str]) -> Any:
    """The module behind one that gives its outputs names, if there are any to give."""
    if not names:
        return module

    class Named(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *tensors: Any) -> Any:
            result = self.module(*tensors)
            if isinstance(result, torch.Tensor):
                result = (result,)
            values = list(result.values()) if isinstance(result, dict) else list(result)
            if len(values) != len(names):
                raise InvalidArgumentError(f"--output: the model has {len(values)} outputs, got {len(names)} names")
            return dict(zip(names, values, strict=True))

    # torch.export names inputs by the arguments of forward(); these must stay the module's.
    Named.forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
            *(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in inputs),
        ]
    )
    return Named().eval()


def load_program(path: Path) -> Any:
    """A torch.export program from its file. Raises InvalidArgumentError."""
    torch = torch_library()
    try:
        with quiet_torch():
            return torch.export.load(str(path))
    except Exception as error:  # a damaged archive makes torch raise anything
        raise InvalidArgumentError(f"torch.export cannot load '{path}': {first_line(error)}") from error


def save_program(program: Any, path: Path) -> None:
    """Write a program without the lines of source that it was traced from."""
    torch = torch_library()
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    with quiet_torch():
        torch.export.save(program, str(path))


def first_line(error: Exception) -> str:
    """The line of an error that says something: torch puts it first, among blank lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


_COMPILERS = ("g++", "c++", "clang++")


def write_package(program_path: Path, path: Path, *, shown: str) -> None:
    """Compile a torch.export program into an AOTInductor package; takes half a minute and more.

    Raises UnavailableError without a compiler, UnsupportedError when it cannot be compiled.
    """
    torch = torch_library()
    wanted = os.environ.get("CXX")
    if shutil.which(wanted) is None if wanted else not any(map(shutil.which, _COMPILERS)):
        raise UnavailableError(
            f"AOTInductor needs a C++ compiler, and there is no {wanted or ' or '.join(_COMPILERS)}: "
            "apt-get install g++, or name one in the variable CXX"
        )
    program = load_program(program_path)
    try:
        with quiet_torch(), torch.no_grad():
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs=_settings(torch, program)
            )
    except Exception as error:  # compilers of several kinds, each with its own errors
        raise UnsupportedError(f"AOTInductor cannot compile '{shown}': {first_line(error)}") from error


def _settings(torch: Any, program: Any) -> dict[str, object]:
    """Without the library's check of smallest sizes, unless the program has some itself.

    Torch's compiler takes every variable size for 2 at least, refuses 1 for that reason alone, and says that the check
    may go (`torch._inductor.config.aot_inductor.check_lowerbound`). Who calls compares a row alone, too.
    """
    smallest = max((bounds.lower for bounds in program.range_constraints.values()), default=0)
    has_switch = hasattr(torch._inductor.config.aot_inductor, "check_lowerbound")
    return {"aot_inductor.check_lowerbound": False} if has_switch and smallest <= 1 else {}


# TorchScript archives: their inputs and outputs, determined by calling them. Needs torch.


def load_torchscript(path: Path) -> Any:
    """The archive's module. Raises InvalidArgumentError for a damaged file."""
    torch = torch_library()
    try:
        with quiet_torch():
            return torch.jit.load(str(path), map_location="cpu").eval()
    except (RuntimeError, ValueError) as error:
        raise InvalidArgumentError(
            f"PyTorch cannot load the TorchScript archive '{path}': {first_line(error)}"
        ) from error


def describe_torchscript(path: Path, options: ModuleOptions) -> ModelConfig:
    """The config that such a file needs: inputs as they were said, outputs as a call gives them.

    Raises InvalidArgumentError when inputs were not said, or do not fit.
    """
    module = load_torchscript(path)
    taken = [argument.name for argument in module.forward.schema.arguments[1:]]
    if not options.inputs:
        raise InvalidArgumentError(
            f"'{path}' is TorchScript, which tells neither datatypes nor shapes: say them for each argument of "
            f"forward({', '.join(taken)}), such as --input {taken[0] if taken else 'x'}:FP32:3,224,224 (without the "
            "batch), or name a model directory with a config.pbtxt"
        )
    names = [spec.name for spec in options.inputs]
    if names != taken[: len(names)]:
        raise InvalidArgumentError(
            f"--input: expected the arguments of forward({', '.join(taken)}) in order, got {names}"
        )
    results = call_torchscript(module, options.inputs, options.max_batch_size)
    outputs = [
        ModelOutput(
            name=name, data_type=_datatype(tensor), dims=tuple(tensor.shape[1 if options.max_batch_size else 0 :])
        )
        for name, tensor in results.items()
    ]
    return ModelConfig(
        backend="pytorch",
        max_batch_size=options.max_batch_size,
        input=tuple(ModelInput(name=spec.name, data_type=spec.datatype, dims=spec.dims) for spec in options.inputs),
        output=tuple(outputs),
        dynamic_batching=ModelDynamicBatching() if options.max_batch_size > 1 else None,
    )


def call_torchscript(module: Any, inputs: tuple[TensorSpec, ...], max_batch_size: int) -> dict[str, Any]:
    """The outputs of a call with example inputs, by the names that the pytorch backend gives them."""
    torch = torch_library()
    example = [example_tensor(torch, spec, max_batch_size) for spec in inputs]
    try:
        with quiet_torch(), torch.inference_mode():
            result = module(*example)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise InvalidArgumentError(f"--input: the model refuses such inputs: {lines[-1]}") from error
    if isinstance(result, torch.Tensor):
        result = (result,)
    if isinstance(result, dict):
        return {str(key): value for key, value in result.items()}
    return {f"OUTPUT__{place}": value for place, value in enumerate(result)}


def _datatype(tensor: Any) -> Datatype:
    word = str(tensor.dtype).removeprefix("torch.")
    if word == "bfloat16":
        return Datatype.BF16
    import numpy as np

    return Datatype.from_numpy(np.dtype(word))
