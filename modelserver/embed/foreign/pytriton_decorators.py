"""PyTriton's decorators: a function of a list of requests becomes one of arrays.

Each gets the list of requests as the last argument, so that methods may have them, too.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import numpy as np

from modelserver.backend import Array


class PyTritonError(Exception):
    """The base of PyTriton's exceptions."""


class PyTritonValidationError(PyTritonError):
    """A model's function or its config is wrong."""


class PyTritonUnrecoverableError(PyTritonError):
    """What a function raises when it can never answer again."""


PyTritonInvalidOperationError = PyTritonRuntimeError = PyTritonBadParameterError = PyTritonError


@dataclass
class Request(MutableMapping[str, Array]):
    """The inputs of a request by name, and its parameters."""

    data: dict[str, Array]
    parameters: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Array:
        return self.data[name]

    def __setitem__(self, name: str, value: Array) -> None:
        self.data[name] = value

    def __delitem__(self, name: str) -> None:
        del self.data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


@dataclass
class TritonContext:
    """What `triton_context` hands to a function: the config of the model."""

    model_config: Any


# The model whose function is being called, as `bind` has it.
BOUND: ContextVar[Any] = ContextVar("BOUND")


def _decorator(transform: Callable[..., Any]) -> Callable[..., Any]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            return transform(lambda *last, **more: function(*arguments[:-1], *last, **named, **more), arguments[-1])

        return call

    return decorate


def _rows(request: Mapping[str, Array]) -> int:
    return int(next(iter(request.values())).shape[0])


def _by_generator(results: Any, each: Callable[[Any], Any]) -> Any:
    """`each` of a result, or of all results of a generator."""
    return (each(one) for one in results) if inspect.isgenerator(results) else each(results)


@_decorator
def sample(function: Callable[..., Any], requests: Sequence[Mapping[str, Array]]) -> Any:
    """The inputs of the only request, without a batch dimension, as named arguments."""
    return _by_generator(function(**requests[0]), lambda result: [result])


@_decorator
def batch(function: Callable[..., Any], requests: Sequence[Mapping[str, Array]]) -> Any:
    """The inputs of all requests in one batch, as named arguments; outputs are shared out again."""
    names = requests[0].keys()
    if any(request.keys() != names for request in requests):
        raise PyTritonValidationError("requests of one batch have different inputs: use group_by_keys before batch")
    sizes = [_rows(request) for request in requests]
    ends = list(itertools.accumulate(sizes))

    def share(result: Any) -> list[Any]:
        values = result.values() if isinstance(result, Mapping) else result
        wrong = [np.shape(value) for value in values if np.shape(value)[:1] != (ends[-1],)]
        if wrong:
            raise ValueError(f"an output has the shape {wrong[0]}: its first dimension should be {ends[-1]}, the batch")
        parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        if isinstance(result, Mapping):
            return [{name: value[part] for name, value in result.items()} for part in parts]
        return [[value[part] for value in result] for part in parts]

    return _by_generator(function(**{name: np.concatenate([one[name] for one in requests]) for name in names}), share)


@_decorator
def group_by_keys(function: Callable[..., Any], requests: Sequence[Mapping[str, Array]]) -> list[Any]:
    """Requests with the same inputs in one call."""
    return _grouped(function, requests, lambda request: frozenset(request.keys()))


def _grouped(function: Callable[..., Any], requests: Sequence[Any], key: Callable[[Any], Any]) -> list[Any]:
    groups: dict[Any, list[int]] = {}
    for number, request in enumerate(requests):
        groups.setdefault(key(request), []).append(number)
    results: list[Any] = [None] * len(requests)
    for numbers in groups.values():
        answers = function([requests[number] for number in numbers])
        for number, answer in zip(numbers, answers, strict=True):
            results[number] = answer
    return results


def group_by_values(*keys: str, pad_fn: Callable[[list[Any]], list[Any]] | None = None) -> Callable[..., Any]:
    """Rows whose inputs `keys` are equal in one call; `pad_fn` makes the results of one request fit together."""

    @_decorator
    def grouped(function: Callable[..., Any], requests: Sequence[Request]) -> list[Any]:
        parts: list[Request] = []
        rows: list[tuple[int, list[int]]] = []
        for number, request in enumerate(requests):
            by_value: dict[Any, list[int]] = {}
            for row in range(_rows(request)):
                by_value.setdefault(_key(request, keys, row), []).append(row)
            for own in by_value.values():
                data = {name: value[own] for name, value in request.items()}
                parts.append(Request(data, getattr(request, "parameters", {})))
                rows.append((number, own))
        answers = _grouped(function, parts, lambda part: _key(part, keys, 0))
        return [_joined(number, rows, answers, pad_fn) for number in range(len(requests))]

    return grouped


