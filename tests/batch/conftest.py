"""A server of functions, which offline batches ask."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.mock_llm import write_mock_llm

import modelserver
from modelserver import Tensor

BATCH_S = 0.002


@pytest.fixture(scope="package")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server with the models `scale`, `shout` and `mock`, a language model."""
    root = tmp_path_factory.mktemp("models")
    write_mock_llm(root, "mock")
    server = modelserver.Server(root, http_port=0, http_address="127.0.0.1", allow_grpc=False, allow_metrics=False)
    numbers, number, text = Tensor["FP32", 2], Tensor["FP32", 1], Tensor["BYTES", 1]
    inputs, outputs = {"x": numbers, "k": number}, {"y": numbers, "total": number}
    server.add("scale", scale, max_batch_size=32, inputs=inputs, outputs=outputs)
    server.add("shout", shout, inputs={"text": text}, outputs={"loud": text})
    with server:
        yield server.http_url


def scale(x: Any, k: Any) -> Any:
    """Takes a while; refuses a factor of 13."""
    time.sleep(BATCH_S)
    if (k == 13).any():
        raise modelserver.InvalidArgumentError("unlucky")
    y = x * k
    return {"y": y, "total": y.sum(axis=1, keepdims=True)}


def shout(text: Any) -> Any:
    return {"loud": np.array([value.upper() for value in text], object)}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"
