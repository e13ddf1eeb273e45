"""scikit-learn: estimators and pipelines in files of skops; pickles and joblib's only where they are vouched for.

Outputs are `predict`, `predict_proba`, `transform`, `decision_function` and `score_samples`, as far as the estimator
has them. Text pipelines take texts, and pipelines over named columns take an input for each column.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modelserver.backend import Array, BackendContext, Datatype, InvalidArgumentError, UnsupportedError

from .base import TableBackend, file_of, num_threads
from .table_model import TableModel, need

FILENAMES = ("model.skops", "model.joblib", "model.pkl", "model.pickle")
_METHODS = ("predict", "predict_proba", "transform", "decision_function", "score_samples")
_ALLOW_PICKLE = "allow-pickle"
# Classes of scikit-learn that skops does not list as safe. Functions are not among them.
_OWN_CLASS = re.compile(r"sklearn\.(?!utils\._testing\.)([a-z_]\w*\.)*_?[A-Z]\w*")


class SklearnModel(TableModel):
    """A fitted estimator, or anything else with its methods."""

    def __init__(self, estimator: Any, threads: int) -> None:
        self._estimator = estimator
        for name in estimator.get_params() if hasattr(estimator, "get_params") else ():
            if name.split("__")[-1] == "n_jobs":
                estimator.set_params(**{name: threads})
        names = [name for name in _METHODS if callable(getattr(estimator, name, None))]
        if not names:
            raise InvalidArgumentError(f"a {type(estimator).__name__} has none of the methods {', '.join(_METHODS)}")
        self.feature_names = tuple(str(each) for each in getattr(estimator, "feature_names_in_", ()))
        self.columns = _columns(estimator)
        if not self.columns:
            for each in list(_parts(estimator)):
                vars(each).pop("feature_names_in_", None)  # a matrix has no names, and needs no warning of that
        if self.columns:
            self.feature_names = tuple(self.columns)
        elif hasattr(estimator, "n_features_in_"):
            self.num_features = int(estimator.n_features_in_)
        elif any(callable(getattr(each, "build_analyzer", None)) for each in _parts(estimator)):
            self.datatype = Datatype.BYTES
        else:
            raise InvalidArgumentError(f"a {type(estimator).__name__} without n_features_in_ is not fitted")
        try:
            self.outputs = self._tensors(names)
        except ValueError:  # some take only the type that they were fitted with
            if self.datatype is not Datatype.FP64 or self.columns:
                raise
            self.datatype = Datatype.FP32
            self.outputs = self._tensors(names)
        usual = [name for name in ("predict", "predict_proba") if name in self.outputs]
        self.usual_outputs = tuple(usual) or self.outputs[:1]

    def _tensors(self, names: Sequence[str]) -> tuple[str, ...]:
        """Without answers of several outputs, as lists."""
        return tuple(name for name in names if not isinstance(self._call(name, self.example()), list))

    def example(self) -> Any:
        if self.columns:
            categories = dict(_categories(self._estimator))
            texts = {name: [categories.get(name, "" if kind is Datatype.BYTES else 0.0)]
                     for name, kind in self.columns.items()}  # fmt: skip
            return need("pandas").DataFrame(texts)
        return [""] if self.datatype is Datatype.BYTES else super().example()

    def predict(self, rows: Any, outputs: Collection[str]) -> Mapping[str, Array]:
        return {name: np.asarray(self._call(name, rows)) for name in outputs}

    def _call(self, method: str, rows: Any) -> Any:
        answer = getattr(self._estimator, method)(rows)
        return answer.toarray() if hasattr(answer, "toarray") else answer

    def to_onnx(self) -> Any:
        types = need("skl2onnx.common.data_types")
        is_classifier = "predict_proba" in self.outputs and hasattr(self._estimator, "classes_")
        return need("skl2onnx").to_onnx(
            self._estimator,
            initial_types=[("input", types.FloatTensorType([None, self.num_features]))],
            options={id(self._estimator): {"zipmap": False}} if is_classifier else None,
        )

    def outputs_of_onnx(self, arrays: Sequence[Array]) -> Mapping[str, Array]:
        first = "predict" if "predict" in self.outputs else "transform"
        found = {first: arrays[0] if first == "transform" else arrays[0].reshape(len(arrays[0]), -1)}
        if len(arrays) > 1 and "predict_proba" in self.outputs:
            found["predict_proba"] = arrays[1]
        return found


class SklearnBackend(TableBackend):
    """One version of a scikit-learn model.

    Parameter `allow_version_mismatch`: also serve a pickle of another version of scikit-learn.
    """

    model_filenames = FILENAMES
    package = "scikit-learn"
    completes_quickly = False

    @classmethod
    def read(cls, context: BackendContext) -> SklearnModel:
        return SklearnModel(read_estimator(file_of(context, FILENAMES), context), num_threads(context))


def read_estimator(path: Path, context: BackendContext) -> Any:
    """The estimator of a file. Raises UnsupportedError for one that may run code and is not vouched for."""
    need("sklearn")
    is_vouched = context.options.get(_ALLOW_PICKLE, "").strip().lower() in ("true", "1", "yes", "on")
    load = _load_skops if path.suffix == ".skops" else _load_pickle
    mismatch = need("sklearn.exceptions").InconsistentVersionWarning
    with warnings.catch_warnings():
        is_allowed = context.bool_parameter("allow_version_mismatch")
        warnings.simplefilter("ignore" if is_allowed else "error", mismatch)
        try:
            return load(path, is_vouched)
        except mismatch as error:
            raise InvalidArgumentError(
                f"{path} was written by scikit-learn {error.original_sklearn_version}, and "
                f"{error.current_sklearn_version} is installed: its answers may differ. Install that version, or "
                "accept the difference with the parameter allow_version_mismatch: true"
            ) from error


def _load_skops(path: Path, is_vouched: bool) -> Any:
    """Raises UnsupportedError for types that may run code."""
    io = need("skops.io")
    found = io.get_untrusted_types(file=path)
    foreign = [name for name in found if not _OWN_CLASS.fullmatch(name)]
    if foreign and not is_vouched:
        raise UnsupportedError(
            f"{path} has objects of {', '.join(foreign)}, which may run any code when loaded; vouch for all models of "
            "this server with --allow-pickle-models"
        )
    return io.load(path, trusted=found)


def _load_pickle(path: Path, is_vouched: bool) -> Any:
    if not is_vouched:
        raise UnsupportedError(
            f"{path} is a pickle, which can run any code when loaded; save it with skops.io.dump as model.skops, or "
            "vouch for all models of this server with --allow-pickle-models"
        )
    return need("joblib").load(path)


def _parts(estimator: Any) -> Iterator[Any]:
    """The estimator and those in it."""
    seen: set[int] = set()
    waiting = [estimator]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list | tuple):
            waiting.extend(each)
        elif isinstance(each, dict):
            waiting.extend(each.values())
        elif hasattr(each, "get_params") and not isinstance(each, type) and id(each) not in seen:
            seen.add(id(each))
            waiting.extend(vars(each).values())
            yield each


def _column_transformers(estimator: Any) -> Iterator[Any]:
    """Those that choose columns by their names."""
    for each in _parts(estimator):
        chosen = getattr(each, "transformers_", ()) if hasattr(each, "feature_names_in_") else ()
        if any(isinstance(column, str) for _, _, columns in chosen for column in np.atleast_1d(columns)):
            yield each


def _columns(estimator: Any) -> dict[str, Datatype]:
    """The named columns that the estimator needs; none if it takes a matrix."""
    texts = {name for name, value in _categories(estimator) if isinstance(value, str)}
    for each in _column_transformers(estimator):
        return {str(name): Datatype.BYTES if name in texts else Datatype.FP64 for name in each.feature_names_in_}
    return {}


def _categories(estimator: Any) -> Iterator[tuple[str, Any]]:
    """Columns whose values are known, with the first value of each."""
    for each in _column_transformers(estimator):
        for _, transformer, columns in each.transformers_:
            names = [str(name) for name in np.atleast_1d(columns)]
            for part in _parts(transformer):
                if hasattr(part, "build_analyzer"):
                    yield from ((name, "") for name in names)
                known = getattr(part, "categories_", ())
                if len(known) == len(names):
                    yield from ((name, values[0]) for name, values in zip(names, known, strict=True) if len(values))


BACKEND = SklearnBackend
