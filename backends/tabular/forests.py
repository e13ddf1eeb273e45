"""What models of boosted trees share: they give scores, from which classes and probabilities follow."""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from modelserver.backend import Array

from .table_model import TableModel, need


class ForestModel(TableModel):
    """A forest. `num_classes` is 0 where scores are values, 2 or more where they are probabilities of classes."""

    num_classes: int = 0

    @abc.abstractmethod
    def scores(self, rows: Array) -> Array:
        """Values or, of two classes, probabilities of the second, [rows]; of more, [rows, classes]."""

    def predict(self, rows: Any, outputs: Collection[str]) -> Mapping[str, Array]:
        return self.outputs_of(self.scores(rows), outputs)

    def outputs_of(self, scores: Array, outputs: Collection[str]) -> Mapping[str, Array]:
        """The outputs that follow from the scores."""
        return {name: probabilities(scores) if name == "predict_proba" else self.predicted(scores) for name in outputs}

    def predicted(self, scores: Array) -> Array:
        """The output `predict`."""
        return classes(scores) if self.num_classes else scores

    def scores_of_onnx(self, arrays: Sequence[Array]) -> Array:
        """The scores from the outputs of a graph: a label and probabilities of all classes, or values."""
        if self.num_classes:
            return arrays[-1][:, 1] if self.num_classes == 2 else arrays[-1]
        return arrays[0].reshape(len(arrays[0]), -1).squeeze(1) if arrays[0].size == len(arrays[0]) else arrays[0]

    def outputs_of_onnx(self, arrays: Sequence[Array]) -> Mapping[str, Array]:
        return self.outputs_of(self.scores_of_onnx(arrays), self.outputs)

    def onnx_input(self) -> Any:
        """The description of the input that the converters of onnxmltools take."""
        types = need("onnxmltools.convert.common.data_types")
        return [("input", types.FloatTensorType([None, self.num_features]))]


def probabilities(scores: Array) -> Array:
    """The probabilities of all classes, [rows, classes]."""
    return np.stack([1 - scores, scores], axis=1) if scores.ndim == 1 else scores


def classes(scores: Array, threshold: float = 0.5) -> Array:
    """The most probable class; of two, the second if its probability is above the threshold."""
    return (scores > threshold).astype(np.int64) if scores.ndim == 1 else scores.argmax(axis=1)


def softmax(margins: Array) -> Array:
    powers = np.exp(margins - margins.max(axis=1, keepdims=True))
    normalized: Array = powers / powers.sum(axis=1, keepdims=True)
    return normalized
