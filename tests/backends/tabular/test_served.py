"""Models of tables answer over both protocols as their libraries do."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import numpy as np
import pytest
from support.clients import ClientError, ProtocolClient
from support.serving import RunningServer
from support.tabular_models import ROWS, TEXTS, Trained, people_table

X = ROWS[:7]


@pytest.fixture
def tables_client(protocol: type[ProtocolClient], tables: RunningServer) -> Any:
    with protocol(tables) as connected:
        yield connected


def softmaxed(booster: Any) -> Any:
    margins = booster.inplace_predict(X, predict_type="margin")
    powers = np.exp(margins)
    return powers / powers.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("name", ["logistic", "forest", "linear", "scaler", "clusters"])
def test_scikit_learn(tables_client: ProtocolClient, trained: Trained, name: str) -> None:
    model = trained.models[name]
    answer = tables_client.infer(name, {"input-0": X.astype(np.float64)})
    assert set(answer.outputs) <= {"predict", "predict_proba", "transform"}
    for method, got in answer.outputs.items():
        expected = getattr(model, method)(X)
        expected = expected[:, None] if expected.ndim == 1 else expected
        if expected.dtype.kind == "U":
            assert [[each.decode() for each in row] for row in got] == expected.tolist()
        else:
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "classes"), [("xgb_two", 2), ("xgb_three", 3)])
def test_xgboost_classifies(tables_client: ProtocolClient, trained: Trained, name: str, classes: int) -> None:
    booster = trained.models[name]
    scores = booster.inplace_predict(X) if classes == 2 else softmaxed(booster)
    expected = np.stack([1 - scores, scores], axis=1) if classes == 2 else scores
    answer = tables_client.infer(name, {"input-0": X})
    np.testing.assert_allclose(answer["predict_proba"], expected, rtol=1e-4, atol=1e-6)
    assert answer["predict"].tolist() == expected.argmax(axis=1)[:, None].tolist()


@pytest.mark.parametrize("name", ["xgb_value", "lgb_two", "lgb_three"])
def test_predict_is_what_the_booster_predicts(tables_client: ProtocolClient, trained: Trained, name: str) -> None:
    model = trained.models[name]
    expected = model.inplace_predict(X) if name.startswith("xgb") else model.predict(X)
    got = tables_client.infer(name, {"input-0": X})["predict"]
    np.testing.assert_allclose(got, expected.reshape(len(X), -1), rtol=1e-4, atol=1e-6)


def test_directories_of_fil_are_served_unmodified(tables_client: ProtocolClient, trained: Trained) -> None:
    def output(name: str) -> Any:
        return tables_client.infer(name, {"input__0": X})["output__0"]

    scores = trained.models["fil_class"].inplace_predict(X)
    assert output("fil_class").tolist() == (scores > 0.7).astype(np.float32)[:, None].tolist()
    np.testing.assert_allclose(output("fil_both"), np.stack([1 - scores, scores], axis=1), atol=1e-6)
    np.testing.assert_allclose(output("fil_value")[:, 0], trained.models["fil_value"].predict(X), rtol=1e-4)
    np.testing.assert_allclose(output("fil_checkpoint"), trained.models["fil_checkpoint"].inplace_predict(X), atol=1e-5)
    assert output("fil_class").dtype == np.float32


def test_any_name_and_any_numeric_type(tables_client: ProtocolClient) -> None:
    """MLServer's and KServe's clients choose both."""
    expected = tables_client.infer("xgb_two", {"input-0": X.round()})["predict_proba"]
    for array in (X.round().astype(np.float64), X.round().astype(np.int32)):
        got = tables_client.infer("xgb_two", {"whatever": array}, ["predict_proba"])
        np.testing.assert_array_equal(got["predict_proba"], expected)
    with pytest.raises(ClientError, match="Expected"):
        tables_client.infer("xgb_two", {"whatever": X[:, :2]})
    with pytest.raises(ClientError, match="data-type is 'BYTES'"):
        tables_client.infer("xgb_two", {"x": X.astype(str).astype(object)})


def test_named_columns(tables_client: ProtocolClient, trained: Trained) -> None:
    """As MLServer's codec for pandas sends them; a pipeline over columns needs them."""
    columns = {name: X[:, [index]] for index, name in enumerate("dcba")}
    answer = tables_client.infer("frame", columns)
    import pandas as pd

    frame = pd.DataFrame(X[:, ::-1], columns=list("abcd"))
    expected = trained.models["frame"].predict_proba(frame)
    np.testing.assert_allclose(answer["predict_proba"], expected, rtol=1e-4)
    np.testing.assert_allclose(tables_client.infer("frame", {"x": X[:, ::-1]})["predict_proba"], expected, rtol=1e-4)
    with pytest.raises(ClientError, match="lack the columns c, d"):
        tables_client.infer("frame", {"a": X[:, :1], "b": X[:, :1]})
    table = people_table()
    people = {"age": table["age"].to_numpy()[:, None], "city": table["city"].to_numpy(object)[:, None]}
    got = tables_client.infer("people", people)["predict_proba"]
    np.testing.assert_allclose(got, trained.models["people"].predict_proba(table), rtol=1e-6)
    with pytest.raises(ClientError, match="the model refuses the inputs: Found unknown categories"):
        tables_client.infer("people", people | {"city": np.full((60, 1), b"atlantis", object)})


def test_texts(tables_client: ProtocolClient, trained: Trained) -> None:
    got = tables_client.infer("texts", {"text": np.array(TEXTS, object)})
    assert got["predict"][:, 0].tolist() == trained.models["texts"].predict(TEXTS).tolist()


def test_the_metadata_tell_what_the_file_says(tables_client: ProtocolClient) -> None:
    metadata = tables_client.model_metadata("logistic")
    assert metadata["inputs"] == [{"name": "input-0", "datatype": "FP64", "shape": [-1, 4]}]
    assert [(each["name"], each["datatype"], each["shape"]) for each in metadata["outputs"]] == [
        ("predict", "BYTES", [-1, 1]),
        ("predict_proba", "FP64", [-1, 3]),
    ]


def test_a_request_of_json_with_integers(tables: RunningServer, trained: Trained) -> None:
    body = {"inputs": [{"name": "predict", "shape": [1, 4], "datatype": "INT64", "data": [1, 2, 3, 4]}]}
    request = urllib.request.Request(
        f"http://{tables.http_url}/v2/models/forest/infer", json.dumps(body).encode(), method="POST"
    )
    for _ in range(3):  # also once the request's form is known
        with urllib.request.urlopen(request) as response:
            outputs = json.loads(response.read())["outputs"]
        expected = trained.models["forest"].predict([[1, 2, 3, 4]])
        assert outputs[0]["data"] == expected.tolist()
