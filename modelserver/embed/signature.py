"""What a Python function takes and returns, as inputs and outputs of a model: read from its annotations.

    def double(x: Tensor["FP32", -1, 3]) -> {"y": Tensor["FP32", -1, 3]}: ...
    def greet(name: str, times: int = 1) -> str: ...
    def words(text: str) -> Iterator[str]: ...          # answers many times

An array is `Tensor[datatype, *dims]`, or `Annotated[np.ndarray, Tensor[...]]` for type checkers. Plain values (`str`,
`bytes`, `int`, `float`, `bool`, lists of them, `dict` for JSON, a Pillow image) are tensors of one dimension.
"""

from __future__ import annotations

import inspect
import io
import types
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import orjson

from modelserver.backend import Array, Datatype, InferRequest, InternalError, InvalidArgumentError
from modelserver.errors import ConfigError

# The name of the output of a function whose annotation gives none.
OUTPUT = "output"
_STREAMS = (Iterator, Generator, AsyncIterator, AsyncGenerator, Iterable)
_EXPECTED = (
    "expected Tensor[datatype, *dims], str, bytes, int, float, bool, a list of one of them, dict (JSON) or "
    "PIL.Image.Image"
)


class Tensor:
    """An array: a datatype of KServe ("FP32", "INT64", "BYTES", …) or of NumPy, and dims (-1: any length).

    Without a batch dimension, which a model with `max_batch_size` has in front.
    """

    def __init__(self, datatype: str | np.dtype[Any] | type, *dims: int) -> None:
        try:
            self.datatype = (
                Datatype(datatype) if isinstance(datatype, str) and datatype.isupper() else _of_numpy(datatype)
            )
        except (ValueError, KeyError, TypeError):
            names = ", ".join(one.value for one in Datatype)
            raise ConfigError(f"Tensor[{datatype!r}, …]: expected a datatype ({names}) or a dtype of NumPy") from None
        if bad := [dim for dim in dims if not isinstance(dim, int) or dim == 0 or dim < -1]:
            raise ConfigError(f"Tensor[…, {bad[0]!r}]: expected dims of 1 and more, or -1 for any length")
        self.dims = dims

    def __class_getitem__(cls, item: object) -> Tensor:
        return cls(*item) if isinstance(item, tuple) else cls(item)  # type: ignore[arg-type]  # checked above

    def __repr__(self) -> str:
        return f"Tensor[{', '.join([repr(self.datatype.value), *map(str, self.dims)])}]"


def _of_numpy(dtype: Any) -> Datatype:
    return Datatype.from_numpy(np.dtype(dtype))


@dataclass(frozen=True, slots=True)
class Value:
    """An input or an output: its tensor, and how the function's values become arrays and the other way round.

    `is_array`: the function sees the array itself, so that requests can share a batch.
    """

    name: str
    datatype: Datatype
    dims: tuple[int, ...]
    read: Callable[[Array], Any]
    write: Callable[[Any], Array]
    is_array: bool = False
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of a function.

    `returns_value`: it returns the value of its only output, not a mapping. `is_stream`: it is a generator, sync or
    async, and each of its values is a response. `request_name` is the parameter that wants the request itself.
    `gathers`: it is called once with all requests of a batch, a `Gathered` each, and returns a result for each.
    `is_open`: it declares no tensors, and is called with the request alone and returns an InferResponse.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    returns_value: bool
    is_stream: bool
    is_async: bool
    request_name: str = ""
    gathers: bool = False
    is_open: bool = False

    def results(self, result: Any) -> dict[str, Array]:
        """The outputs as arrays. Raises InternalError for a result that does not fit the annotation."""
        if self.returns_value:
            result = {self.outputs[0].name: result}
        if not isinstance(result, Mapping):
            raise InternalError(
                f"expected a mapping with the outputs {', '.join(value.name for value in self.outputs)}, "
                f"the function returned {type(result).__name__}"
            )
        missing = [value.name for value in self.outputs if value.name not in result]
        if missing and not self.is_stream:
            raise InternalError(f"the function returned no output {missing[0]!r}")
        known = {value.name for value in self.outputs}
        if extra := [name for name in result if name not in known]:
            raise InternalError(f"the function returned {extra[0]!r}, which is none of its outputs")
        return {value.name: self._written(value, result[value.name]) for value in self.outputs if value.name in result}

    @staticmethod
    def _written(value: Value, result: Any) -> Array:
        try:
            return value.write(result)
        except (TypeError, ValueError, AttributeError) as error:
            raise InternalError(
                f"output '{value.name}': {type(result).__name__} is no {value.datatype.value} of dims "
                f"{list(value.dims)}: {error}"
            ) from error


