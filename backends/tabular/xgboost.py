"""XGBoost: files of `Booster.save_model`. Missing values are NaN."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelserver.backend import Array, BackendContext, Datatype

from .base import TableBackend, file_of, num_threads
from .forests import ForestModel, softmax
from .table_model import need
from .xgboost_file import check_file

FILENAMES = ("model.ubj", "model.json", "model.bst")
_BINARY = frozenset({"binary:logistic"})
_SOFTMAX = "multi:softmax"
_MULTI = frozenset({"multi:softprob", _SOFTMAX})


class XgboostModel(ForestModel):
    """A booster: `predict` gives classes or values, and of classifiers `predict_proba` gives probabilities."""

    datatype = Datatype.FP32

    def __init__(self, path: Path, threads: int) -> None:
        booster = self._booster = need("xgboost").Booster()
        content = path.read_bytes()
        check_file(content)
        booster.load_model(bytearray(content))
        booster.set_param({"nthread": threads})
        learner = json.loads(booster.save_config())["learner"]
        self._objective = str(learner["objective"]["name"])
        self.num_features = booster.num_features()
        self.feature_names = tuple(booster.feature_names or ())
        if self._objective in _BINARY:
            self.num_classes = 2
        elif self._objective in _MULTI:
            self.num_classes = int(learner["learner_model_param"]["num_class"])
        if self.num_classes:
            self.outputs = self.usual_outputs = ("predict", "predict_proba")

    def scores(self, rows: Array) -> Array:
        kind = "margin" if self._objective == _SOFTMAX else "value"
        found: Array = self._booster.inplace_predict(rows, predict_type=kind, validate_features=False)
        return softmax(found) if self._objective == _SOFTMAX else found

    def to_onnx(self) -> Any:
        booster = self._booster.copy()
        # The converter wants the names that it gives itself.
        booster.feature_names = None
        return need("onnxmltools").convert_xgboost(booster, initial_types=self.onnx_input())

    def scores_of_onnx(self, arrays: Sequence[Array]) -> Array:
        found = super().scores_of_onnx(arrays)
        return softmax(found) if self._objective == _SOFTMAX else found


class XgboostBackend(TableBackend):
    """One version of an XGBoost model."""

    model_filenames = FILENAMES
    package = "XGBoost"

    @classmethod
    def read(cls, context: BackendContext) -> XgboostModel:
        return XgboostModel(file_of(context, FILENAMES), num_threads(context))


BACKEND = XgboostBackend
