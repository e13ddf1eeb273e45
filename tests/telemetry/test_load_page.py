"""The load in a few totals, as an endpoint picker reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.model_files import write_identity
from support.serving import running_server

from modelserver.errors import NotFoundError
from modelserver.telemetry.load_page import LoadPage
from modelserver.telemetry.measurement import Measurement


@dataclass(eq=False)
class Model:
    """`waiting` are the requests that wait within a language model, by instance."""

    name: str
    inflight: int = 0
    queue_depth: int = 0
    is_ensemble: bool = False
    waiting: tuple[int, ...] = ()
    use: float = 0.0
    num_measured: int = 0

    @property
    def measures(self) -> bool:
        return bool(self.waiting)

    def measure(self) -> Sequence[Sequence[Measurement]]:
        self.num_measured += 1
        labels = {"block_size": "16", "num_gpu_blocks": "512"}
        return [
            [
                Measurement("vllm:num_requests_waiting", "gauge", "", number, adds_queue=True),
                Measurement("vllm:kv_cache_usage_perc", "gauge", "", self.use),
                Measurement("vllm:cache_config_info", "gauge", "", 1.0, labels),
            ]
            for number in self.waiting
        ]


def read(page: bytes) -> dict[str, float]:
    families = list(text_string_to_metric_families(page.decode()))
    assert all(family.type == "gauge" and len(family.samples) == 1 for family in families)
    return {family.name: family.samples[0].value for family in families}


MODELS = (
    Model("resnet", inflight=7, queue_depth=4),
    Model("llm", inflight=9, queue_depth=1, waiting=(2, 3), use=0.25),
    Model("llm", inflight=1, waiting=(0,), use=0.5),
    Model("pipeline", inflight=7, is_ensemble=True),
)


def test_totals_of_all_models() -> None:
    """What waits in queues or in engines, and what runs. An ensemble's requests are those of its steps."""
    assert read(LoadPage(lambda: MODELS).text()) == {
        "vllm:num_requests_waiting": 10,
        "vllm:num_requests_running": 7,
        "vllm:kv_cache_usage_perc": 0.5,
        "vllm:cache_config_info": 1,
        "nv_inference_pending_request_count": 5,
        "modelserver_running_requests": 12,
        "modelserver_inflight_requests": 17,
    }


def test_one_model() -> None:
    page = LoadPage(lambda: MODELS)
    assert read(page.text("resnet"))["vllm:num_requests_waiting"] == 4
    assert read(page.text("pipeline"))["modelserver_inflight_requests"] == 7
    assert b'vllm:cache_config_info{block_size="16",num_gpu_blocks="512"} 1\n' in page.text("llm")
    assert b"cache_config_info" not in page.text("resnet")
    with pytest.raises(NotFoundError, match="no version of model 'absent' is loaded"):
        page.text("absent")


def test_language_models_are_measured_ten_times_a_second_at_most() -> None:
    now_s, model = 0.0, Model("llm", waiting=(1,))
    page = LoadPage(lambda: (model,), lambda: now_s)
    for _ in range(20):
        page.text()
        now_s += 0.05
    assert model.num_measured <= 11


def test_the_http_port_and_the_metrics_port_have_it(tmp_path: Path) -> None:
    write_identity(tmp_path, "m")
    with running_server(tmp_path) as running:
        for port in (running.http_url, running.metrics_url):
            answer = httpx.get(f"http://{port}/metrics/load")
            assert answer.headers["content-type"].startswith("text/plain")
            assert read(answer.content)["modelserver_inflight_requests"] == 0
        absent = httpx.get(f"http://{running.http_url}/metrics/load?model=absent")
        assert (absent.status_code, absent.text) == (404, "no version of model 'absent' is loaded\n")