def read_signature(
    function: Callable[..., Any],
    *,
    inputs: Mapping[str, Any] | None = None,
    outputs: Mapping[str, Any] | None = None,
) -> Signature:
    """The signature of a function or of a bound method.

    `inputs` and `outputs` are annotations by name, for functions without them. Raises ConfigError with the parameter
    that is not understood.
    """
    name = getattr(function, "__qualname__", repr(function))
    try:
        found = inspect.signature(function, eval_str=True)
    except NameError as error:
        raise ConfigError(f"{name}: an annotation cannot be evaluated: {error}") from error
    read: list[Value] = []
    request_name = ""
    takes_any = False
    for parameter in found.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            takes_any |= parameter.kind is parameter.VAR_KEYWORD
            if parameter.kind is not parameter.VAR_KEYWORD or inputs is None:
                raise ConfigError(f"{name}: parameter '{parameter}' has no name of an input; give inputs= and use **")
            continue
        annotation = (inputs or {}).get(parameter.name, parameter.annotation)
        if annotation is InferRequest:
            request_name = parameter.name
            continue
        is_optional = parameter.default is not parameter.empty
        read.append(value_of(f"{name}: parameter '{parameter.name}'", parameter.name, annotation, is_optional))
    known = {value.name for value in read}
    for extra, annotation in (inputs or {}).items():
        if extra not in known:
            if not takes_any:
                raise ConfigError(f"{name} has no parameter '{extra}', which inputs= names")
            read.append(value_of(f"{name}: input '{extra}'", extra, annotation))
    returned, is_stream = _returned(function, found.return_annotation)
    named, returns_value = _named_outputs(name, outputs if outputs is not None else returned)
    return Signature(
        inputs=tuple(read),
        outputs=named,
        returns_value=returns_value,
        is_stream=is_stream,
        is_async=inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function),
        request_name=request_name,
    )


def _returned(function: Callable[..., Any], annotation: Any) -> tuple[Any, bool]:
    """The annotation of one response, and whether there are many."""
    is_stream = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    origin = typing.get_origin(annotation)
    if origin in _STREAMS:
        return typing.get_args(annotation)[0], True
    return annotation, is_stream


def _named_outputs(name: str, annotation: Any) -> tuple[tuple[Value, ...], bool]:
    """The outputs, and whether the function returns the value of the only one."""
    if isinstance(annotation, Mapping):
        fields = dict(annotation)
    elif typing.is_typeddict(annotation):
        fields = typing.get_type_hints(annotation, include_extras=True)
    elif annotation in (inspect.Signature.empty, None, type(None)):
        raise ConfigError(
            f"{name} does not say what it returns: annotate it, as in -> str or -> {{'y': Tensor['FP32', -1]}}, "
            "or give outputs="
        )
    else:
        return (value_of(f"{name}: the returned value", OUTPUT, annotation),), True
    if not fields:
        raise ConfigError(f"{name} has no output")
    return tuple(value_of(f"{name}: output '{key}'", key, one) for key, one in fields.items()), False


