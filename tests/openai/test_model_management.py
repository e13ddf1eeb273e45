"""Loading and unloading models over OpenAI's API, and the metrics on the port of that API."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from support.keys import KeyFile
from support.mock_llm import PLAIN_INPUTS, PLAIN_OUTPUTS, write_mock_llm
from support.serving import RunningServer, running_server

from modelserver.auth.api_keys import SCOPES


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyFile:
    file = KeyFile(tmp_path_factory.mktemp("keys") / "keys.yaml")
    for scope in SCOPES:
        file.add(scope.value, scope)
    return file


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, keys: KeyFile) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("models")
    write_mock_llm(root, "mock", inputs=PLAIN_INPUTS, outputs=PLAIN_OUTPUTS)
    with running_server(root, model_control_mode="explicit", api_keys_file=str(keys.path)) as running:
        yield running


def client_of(served: RunningServer, key: str) -> httpx.Client:
    return httpx.Client(base_url=f"http://{served.http_url}", headers={"Authorization": f"Bearer {key}"}, timeout=20)


def test_a_model_is_loaded_and_unloaded(served: RunningServer, keys: KeyFile) -> None:
    with (
        client_of(served, keys.texts["admin"]) as admin,
        openai.OpenAI(base_url=f"http://{served.http_url}/v1", api_key=keys.texts["infer"], max_retries=0) as client,
    ):
        for _ in range(2):
            loaded = admin.post("/v1/models/mock/load")
            assert loaded.status_code == 200, loaded.text
            assert (loaded.json()["id"], loaded.json()["object"]) == ("mock", "model")
            assert client.completions.create(model="mock", prompt="a b").choices[0].text == "a b"
            unloaded = admin.post("/v1/models/mock/unload", json={})
            assert unloaded.json() == {"status": "success", "model": "mock"}
            assert admin.get("/v2/models/mock/ready").status_code != 200


def test_what_cannot_be_loaded_is_told_in_the_api_s_form(served: RunningServer, keys: KeyFile) -> None:
    with client_of(served, keys.texts["admin"]) as admin:
        missing = admin.post("/v1/models/nothing/load")
        assert missing.status_code in (400, 404)
        assert "nothing" in missing.json()["error"]["message"]
        config = admin.post("/v1/models/mock/load", json={"parameters": {"config": "{}"}})
        assert config.status_code == 400
        assert "/v2/repository/models/mock/load" in config.json()["error"]["message"]
        assert admin.get("/v1/models/mock/load").json()["error"]["code"] == "method_not_allowed"
    with client_of(served, keys.texts["infer"]) as caller:
        assert caller.post("/v1/models/mock/unload").json()["error"]["code"] == "permission_denied"


@pytest.mark.direct
def test_metrics_are_on_the_http_port_too(served: RunningServer, keys: KeyFile) -> None:
    with client_of(served, keys.texts["metrics"]) as scraper, httpx.Client() as plain:
        page = scraper.get("/metrics")
        assert page.headers["content-type"].startswith("text/plain")
        assert "modelserver_build_info" in page.text
        assert (
            "openmetrics"
            in scraper.get("/metrics", headers={"Accept": "application/openmetrics-text"}).headers["content-type"]
        )
        assert scraper.head("/metrics").content == b""
        assert scraper.post("/metrics").status_code == 405
        assert plain.get(f"http://{served.http_url}/metrics").status_code == 401
    with client_of(served, keys.texts["infer"]) as caller:
        assert caller.get("/metrics").status_code == 403


@pytest.mark.direct
def test_metrics_follow_their_flags(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("none")
    with running_server(root, allow_metrics=False) as server:
        assert httpx.get(f"http://{server.http_url}/metrics").status_code == 404
    with running_server(root, http_restricted_api=("statistics:x-own=secret",)) as server:
        url = f"http://{server.http_url}/metrics"
        assert httpx.get(url).status_code == 403
        assert "nv_cpu_utilization" in httpx.get(url, headers={"x-own": "secret"}).text
