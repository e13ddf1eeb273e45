"""What the backends of tables share: a model of rows and features, its config, and its instances."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from modelserver.backend import (
    Array,
    Backend,
    BackendContext,
    ConfigError,
    Datatype,
    FileSignature,
    FileTensor,
    InternalError,
    InvalidArgumentError,
    ModelConfig,
    NotFoundError,
    Placement,
    ServerError,
    TensorInstance,
)

from .onnx_form import onnx_predict
from .table_model import EXTRA, Predict, TableModel, need

log = logging.getLogger(__name__)

# Clients of MLServer and KServe send as many rows as they like.
_DEFAULT_MAX_BATCH_SIZE = 4096
_EXECUTIONS = ("auto", "native", "onnx")


class TableInstance(TensorInstance):
    """Answers whole batches by one function, which instances share."""

    def __init__(self, model: TableModel, config: ModelConfig, predict: Predict) -> None:
        self._predict = predict
        self._inputs = [spec.name for spec in config.input]
        self._rows = _row_maker(model, self._inputs)
        self._outputs = [(spec.name, spec.data_type, len(spec.dims)) for spec in config.output]

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        try:
            found = self._predict(self._rows(inputs))
        except ServerError:
            raise
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidArgumentError(f"the model refuses the inputs: {error}") from error
        except Exception as error:
            raise InternalError(f"the model failed: {type(error).__name__}: {error}") from error
        return {name: _shaped(found[name], datatype, num_dims) for name, datatype, num_dims in self._outputs}


class TableBackend(Backend):
    """One version of a model of tables.

    Parameters: `execution` (auto, native or onnx), `threads` of an instance (1).
    """

    extra = EXTRA
    option_names = frozenset[str]()
    package: ClassVar[str] = ""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._model: TableModel | None = None
        self._predict: Predict | None = None

    @classmethod
    @abc.abstractmethod
    def read(cls, context: BackendContext) -> TableModel:
        """The model of the version directory. Raises anything; `ServerError` as it is."""

    @classmethod
    def complete_config(cls, context: BackendContext) -> ModelConfig:
        model = cls._opened(context)
        return context.complete_config(_signature(model, context), default_max_batch_size=_DEFAULT_MAX_BATCH_SIZE)

    @classmethod
    def needs_process(cls, context: BackendContext) -> bool:
        """The libraries do not check their files well enough for those that clients send."""
        return context.is_uploaded

    def load(self) -> None:
        execution = self.context.parameter("execution", "auto")
        if execution not in _EXECUTIONS:
            raise ConfigError(f"parameter execution: expected one of {', '.join(_EXECUTIONS)}, got '{execution}'")
        model = self._model = self._opened(self.context)
        self.context.check_config(_signature(model, self.context))
        names = [spec.name for spec in self.context.config.output]
        self._predict = None if execution == "native" else self._as_onnx(model, names, must=execution == "onnx")
        if self._predict is None:
            self._predict = lambda rows: model.predict(rows, names)

    def create_instance(self, placement: Placement) -> TableInstance:  # noqa: ARG002  # they share everything
        assert self._model is not None, "loaded before"
        assert self._predict is not None, "loaded before"
        return TableInstance(self._model, self.context.config, self._predict)

    @classmethod
    def _opened(cls, context: BackendContext) -> TableModel:
        """The model that `read` gives; its errors name the model."""
        what = f"model '{context.model_name}' version {context.version}"
        try:
            return cls.read(context)
        except ServerError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split("\n")[:2]).strip() or type(error).__name__
            raise InvalidArgumentError(f"{what}: {cls.package} cannot read it: {reason[:500]}") from error

    def _as_onnx(self, model: TableModel, names: Sequence[str], *, must: bool) -> Predict | None:
        """The model by ONNX Runtime; None, with a line in the log, if that is not possible or answers otherwise."""
        name = self.context.model_name
        try:
            predict = onnx_predict(model, names, num_threads=num_threads(self.context))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, ServerError) else error.message
            reason = reason.split("\n")[0][:300]
            if must:
                raise InvalidArgumentError(f"model '{name}': it cannot be executed as ONNX: {reason}") from error
            log.info("model '%s': executed by %s, since as ONNX it is not: %s", name, self.package, reason)
            return None
        log.info("model '%s': executed by ONNX Runtime, which answers as %s does", name, self.package)
        return predict


def num_threads(context: BackendContext) -> int:
    """How many threads an instance may use: the parameter `threads`."""
    return max(1, context.int_parameter("threads", 1))


def file_of(context: BackendContext, filenames: Sequence[str]) -> Path:
    """The model's file: `default_model_filename`, or the first of the names that is there. Raises NotFoundError."""
    if context.config.default_model_filename:
        return context.model_file("")
    for name in filenames:
        if (path := context.version_directory / name).is_file():
            return path
    raise NotFoundError(
        f"model '{context.model_name}' version {context.version}: none of the files {', '.join(filenames)} is in "
        f"{context.version_directory}"
    )


