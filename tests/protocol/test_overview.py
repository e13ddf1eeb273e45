"""What people's tools ask: the overview, statistics that begin anew, and why a server is not ready."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from support.clients import HttpClient
from support.keys import KeyFile
from support.model_files import write_identity
from support.serving import RunningServer, running_server

from modelserver.auth.api_keys import Scope


@pytest.fixture(scope="module")
def served(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("overview")
    write_identity(repository, "one")
    write_identity(repository, "other")
    with running_server(repository) as running:
        yield running


def ask(url: str, path: str, method: str = "GET", **options: object) -> httpx.Response:
    return httpx.request(method, f"http://{url}{path}", timeout=10, **options)  # type: ignore[arg-type]


def row_of(document: dict[str, object], name: str) -> dict[str, object]:
    (row,) = (row for row in document["models"] if row["name"] == name)  # type: ignore[attr-defined]
    return dict(row)


def infer(served: RunningServer, name: str, times: int) -> None:
    with HttpClient(served) as client:
        for _ in range(times):
            client.infer(name, {"INPUT0": np.zeros((1, 16), np.float32)})


def test_the_overview_tells_of_server_host_and_models(served: RunningServer) -> None:
    infer(served, "one", 5)
    document = ask(served.http_url, "/v2/overview").json()
    assert document["server"]["ready"] is True
    assert document["server"]["reasons"] == []
    assert document["server"]["memory_bytes"] > 0
    assert 0 <= document["host"]["cpu_utilization"] <= 1
    row = row_of(document, "one")
    assert (row["state"], row["version"], row["backend"]) == ("READY", "1", "identity")
    assert row["success"] >= 5
    assert (row["fail"], row["queue_depth"], row["inflight"]) == (0, 0, 0)
    latency = row["latency"]
    assert 0 < latency["p50_ms"] <= latency["p90_ms"] <= latency["p99_ms"]
    assert sum(latency["counts"]) == row["success"]
    assert len(latency["counts"]) == len(document["latency_bounds_ms"]) + 1
    assert [instance["kind"] for instance in row["instances"]] == ["KIND_CPU"]


@pytest.mark.parametrize("path", ["/v2/models/one/stats/reset", "/v2/models/one/versions/1/stats/reset"])
def test_statistics_begin_anew_and_metrics_go_on(served: RunningServer, path: str) -> None:
    infer(served, "one", 3)
    infer(served, "other", 1)
    before = _successes(served, "one")
    assert ask(served.http_url, path, "POST").status_code == 200
    infer(served, "one", 2)
    with HttpClient(served) as client:
        (row,) = client.statistics("one")
        (other,) = client.statistics("other")
    assert row["inference_stats"]["success"]["count"] == 2
    assert [line["compute_infer"]["count"] for line in row["batch_stats"]] == [2]
    assert other["inference_stats"]["success"]["count"] >= 1
    assert _successes(served, "one") == before + 2


def _successes(served: RunningServer, name: str) -> float:
    lines = httpx.get(f"http://{served.metrics_url}/metrics").text.splitlines()
    (line,) = (line for line in lines if line.startswith("nv_inference_request_success") and f'model="{name}"' in line)
    return float(line.rsplit(" ", 1)[1])


def test_statistics_of_nobody_are_not_reset(served: RunningServer) -> None:
    assert ask(served.http_url, "/v2/models/nobody/stats/reset", "POST").status_code == 404


@pytest.mark.direct
def test_a_server_says_why_it_is_not_ready(layout: str, tmp_path: Path) -> None:
    write_identity(tmp_path, "good")
    (tmp_path / "bad" / "1").mkdir(parents=True)
    (tmp_path / "bad" / "config.pbtxt").write_text('backend: "nobody"')
    with running_server(tmp_path, exit_on_error=False) as running:
        answer = ask(running.http_url, "/v2/health/ready", headers={"Accept": "application/json"})
        assert answer.status_code == 400
        (reason,) = answer.json()["reasons"]
        assert "model 'bad' does not serve" in reason
        assert "nobody" in reason
        assert ask(running.http_url, "/v2/overview").json()["server"]["reasons"] == [reason]


@pytest.mark.direct
def test_without_a_key_the_reason_names_no_model(layout: str, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    (repository / "secret_model" / "1").mkdir(parents=True)
    (repository / "secret_model" / "config.pbtxt").write_text('backend: "nobody"')
    keys = KeyFile(tmp_path / "keys.yaml")
    watcher = keys.add("watcher", Scope.METRICS)
    user = keys.add("user", Scope.INFER)
    with running_server(repository, exit_on_error=False, api_keys_file=str(keys.path)) as running:
        answer = ask(running.http_url, "/v2/health/ready", headers={"Accept": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["reasons"]
        assert "secret_model" not in answer.text
        told = ask(running.http_url, "/v2/overview", headers={"Authorization": f"Bearer {watcher}"})
        assert "secret_model" in told.json()["server"]["reasons"][0]
        for key, status in ((user, 403), ("", 401)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            assert ask(running.http_url, "/v2/overview", headers=headers).status_code == status
            assert ask(running.http_url, "/v2/models/stats/reset", "POST", headers=headers).status_code == status
