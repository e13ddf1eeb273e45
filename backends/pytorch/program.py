"""A loaded model: its function, and the arguments of that."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from modelserver.backend import FileSignature, FileTensor, UnsupportedError

from .binding import Arguments
from .options import TorchOptions
from .tensors import DATATYPES

# torch.export reads one program at a time, because its state is a global of its module (torch 2.13).
_export_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Program:
    """`call(*tensors, **tensors)` executes the model; `signature` is known for exported programs only.

    `module` is what holds the weights, where that is a module. `result_names` are known of packages, whose results come
    in flat order.
    """

    call: Callable[..., Any]
    arguments: Arguments
    signature: FileSignature | None = None
    module: Any = None
    result_names: tuple[str, ...] = ()


def load_torchscript(path: Path, device: str | None) -> Program:
    """A TorchScript archive, its weights on `device`, or where they were saved (None)."""
    module: Any = torch.jit.load(str(path), map_location=device)
    module.eval()
    taken = module.forward.schema.arguments[1:]  # without self
    required = [argument for argument in taken if not argument.has_default_value()]
    takes_dict = len(required) == 1 and required[0].type.kind() == "DictType"
    texts = frozenset(argument.name for argument in taken if str(argument.type) == "List[str]")
    arguments = Arguments(tuple(argument.name for argument in taken), len(required), takes_dict, texts)
    return Program(module, arguments, module=module)


def load_checkpoint(path: Path, device: str | None) -> Program:
    """A pickled module: runs whatever code the file names. Only for files that the operator vouches for."""
    module: Any = torch.load(path, map_location=device, weights_only=False)
    if not isinstance(module, torch.nn.Module):
        raise UnsupportedError(
            f"{path} holds a {type(module).__name__}, not a module: weights without the code that uses them; "
            "save the model with torch.export.save"
        )
    module.eval()
    taken = list(inspect.signature(module.forward).parameters.values())
    required = [parameter for parameter in taken if parameter.default is parameter.empty]
    return Program(module, Arguments(tuple(parameter.name for parameter in taken), len(required)), module=module)


def load_exported(path: Path, device: str | None) -> Program:
    """A torch.export program, called with its tensors in flat order, however it nests them."""
    with _export_lock, _quiet():
        exported: Any = torch.export.load(str(path))
    if device is not None and device != "cpu":
        from torch.export.passes import move_to_device_pass

        exported = move_to_device_pass(exported, device)
    module = exported.module()
    signature = exported_signature(exported)
    names = tuple(tensor.name for tensor in signature.inputs)
    return Program(_flat_call(exported, module), Arguments(names, len(names)), signature, module=module)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the tracebacks that torch.export prints of errors that it also raises."""
    logger = logging.getLogger("torch.export")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def prepared(program: Program, options: TorchOptions) -> Program:
    """The program in the memory format, and compiled, as the options say. Raises UnsupportedError if it cannot be."""
    if options.is_channels_last and program.module is not None:
        program.module.to(memory_format=torch.channels_last)
    if options.compile_arguments is None:
        return program
    if program.module is None or isinstance(program.module, torch.jit.ScriptModule):
        raise UnsupportedError(
            "torch.compile takes exported programs (.pt2) and modules, not TorchScript or packages: remove the "
            "parameter TORCH_COMPILE, or save the model with torch.export.save"
        )
    compiled: Callable[..., Any] = torch.compile(program.call, **options.compile_arguments)
    return replace(program, call=compiled)


def _flat_call(exported: Any, module: Any) -> Callable[..., Any]:
    """`module` behind a flat argument list; itself when its arguments are flat already."""
    spec = exported.call_spec.in_spec
    leaves = list(exported.graph_signature.user_inputs)
    by_position, by_keyword = spec.children()
    if not by_keyword.num_leaves and by_position.num_leaves == by_position.num_children == len(_tensor_names(exported)):
        call: Callable[..., Any] = module
        return call
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, str)]

    def flat(*tensors: Any) -> Any:
        values = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        args, kwargs = pytree.tree_unflatten(values, spec)
        return module(*args, **kwargs)

    return flat


def _tensor_names(exported: Any) -> list[str]:
    """Names of the tensor inputs in flat order; constants are part of the program."""
    return [name for name in exported.graph_signature.user_inputs if isinstance(name, str)]


def exported_signature(exported: Any) -> FileSignature:
    """Inputs, outputs and largest batch as the program's graph has them.

    An input keeps its argument's name, or its key if the only argument is a dict. An output is named by its key
    in a dict of results, else `OUTPUT__<position>`.
    """
    nodes = {node.name: node for node in exported.graph.nodes}
    taken = _tensor_names(exported)
    given = list(exported.graph_signature.user_outputs)
    # Every argument but one dict is called by its own name.
    positional = exported.call_spec.in_spec.children()[0]
    keys = _dict_keys(positional.children()[0]) if positional.num_children == 1 else None
    values = [nodes[name].meta["val"] for name in taken]
    inputs = [_tensor(name, value) for name, value in zip(keys or taken, values, strict=True)]
    named = _dict_keys(exported.call_spec.out_spec) or [f"OUTPUT__{position}" for position in range(len(given))]
    results = [_value(nodes, node) for node in given]
    outputs = [_tensor(name, value) for name, value in zip(named, results, strict=True)]
    return FileSignature(tuple(inputs), tuple(outputs), _largest_batch(exported, values))


def _value(nodes: Any, output: Any) -> Any:
    return nodes[output].meta["val"] if isinstance(output, str) else output


def _dict_keys(spec: Any) -> list[str] | None:
    """Keys of a dict of tensors; None for anything else."""
    if spec.type is dict and all(child.is_leaf() for child in spec.children()):
        return [str(key) for key in spec.context]
    return None


def _tensor(name: str, value: Any) -> FileTensor:
    if not isinstance(value, torch.Tensor):
        raise UnsupportedError(f"'{name}' is a {type(value).__name__}; only tensors can be inputs and outputs")
    if value.dtype not in DATATYPES:
        raise UnsupportedError(f"'{name}' is a tensor of {value.dtype}, which no KServe tensor can carry")
    return FileTensor(
        name, DATATYPES[value.dtype], tuple(size if isinstance(size, int) else -1 for size in value.shape)
    )


def _largest_batch(exported: Any, values: list[Any]) -> int | None:
    """The upper bound of the inputs' first dimension, None if it has none."""
    bounds = []
    for value in values:
        if value.ndim and not isinstance(value.shape[0], int):
            constraint = exported.range_constraints.get(value.shape[0].node.expr)
            if constraint is not None and constraint.upper.is_Integer and constraint.upper < 2**31:
                bounds.append(int(constraint.upper))
    return min(bounds, default=None)
