"""Directories that MLflow writes, described here as it does: served by the backends of their flavors."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml
from support.contexts import context_of, loaded
from support.tabular_models import ROWS, TWO, boost, light

from modelserver.backend import ServerError
from modelserver.backend.discovery import find_backend
from modelserver.backend.model_files import backend_for_model_files
from modelserver.execution.process.environment import has_environment
from modelserver.repository.roots import resolve_roots

COLUMNS = [{"name": name, "type": "double", "required": True} for name in "abcd"]


def saved(directory: Path, flavor: str, fields: dict[str, Any]) -> Path:
    """The version directory, with a description as MLflow writes it."""
    version = directory / "1"
    version.mkdir(parents=True)
    document = {
        "artifact_path": "model",
        "flavors": {"python_function": {"loader_module": f"mlflow.{flavor}", "env": "conda.yaml"}, flavor: fields},
        "mlflow_version": "3.1.0",
        "model_uuid": "0",
        "signature": {"inputs": json.dumps(COLUMNS), "outputs": None},
    }
    (version / "MLmodel").write_text(yaml.safe_dump(document))
    (version / "requirements.txt").write_text("mlflow\n")
    return version


def write(directory: Path, kind: str) -> Any:
    """A model of this kind in MLflow's directory; what it predicts."""
    if kind == "sklearn":
        from sklearn.linear_model import LogisticRegression

        model = LogisticRegression().fit(ROWS, TWO)
        version = saved(directory, kind, {"pickled_model": "model.pkl", "serialization_format": "cloudpickle"})
        (version / "model.pkl").write_bytes(pickle.dumps(model))
        return model.predict(ROWS)
    booster = boost("binary:logistic", TWO) if kind.startswith("xgboost") else light("binary", TWO)
    file = {"xgboost": "model.xgb", "xgboost_ubj": "model.ubj", "lightgbm": "model.lgb"}[kind]
    version = saved(directory, kind.partition("_")[0], {"data": file, "model_class": "Booster"})
    if kind.startswith("xgboost"):
        (version / file).write_bytes(booster.save_raw("ubj"))
        return booster.inplace_predict(ROWS) > 0.5
    booster.save_model(version / file)
    return booster.predict(ROWS)


@pytest.mark.parametrize("kind", ["sklearn", "xgboost", "xgboost_ubj", "lightgbm"])
def test_the_flavor_tells_the_backend(tmp_path: Path, kind: str) -> None:
    expected = write(tmp_path / "m", kind)
    assert backend_for_model_files(tmp_path / "m" / "1") == "mlflow"
    context = context_of(tmp_path / "m", options={"allow-pickle": "true"})
    backend = loaded(find_backend("mlflow"), context)
    config = backend.context.config
    assert json.loads(config.parameters["input_columns"]) == list("abcd")
    array = ROWS.astype(config.input[0].data_type.numpy)
    got = backend.create_instance(None).run({config.input[0].name: array})["predict"]
    np.testing.assert_allclose(got.reshape(-1), expected, rtol=1e-4)


def test_a_directory_and_its_description_are_the_model(tmp_path: Path) -> None:
    write(tmp_path / "prices", "lightgbm")
    directory = (tmp_path / "prices" / "1").rename(tmp_path / "cheap")
    for path in (directory, directory / "MLmodel"):
        (root,) = resolve_roots([path], find_backend=backend_for_model_files)
        assert (root.model_name, root.path) == ("cheap", directory)


@pytest.mark.parametrize(
    ("flavor", "fields", "message"),
    [
        ("pytorch", {"model_data": "data"}, "convert FILE.py:NAME DIRECTORY --to pt2"),
        ("diviner", {}, r"flavors diviner, python_function, .* serve it by a Python model \(model.py\)"),
        ("sklearn", {"pickled_model": "../other.pkl"}, "names no file of the directory"),
        ("xgboost", {"data": "gone.ubj"}, "names .*gone.ubj, which is not there"),
        ("xgboost", {}, "names no file"),
    ],
)
def test_what_is_not_served_is_refused_with_a_way_out(
    tmp_path: Path, flavor: str, fields: dict[str, Any], message: str
) -> None:
    saved(tmp_path, flavor, fields)
    with pytest.raises(ServerError, match=message):
        loaded(find_backend("mlflow"), context_of(tmp_path))


def test_a_python_function_is_loaded_by_mlflow_once_its_code_is_vouched_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow is stood for by a module; its directory's requirements are those of the model."""

    class Loaded:
        def predict(self, table: Any) -> Any:
            return table["a"] + table["b"]

    pyfunc = ModuleType("mlflow.pyfunc")
    pyfunc.load_model = lambda _path: Loaded()  # type: ignore[attr-defined]
    saved(tmp_path / "m", "diviner", {})
    backend_class = find_backend("mlflow")
    with pytest.raises(ServerError, match="vouch for its code with --allow-pickle-models"):
        loaded(backend_class, context_of(tmp_path / "m"))
    context = context_of(tmp_path / "m", options={"allow-pickle": "true"})
    assert not has_environment(backend_class, context_of(tmp_path / "m"))
    assert has_environment(backend_class, context)
    assert backend_class.needs_process(context)
    with pytest.raises(ServerError, match=r"'mlflow', which is not installed: name it in .*requirements\.txt"):
        loaded(backend_class, context)
    monkeypatch.setitem(sys.modules, "mlflow", ModuleType("mlflow"))
    monkeypatch.setitem(sys.modules, "mlflow.pyfunc", pyfunc)
    backend = loaded(backend_class, context)
    assert [spec.name for spec in backend.context.config.input] == list("abcd")
    columns = {name: np.full((2, 1), number, np.float64) for number, name in enumerate("abcd", 1)}
    got = backend.create_instance(None).run(columns)["predict"]
    np.testing.assert_array_equal(got.reshape(-1), [3, 3])


def test_pickles_have_to_be_vouched_for(tmp_path: Path) -> None:
    write(tmp_path, "sklearn")
    with pytest.raises(ServerError, match="can run any code"):
        loaded(find_backend("mlflow"), context_of(tmp_path))
