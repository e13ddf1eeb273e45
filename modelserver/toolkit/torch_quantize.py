"""PyTorch programs with int8 or int4 weights, by torchao. Needs torch and torchao; the result needs torch alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelserver.errors import InvalidArgumentError, UnsupportedError
from modelserver.toolkit import require
from modelserver.toolkit.torch_module import first_line, load_program, quiet_torch, torch_library


def pack_linear(torch: Any, layer: Any, group_size: int) -> Any:
    """The layer that torchao has given int4 weights in bytes (one scale for each group of a row), packed.

    Its weights are unpacked at every call: half the memory of int8, for some time.
    """
    values = layer.weight.qdata.to(torch.int8)
    scales = layer.weight.scale.detach().clone()
    zeros = layer.weight.zero_point
    if zeros is not None and bool((zeros != 0).any()):
        raise AssertionError("int4 weights are symmetric: torchao was asked for no zero points")
    return _packed_class(torch)(values, scales, layer.bias, group_size)


def _packed_class(torch: Any) -> Any:
    class PackedLinear(torch.nn.Module):  # type: ignore[misc]
        """`packed` uint8 [out, in / 2]: the even columns in the low half, the odd ones in the high half, plus 8."""

        def __init__(self, values: Any, scales: Any, bias: Any, group_size: int) -> None:
            super().__init__()
            offset = (values + 8).to(torch.uint8)
            self.register_buffer("packed", offset[:, 0::2] | (offset[:, 1::2] << 4))
            self.register_buffer("scales", scales)
            self.bias = bias
            self._num_groups = values.shape[1] // group_size
            self._shape = tuple(values.shape)

        def forward(self, rows: Any) -> Any:
            # By name, not as & and >>: those are traced to operators that some servers refuse in a file.
            low = torch.bitwise_and(self.packed, 15).to(torch.int8) - 8
            high = torch.bitwise_right_shift(self.packed, 4).to(torch.int8) - 8
            values = torch.stack((low, high), dim=-1).reshape(self._shape[0], self._num_groups, -1)
            weight = (values.to(self.scales.dtype) * self.scales.unsqueeze(-1)).reshape(self._shape)
            return torch.nn.functional.linear(rows, weight, self.bias)

    return PackedLinear


# Weights of one scale: fewer are more exact and larger.
GROUP_SIZE = 32
INT8, INT8_DYNAMIC, INT4 = "int8", "dynamic", "int4"


def quantize_program(
    path: Path, method: str, *, shown: str, exclude: Sequence[str] = ()
) -> tuple[Any, tuple[str, ...]]:
    """The program of `path` with the weights of its linear layers quantized, and notes.

    `method` is INT8 (weights alone), INT8_DYNAMIC (weights, and activations when they come) or INT4 (weights, packed
    two to a byte). Layers in `exclude` stay as they are. Raises UnsupportedError when it has no linear layer, or
    cannot be traced again, InvalidArgumentError for a layer to exclude that is not there.
    """
    torch = torch_library()
    with quiet_torch():
        quantization = require("torchao.quantization", extra="quantize", purpose="quantizing PyTorch models")
    program = load_program(path)
    with quiet_torch(), torch.no_grad():
        module = program.module(check_guards=False)
        found = restore_linear_layers(torch, module)
        _check_layers(shown, found, exclude, program)
        wanted = [name for name in found if name not in exclude]
        notes = [f"quantized {len(wanted)} linear layers: {', '.join(wanted)}"]
        if method == INT4:
            narrow = [name for name in wanted if module.get_submodule(found[name]).in_features % GROUP_SIZE]
            wanted = [name for name in wanted if name not in narrow]
            if narrow:
                notes.append(f"left as they are, not multiples of {GROUP_SIZE} wide: {', '.join(narrow)}")
        places = {found[name] for name in wanted}
        quantization.quantize_(module, _config(torch, quantization, method), lambda _, name: name in places)
        if method == INT4:
            for place in places:
                _replace(module, place, pack_linear(torch, module.get_submodule(place), GROUP_SIZE))
        others = _other_weights(program)
        if others:
            notes.append(f"left as they are: {others}")
        return _exported_again(torch, program, module, shown), tuple(notes)


def _config(torch: Any, quantization: Any, method: str) -> Any:
    if method == INT8:
        return quantization.Int8WeightOnlyConfig()
    if method == INT8_DYNAMIC:
        return quantization.Int8DynamicActivationInt8WeightConfig()
    granularity = require("torchao.quantization.granularity", extra="quantize", purpose="quantizing PyTorch models")
    return quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=granularity.PerGroup(GROUP_SIZE))


def _check_layers(shown: str, found: dict[str, str], exclude: Sequence[str], program: Any) -> None:
    for name in exclude:
        if name not in found:
            raise InvalidArgumentError(f"--exclude: there is no linear layer '{name}' (there are {', '.join(found)})")
    if not set(found) - set(exclude):
        raise UnsupportedError(
            f"'{shown}' has no linear layer whose weights could be quantized "
            f"({_other_weights(program) or 'no weights'}); "
            "for convolutions convert it to ONNX, and quantize that"
        )


def restore_linear_layers(torch: Any, module: Any) -> dict[str, str]:
    """Give calls of aten.linear with weights of the program a torch.nn.Linear, which torchao knows, in place.

    The layers' names in the program, with the new submodules' names.
    """
    found: dict[str, str] = {}
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target is not torch.ops.aten.linear.default:
            continue
        weight: Any = node.args[1]
        if weight.op != "get_attr":
            continue
        bias = node.args[2] if len(node.args) > 2 else None
        if bias is not None and bias.op != "get_attr":
            continue
        name = str(weight.target).removesuffix(".weight")
        place = f"linear_{len(found)}"
        module.add_submodule(place, _linear(torch, module, weight, bias))
        with module.graph.inserting_before(node):
            call = module.graph.call_module(place, (node.args[0],))
        call.meta.update(node.meta)
        node.replace_all_uses_with(call)
        module.graph.erase_node(node)
        # A layer that is called twice has one name and two places: both hold the same weights.
        found[name if name not in found else f"{name} ({place})"] = place
    module.graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    module.recompile()
    return found


def _linear(torch: Any, module: Any, weight: Any, bias: Any) -> Any:
    values = _attribute(module, weight.target)
    layer = torch.nn.Linear(values.shape[1], values.shape[0], bias=bias is not None, dtype=values.dtype)
    layer.weight = torch.nn.Parameter(values.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = torch.nn.Parameter(_attribute(module, bias.target).detach(), requires_grad=False)
    return layer.eval()


def _attribute(module: Any, path: str) -> Any:
    value = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _replace(module: Any, place: str, layer: Any) -> None:
    setattr(module, place, layer)


def _other_weights(program: Any) -> str:
    """The operators with weights that stay: convolutions, embeddings."""
    weights = set(program.graph_signature.inputs_to_parameters) | set(program.graph_signature.inputs_to_buffers)
    counts: Counter[str] = Counter()
    for node in program.graph.nodes:
        if node.op == "call_function" and any(getattr(value, "name", "") in weights for value in node.args):
            name = str(node.target).removeprefix("aten.").partition(".")[0]
            if name != "linear":
                counts[name] += 1
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _exported_again(torch: Any, program: Any, module: Any, shown: str) -> Any:
    """The changed module as a program with the same inputs, outputs and variable dimensions, free of torchao's own
    operators, which cannot be loaded without it.
    """
    arguments, shapes = _arguments(torch, program)
    try:
        exported = torch.export.export(module, arguments, dynamic_shapes=shapes)
        decompositions = require("torch._inductor.decomposition", extra="quantize", purpose="torchao").decompositions
        table = {operator: way for operator, way in decompositions.items() if str(operator).startswith("torchao")}
        if any(str(node.target).startswith("torchao") for node in exported.graph.nodes):
            exported = exported.run_decompositions(table)
    except Exception as error:  # torch raises whatever its tracer meets
        raise UnsupportedError(f"'{shown}' cannot be traced again after quantization: {first_line(error)}") from error
    foreign = sorted({str(node.target) for node in exported.graph.nodes if str(node.target).startswith("torchao")})
    if foreign:
        raise UnsupportedError(
            f"'{shown}': operators of torchao are left that no server could load: {', '.join(foreign)}"
        )
    return exported


def _arguments(torch: Any, program: Any) -> tuple[tuple[Any, ...], Any]:
    """Example arguments and variable dimensions, as the program's own graph has them. Raises UnsupportedError."""
    pytree = torch.utils._pytree
    spec = program.call_spec.in_spec
    if spec.children()[1].num_leaves:
        raise UnsupportedError("the program takes arguments by keyword, which cannot be traced again")
    nodes = {node.name: node for node in program.graph.nodes}
    symbols: dict[str, Any] = {}
    examples, shapes = [], []
    for name in program.graph_signature.user_inputs:
        value = nodes[name].meta["val"] if isinstance(name, str) else name
        if not isinstance(value, torch.Tensor):
            raise UnsupportedError(f"argument {name!r} is not a tensor: such programs cannot be traced again")
        sizes = [_size(program, size) for size in value.shape]
        examples.append(torch.ones(sizes, dtype=value.dtype))
        shapes.append(
            {place: _dim(torch, program, size, symbols) for place, size in enumerate(value.shape) if _is_open(size)}
        )
    arguments = pytree.tree_unflatten(examples, spec)[0]
    return tuple(arguments), tuple(pytree.tree_unflatten(shapes, spec)[0])


def _is_open(size: Any) -> bool:
    return not isinstance(size, int)


def _range(program: Any, size: Any) -> tuple[int, int | None]:
    bounds = program.range_constraints.get(size.node.expr)
    if bounds is None:
        return 0, None
    upper = int(bounds.upper) if bounds.upper.is_Integer and bounds.upper < 2**31 else None
    return int(bounds.lower), upper


def _size(program: Any, size: Any) -> int:
    """An example of a size: 0 and 1 would be taken for constants."""
    if not _is_open(size):
        return int(size)
    lower, upper = _range(program, size)
    return max(lower, min(3, upper if upper is not None else 3))


def _dim(torch: Any, program: Any, size: Any, symbols: dict[str, Any]) -> Any:
    expression = str(size.node.expr)
    if not expression.isidentifier():
        return torch.export.Dim.AUTO
    if expression not in symbols:
        lower, upper = _range(program, size)
        symbols[expression] = torch.export.Dim(f"size_{len(symbols)}", min=max(lower, 1), max=upper)
    return symbols[expression]