def _signature(model: TableModel, context: BackendContext) -> FileSignature:
    """The inputs and outputs of the model: a matrix, a text, or an input for each column."""
    listed = [spec.name for spec in context.config.input]
    by_columns = bool(model.columns) or (bool(listed) and set(listed) == set(model.feature_names))
    if by_columns:
        known = {spec.name: spec.data_type for spec in context.config.input}
        datatypes = {name: model.columns.get(name, model.datatype) for name in model.columns or model.feature_names}
        inputs = [FileTensor(name, known.get(name) or datatype, (-1, 1)) for name, datatype in datatypes.items()]
    else:
        # Any name will do for the only input.
        name = listed[0] if len(listed) == 1 else model.input_name
        inputs = [FileTensor(name, model.datatype, (-1, model.num_features))]
    wanted = [spec.name for spec in context.config.output if spec.name in model.outputs] or model.usual_outputs
    answers = model.predict(model.example(), wanted)
    outputs = [FileTensor(name, *_described(answers[name])) for name in wanted]
    columns = () if by_columns else model.feature_names
    return FileSignature(tuple(inputs), tuple(outputs), is_lenient=True, columns=columns)


def _described(array: Array) -> tuple[Datatype, tuple[int, ...]]:
    """The datatype and the shape of an output with any number of rows."""
    datatype = Datatype.BYTES if array.dtype.kind in "OSU" else Datatype.from_numpy(array.dtype)
    return datatype, (-1, *(array.shape[1:] or (1,)))


def _row_maker(model: TableModel, names: Sequence[str]) -> Callable[[Mapping[str, Array]], Any]:
    """From the inputs of a batch to the rows of `TableModel.predict`."""
    if model.columns:
        frame = need("pandas").DataFrame
        return lambda inputs: frame({name: _values(inputs[name]) for name in model.columns})
    if model.datatype is Datatype.BYTES:
        return lambda inputs: _values(inputs[names[0]]).tolist()
    if len(names) > 1 or names[0] in model.feature_names:
        return lambda inputs: np.concatenate(
            [inputs[name] for name in model.feature_names], 1, dtype=model.datatype.numpy
        )
    return lambda inputs: inputs[names[0]]


def _values(column: Array) -> Array:
    """A column as the library takes it: BYTES become texts."""
    values = column.reshape(-1)
    if values.dtype != object:
        return values
    texts = [each.decode("utf-8", "replace") if isinstance(each, bytes) else each for each in values]
    return np.array(texts, object)


def _shaped(array: Array, datatype: Datatype | None, num_dims: int) -> Array:
    assert datatype is not None, "a checked output has a datatype"
    if datatype is Datatype.BYTES:
        encoded = np.empty(array.shape, object)
        encoded.reshape(-1)[:] = [str(each).encode() for each in array.reshape(-1)]
        array = encoded
    elif array.dtype != datatype.numpy:
        array = array.astype(datatype.numpy)
    return array[:, None] if array.ndim == num_dims else array
