"""A model of rows and features, as its library has read it."""

from __future__ import annotations

import abc
import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from modelserver.backend import Array, Datatype, UnsupportedError, missing_package

EXTRA = "classical"
# Rows in, outputs by name.
Predict = Callable[[Any], Mapping[str, Array]]


class TableModel(abc.ABC):
    """A model that has been read from its file.

    Rows are a matrix [rows, `num_features`] of `datatype`; if `datatype` is BYTES, a list of texts. With `columns`,
    they are a table (pandas) with these columns. `feature_names` are known or not: any model that has them also takes
    an input for each of them.
    """

    input_name: str = "input-0"
    datatype: Datatype = Datatype.FP64
    num_features: int = 1
    feature_names: tuple[str, ...] = ()
    columns: Mapping[str, Datatype] = {}
    # All that the model can compute, and what it computes unless its config says otherwise.
    outputs: tuple[str, ...] = ("predict",)
    usual_outputs: tuple[str, ...] = ("predict",)

    @abc.abstractmethod
    def predict(self, rows: Any, outputs: Collection[str]) -> Mapping[str, Array]:
        """The named outputs, each with a row for each row."""

    def example(self) -> Any:
        """One row that the model accepts; its answer tells the datatypes and shapes of the outputs."""
        return np.zeros((1, self.num_features), self.datatype.numpy)

    def to_onnx(self) -> Any:
        """The model as an ONNX graph with one FP32 input [rows, features]. Raises anything.

        Models without a converter keep this: their library executes them.
        """
        raise UnsupportedError(f"there is no converter for {type(self).__name__}")

    def outputs_of_onnx(self, arrays: Sequence[Array]) -> Mapping[str, Array]:
        """The outputs by name, from those of the graph in order. Models with a converter define it."""
        raise UnsupportedError(f"{type(self).__name__} has no graph with {len(arrays)} outputs")


def need(package: str, extra: str = EXTRA) -> Any:
    """A library. Raises UnavailableError with the extra that brings it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise missing_package(error.name, extra) from error
