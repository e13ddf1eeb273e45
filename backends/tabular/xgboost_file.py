"""The structure of XGBoost's files, JSON and UBJ, checked before the library reads them.

The library trusts them: a number that is changed can end the process, or keep it busy for ever.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from modelserver.backend import Array

# The numbers of UBJSON by their marks, as formats of `struct` and types of NumPy.
_NUMBERS = {"i": "b", "U": "B", "I": ">h", "u": ">H", "l": ">i", "m": ">I", "L": ">q", "M": ">Q", "d": ">f", "D": ">d"}
_DTYPES = {"i": "i1", "U": "u1", "I": ">i2", "u": ">u2", "l": ">i4", "m": ">u4", "L": ">i8", "M": ">u8"}
_DTYPES |= {"d": ">f4", "D": ">f8"}
_CONSTANTS = {"T": True, "F": False, "Z": None}
_MAX_DEPTH = 32
_LINKS = ("left_children", "right_children", "split_indices", "parents")
_OF_NODES = (*_LINKS, "split_conditions", "default_left", "loss_changes", "sum_hessian")
_CATEGORIES = ("categories", "categories_nodes", "categories_segments", "categories_sizes")
_CATEGORICAL = 1


def check_file(content: bytes) -> None:
    """Raise ValueError, KeyError, TypeError or struct.error for a model that the library must not read."""
    is_json = content.lstrip()[:1] == b"{" and content.lstrip()[1:2] in b'"\n \t\r}'
    document = orjson.loads(content) if is_json else _UbjReader(content).document()
    learner = document["learner"]
    parameters = learner["learner_model_param"]
    num_features = int(parameters["num_feature"])
    num_groups = max(1, int(parameters["num_class"]), int(parameters.get("num_target", 1)))
    booster = learner["gradient_booster"]
    if booster["name"] == "gblinear":
        weights = np.asarray(booster["model"]["weights"])
        if weights.shape != ((num_features + 1) * num_groups,):
            raise ValueError(f"it has {weights.size} weights of {num_features} features and {num_groups} groups")
        return
    model = (booster["gbtree"] if booster["name"] == "dart" else booster)["model"]
    trees = model["trees"]
    groups = _whole(model["tree_info"])
    if int(model["gbtree_model_param"]["num_trees"]) != len(trees) or groups.shape != (len(trees),):
        raise ValueError(f"it has {len(trees)} of {model['gbtree_model_param']['num_trees']} trees")
    if ((groups < 0) | (groups >= num_groups)).any():
        raise ValueError("a tree is of no group")
    starts = _whole(model.get("iteration_indptr", [0, len(trees)]))
    if not starts.size or starts[0] != 0 or starts[-1] != len(trees) or (np.diff(starts) < 0).any():
        raise ValueError("its iterations are damaged")
    if booster["name"] == "dart" and len(booster["weight_drop"]) != len(trees):
        raise ValueError("it has other weights than trees")
    _check_trees(trees, num_features, num_groups)


def _check_trees(trees: Sequence[Mapping[str, Any]], num_features: int, num_groups: int) -> None:
    """Of all trees at once, since there may be thousands."""
    counts = np.array([int(tree["tree_param"]["num_nodes"]) for tree in trees], np.int64)
    sizes = {max(1, int(tree["tree_param"].get("size_leaf_vector", 1))) for tree in trees}
    for number, tree in enumerate(trees):
        if counts[number] < 1 or any(len(tree[name]) != counts[number] for name in _OF_NODES):
            raise ValueError(f"tree {number} is damaged")
        if len(tree["base_weights"]) != counts[number] * max(sizes) or int(tree.get("id", number)) != number:
            raise ValueError(f"tree {number} is damaged")
    if not trees:
        return
    if len(sizes) > 1 or (sizes != {1} and sizes != {num_groups}):
        raise ValueError("its trees have values of other sizes")
    left, right, split, parents = (_whole(np.concatenate([tree[name] for tree in trees])) for name in _LINKS)
    # Nodes are numbered through all trees.
    first = np.repeat(np.cumsum(counts) - counts, counts)
    last = first + np.repeat(counts, counts)
    is_inner = left != -1
    # The right child of a leaf with several values is its number among the leaves.
    leaves = np.repeat([_num_leaves(tree) for tree in trees], counts)
    children = np.stack([left, right])[:, is_inner] + first[is_inner]
    # Every node is the child of one node at most, and the root of none, so that nothing is a circle.
    is_whole = bool(
        ((right >= -1) & (is_inner | (right < leaves))).all()
        and ((children > first[is_inner]) & (children < last[is_inner])).all()
        and len(np.unique(children)) == children.size
        and (parents[children] + first[is_inner] == np.flatnonzero(is_inner)).all()
        and ((split[is_inner] >= 0) & (split[is_inner] < num_features)).all()
    )
    if not is_whole:
        raise ValueError("a tree is damaged")
    for number, tree in enumerate(trees):
        if len(tree.get("categories_nodes", ())) or np.any(tree.get("split_type", ())):
            _check_categories(number, tree)


def _num_leaves(tree: Mapping[str, Any]) -> int:
    """The leaves of several values, 0 in a tree of single ones."""
    return len(tree.get("leaf_weights", ())) // max(1, int(tree["tree_param"].get("size_leaf_vector", 1)))


def _check_categories(number: int, tree: Mapping[str, Any]) -> None:
    """Raise ValueError unless the categories of the nodes that split by them are there."""
    kinds = _whole(tree.get("split_type", ()))
    categorical = set(np.flatnonzero(kinds == _CATEGORICAL).tolist())
    values, nodes, starts, sizes = (_whole(tree.get(name, ())) for name in _CATEGORIES)
    is_whole = bool(
        len(kinds) == len(tree["left_children"])
        and len(nodes) == len(starts) == len(sizes)
        and categorical == set(nodes.tolist())
        and (np.diff(nodes) > 0).all()
        and (starts >= 0).all()
        and (sizes > 0).all()
        and (starts + sizes <= len(values)).all()
        and ((values >= 0) & (values < 1 << 24)).all()
    )
    if not is_whole:
        raise ValueError(f"the categories of tree {number} are damaged")


def _whole(values: Any) -> Array:
    """A list of whole numbers. Raises ValueError for others."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
        raise ValueError("expected a list of whole numbers")
    return array.astype(np.int64)


