"""Files of tables' models: recognised by name and content, refused with the reason, executed as their config says."""

from __future__ import annotations

import json
import logging
import pickle
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from modelserver_backends.tabular import onnx_form
from support.contexts import context_of, loaded
from support.tabular_models import ROWS, THREE, TWO, Trained

from modelserver.backend import ConfigError, InvalidArgumentError, ModelConfig, ServerError, UnavailableError
from modelserver.backend.discovery import find_backend
from modelserver.backend.model_files import backend_for_model_file, backend_for_model_files
from modelserver.execution.process.hosted_backend import HostedBackend, complete_config, make_backend

FILES = {
    "logistic": ("model.skops", "sklearn"),
    "forest": ("model.joblib", "sklearn"),
    "xgb_two": ("model.json", "xgboost"),
    "xgb_three": ("model.ubj", "xgboost"),
    "lgb_two": ("model.txt", "lightgbm"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_tells_its_backend(trained: Trained, tmp_path: Path, name: str) -> None:
    file, backend = FILES[name]
    source = trained.repository / name / "1" / file
    assert backend_for_model_files(source.parent) == backend
    renamed = tmp_path / f"prices{source.suffix}"
    renamed.write_bytes(source.read_bytes())
    assert backend_for_model_file(renamed) == backend


@pytest.mark.parametrize(("name", "backend"), [("xgb_three", "xgboost"), ("lgb_two", "lightgbm")])
def test_bst_is_the_ending_of_two_libraries(trained: Trained, tmp_path: Path, name: str, backend: str) -> None:
    content = (trained.repository / name / "1" / FILES[name][0]).read_bytes()
    (tmp_path / "model.bst").write_bytes(content)
    assert backend_for_model_files(tmp_path) == backend_for_model_file(tmp_path / "model.bst") == backend


@pytest.mark.parametrize("content", ["", "Dear reader", '{"vocabulary": []}'])
def test_other_texts_are_no_models(tmp_path: Path, content: str) -> None:
    for name in ("notes.txt", "notes.json"):
        (tmp_path / name).write_text(content)
        with pytest.raises(InvalidArgumentError, match="cannot be served: it is not a model of"):
            backend_for_model_file(tmp_path / name)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["half", "nothing", "noise"])
def test_a_damaged_file_is_refused_with_the_reason(trained: Trained, tmp_path: Path, name: str, damage: str) -> None:
    file, backend = FILES[name]
    content = (trained.repository / name / "1" / file).read_bytes()
    (tmp_path / "1").mkdir()
    half = content[: len(content) // 2]
    (tmp_path / "1" / file).write_bytes({"half": half, "nothing": b"", "noise": bytes(range(256))}[damage])
    with pytest.raises(ServerError, match=r"cannot read it: .") as caught:
        loaded(find_backend(backend), context_of(tmp_path, options={"allow-pickle": "true"}))
    assert len(caught.value.message) < 800


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("left_children", 10**6),  # beyond the tree
        ("left_children", 0),  # a circle
        ("right_children", -1),
        ("split_indices", 4),  # of four features
        ("split_type", 1),  # by categories that are not there
    ],
)
def test_a_tree_that_would_end_the_process_is_refused(trained: Trained, tmp_path: Path, name: str, number: int) -> None:
    document = json.loads((trained.repository / "xgb_two" / "1" / "model.json").read_text())
    document["learner"]["gradient_booster"]["model"]["trees"][2][name][0] = number
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.json").write_text(json.dumps(document))
    with pytest.raises(ServerError, match=r"XGBoost cannot read it: .* damaged"):
        loaded(find_backend("xgboost"), context_of(tmp_path))


@pytest.mark.parametrize(
    "settings",
    [
        {"booster": "dart", "rate_drop": 0.5},
        {"booster": "gblinear"},
        {"multi_strategy": "multi_output_tree"},
        {"num_parallel_tree": 2, "gamma": 1.0},
        {"tree_method": "hist", "max_cat_to_onehot": 1},
    ],
)
@pytest.mark.parametrize("form", ["ubj", "json"])
def test_whole_files_of_every_booster_pass_the_check(settings: dict[str, Any], form: str) -> None:
    import pandas as pd
    import xgboost
    from modelserver_backends.tabular.xgboost_file import check_file

    labels = ROWS[:, :2] if "multi_strategy" in settings else TWO
    rows = pd.DataFrame({"a": ROWS[:, 0], "b": pd.Categorical(THREE)}) if "max_cat_to_onehot" in settings else ROWS
    data = xgboost.DMatrix(rows, label=labels, enable_categorical=True)
    check_file(bytes(xgboost.train({"nthread": 1, **settings}, data, 3).save_raw(form)))


def place(directory: Path, model: Any) -> Path:
    import skops.io

    (directory / "1").mkdir()
    skops.io.dump(model, directory / "1" / "model.skops")
    return directory


def test_pickles_have_to_be_vouched_for(tmp_path: Path) -> None:
    from sklearn.linear_model import LinearRegression

    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.pkl").write_bytes(pickle.dumps(LinearRegression().fit(ROWS, TWO)))
    with pytest.raises(ServerError, match=r"can run any code .* skops\.io\.dump .* --allow-pickle-models"):
        loaded(find_backend("sklearn"), context_of(tmp_path))
    assert loaded(find_backend("sklearn"), context_of(tmp_path, options={"allow-pickle": "true"}))


