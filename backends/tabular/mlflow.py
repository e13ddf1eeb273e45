"""Directories of MLflow (`MLmodel`) by the flavors of tables: scikit-learn, XGBoost, LightGBM, CatBoost.

MLflow itself is not needed. ONNX files of MLflow have a name that ONNX Runtime's backend knows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from modelserver.backend import BackendContext, InvalidArgumentError, UnsupportedError

from .base import TableBackend, num_threads
from .catboost import CatboostModel
from .lightgbm import LightgbmModel
from .sklearn import SklearnModel, read_estimator
from .table_model import TableModel
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


class MlflowBackend(TableBackend):
    """One version of a directory that MLflow has saved."""

    model_filenames = (FILENAME,)
    package = "the library of its flavor"
    completes_quickly = False

    @classmethod
    def read(cls, context: BackendContext) -> TableModel:
        directory = context.version_directory
        document = yaml.safe_load((directory / FILENAME).read_text())
        flavors = document.get("flavors") if isinstance(document, Mapping) else None
        if not isinstance(flavors, Mapping):
            raise InvalidArgumentError(f"{directory / FILENAME} lists no flavors")
        for name, (key, read) in _FLAVORS.items():
            if name in flavors:
                model = read(_file_of(directory, name, flavors[name].get(key)), context)
                _name_features(model, document)
                return model
        found = next((name for name in _WAYS_OUT if name in flavors), "")
        raise UnsupportedError(
            f"{directory} is a model of MLflow with the flavors {', '.join(map(str, flavors)) or 'none'}, which are "
            f"not served from there: {_WAYS_OUT.get(found, _OWN_CODE)}"
        )


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