class _UbjReader:
    """A document of Universal Binary JSON, as XGBoost writes it."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    def document(self) -> Any:
        return self._value(self._mark(), 0)

    def _take(self, count: int) -> bytes:
        part = self._content[self._at : self._at + count]
        if count < 0 or len(part) < count:
            raise ValueError("the file ends early")
        self._at += count
        return part

    def _mark(self) -> str:
        return self._take(1).decode("latin-1")

    def _number(self, mark: str) -> Any:
        form = _NUMBERS.get(mark)
        if form is None:
            raise ValueError(f"there is no number at byte {self._at}")
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _text(self) -> str:
        return self._take(int(self._number(self._mark()))).decode()

    def _value(self, mark: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("it is nested too deep")
        if mark == "{":
            found = {}
            while (self._content[self._at : self._at + 1]) != b"}":
                name = self._text()
                found[name] = self._value(self._mark(), depth + 1)
            self._at += 1
            return found
        if mark == "[":
            return self._list(depth)
        if mark == "S":
            return self._text()
        return _CONSTANTS[mark] if mark in _CONSTANTS else self._number(mark)

    def _list(self, depth: int) -> Any:
        mark = self._mark()
        if mark == "$":
            kind = self._mark()
            if self._mark() != "#" or kind not in _DTYPES:
                raise ValueError(f"there is no list at byte {self._at}")
            dtype = np.dtype(_DTYPES[kind])
            return np.frombuffer(self._take(int(self._number(self._mark())) * dtype.itemsize), dtype)
        if mark == "#":
            count = int(self._number(self._mark()))
            return [self._value(self._mark(), depth + 1) for _ in range(count)]
        found = []
        while mark != "]":
            found.append(self._value(mark, depth + 1))
            mark = self._mark()
        return found
