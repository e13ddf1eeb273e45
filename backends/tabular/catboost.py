"""CatBoost: files of `save_model`, cbm or JSON. Models with categories or texts take an input for each column."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modelserver.backend import Array, BackendContext, Datatype, UnsupportedError

from .base import TableBackend, file_of, num_threads
from .table_model import TableModel, need

FILENAMES = ("model.cbm", "model.cb", "model.json")
EXTRA = "catboost"
_KINDS = {"predict": "Class", "predict_proba": "Probability"}


class CatboostModel(TableModel):
    """A model: `predict` gives classes or values, and of classifiers `predict_proba` gives probabilities."""

    datatype = Datatype.FP32

    def __init__(self, path: Path, threads: int) -> None:
        model = self._model = need("catboost", EXTRA).CatBoost()
        model.load_model(str(path), format="json" if path.suffix == ".json" else "cbm")
        self._threads = threads
        self._is_classifier = len(model.classes_) > 0
        names = [str(name) for name in model.feature_names_]
        self.num_features = len(names)
        if names != [str(index) for index in range(len(names))]:
            self.feature_names = tuple(names)
        if model.get_embedding_feature_indices():
            raise UnsupportedError("its features are embeddings, which are not served")
        texts = {*model.get_cat_feature_indices(), *model.get_text_feature_indices()}
        if texts:
            kinds = [Datatype.BYTES if index in texts else Datatype.FP32 for index in range(len(names))]
            self.columns = dict(zip(names, kinds, strict=True))
        if self._is_classifier:
            self.outputs = self.usual_outputs = ("predict", "predict_proba")

    def example(self) -> Any:
        if not self.columns:
            return super().example()
        values = {name: [""] if kind is Datatype.BYTES else [0.0] for name, kind in self.columns.items()}
        return need("pandas").DataFrame(values)

    def predict(self, rows: Any, outputs: Collection[str]) -> Mapping[str, Array]:
        if not self.columns:
            rows = np.ascontiguousarray(rows)
        return {name: self._called(rows, name) for name in outputs}

    def _called(self, rows: Any, output: str) -> Array:
        kind = _KINDS[output] if self._is_classifier else "RawFormulaVal"
        return np.asarray(self._model.predict(rows, prediction_type=kind, thread_count=self._threads))

    def to_onnx(self) -> Any:
        graph = need("catboost.utils", EXTRA).convert_to_onnx_object(self._model)
        # The probabilities as a tensor, not as a sequence of maps.
        maps = [node for node in graph.graph.node if node.op_type == "ZipMap"]
        for node in maps:
            (output,) = [each for each in graph.graph.output if each.name == node.output[0]]
            graph.graph.output.remove(output)
            graph.graph.output.append(need("onnx", EXTRA).helper.make_empty_tensor_value_info(node.input[0]))
            graph.graph.node.remove(node)
        return graph

    def outputs_of_onnx(self, arrays: Sequence[Array]) -> Mapping[str, Array]:
        first = arrays[0].reshape(len(arrays[0]), -1)
        return {"predict": first, "predict_proba": arrays[1]} if self._is_classifier else {"predict": first}


class CatboostBackend(TableBackend):
    """One version of a CatBoost model."""

    model_filenames = FILENAMES
    extra = EXTRA
    package = "CatBoost"

    @classmethod
    def read(cls, context: BackendContext) -> CatboostModel:
        return CatboostModel(file_of(context, FILENAMES), num_threads(context))


BACKEND = CatboostBackend
