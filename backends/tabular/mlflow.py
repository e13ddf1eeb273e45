"""Directories of MLflow (`MLmodel`) by the flavors of tables: scikit-learn, XGBoost, LightGBM, CatBoost.

These do not need MLflow itself. ONNX files of MLflow have a name that ONNX Runtime's backend knows. Any other
`python_function` is code: where pickles are vouched for, MLflow loads it, in the environment of its requirements.txt.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from modelserver.backend import (
    Array,
    BackendContext,
    Datatype,
    InvalidArgumentError,
    UnavailableError,
    UnsupportedError,
)

from .base import TableBackend, num_threads
from .catboost import CatboostModel
from .lightgbm import LightgbmModel
from .sklearn import SklearnModel, read_estimator
from .table_model import TableModel, need
from .xgboost import XgboostModel

FILENAME = "MLmodel"
# What to do with flavors that are no tables.
_WAYS_OUT = {
    "pytorch": "write its module with 'modelserver convert FILE.py:NAME DIRECTORY --to pt2' and serve that",
    "transformers": "serve its directory 'model' with the files of 'components' copied into it",
    "tensorflow": "serve the directory of its saved_model.pb",
    "onnx": "serve its .onnx file",
}
_OWN_CODE = "serve it by a Python model (model.py), with a requirements.txt that names mlflow"
_PYFUNC = "python_function"
_TYPES = {
    "boolean": Datatype.BOOL,
    "integer": Datatype.INT32,
    "long": Datatype.INT64,
    "float": Datatype.FP32,
    "double": Datatype.FP64,
    "string": Datatype.BYTES,
}


def _sklearn(path: Path, context: BackendContext) -> TableModel:
    return SklearnModel(read_estimator(path, context), num_threads(context))


def _lightgbm(path: Path, context: BackendContext) -> TableModel:
    if path.suffix in (".pkl", ".skops"):  # of its classes for scikit-learn
        return _sklearn(path, context)
    return LightgbmModel(path, num_threads(context))


_FLAVORS: dict[str, tuple[str, Callable[[Path, BackendContext], TableModel]]] = {
    "sklearn": ("pickled_model", _sklearn),
    "xgboost": ("data", lambda path, context: XgboostModel(path, num_threads(context))),
    "lightgbm": ("data", _lightgbm),
    "catboost": ("data", lambda path, context: CatboostModel(path, num_threads(context))),
}


class PyfuncModel(TableModel):
    """A model that MLflow loads: a table with the columns of its signature in, `predict` out."""

    def __init__(self, directory: Path, document: Mapping[str, Any]) -> None:
        signature = document.get("signature") or {}
        columns = json.loads(signature.get("inputs") or "[]")
        known = [each for each in columns if each.get("type") in _TYPES and "name" in each]
        if not columns or len(known) != len(columns):
            raise UnsupportedError(
                f"{directory / FILENAME} has no signature of columns of {', '.join(_TYPES)}: log the model with "
                f"one, or {_OWN_CODE}"
            )
        self.columns = {str(each["name"]): _TYPES[each["type"]] for each in known}
        self.num_features = len(known)
        try:
            self._model = importlib.import_module("mlflow.pyfunc").load_model(str(directory))
        except ModuleNotFoundError as error:
            raise UnavailableError(
                f"the model needs the Python package '{error.name}', which is not installed: name it in "
                f"{directory / 'requirements.txt'}"
            ) from error

    def predict(self, rows: Any, outputs: Collection[str]) -> Mapping[str, Array]:  # noqa: ARG002  # there is one
        found = np.asarray(self._model.predict(rows))
        return {"predict": found.astype(object) if found.dtype.kind in "OSU" else found}

    def example(self) -> Any:
        columns = self.columns.items()
        values = {name: [""] if kind is Datatype.BYTES else np.zeros(1, kind.numpy) for name, kind in columns}
        return need("pandas").DataFrame(values)


class MlflowBackend(TableBackend):
    """One version of a directory that MLflow has saved."""

    model_filenames = (FILENAME,)
    package = "the library of its flavor"
    completes_quickly = False

    @classmethod
    def runs_code_of(cls, context: BackendContext) -> bool:
        """Those that MLflow loads, once their code is vouched for."""
        return _is_vouched_for(context) and _is_pyfunc(context.version_directory)

    @classmethod
    def needs_process(cls, context: BackendContext) -> bool:
        return context.is_uploaded or _is_pyfunc(context.version_directory)

    @classmethod
    def read(cls, context: BackendContext) -> TableModel:
        directory = context.version_directory
        document = _document(directory)
        flavors = document.get("flavors")
        if not isinstance(flavors, Mapping):
            raise InvalidArgumentError(f"{directory / FILENAME} lists no flavors")
        for name, (key, read) in _FLAVORS.items():
            if name in flavors:
                model = read(_file_of(directory, name, flavors[name].get(key)), context)
                _name_features(model, document)
                return model
        if _is_pyfunc(directory) and _is_vouched_for(context):
            return PyfuncModel(directory, document)
        found = next((name for name in _WAYS_OUT if name in flavors), "")
        raise UnsupportedError(
            f"{directory} is a model of MLflow with the flavors {', '.join(map(str, flavors)) or 'none'}, which are "
            f"not served from there: {_WAYS_OUT.get(found, _OWN_CODE)}"
            + ("; or vouch for its code with --allow-pickle-models" if _PYFUNC in flavors else "")
        )


def _document(directory: Path) -> Mapping[str, Any]:
    document = yaml.safe_load((directory / FILENAME).read_text())
    return document if isinstance(document, Mapping) else {}


def _is_vouched_for(context: BackendContext) -> bool:
    return context.options.get("allow-pickle", "").lower() in ("1", "true") and not context.is_uploaded


def _is_pyfunc(directory: Path) -> bool:
    """Whether only MLflow itself can load the model."""
    try:
        flavors = _document(directory).get("flavors") or {}
    except (OSError, ValueError, yaml.YAMLError):
        return False
    return _PYFUNC in flavors and not any(name in flavors for name in (*_FLAVORS, "onnx"))


def _file_of(directory: Path, flavor: str, name: Any) -> Path:
    """The model's file, which must lie in the directory."""
    if not isinstance(name, str) or not (path := directory / name).resolve().is_relative_to(directory.resolve()):
        raise InvalidArgumentError(f"{directory / FILENAME}: the flavor {flavor} names no file of the directory")
    if not path.is_file():
        raise InvalidArgumentError(f"{directory / FILENAME}: the flavor {flavor} names {path}, which is not there")
    return path


def _name_features(model: TableModel, document: Mapping[str, Any]) -> None:
    """The names of a matrix's columns by the model's signature, so that clients may send them one by one."""
    signature = document.get("signature") or {}
    columns = json.loads(signature.get("inputs") or "[]")
    names = tuple(str(each["name"]) for each in columns if "name" in each)
    if not model.feature_names and len(names) == model.num_features:
        model.feature_names = names


BACKEND = MlflowBackend
