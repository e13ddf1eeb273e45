"""Directories of Triton's FIL backend, served on the CPU by the libraries that wrote their files.

`input__0` is FP32 [features], `output__0` FP32: a value, a class, or with `predict_proba` the probabilities.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modelserver.backend import Array, BackendContext, ConfigError, Datatype, model_outputs

from .base import TableBackend, file_of, num_threads
from .forests import ForestModel, classes, probabilities
from .lightgbm import LightgbmModel
from .table_model import TableModel, need
from .xgboost import XgboostModel

_FILES = {
    "xgboost": "xgboost.model",
    "xgboost_json": "xgboost.json",
    "xgboost_ubj": "xgboost.ubj",
    "lightgbm": "model.txt",
    "treelite_checkpoint": "checkpoint.tl",
}
_OUTPUT = "output__0"


class TreeliteModel(ForestModel):
    """A checkpoint of Treelite, computed by its reference implementation."""

    datatype = Datatype.FP32

    def __init__(self, path: Path, threads: int) -> None:
        treelite = need("treelite")
        self._model = treelite.Model.deserialize(str(path))
        self._predict = treelite.gtil.predict
        self._threads = threads
        header = self._model.get_header_accessor()
        self.num_features = int(self._model.num_feature)
        (task,) = header.get_field("task_type")
        num_classes = int(header.get_field("num_class")[0])
        # The task types of binary and multiclass classification, isolation forests and the rest have values.
        self.num_classes = {0: 2, 2: num_classes}.get(int(task), 0)

    def scores(self, rows: Array) -> Array:
        found: Array = np.asarray(self._predict(self._model, rows, nthread=self._threads))
        return found.reshape(len(rows), -1).squeeze(1) if found.size == len(rows) else found.reshape(len(rows), -1)


class FilModel(TableModel):
    """A forest with FIL's one output."""

    input_name = "input__0"
    datatype = Datatype.FP32
    outputs = usual_outputs = (_OUTPUT,)

    def __init__(self, forest: ForestModel, context: BackendContext) -> None:
        self._forest = forest
        self.num_features = forest.num_features
        is_classifier = context.bool_parameter("output_class", context.bool_parameter("is_classifier"))
        self._gives_probabilities = is_classifier and context.bool_parameter("predict_proba")
        self._gives_classes = is_classifier and not self._gives_probabilities
        self._threshold = context.float_parameter("threshold", 0.5)
        dims = [spec.dims for spec in model_outputs(context.config) if spec.name == _OUTPUT]
        # FIL gives one probability of two classes, and older versions of it gave both.
        self._gives_both = (2,) in dims

    def predict(self, rows: Any, outputs: Collection[str]) -> Mapping[str, Array]:  # noqa: ARG002  # there is one
        return self._output(self._forest.scores(rows))

    def _output(self, scores: Array) -> Mapping[str, Array]:
        if self._gives_classes:
            scores = classes(scores, self._threshold)
        elif self._gives_probabilities and self._gives_both:
            scores = probabilities(scores)
        return {_OUTPUT: scores.astype(np.float32, copy=False)}

    def to_onnx(self) -> Any:
        return self._forest.to_onnx()

    def outputs_of_onnx(self, arrays: Sequence[Array]) -> Mapping[str, Array]:
        return self._output(self._forest.scores_of_onnx(arrays))


class FilBackend(TableBackend):
    """One version of a model of Triton's `backend: "fil"`. Parameters of its GPU kernels have no effect."""

    package = "the library of its model_type"

    @classmethod
    def read(cls, context: BackendContext) -> FilModel:
        kind = context.parameter("model_type", "xgboost")
        if kind not in _FILES:
            raise ConfigError(f"parameter model_type: expected one of {', '.join(_FILES)}, got '{kind}'")
        path = file_of(context, (_FILES[kind],))
        threads = num_threads(context)
        if kind == "lightgbm":
            return FilModel(LightgbmModel(path, threads), context)
        if kind == "treelite_checkpoint":
            return FilModel(TreeliteModel(path, threads), context)
        return FilModel(XgboostModel(path, threads), context)


BACKEND = FilBackend