def _key(request: Mapping[str, Array], keys: Sequence[str], row: int) -> Any:
    return tuple(
        (name, request[name][row].shape, tuple(request[name][row].ravel().tolist())) for name in keys if name in request
    )


def _joined(number: int, rows: Sequence[tuple[int, list[int]]], answers: Sequence[Any], pad_fn: Any) -> Any:
    """The result of a request from those of its groups of rows, in the order of its rows."""
    own = [(order, answer) for (owner, order), answer in zip(rows, answers, strict=True) if owner == number]
    results = [answer for _, answer in own]
    if len(own) == 1:
        return results[0]
    results = pad_fn(results) if pad_fn is not None else results
    order = np.argsort(np.concatenate([rows_of_group for rows_of_group, _ in own]))
    if isinstance(results[0], Mapping):
        return {name: np.concatenate([one[name] for one in results])[order] for name in results[0]}
    return [np.concatenate(values)[order] for values in zip(*results, strict=True)]


class ConstantPadder:
    """Pads the outputs of groups to one shape."""

    def __init__(self, pad_value: Any = 0) -> None:
        self._value = pad_value

    def __call__(self, results: list[Any]) -> list[Any]:
        shapes = {
            name: np.max([one[name].shape[1:] for one in results], axis=0)
            for name in results[0]
            if results[0][name].ndim > 1
        }
        return [
            {name: self._padded(value, shapes[name]) if name in shapes else value for name, value in one.items()}
            for one in results
        ]

    def _padded(self, value: Array, shape: Any) -> Array:
        is_bytes = value.dtype.kind in "OSU"
        widths = [(0, 0), *((0, int(want - have)) for want, have in zip(shape, value.shape[1:], strict=True))]
        fill = b"" if is_bytes and self._value == 0 else self._value
        return np.pad(value.astype(object) if is_bytes else value, widths, constant_values=fill)


def fill_optionals(**defaults: Array) -> Callable[..., Any]:
    """Inputs that a request lacks, for each of its rows."""

    @_decorator
    def filled(function: Callable[..., Any], requests: Sequence[Request]) -> Any:
        batches = BOUND.get().config.batching
        for request in requests:
            for name, default in defaults.items():
                if name not in request:
                    value = np.asarray(default)
                    request[name] = np.repeat(value[None], _rows(request), axis=0) if batches else value
        return function(requests)

    return filled


def first_value(*keys: str, squeeze_single_values: bool = True, strict: bool = True) -> Callable[..., Any]:
    """The first row of inputs `keys`, which have the same value in all rows."""

    def first(name: str, values: Array) -> Any:
        if strict and any(not np.array_equal(values[0], one) for one in values):
            raise PyTritonValidationError(f"the values of '{name}' differ in one batch: use group_by_values before")
        value = values[0]
        return value.reshape(-1)[0] if squeeze_single_values and np.size(value) == 1 else value

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            if arguments and isinstance(arguments[-1], list):
                requests = [{n: first(n, v) if n in keys else v for n, v in one.items()} for one in arguments[-1]]
                return function(*arguments[:-1], requests, **named)
            return function(*arguments, **{n: first(n, v) if n in keys else v for n, v in named.items()})

        return call

    return decorate


def pad_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Repeats the last row until the batch has a preferred size, or the largest."""

    @wraps(function)
    def call(*arguments: Any, **inputs: Any) -> Any:
        config = BOUND.get().config
        arrays = {name: value for name, value in inputs.items() if isinstance(value, np.ndarray)}
        rows = _rows(arrays)
        sizes = sorted({*(config.batcher.preferred_batch_size or ()), config.max_batch_size})
        size = next((one for one in sizes if one >= rows), rows)
        padded = {
            name: np.concatenate([value, np.repeat(value[-1:], size - rows, axis=0)]) for name, value in arrays.items()
        }
        result = function(*arguments, **inputs | padded)
        if isinstance(result, Mapping):
            return {name: value[:rows] for name, value in result.items()}
        return [value[:rows] for value in result]

    return call


def triton_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the function the argument `triton_context`."""

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named, triton_context=TritonContext(BOUND.get()))

    return call