def value_of(where: str, name: str, annotation: Any, is_optional: bool = False) -> Value:
    """An input or output by its annotation. Raises ConfigError, which begins with `where`, for another."""
    annotation, allows_none = _without_none(annotation)
    is_optional = is_optional or allows_none
    if typing.get_origin(annotation) is Annotated:
        tensors = [one for one in typing.get_args(annotation) if isinstance(one, Tensor)]
        annotation = tensors[0] if tensors else typing.get_args(annotation)[0]
    if isinstance(annotation, Tensor):
        datatype = annotation.datatype
        return Value(
            name, datatype, annotation.dims or (1,), lambda data: data, _array_writer(datatype), True, is_optional
        )
    if isinstance(annotation, type) and annotation in _SCALARS:
        datatype, read, write = _SCALARS[annotation]
        return Value(name, datatype, (1,), _first(read), _only(datatype, write), is_optional=is_optional)
    if typing.get_origin(annotation) is list and typing.get_args(annotation)[0] in _SCALARS:
        datatype, read, write = _SCALARS[typing.get_args(annotation)[0]]
        return Value(name, datatype, (-1,), _each(read), _all(datatype, write), is_optional=is_optional)
    if _is_picture(annotation):
        return Value(
            name, Datatype.BYTES, (1,), _first(_read_picture), _only(Datatype.BYTES, _write_picture), False, is_optional
        )
    if annotation in (dict, list) or typing.get_origin(annotation) in (dict, list, Mapping):
        return Value(
            name, Datatype.BYTES, (1,), _first(_read_json), _only(Datatype.BYTES, orjson.dumps), False, is_optional
        )
    what = "it has no annotation" if annotation is inspect.Parameter.empty else f"{annotation!r} is not understood"
    raise ConfigError(f"{where}: {what}; {_EXPECTED}")


def _without_none(annotation: Any) -> tuple[Any, bool]:
    """`X | None` as X."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        rest = [one for one in typing.get_args(annotation) if one is not type(None)]
        if len(rest) == 1:
            return rest[0], True
    return annotation, False


def _array_writer(datatype: Datatype) -> Callable[[Any], Array]:
    def write(value: Any) -> Array:
        if datatype is Datatype.BYTES:
            return _objects(np.asarray(value, object))
        array = np.asarray(value)
        if array.dtype == datatype.numpy:
            return array
        return array.astype(datatype.numpy, casting="same_kind")

    return write


def _objects(array: Array) -> Array:
    """Texts as UTF-8."""
    flat = [one.encode() if isinstance(one, str) else bytes(one) for one in array.ravel()]
    made = np.empty(len(flat), object)
    made[:] = flat
    return made.reshape(array.shape)


def _first(read: Callable[[Any], Any]) -> Callable[[Array], Any]:
    def value(data: Array) -> Any:
        if data.size != 1:
            raise InvalidArgumentError(f"expected one element, got {data.size}")
        return read(data.reshape(-1)[0])

    return value


def _each(read: Callable[[Any], Any]) -> Callable[[Array], Any]:
    return lambda data: [read(one) for one in data.ravel()]


def _only(datatype: Datatype, write: Callable[[Any], Any]) -> Callable[[Any], Array]:
    return lambda value: _array(datatype, [write(value)])


def _all(datatype: Datatype, write: Callable[[Any], Any]) -> Callable[[Any], Array]:
    return lambda values: _array(datatype, [write(value) for value in values])


def _array(datatype: Datatype, elements: list[Any]) -> Array:
    array = np.empty(len(elements), datatype.numpy)
    array[:] = elements
    return array


def _read_text(element: bytes) -> str:
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"the text is not UTF-8: {error.reason}") from None


def _read_json(element: bytes) -> Any:
    try:
        return orjson.loads(element)
    except orjson.JSONDecodeError as error:
        raise InvalidArgumentError(f"expected JSON: {error}") from None


def _write_text(value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError("expected a str")
    return value.encode()


def _is_picture(annotation: Any) -> bool:
    module = getattr(annotation, "__module__", "")
    return module == "PIL.Image" and getattr(annotation, "__name__", "") == "Image"


def _read_picture(element: bytes) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        picture = Image.open(io.BytesIO(element))
        picture.load()
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError) as error:
        raise InvalidArgumentError(
            f"expected a picture (PNG, JPEG or another kind that Pillow reads): {error}"
        ) from None
    return picture


def _write_picture(picture: Any) -> bytes:
    target = io.BytesIO()
    picture.save(target, format="PNG")
    return target.getvalue()


_SCALARS: dict[Any, tuple[Datatype, Callable[[Any], Any], Callable[[Any], Any]]] = {
    str: (Datatype.BYTES, _read_text, _write_text),
    bytes: (Datatype.BYTES, bytes, bytes),
    int: (Datatype.INT64, int, int),
    float: (Datatype.FP64, float, float),
    bool: (Datatype.BOOL, bool, bool),
}
