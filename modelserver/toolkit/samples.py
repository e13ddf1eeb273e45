"""Samples: inputs for calibration and comparison of a model, with their labels if known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from modelserver.config.schema import ModelConfig, ModelInput
from modelserver.core.datatype import Datatype
from modelserver.core.spelling import nearest_hint
from modelserver.errors import InvalidArgumentError

Array = np.ndarray[Any, Any]

# A variable dimension of made-up samples, unless --shape says another.
OPEN_DIMENSION = 16
LABELS = "labels"


@dataclass(frozen=True, slots=True)
class Samples:
    """`arrays` by input name, each [count, *dims] without the batch dimension of a request; `labels` [count] or None.

    `is_made_up` if they are generated: good for parity, bad for calibration.
    """

    arrays: Mapping[str, Array]
    labels: Array | None = None
    is_made_up: bool = False

    @property
    def count(self) -> int:
        return len(next(iter(self.arrays.values()))) if self.arrays else 0

    def head(self, count: int) -> Samples:
        """The first `count` of them."""
        labels = None if self.labels is None else self.labels[:count]
        return Samples({name: array[:count] for name, array in self.arrays.items()}, labels, self.is_made_up)

    def requests(self, config: ModelConfig, rows: int = 0) -> Iterator[dict[str, Array]]:
        """Inputs of one request after the other: batches of up to `rows` (0: the largest that the model takes)."""
        size = request_rows(config, rows)
        for start in range(0, self.count, size):
            if config.max_batch_size:
                yield {name: array[start : start + size] for name, array in self.arrays.items()}
            else:
                yield {name: array[start] for name, array in self.arrays.items()}


def request_rows(config: ModelConfig, rows: int = 0) -> int:
    """How many samples go into one request."""
    if not config.max_batch_size:
        return 1
    return min(rows, config.max_batch_size) if rows else min(config.max_batch_size, 64)


@dataclass(frozen=True, slots=True)
class MadeUp:
    """How samples are made up: `shapes` are the sizes of variable dimensions by input, without the batch."""

    count: int = 8
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    seed: int = 0


def made_up_samples(config: ModelConfig, options: MadeUp) -> Samples:
    """Standard normal numbers, small integers, short texts. Raises InvalidArgumentError for shapes that do not fit."""
    names = [spec.name for spec in config.input]
    for name in options.shapes:
        if name not in names:
            raise InvalidArgumentError(f"--shape: the model has no input '{name}'{nearest_hint(name, names)}")
    source = np.random.default_rng(options.seed)
    arrays = {}
    for spec in config.input:
        if spec.optional and spec.name not in options.shapes:
            continue
        shape = (options.count, *_sample_shape(spec, options.shapes.get(spec.name)))
        arrays[spec.name] = _values(source, spec, shape)
    return Samples(arrays, is_made_up=True)


def _sample_shape(spec: ModelInput, given: Sequence[int] | None) -> tuple[int, ...]:
    if given is None:
        return tuple(OPEN_DIMENSION if size < 0 else size for size in spec.dims)
    if len(given) != len(spec.dims) or any(
        size not in (-1, wanted) for size, wanted in zip(spec.dims, given, strict=True)
    ):
        raise InvalidArgumentError(
            f"--shape {spec.name}:{','.join(map(str, given))} does not fit the model's {list(spec.dims)} "
            "(without the dimension of the batch)"
        )
    return tuple(given)


def _values(source: np.random.Generator, spec: ModelInput, shape: tuple[int, ...]) -> Array:
    datatype = spec.data_type
    assert datatype is not None, "a completed config has datatypes"
    if datatype is Datatype.BYTES:
        texts = np.empty(shape, dtype=object)
        texts.reshape(-1)[:] = [b"sample %d" % number for number in range(texts.size)]
        return texts
    if datatype is Datatype.BOOL:
        return source.integers(0, 2, shape).astype(np.bool_)
    if datatype is Datatype.BF16:
        return (source.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if datatype.numpy.kind == "f":
        return source.standard_normal(shape, np.float32).astype(datatype.numpy)
    # Small, because integers are mostly indices, and those of small tables, too.
    return source.integers(0, 2, shape).astype(datatype.numpy)


def checked_samples(arrays: Mapping[str, Array], config: ModelConfig, where: str) -> Samples:
    """Samples of these arrays, of which one may be the labels. Raises InvalidArgumentError for what does not fit."""
    given = dict(arrays)
    specs = {spec.name: spec for spec in config.input}
    labels = given.pop(LABELS, None) if LABELS not in specs else None
    for name in given:
        if name not in specs:
            raise InvalidArgumentError(
                f"{where}: '{name}' is not an input of the model{nearest_hint(name, list(specs))} (it has "
                f"{', '.join(specs)}; right answers are called '{LABELS}')"
            )
    for name, spec in specs.items():
        if name in given:
            given[name] = _fitted(given[name], spec, where)
        elif not spec.optional:
            raise InvalidArgumentError(f"{where}: input '{name}' is missing; there are {', '.join(arrays) or 'none'}")
    counts = {name: len(array) for name, array in given.items()}
    if labels is not None:
        labels = np.asarray(labels)
        if labels.ndim > 1 and labels.size == len(labels):
            labels = labels.reshape(-1)
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise InvalidArgumentError(
                f"{where}: '{LABELS}' must be one whole number per sample, got {labels.dtype} {list(labels.shape)}"
            )
        counts[LABELS] = len(labels)
    if len(set(counts.values())) > 1 or not all(counts.values()):
        told = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise InvalidArgumentError(f"{where}: every array needs the same number of samples, and one at least: {told}")
    return Samples(given, labels)


def _fitted(array: Array, spec: ModelInput, where: str) -> Array:
    """`array` in the input's datatype. Raises InvalidArgumentError for other shapes, and for lossy conversions."""
    array = np.asarray(array)
    datatype = spec.data_type
    assert datatype is not None, "a completed config has datatypes"
    fits = array.ndim == len(spec.dims) + 1 and all(
        wanted in (-1, size) for size, wanted in zip(array.shape[1:], spec.dims, strict=True)
    )
    if not fits:
        raise InvalidArgumentError(
            f"{where}: '{spec.name}' must be [samples, {', '.join(map(str, spec.dims))}], got {list(array.shape)}"
        )
    if datatype is Datatype.BYTES:
        return array.astype(object)
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and datatype.numpy.kind != "f"):
        raise InvalidArgumentError(f"{where}: '{spec.name}' must be {datatype.value}, got {array.dtype}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise InvalidArgumentError(f"{where}: '{spec.name}' has values that are not finite")
    return np.ascontiguousarray(array, dtype=datatype.numpy)