def test_functions_in_a_file_of_skops_have_to_be_vouched_for(tmp_path: Path) -> None:
    from sklearn.preprocessing import FunctionTransformer

    context = context_of(place(tmp_path, FunctionTransformer(re.escape).fit(ROWS)))
    with pytest.raises(ServerError, match=r"objects of re\.escape, which may run any code"):
        loaded(find_backend("sklearn"), context)


def test_a_pickle_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.linear_model import LinearRegression

    (tmp_path / "1").mkdir()
    model = LinearRegression().fit(ROWS, TWO)
    monkeypatch.setattr(sys.modules["sklearn.base"], "__version__", "1.2.3")
    (tmp_path / "1" / "model.pkl").write_bytes(pickle.dumps(model))
    monkeypatch.undo()
    context = context_of(tmp_path, options={"allow-pickle": "true"})
    with pytest.raises(InvalidArgumentError, match=r"written by scikit-learn 1\.2\.3, .* allow_version_mismatch: true"):
        loaded(find_backend("sklearn"), context)
    assert loaded(
        find_backend("sklearn"), replace(context, config=ModelConfig(parameters={"allow_version_mismatch": "true"}))
    )


def test_what_is_not_fitted_is_refused(tmp_path: Path) -> None:
    from sklearn.linear_model import LinearRegression

    with pytest.raises(InvalidArgumentError, match=r"a LinearRegression without n_features_in_ is not fitted"):
        loaded(find_backend("sklearn"), context_of(place(tmp_path, LinearRegression())))


def test_a_converted_model_is_used_only_if_it_answers_alike(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from modelserver_backends.tabular.sklearn import SklearnModel

    caplog.set_level(logging.INFO)
    context = context_of(trained.repository / "forest", options={"allow-pickle": "true"})
    rows = {"input-0": ROWS.astype(np.float64)}
    expected = trained.models["forest"].predict(ROWS)[:, None]
    for name, executed in (("auto", "by ONNX Runtime, which answers as"), ("native", "")):
        caplog.clear()
        backend = loaded(find_backend("sklearn"), replace(context, config=ModelConfig(parameters={"execution": name})))
        assert backend.create_instance(None).run(rows)["predict"].tolist() == expected.tolist()
        assert executed in caplog.text

    class Wrong(SklearnModel):
        def outputs_of_onnx(self, arrays: Any) -> Any:
            return {name: values + 1 for name, values in super().outputs_of_onnx(arrays).items()}

    monkeypatch.setattr(sys.modules[SklearnModel.__module__], "SklearnModel", Wrong)
    caplog.clear()
    backend = loaded(find_backend("sklearn"), context)
    assert "executed by scikit-learn, since as ONNX it is not: output 'predict' differs in" in caplog.text
    assert backend.create_instance(None).run(rows)["predict"].tolist() == expected.tolist()
    with pytest.raises(InvalidArgumentError, match="cannot be executed as ONNX: output 'predict' differs"):
        loaded(find_backend("sklearn"), replace(context, config=ModelConfig(parameters={"execution": "onnx"})))
    with pytest.raises(ConfigError, match="parameter execution: expected one of auto, native, onnx, got 'fast'"):
        loaded(find_backend("sklearn"), replace(context, config=ModelConfig(parameters={"execution": "fast"})))


def test_rows_for_the_comparison_lie_around_the_thresholds(trained: Trained) -> None:
    """Of numbers far from all thresholds a model that was converted badly would not be told apart."""
    from modelserver_backends.tabular.sklearn import SklearnModel

    model = SklearnModel(trained.models["forest"], 1)
    rows = onnx_form._sample(model.to_onnx(), model)
    assert len({tuple(row) for row in model.predict(rows, ["predict_proba"])["predict_proba"].tolist()}) > 20


def test_inputs_and_outputs_may_be_chosen(tmp_path: Path) -> None:
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression().fit(ROWS, TWO)
    directory = place(tmp_path, model)
    (directory / "config.pbtxt").write_text('input { name: "x" }\noutput { name: "decision_function" }')
    instance = loaded(find_backend("sklearn"), context_of(directory)).create_instance(None)
    got = instance.run({"x": ROWS.astype(np.float64)})
    np.testing.assert_allclose(got["decision_function"][:, 0], model.decision_function(ROWS), rtol=1e-5)
    (directory / "config.pbtxt").write_text('output { name: "predictions" }')
    with pytest.raises(ConfigError, match="expected one of the file's outputs predict, predict_proba"):
        loaded(find_backend("sklearn"), context_of(directory))


def test_files_that_clients_send_are_read_in_a_process(trained: Trained, tmp_path: Path) -> None:
    """XGBoost's reader can be made to crash; here it only refuses, and the reason comes through."""
    context = replace(context_of(trained.repository / "xgb_two"), is_uploaded=True)
    backend = find_backend("xgboost")
    assert isinstance(make_backend(backend, context), HostedBackend)
    assert [spec.name for spec in complete_config(backend, context).output] == ["predict", "predict_proba"]


def test_a_missing_library_names_the_extra(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgboost", None)
    with pytest.raises(
        UnavailableError, match=r"'xgboost', which is not installed.*'modelserver-py\[classical\]'.*requirements\.txt"
    ):
        loaded(find_backend("xgboost"), context_of(trained.repository / "xgb_two"))
