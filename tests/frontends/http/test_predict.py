"""KServe's protocol of version 1, as TensorFlow Serving's clients speak it, for models of every shape."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

import modelserver as ms

PAIR = ms.Tensor["FP32", 2]
ONE = ms.Tensor["FP32", 1]
TEXT = ms.Tensor["BYTES", 1]
# Outputs by name, as annotations that tools for types leave alone.
Y = {"y": PAIR}
SUMS = {"sum": ONE, "size": ms.Tensor["INT64", 1]}
LOWER = {"text": TEXT}
ROWS = ms.Tensor["FP32", -1, 2]
TOTAL = {"total": ONE}


def double(x: PAIR) -> Y:
    return {"y": 2 * x}


def sums(x: PAIR, bias: ONE) -> SUMS:
    return {"sum": x.sum(1, keepdims=True) + bias, "size": np.full((len(x), 1), len(x))}


def lower(text: TEXT) -> LOWER:
    return {"text": np.array([[one.lower()] for one in text.ravel()], object)}


def grid(x: ROWS) -> TOTAL:
    return {"total": [x.sum()]}


def fail(x: ONE) -> TOTAL:
    raise ms.InvalidArgumentError("not this one")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    # With a log of each request, which stands before the reader of its responses.
    server = ms.Server(http_port=0, allow_grpc=False, allow_metrics=False, log_verbose=1)
    server.add("double", double, max_batch_size=2)
    server.add("double", double, max_batch_size=2, version=3)
    server.add("sums", sums, max_batch_size=4)
    server.add("lower", lower, max_batch_size=4)
    server.add("grid", grid)
    server.add("fail", fail, max_batch_size=1)
    with server:
        yield f"http://{server.http_url}/v1/models/"


ENCODED = base64.b64encode(b"AB").decode()


@pytest.mark.parametrize(
    ("path", "document", "answer"),
    [
        ("double:predict", {"instances": [[1, 2]]}, {"predictions": [[2, 4]]}),
        ("double/versions/3:predict", {"instances": [[1, 2]]}, {"predictions": [[2, 4]]}),
        ("double:predict", {"instances": [{"x": [1, 2]}, {"x": [3, 4]}]}, {"predictions": [[2, 4], [6, 8]]}),
        # More rows than a batch of the model may have.
        ("double:predict", {"instances": [[n, 0] for n in range(7)]}, {"predictions": [[2 * n, 0] for n in range(7)]}),
        ("double:predict", {"inputs": [[1, 2], [3, 4]]}, {"outputs": [[2, 4], [6, 8]]}),
        ("double:predict", {"inputs": {"x": [[1, 2]]}, "signature_name": "serving_default"}, {"outputs": [[2, 4]]}),
        (
            "sums:predict",
            {"instances": [{"x": [1, 2], "bias": 1}, {"x": [3, 4], "bias": [2]}]},
            {"predictions": [{"sum": 4, "size": 2}, {"sum": 9, "size": 2}]},
        ),
        (
            "sums:predict",
            {"inputs": {"x": [[1, 2]], "bias": [[1]]}},
            {"outputs": {"sum": [4], "size": [1]}},
        ),
        ("lower:predict", {"instances": ["Ab", {"b64": ENCODED}]}, {"predictions": ["ab", "ab"]}),
        ("lower:predict", {"instances": [{"text": "Ab"}, {"text": {"b64": ENCODED}}]}, {"predictions": ["ab", "ab"]}),
        ("grid:predict", {"instances": [[1, 2], [3, 4], [5, 6]]}, {"predictions": [[21]]}),
    ],
)
def test_rows_and_columns(url: str, path: str, document: Any, answer: Any) -> None:
    response = httpx.post(url + path, json=document)
    assert (response.status_code, response.json()) == (200, answer)


@pytest.mark.parametrize(
    ("path", "document", "status", "message"),
    [
        ("double:predict", {}, 400, "either 'instances'"),
        ("double:predict", {"instances": []}, 400, "at least one row"),
        ("double:predict", {"instances": [[1, 2, 3]]}, 400, "shape"),
        ("double:predict", {"instances": [["a", "b"]]}, 400, "'x'"),
        ("sums:predict", {"instances": [[1, 2]]}, 400, "an object of the inputs x, bias"),
        ("sums:predict", {"instances": [{"x": [1, 2], "bias": 1}, {"x": [1, 2]}]}, 400, "the same inputs"),
        ("sums:predict", {"inputs": {"z": 1}}, 400, "unexpected input 'z'"),
        ("lower:predict", {"instances": [{"b64": "!"}]}, 400, "base64"),
        ("nothing:predict", {"instances": [1]}, 404, "nothing"),
        ("double/versions/9:predict", {"instances": [[1, 2]]}, 404, "9"),
        ("double/versions/x:predict", {"instances": [[1, 2]]}, 400, "not a number"),
        ("fail:predict", {"instances": [1, 2, 3]}, 400, "not this one"),
    ],
)
def test_what_is_no_prediction_is_refused_in_the_protocols_form(
    url: str, path: str, document: Any, status: int, message: str
) -> None:
    response = httpx.post(url + path, json=document)
    assert response.status_code == status
    assert message in response.json()["error"]


def test_a_long_call_is_read_in_pieces(url: str) -> None:
    rows = np.arange(20_000, dtype="f4").reshape(-1, 2).tolist()
    response = httpx.post(url + "grid:predict", content=json.dumps({"instances": rows}))
    assert response.json()["predictions"][0][0] == pytest.approx(np.arange(20_000).sum(), rel=1e-6)


def test_a_model_says_that_it_is_ready(url: str) -> None:
    assert httpx.get(f"{url}double").json() == {"name": "double", "ready": True}
    assert httpx.get(f"{url}doble").status_code == 404
