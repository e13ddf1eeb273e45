"""What a whole server's metrics and statistics say of answers, failures and cached answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.asking import ask
from support.python_models import write_model
from support.serving import RunningServer, running_server

CONFIG = """
input { name: "I" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "O" data_type: TYPE_INT32 dims: [ 1 ] }
"""
# Refuses negative numbers one by one, and fails on a batch that has one above 100.
SOURCE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        value = pb_utils.get_input_tensor_by_name(request, "I").as_numpy()
        if value.max() > 100:
            raise RuntimeError("too large")
        if value.min() < 0:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("negative"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("O", value)])
"""
# The same, with a sender.
DECOUPLED = SOURCE.replace(
    "return [self.answer(request) for request in requests]",
    """for request in requests:
            sender = request.get_response_sender()
            sender.send(self.answer(request), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)""",
)
MODELS = {
    "alone": (SOURCE, ""),
    "batching": (SOURCE, "max_batch_size: 4 dynamic_batching { }"),
    "decoupled": (DECOUPLED, "model_transaction_policy { decoupled: true }"),
    "tagged": (SOURCE, 'metric_tags { key: "z" value: "1" } metric_tags { key: "a" value: "2" }'),
    "cached": (SOURCE, "response_cache { enable: true }"),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("models")
    for name, (source, more) in MODELS.items():
        write_model(root, source, CONFIG + more).rename(root / name)
    flags = ("summary_latencies=true", "summary_quantiles=0.5:0.05,0.99:0.001")
    with running_server(root, metrics_config=flags, cache_config=("local,size=1000000",)) as running:
        for name in MODELS:
            for value in (1, 2, 2, -1, 200, 200):
                _infer(running, name, value)
        yield running


def _infer(running: RunningServer, model: str, value: int) -> int:
    shape = [1, 1] if model == "batching" else [1]
    tensor = {"name": "I", "shape": shape, "datatype": "INT32", "data": [value]}
    return httpx.post(f"http://{running.http_url}/v2/models/{model}/infer", json={"inputs": [tensor]}).status_code


def _lines(running: RunningServer, start: str) -> dict[str, float]:
    text = httpx.get(f"http://{running.metrics_url}/metrics").text
    rows = (line.rpartition(" ") for line in text.splitlines() if line.startswith(start))
    return {name: float(value) for name, _, value in rows}


def _statistics(running: RunningServer, model: str) -> dict[str, Any]:
    (row,) = ask(running.http_url, "GET", f"/v2/models/{model}/stats")[1]["model_stats"]
    return dict(row)


@pytest.mark.parametrize("model", ["alone", "batching", "decoupled"])
def test_executions_that_fail_are_counted(served: RunningServer, model: str) -> None:
    """As executions and as failures, by reason; no inference comes of one that fails as a whole."""
    labels = f'{{model="{model}",version="1"}}'
    assert _lines(served, "nv_inference_exec_count")[f"nv_inference_exec_count{labels}"] == 6
    failed = f'nv_inference_request_failure{{model="{model}",reason="BACKEND",version="1"}}'
    assert _lines(served, "nv_inference_request_failure")[failed] == 3
    row = _statistics(served, model)
    assert (row["execution_count"], row["inference_count"]) == (6, 4)
    assert (row["inference_stats"]["success"]["count"], row["inference_stats"]["fail"]["count"]) == (3, 3)


def test_summaries_are_told_as_triton_tells_them(served: RunningServer) -> None:
    labels = 'model="alone",version="1"'
    for name in ("request", "queue", "compute_input", "compute_infer", "compute_output"):
        family = f"nv_inference_{name}_summary_us"
        found = _lines(served, family)
        assert found[f"{family}_count{{{labels}}}"] == 3
        if name in ("request", "compute_infer"):
            assert 0 < found[f'{family}{{{labels},quantile="0.5"}}'] <= found[f'{family}{{{labels},quantile="0.99"}}']
            assert found[f"{family}_sum{{{labels}}}"] > 0


def test_summaries_of_cached_models_are_of_their_look_ups(served: RunningServer) -> None:
    labels = '{model="cached",version="1"}'
    assert _lines(served, "nv_cache_hit_summary")[f"nv_cache_hit_summary_per_model_count{labels}"] == 1
    assert _lines(served, "nv_cache_miss_summary")[f"nv_cache_miss_summary_per_model_count{labels}"] == 5
    assert f"nv_inference_request_summary_us_count{labels}" not in _lines(served, "nv_inference_request_summary")
    assert not [line for line in _lines(served, "nv_cache_hit_summary") if 'model="alone"' in line]


@pytest.mark.parametrize("model", ["alone", "batching", "decoupled", "cached"])
def test_every_model_tells_when_its_first_response_came(served: RunningServer, model: str) -> None:
    name = "nv_inference_first_response_histogram_ms_count"
    assert _lines(served, name)[f'{name}{{model="{model}",version="1"}}'] == 3


def test_labels_are_in_the_order_of_triton(served: RunningServer) -> None:
    text = httpx.get(f"http://{served.metrics_url}/metrics").text
    assert 'nv_inference_request_success{_a="2",_z="1",model="tagged",version="1"} 3' in text
    for labels in re.findall(r"^\w+\{(.*)\} ", text, re.MULTILINE):
        names = re.findall(r'(\w+)="(?:[^"\\]|\\.)*"', labels)
        assert names == sorted(names, key=lambda name: (name in ("le", "quantile"), name))


def test_without_being_asked_for_there_are_no_summaries(tmp_path: Path) -> None:
    with running_server(tmp_path) as running:
        assert "summary" not in httpx.get(f"http://{running.metrics_url}/metrics").text
