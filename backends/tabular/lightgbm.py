"""LightGBM: files of `Booster.save_model`. The output `predict` is what `Booster.predict` gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from modelserver.backend import Array, BackendContext

from .base import TableBackend, file_of, num_threads
from .forests import ForestModel
from .table_model import need

FILENAMES = ("model.txt", "model.bst")
_TREE = re.compile(r"^Tree=\d+$", re.MULTILINE)
_TREE_SIZES = re.compile(r"^tree_sizes=(.*)\n", re.MULTILINE)
_MAX_FEATURE = re.compile(r"^max_feature_idx=(\d+)$", re.MULTILINE)


class LightgbmModel(ForestModel):
    """A booster: `predict` gives values, or the probabilities of classes."""

    def __init__(self, path: Path, threads: int) -> None:
        # From the text, since the library opens no file whose path is not ASCII.
        text = path.read_text(encoding="utf-8")
        _check_trees(text)
        # Without the sizes it reads the trees one after another, and an error in one does not end the process.
        booster = self._booster = need("lightgbm").Booster(model_str=_TREE_SIZES.sub("", text))
        self._threads = threads
        self.num_features = booster.num_feature()
        names = booster.feature_name()
        if names != [f"Column_{index}" for index in range(self.num_features)]:
            self.feature_names = tuple(names)
        objective = next((line for line in text.splitlines() if line.startswith("objective=")), "objective=")
        kind = objective.removeprefix("objective=").split(" ")[0]
        if kind in ("binary", "cross_entropy"):
            self.num_classes = 2
        elif kind in ("multiclass", "multiclassova"):
            self.num_classes = booster.num_model_per_iteration()

    def scores(self, rows: Array) -> Array:
        return np.asarray(self._booster.predict(np.ascontiguousarray(rows), num_threads=self._threads))

    def predicted(self, scores: Array) -> Array:
        return scores

    def to_onnx(self) -> Any:
        return need("onnxmltools").convert_lightgbm(self._booster, initial_types=self.onnx_input(), zipmap=False)


def _check_trees(text: str) -> None:
    """Raise ValueError or KeyError for damaged trees: the library ends the process over them, or never ends."""
    head, *trees = _TREE.split(text.partition("\nend of trees\n")[0] + "\n")
    sizes = _TREE_SIZES.search(head)
    features = _MAX_FEATURE.search(head)
    if sizes is None or features is None:
        raise ValueError("the head of a model is missing")
    if "\nend of trees\n" not in text or ("\nend of parameters\n" not in text and "\nversion=v2\n" not in head):
        raise ValueError("the file ends early")
    if len(trees) != len(sizes[1].split()):
        raise ValueError(f"it has {len(trees)} of {len(sizes[1].split())} trees")
    for number, tree in enumerate(trees):
        fields = dict(line.split("=", 1) for line in tree.splitlines() if "=" in line)
        num_leaves = int(fields["num_leaves"])
        num_nodes = num_leaves - 1
        children = np.array([fields[name].split() for name in ("left_child", "right_child")], np.int64)
        split = np.array(fields["split_feature"].split(), np.int64)
        counts = {name: len(fields[name].split()) for name in ("threshold", "decision_type")}
        is_whole = (
            children.shape == (2, num_nodes)
            and split.shape == (num_nodes,)
            and set(counts.values()) == {num_nodes}
            and len(fields["leaf_value"].split()) == num_leaves
        )
        # A node's children are leaves (below 0) or nodes that were made later.
        is_tree = is_whole and bool(
            (((children >= -num_leaves) & (children < 0)) | (children > np.arange(num_nodes))).all()
            and (children < num_nodes).all()
            and ((split >= 0) & (split <= int(features[1]))).all()
        )
        if num_nodes and not is_tree:
            raise ValueError(f"tree {number} is damaged")


class LightgbmBackend(TableBackend):
    """One version of a LightGBM model."""

    model_filenames = FILENAMES
    package = "LightGBM"

    @classmethod
    def read(cls, context: BackendContext) -> LightgbmModel:
        return LightgbmModel(file_of(context, FILENAMES), num_threads(context))


BACKEND = LightgbmBackend
