"""CatBoost: recognised by name and content, answers as its library does, and refused with the reason."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.contexts import context_of, loaded
from support.tabular_models import NAMES, ROWS, THREE, TWO

from modelserver.backend import ModelConfig, ServerError
from modelserver.backend.discovery import find_backend
from modelserver.backend.model_files import backend_for_model_file, backend_for_model_files

KINDS = ("two", "three", "value")
# CatBoost takes seconds to import.
SETTINGS = {"iterations": 4, "depth": 3, "verbose": 0, "thread_count": 1, "allow_writing_files": False}
CITIES = NAMES[THREE]
AGES = np.linspace(20, 60, 60, dtype=np.float32)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    import catboost
    import pandas as pd

    table = pd.DataFrame({"age": AGES, "city": CITIES})
    return {
        "two": catboost.CatBoostClassifier(**SETTINGS).fit(ROWS, TWO),
        "three": catboost.CatBoostClassifier(**SETTINGS).fit(ROWS, CITIES),
        "value": catboost.CatBoostRegressor(**SETTINGS).fit(ROWS, ROWS[:, 2]),
        "table": catboost.CatBoostClassifier(**SETTINGS).fit(table, TWO, cat_features=["city"]),
    }


def place(directory: Path, model: Any, file: str = "model.cbm") -> Path:
    (directory / "1").mkdir()
    model.save_model(str(directory / "1" / file), format="json" if file.endswith("json") else "cbm")
    return directory


def served(directory: Path, execution: str = "auto") -> Any:
    context = context_of(directory, config=ModelConfig(parameters={"execution": execution}))
    return loaded(find_backend("catboost"), context).create_instance(None)


@pytest.mark.parametrize("execution", ["native", "onnx"])
@pytest.mark.parametrize("name", KINDS)
def test_answers_are_those_of_catboost(tmp_path: Path, models: dict[str, Any], name: str, execution: str) -> None:
    model = models[name]
    got = served(place(tmp_path, model), execution).run({"input-0": ROWS})
    expected = model.predict(ROWS).reshape(-1)
    if name == "value":
        np.testing.assert_allclose(got["predict"].reshape(-1), expected, rtol=1e-4, atol=1e-5)
        return
    flat = got["predict"].reshape(-1).tolist()
    assert [each.decode() if isinstance(each, bytes) else each for each in flat] == expected.tolist()
    np.testing.assert_allclose(got["predict_proba"], model.predict_proba(ROWS), atol=1e-5)


def test_categories_are_columns(tmp_path: Path, models: dict[str, Any]) -> None:
    import pandas as pd

    instance = served(place(tmp_path, models["table"]))
    cities = np.array([[name.encode()] for name in CITIES], object)
    got = instance.run({"age": AGES[:, None], "city": cities})["predict_proba"]
    expected = models["table"].predict_proba(pd.DataFrame({"age": AGES, "city": CITIES}))
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("file", ["model.cbm", "model.json"])
def test_a_file_tells_its_backend(tmp_path: Path, models: dict[str, Any], file: str) -> None:
    directory = place(tmp_path, models["two"], file) / "1"
    assert backend_for_model_files(directory) == "catboost"
    renamed = (directory / file).rename(directory / f"prices{Path(file).suffix}")
    assert backend_for_model_file(renamed) == "catboost"


@pytest.mark.parametrize("damage", ["half", "nothing", "noise"])
def test_a_damaged_file_is_refused_with_the_reason(tmp_path: Path, models: dict[str, Any], damage: str) -> None:
    path = place(tmp_path, models["two"]) / "1" / "model.cbm"
    content = path.read_bytes()
    path.write_bytes({"half": content[: len(content) // 2], "nothing": b"", "noise": bytes(range(256))}[damage])
    with pytest.raises(ServerError, match=r"CatBoost cannot read it: ."):
        served(tmp_path)


def test_the_log_says_what_executes_it(
    tmp_path: Path, models: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    served(place(tmp_path, models["two"]))
    assert "executed by ONNX Runtime, which answers as CatBoost does" in caplog.text
