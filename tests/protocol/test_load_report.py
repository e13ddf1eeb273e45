"""The ORCA header: how busy a model is, in answers of clients that ask for it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from support.model_files import write_identity
from support.serving import RunningServer, running_server

pytestmark = pytest.mark.one_layout

INFER = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
PATHS = [("infer", INFER), ("generate", {"INPUT0": 1}), ("generate_stream", {"INPUT0": 1})]


@pytest.fixture(scope="module")
def served(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("served")
    write_identity(root, "echo")
    with running_server(root) as running:
        yield running


@pytest.mark.parametrize(("path", "document"), PATHS)
def test_the_header_has_the_format_that_is_asked_for(served: RunningServer, path: str, document: object) -> None:
    url = f"http://{served.http_url}/v2/models/echo/{path}"
    for _ in range(2):
        answer = httpx.post(url, json=document, headers={"endpoint-load-metrics-format": "json"})
        assert answer.status_code == 200
        kind, _, text = answer.headers["endpoint-load-metrics"].partition(" ")
        report = json.loads(text)
        assert kind == "JSON"
        assert set(report) == {"application_utilization", "named_metrics"}
        assert set(report["named_metrics"]) == {"inflight", "queue_depth"}
        answer = httpx.post(url, json=document, headers={"endpoint-load-metrics-format": "text"})
        text = answer.headers["endpoint-load-metrics"]
        assert text.startswith("TEXT application_utilization=")
        assert "named_metrics.queue_depth=0" in text


@pytest.mark.parametrize(("path", "document"), PATHS)
def test_nobody_else_gets_it(served: RunningServer, path: str, document: object) -> None:
    url = f"http://{served.http_url}/v2/models/echo/{path}"
    for headers in ({}, {"endpoint-load-metrics-format": "xml"}):
        answer = httpx.post(url, json=document, headers=headers)
        assert answer.status_code == 200
        assert "endpoint-load-metrics" not in answer.headers


def test_a_model_that_is_not_there_has_no_load(served: RunningServer) -> None:
    url = f"http://{served.http_url}/v2/models/nope/infer"
    answer = httpx.post(url, json=INFER, headers={"endpoint-load-metrics-format": "json"})
    assert answer.status_code == 404
    assert "endpoint-load-metrics" not in answer.headers
