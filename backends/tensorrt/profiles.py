"""Optimisation profiles before an engine is built: read from text, derived from a config, checked against the file.

A profile is written `input:MIN/OPT/MAX`, sizes joined by `x`, inputs by commas: `ids:1x16/8x128/32x512,mask:...`. One
shape alone stands for all three; of two the first is the minimum. For a shape tensor the numbers are its values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from modelserver.backend import ConfigError, InvalidArgumentError

from .engine_info import Range, Shape
from .onnx_file import OnnxFile, OnnxTensor

_ENTRY = re.compile(r"(?P<name>[^,;]+):(?P<bounds>\d+(?:x\d+)*(?:/\d+(?:x\d+)*){0,2})(?:,|$)")
_SIZES = re.compile(r"(\d+)(?:/(\d+)(?:/(\d+))?)?")
_LARGEST = 2**31 - 1  # a dimension of TensorRT is an int32 in all that matters

Profile = Mapping[str, Range]


def parse_profile(text: str, source: str) -> dict[str, Range]:
    """Raises InvalidArgumentError; `source` names the flag or parameter that says it."""
    found: dict[str, Range] = {}
    place = 0
    stripped = re.sub(r"\s+", "", text)
    while place < len(stripped) or not found:
        match = _ENTRY.match(stripped, place)
        if match is None:
            raise InvalidArgumentError(
                f"{source}: expected input:MIN/OPT/MAX with sizes joined by x, such as "
                f"image:1x3x224x224/8x3x224x224/32x3x224x224, got '{stripped[place:] or text}'"
            )
        name = match["name"]
        if name in found:
            raise InvalidArgumentError(f"{source}: expected every input once, got '{name}' twice")
        found[name] = _bounds([_parsed(shape) for shape in match["bounds"].split("/")], f"{source}: '{name}'")
        place = match.end()
    return found


def parse_sizes(text: str, source: str) -> tuple[int, int, int]:
    """`MIN/OPT/MAX` of one dimension, as `1/8/32`. Raises InvalidArgumentError."""
    match = _SIZES.fullmatch(text.strip())
    if match is None:
        raise InvalidArgumentError(f"{source}: expected MIN/OPT/MAX, such as 1/8/32, got '{text}'")
    sizes = [(int(size),) for size in match.groups() if size is not None]
    bounds = _bounds(sizes, source)
    return bounds.min[0], bounds.opt[0], bounds.max[0]


def default_sizes(largest: int) -> tuple[int, int, int]:
    """For a batch: from one row to the largest, tuned for half of it."""
    return 1, max(1, largest // 2), largest


def derive_profile(
    onnx: OnnxFile, *, batch: tuple[int, int, int] | None, sizes: Mapping[str, tuple[int, int, int]]
) -> dict[str, Range]:
    """A profile from sizes of symbolic dimensions by name; `batch` is for the first dimension of every input.

    Raises ConfigError that lists the missing sizes, with a line to copy.
    """
    known = {dim for tensor in onnx.inputs for dim in tensor.dims or () if isinstance(dim, str)}
    unknown = sorted(set(sizes) - known)
    if unknown:
        raise ConfigError(
            f"{onnx.path}: expected symbolic dimensions of its inputs ({', '.join(sorted(known)) or 'it has none'}), "
            f"got '{unknown[0]}'"
        )
    profile: dict[str, Range] = {}
    missing = False
    for tensor in onnx.inputs:
        bounds = [_size(dim, place, batch, sizes) for place, dim in enumerate(tensor.dims or ())]
        if tensor.dims is None or None in bounds:
            missing = True
            continue
        columns = [bound for bound in bounds if bound is not None]
        low, best, high = (tuple(column[which] for column in columns) for which in range(3))
        profile[tensor.name] = Range(low, best, high)
    if missing:
        raise ConfigError(_advice(onnx, batch, sizes))
    return profile


def _size(
    dim: int | str | None, place: int, batch: tuple[int, int, int] | None, sizes: Mapping[str, tuple[int, int, int]]
) -> tuple[int, int, int] | None:
    if isinstance(dim, int):
        return dim, dim, dim
    if isinstance(dim, str) and dim in sizes:
        return sizes[dim]
    return batch if place == 0 else None


def _advice(onnx: OnnxFile, batch: tuple[int, int, int] | None, sizes: Mapping[str, tuple[int, int, int]]) -> str:
    """The missing sizes, and the profile with examples in their place."""
    missing = []
    entries = []
    for tensor in onnx.inputs:
        bounds = []
        for place, dim in enumerate(tensor.dims or ()):
            size = _size(dim, place, batch, sizes)
            if size is None:
                missing.append(f"'{tensor.name}' dimension {place}" + (f" ({dim})" if dim else ""))
            bounds.append(size or ((1, 8, 32) if place == 0 else (1, 128, 512)))
        if tensor.dims is None:
            missing.append(f"'{tensor.name}', whose rank the file does not tell")
            bounds = [(1, 8, 32)]
        entries.append(
            f"{tensor.name}:" + "/".join("x".join(str(size[which]) for size in bounds) for which in range(3))
        )
    line = ",".join(entries)
    return (
        f"{onnx.path}: sizes are variable and nothing says how large they may be: {', '.join(missing)}. Say it in "
        f'config.pbtxt, for example: parameters {{ key: "profile.0" value {{ string_value: "{line}" }} }}'
        f' (or modelserver build-engine --profile "{line}")'
    )


def check_profile(profile: Profile, onnx: OnnxFile, source: str) -> None:
    """Raise ConfigError with everything that is wrong; TensorRT ignores most of it, or fails without a word."""
    inputs = {tensor.name: tensor for tensor in onnx.inputs}
    problems = [f"no input '{name}' in the model, only {', '.join(inputs)}" for name in profile if name not in inputs]
    for name, tensor in inputs.items():
        if name in profile:
            problems += _tensor_problems(tensor, profile[name])
        elif tensor.dims is None or not all(isinstance(dim, int) for dim in tensor.dims):
            problems.append(f"'{name}' has variable sizes and is missing")
    if not problems:
        problems += _symbol_problems(profile, onnx.inputs)
    if problems:
        raise ConfigError(f"{source}: " + "; ".join(problems))


def _tensor_problems(tensor: OnnxTensor, bounds: Range) -> Iterator[str]:
    if any(size > _LARGEST for size in (*bounds.min, *bounds.opt, *bounds.max)):
        yield f"'{tensor.name}' has a size over {_LARGEST}"
    if tensor.dims is None or is_shape_candidate(tensor, bounds):
        return
    if len(bounds.min) != len(tensor.dims):
        yield f"'{tensor.name}' has {len(tensor.dims)} dimensions, the profile gives {len(bounds.min)}"
        return
    for place, dim in enumerate(tensor.dims):
        given = (bounds.min[place], bounds.opt[place], bounds.max[place])
        if isinstance(dim, int) and set(given) != {dim}:
            yield f"'{tensor.name}' dimension {place} is {dim} in the model, the profile says {_shown(given)}"


def is_shape_candidate(tensor: OnnxTensor, bounds: Range) -> bool:
    """Whether a range may be one of values: whole numbers, in one dimension, or alone, as many as the range has."""
    if tensor.datatype is None or tensor.datatype.value not in ("INT32", "INT64") or tensor.dims is None:
        return False
    if not tensor.dims:
        return len(bounds.min) == 1
    return len(tensor.dims) == 1 and isinstance(tensor.dims[0], int) and tensor.dims[0] == len(bounds.min)


def _symbol_problems(profile: Profile, inputs: Sequence[OnnxTensor]) -> Iterator[str]:
    """Dimensions of one name are one size: ranges that contradict each other would build, and fail at requests."""
    seen: dict[str, tuple[tuple[int, int, int], str]] = {}
    for tensor in inputs:
        bounds = profile.get(tensor.name)
        if bounds is None or tensor.dims is None or len(bounds.min) != len(tensor.dims):
            continue
        for place, dim in enumerate(tensor.dims):
            if not isinstance(dim, str):
                continue
            given = (bounds.min[place], bounds.opt[place], bounds.max[place])
            first, where = seen.setdefault(dim, (given, tensor.name))
            if first != given:
                yield (
                    f"dimension '{dim}' is {_shown(first)} in '{where}' and {_shown(given)} in '{tensor.name}': "
                    "dimensions of one name have one size"
                )


def _parsed(shape: str) -> Shape:
    return tuple(int(size) for size in shape.split("x"))


def _bounds(shapes: Sequence[Shape], source: str) -> Range:
    low, best, high = (*shapes, *[shapes[-1]] * (3 - len(shapes)))
    if len(shapes) == 2:
        low, best, high = shapes[0], shapes[1], shapes[1]
    if not len(low) == len(best) == len(high):
        raise InvalidArgumentError(
            f"{source}: expected MIN, OPT and MAX of one length, got {len(low)}, {len(best)} and {len(high)} sizes"
        )
    for place, sizes in enumerate(zip(low, best, high, strict=True)):
        if not sizes[0] <= sizes[1] <= sizes[2]:
            raise InvalidArgumentError(f"{source}: expected MIN <= OPT <= MAX, got {_shown(sizes)} at place {place}")
    return Range(low, best, high)


def _shown(sizes: Sequence[int]) -> str:
    return "/".join(map(str, sizes))


def profile_text(profile: Profile) -> str:
    """As `parse_profile` reads it."""
    return ",".join(
        f"{name}:" + "/".join("x".join(map(str, shape)) for shape in (bounds.min, bounds.opt, bounds.max))
        for name, bounds in profile.items()
    )
