"""The data of a run: made up, or read from JSON files and directories in perf_analyzer's forms."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelserver.bench.interface import Interface
from modelserver.bench.tensors import InputTensor, from_document, random_values, stack, zeros
from modelserver.config.signature import TensorSpec
from modelserver.core.datatype import Datatype
from modelserver.core.documents import parse_json
from modelserver.core.tensor import encode_bytes_elements
from modelserver.errors import InvalidArgumentError

RANDOM, ZERO = "random", "zero"


@dataclass(frozen=True, slots=True)
class DataOptions:
    """`sources` are `random`, `zero`, or paths of JSON files, or of one directory."""

    sources: tuple[str, ...] = (RANDOM,)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    batch_size: int = 1
    string_length: int = 128
    string_data: str = ""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """The inputs of one request, and the bytes of outputs that are expected for them."""

    inputs: tuple[InputTensor, ...]
    expected: dict[str, bytes] = field(default_factory=dict)


Stream = tuple[Step, ...]


def read_data(interface: Interface, options: DataOptions) -> tuple[Stream, ...]:
    """The streams of steps to send, with the dimension of the batch where the model has one.

    Raises InvalidArgumentError for data that does not fit the model; it names the input and the fix.
    """
    interface.check_batch(options.batch_size)
    for name in options.shapes:
        interface.input(name)
    if options.sources[0] in (RANDOM, ZERO):
        streams: list[Sequence[Step]] = [[_made_up(interface, options)]]
    elif Path(options.sources[0]).is_dir():
        streams = [[_from_directory(interface, options, Path(options.sources[0]))]]
    else:
        streams = [stream for name in options.sources for stream in _from_file(interface, options, Path(name))]
    if interface.max_batch_size:
        streams = [_in_batches(stream, options.batch_size) for stream in streams]
    return tuple(tuple(stream) for stream in streams)


def _shape_of(spec: TensorSpec, options: DataOptions) -> tuple[int, ...]:
    """The shape to send. Raises InvalidArgumentError if it is variable and --shape is missing or wrong."""
    given = options.shapes.get(spec.name)
    if given is None:
        if not spec.is_fixed:
            example = ",".join("16" if size < 0 else str(size) for size in spec.dims)
            raise InvalidArgumentError(
                f"input '{spec.name}' has variable dimensions {list(spec.dims)}: say its shape with "
                f"--shape {spec.name}:{example}"
            )
        return spec.dims
    fits = len(given) == len(spec.dims) and all(
        wanted in (-1, size) for size, wanted in zip(given, spec.dims, strict=True)
    )
    if not fits:
        raise InvalidArgumentError(
            f"--shape {spec.name}:{','.join(map(str, given))} does not fit the model's {list(spec.dims)} "
            "(without the dimension of the batch)"
        )
    return given


def _made_up(interface: Interface, options: DataOptions) -> Step:
    source = random.Random(options.seed)  # noqa: S311  (data, not secrets)
    inputs = []
    for spec in interface.inputs:
        if spec.is_optional and not spec.is_fixed and spec.name not in options.shapes:
            continue
        shape = _shape_of(spec, options)
        if options.sources[0] == ZERO:
            raw = zeros(spec, shape, options.string_data)
        else:
            raw = random_values(spec, shape, source, text=options.string_data, text_len=options.string_length)
        inputs.append(InputTensor(spec.name, spec.datatype, shape, raw))
    return Step(tuple(inputs))


def _from_directory(interface: Interface, options: DataOptions, directory: Path) -> Step:
    """A file per input, named as it: raw bytes, or for BYTES the elements line by line."""
    inputs = []
    for spec in interface.inputs:
        path = directory / spec.name
        if not path.is_file():
            if spec.is_optional:
                continue
            raise InvalidArgumentError(f"--input-data: there is no file '{path}' for input '{spec.name}'")
        inputs.append(_from_raw_file(spec, _shape_of(spec, options), path))
    expected = {
        spec.name: _file_bytes(spec, directory / spec.name)
        for spec in interface.outputs
        if (directory / spec.name).is_file() and spec.name not in {tensor.name for tensor in inputs}
    }
    return Step(tuple(inputs), expected)


def _file_bytes(spec: TensorSpec, path: Path) -> bytes:
    if spec.datatype is Datatype.BYTES:
        return encode_bytes_elements(path.read_bytes().splitlines())
    return path.read_bytes()


def _from_raw_file(spec: TensorSpec, shape: tuple[int, ...], path: Path) -> InputTensor:
    raw = _file_bytes(spec, path)
    if spec.datatype is Datatype.BYTES:
        found, expected, unit = len(path.read_bytes().splitlines()), math.prod(shape), "lines"
    else:
        found, expected, unit = len(raw), len(zeros(spec, shape, "")), "bytes"
    if found != expected:
        raise InvalidArgumentError(
            f"'{path}' has {found} {unit}, expected {expected} for shape {list(shape)} of {spec.datatype.value}"
        )
    return InputTensor(spec.name, spec.datatype, shape, raw)


def _from_file(interface: Interface, options: DataOptions, path: Path) -> list[list[Step]]:
    document = _load(path)
    data = document["data"]
    wanted = document.get("validation_data")
    _check_lengths(f"{path}", data, wanted)
    if not isinstance(data[0], list):
        return [_stream(interface, options, f"{path}", data, wanted)]
    streams = []
    for number, stream in enumerate(data):
        where = f"{path}: stream {number}"
        if not isinstance(stream, list) or not stream:
            raise InvalidArgumentError(
                f"{where}: expected a list of requests, as the first one is, got {stream!r:.100}"
            )
        expected = wanted[number] if wanted is not None else None
        _check_lengths(where, stream, expected)
        streams.append(_stream(interface, options, where, stream, expected))
    return streams


def _check_lengths(where: str, data: Sequence[Any], wanted: Any) -> None:
    if wanted is not None and (not isinstance(wanted, list) or len(wanted) != len(data)):
        raise InvalidArgumentError(f"{where}: 'validation_data' must have as many entries as 'data' ({len(data)})")


def _load(path: Path) -> dict[str, Any]:
    try:
        document = parse_json(path.read_text(), str(path))
    except OSError as error:
        raise InvalidArgumentError(
            f"--input-data: cannot read '{path}': {error.strerror}; it is random, zero, or a path"
        ) from None
    except ValueError as error:
        raise InvalidArgumentError(f"{path} is not JSON: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("data"), list) or not document["data"]:
        raise InvalidArgumentError(f'{path}: expected {{"data": [{{"<input>": [...]}}, ...]}}')
    return document


def _stream(
    interface: Interface, options: DataOptions, where: str, entries: Sequence[Any], expected: Sequence[Any] | None
) -> list[Step]:
    steps = []
    for number, entry in enumerate(entries):
        place = f"{where}, entry {number}"
        if not isinstance(entry, dict):
            raise InvalidArgumentError(f"{place}: expected an object of inputs, got {type(entry).__name__}")
        for name in entry:
            try:
                interface.input(name)
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"{place}: {error.message}") from None
        outputs = expected[number] if expected is not None else {}
        steps.append(Step(_inputs(interface, options, place, entry), _expected(interface, place, outputs)))
    return steps


def _inputs(interface: Interface, options: DataOptions, place: str, entry: dict[str, Any]) -> tuple[InputTensor, ...]:
    inputs = []
    for spec in interface.inputs:
        if spec.name not in entry:
            if spec.is_optional:
                continue
            raise InvalidArgumentError(f"{place}: input '{spec.name}' is missing")
        default = options.shapes.get(spec.name, spec.dims)
        tensor = from_document(spec, entry[spec.name], default, f"{place}, input '{spec.name}'")
        inputs.append(tensor)
    return tuple(inputs)


def _expected(interface: Interface, place: str, entry: Any) -> dict[str, bytes]:
    specs = {spec.name: spec for spec in interface.outputs}
    found = {}
    if entry is not None and not isinstance(entry, dict):
        raise InvalidArgumentError(f"{place}: expected an object of outputs in 'validation_data', got {entry!r:.100}")
    for name, value in (entry or {}).items():
        if name not in specs:
            raise InvalidArgumentError(f"{place}: the model has no output '{name}' (it has {', '.join(specs)})")
        spec = specs[name]
        # The length of a flat list gives the size of a variable dimension.
        is_open = not spec.is_fixed and isinstance(value, list)
        shape = (len(value),) if is_open else spec.dims
        found[name] = from_document(spec, value, shape, f"{place}, output '{name}'").raw
    return found


def _in_batches(stream: Sequence[Step], batch_size: int) -> list[Step]:
    """Each request takes the next rows; the last one goes on at the beginning."""
    batches = []
    for start in range(0, len(stream), batch_size):
        rows = [stream[(start + number) % len(stream)] for number in range(batch_size)]
        names = [tensor.name for tensor in rows[0].inputs]
        by_name = [{tensor.name: tensor for tensor in row.inputs} for row in rows]
        outputs = rows[0].expected.keys()
        if any(list(row) != names for row in by_name) or any(row.expected.keys() != outputs for row in rows):
            raise InvalidArgumentError(
                "rows of one batch must have the same inputs, and the same outputs in 'validation_data'; "
                "use -b 1, or the same in all"
            )
        inputs = tuple(stack([row[name] for row in by_name]) for name in names)
        expected = {name: b"".join(row.expected[name] for row in rows) for name in outputs}
        batches.append(Step(inputs, expected))
    return batches
