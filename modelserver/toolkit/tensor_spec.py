"""`--input NAME:DATATYPE:DIMS`: an input of a module, which its code does not tell."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from modelserver.config.signature import TensorSpec
from modelserver.core.datatype import Datatype
from modelserver.core.spelling import nearest_hint
from modelserver.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class ModuleOptions:
    """Facts missing in TorchScript files and code: inputs, names of outputs, the largest batch (0: no batching).

    `weights` is the file of a module's weights, None if the code has them.
    """

    inputs: tuple[TensorSpec, ...] = ()
    output_names: tuple[str, ...] = ()
    max_batch_size: int = 64
    weights: Path | None = None


def parse_tensor_spec(text: str) -> TensorSpec:
    """`image:FP32:3,224,224`, or `ids:INT64:-1`. Raises InvalidArgumentError."""
    parts = text.split(":")
    if len(parts) != 3 or not parts[0]:
        raise InvalidArgumentError(f"--input expects NAME:DATATYPE:DIMS such as image:FP32:3,224,224, got '{text}'")
    name, word, sizes = parts
    word = word.upper().removeprefix("TYPE_")
    known = [datatype.value for datatype in Datatype]
    if word not in known:
        raise InvalidArgumentError(
            f"--input {name}: unknown datatype '{word}'{nearest_hint(word, known)} (one of {', '.join(known)})"
        )
    return TensorSpec(name, Datatype(word), parse_dims(sizes, f"--input {name}"))


def parse_dims(text: str, flag: str) -> tuple[int, ...]:
    """Sizes separated by commas, -1 for any; nothing is a scalar. Raises InvalidArgumentError."""
    try:
        dims = tuple(int(size) for size in text.split(",")) if text else ()
    except ValueError:
        dims = (0,)
    if any(size < 1 and size != -1 for size in dims):
        raise InvalidArgumentError(f"{flag}: expected sizes such as 3,224,224 (-1 is any), got '{text}'")
    return dims


def parse_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """`NAME:1,2,3`, the sizes of an input's variable dimensions. Raises InvalidArgumentError."""
    name, colon, sizes = text.rpartition(":")
    if not colon or not name:
        raise InvalidArgumentError(f"--shape expects NAME:1,2,3, got '{text}'")
    dims = parse_dims(sizes, f"--shape {name}")
    if -1 in dims:
        raise InvalidArgumentError(f"--shape {name}: give every size as a number, got '{sizes}'")
    return name, dims
