"""Samples from files: .npz, a directory of .npy or .npz files, and requests that the bench or traces hold."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from modelserver.config.schema import ModelConfig, ModelInput
from modelserver.core.datatype import Datatype
from modelserver.core.documents import parse_json
from modelserver.errors import InvalidArgumentError
from modelserver.toolkit.comparison import MEASURE_S
from modelserver.toolkit.samples import Array, MadeUp, Samples, checked_samples, made_up_samples

# The records of Triton's trace files that hold the inputs of a request.
_TRACED_INPUT = "TENSOR_QUEUE_INPUT"


def read_samples(path: Path, config: ModelConfig) -> Samples:
    """Samples of a .npz file (an array per input, and perhaps `labels`), or of a directory.

    A directory holds `<input>.npy` files, or several .npz files whose samples follow each other.
    Raises InvalidArgumentError that names the file, the expected and the actual content.
    """
    if path.is_dir():
        return _from_directory(path, config)
    if path.suffix == ".npy" and len(config.input) == 1:
        return checked_samples({config.input[0].name: _load_npy(path)}, config, str(path))
    return checked_samples(_load_npz(path), config, str(path))


def _from_directory(path: Path, config: ModelConfig) -> Samples:
    several = sorted(path.glob("*.npz"))
    if several:
        parts = [checked_samples(_load_npz(part), config, str(part)) for part in several]
        return _joined(parts, str(path))
    single = {file.stem: _load_npy(file) for file in sorted(path.glob("*.npy"))}
    if not single:
        wanted = " and ".join(f"{spec.name}.npy" for spec in config.input)
        raise InvalidArgumentError(f"'{path}' holds no samples: expected {wanted}, or .npz files with these arrays")
    return checked_samples(single, config, str(path))


def _joined(parts: Sequence[Samples], where: str) -> Samples:
    names = list(parts[0].arrays)
    if any(list(part.arrays) != names or (part.labels is None) != (parts[0].labels is None) for part in parts):
        raise InvalidArgumentError(f"{where}: every .npz file must have the same arrays")
    try:
        arrays = {name: np.concatenate([part.arrays[name] for part in parts]) for name in names}
    except ValueError as error:
        raise InvalidArgumentError(f"{where}: samples of one shape are needed: {error}") from None
    labels = [part.labels for part in parts if part.labels is not None]
    return Samples(arrays, np.concatenate(labels) if labels else None)


def _load_npz(path: Path) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not hasattr(archive, "files"):
                raise InvalidArgumentError(f"'{path}' is a single array; expected a .npz file with one for each input")
            return {name: archive[name] for name in archive.files}
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidArgumentError(f"cannot read samples from '{path}': {reason}") from None
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidArgumentError(f"'{path}' is not a .npz file of plain arrays (numpy.savez): {error}") from None


def _load_npy(path: Path) -> Array:
    try:
        loaded = np.load(path, allow_pickle=False)
    except OSError as error:
        raise InvalidArgumentError(f"cannot read samples from '{path}': {error.strerror or error}") from None
    except (ValueError, EOFError) as error:
        raise InvalidArgumentError(f"'{path}' is not a .npy file of a plain array: {error}") from None
    if not isinstance(loaded, np.ndarray):
        raise InvalidArgumentError(f"'{path}' is not a single array")
    return loaded


def read_requests(path: Path, config: ModelConfig) -> Samples:
    """The inputs of recorded requests: a trace file with level TENSORS, or the bench's JSON (`{"data": [...]}`).

    Rows of requests with a batch are samples each. Requests of another model or shape than most are an error.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"--from-requests: cannot read '{path}': {error}") from None
    try:
        document = parse_json(text, f"--from-requests: '{path}'")
    except ValueError as error:
        raise InvalidArgumentError(f"--from-requests: '{path}' is not JSON: {error}") from None
    if isinstance(document, list):
        requests = _traced_requests(document, config, str(path))
    elif isinstance(document, dict) and isinstance(document.get("data"), list):
        requests = [_written_request(entry, config, str(path)) for entry in document["data"]]
    else:
        raise InvalidArgumentError(
            f"--from-requests: '{path}' is neither a trace file nor bench data: expected a list of trace records, or "
            '{"data": [...]}'
        )
    if not requests:
        raise InvalidArgumentError(
            f"--from-requests: '{path}' holds no inputs; record them with the trace level TENSORS "
            "(--trace-config level=TENSORS)"
        )
    return _joined([checked_samples(arrays, config, str(path)) for arrays in requests], str(path))


def _traced_requests(records: Sequence[Any], config: ModelConfig, where: str) -> list[dict[str, Array]]:
    specs = {spec.name: spec for spec in config.input}
    by_id: dict[object, dict[str, Array]] = {}
    for record in records:
        if not isinstance(record, dict) or record.get("activity") != _TRACED_INPUT:
            continue
        tensor = record.get("tensor") or {}
        spec = specs.get(tensor.get("name", ""))
        # A file may hold traces of other models, too.
        if spec is not None:
            by_id.setdefault(record.get("id"), {})[spec.name] = _traced_array(tensor, spec, config, where)
    return [arrays for arrays in by_id.values() if len(arrays) == len(specs)]


def _traced_array(tensor: Mapping[str, str], spec: ModelInput, config: ModelConfig, where: str) -> Array:
    datatype = spec.data_type
    assert datatype is not None, "a completed config has datatypes"
    if datatype in (Datatype.BYTES, Datatype.BF16):
        raise InvalidArgumentError(f"{where}: '{spec.name}' is {datatype.value}, which traces do not hold exactly")
    try:
        shape = [int(size) for size in tensor["shape"].split(",") if size]
        array = np.array([float(item) for item in tensor["data"].split(",") if item]).reshape(shape)
    except (KeyError, ValueError, AttributeError) as error:
        raise InvalidArgumentError(f"{where}: the traced tensor '{spec.name}' is damaged: {error}") from None
    array = array.astype(datatype.numpy)
    return array if config.max_batch_size else array[None]


def _written_request(entry: Any, config: ModelConfig, where: str) -> dict[str, Array]:
    """One sample of the bench's form: flat lists, or `content` beside a `shape`."""
    if not isinstance(entry, dict):
        raise InvalidArgumentError(
            f"{where}: expected an object of inputs for each request, got {type(entry).__name__}"
        )
    specs = {spec.name: spec for spec in config.input}
    arrays = {}
    for name, value in entry.items():
        spec = specs.get(name)
        if spec is None:
            raise InvalidArgumentError(f"{where}: the model has no input '{name}' (it has {', '.join(specs)})")
        assert spec.data_type is not None, "a completed config has datatypes"
        content, shape = (value.get("content"), value.get("shape")) if isinstance(value, dict) else (value, None)
        try:
            flat = np.array(content, dtype=spec.data_type.numpy).reshape(-1)
            arrays[name] = flat.reshape((1, *(shape or spec.dims)))
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"{where}: input '{name}' does not fit {list(spec.dims)}: {error}") from None
    return arrays


# Random samples for the comparison if none are given.
NUM_MADE_UP = 32


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """Where samples come from: a file or directory; else made up, with `shapes` for variable dimensions.

    `measure_s` is how long latencies are measured for each number of rows, by those who measure them.
    """

    path: Path | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    label_output: str = ""
    measure_s: float = MEASURE_S

    def samples(self, config: ModelConfig, count: int = NUM_MADE_UP) -> Samples:
        """Raises InvalidArgumentError."""
        if self.path is not None:
            return read_samples(self.path, config)
        return made_up_samples(config, MadeUp(count, self.shapes))
