"""Endpoint pickers, routes and autoscalers: what they name of the server is there, under that path, port and name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from support.deployment import CHART, DOCKER, read_yaml
from support.keys import KeyFile
from support.mock_llm import write_mock_llm
from support.serving import RunningServer, running_server

from modelserver.auth.access import OBJECTIVE_HEADER, Access, parse_objectives
from modelserver.auth.api_keys import Scope
from modelserver.errors import InvalidArgumentError
from modelserver.options.sources import resolve_options
from modelserver.protocol.kserve import SERVICE

GATEWAY = DOCKER / "gateway"
PORTS = read_yaml(CHART / "values.yaml")["ports"]


def documents(path: Path) -> dict[str, Any]:
    """By kind."""
    return {each["kind"]: each for each in yaml.safe_load_all(path.read_text())}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("models")
    write_mock_llm(root, "mock")
    with running_server(root) as running:
        yield running


def test_the_picker_finds_its_gauges_where_it_looks(served: RunningServer) -> None:
    """By the names that it has for vLLM, one series each."""
    found = documents(GATEWAY / "inferencepool.yaml")
    config = yaml.safe_load(found["ConfigMap"]["data"]["epp.yaml"])
    (source,) = [each for each in config["plugins"] if each["type"] == "metrics-data-source"]
    page = httpx.get(f"http://{served.http_url}{source['parameters']['path']}").text
    for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        assert sum(line.startswith(name) for line in page.splitlines()) == 1
    plugins = {each["type"] for each in config["plugins"]}
    assert {each["pluginRef"] for profile in config["schedulingProfiles"] for each in profile["plugins"]} <= plugins
    pool = found["InferencePool"]
    assert pool["spec"]["targetPorts"] == [{"number": PORTS["http"]}]
    assert found["HTTPRoute"]["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"]
    labels = (CHART / "templates" / "_helpers.tpl").read_text()
    assert all(label in labels for label in pool["spec"]["selector"]["matchLabels"])


def test_the_page_has_the_access_rules_of_the_metrics(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.yaml")
    keys.add("picker", Scope.METRICS)
    with running_server(tmp_path, api_keys_file=str(keys.path)) as running:
        for path in ("/metrics", "/metrics/load"):
            assert httpx.get(f"http://{running.http_url}{path}").status_code == 401
            headers = {"authorization": f"Bearer {keys.texts['picker']}"}
            assert httpx.get(f"http://{running.http_url}{path}", headers=headers).status_code == 200


def test_routes_lead_to_paths_and_services_that_are_there(served: RunningServer) -> None:
    found = documents(GATEWAY / "routes.yaml")
    (rule,) = found["HTTPRoute"]["spec"]["rules"]
    prefixes = {match["path"]["value"] for match in rule["matches"]}
    ingress = found["Ingress"]["spec"]["rules"][0]["http"]["paths"]
    assert {each["path"] for each in ingress} <= prefixes
    paths = httpx.get(f"http://{served.http_url}/openapi.json").json()["paths"]
    assert all(any(path.startswith(prefix) for path in paths) for prefix in prefixes)
    assert {ref["port"] for ref in rule["backendRefs"]} == {PORTS["http"]}
    assert {each["backend"]["service"]["port"]["number"] for each in ingress} == {PORTS["http"]}
    (rule,) = found["GRPCRoute"]["spec"]["rules"]
    services = {match["method"]["service"] for match in rule["matches"]}
    assert services == {SERVICE, "grpc.health.v1.Health"}
    assert {ref["port"] for ref in rule["backendRefs"]} == {PORTS["grpc"]}


def test_kserves_language_models_start_this_server_by_vllms_flags(served: RunningServer) -> None:
    service = read_yaml(DOCKER / "kserve" / "llminferenceservice.yaml")
    (container,) = service["spec"]["template"]["containers"]
    assert container["name"] == "main"
    assert container["command"] == ["modelserver", "serve"]
    options = resolve_options(container["args"], {}).options
    assert options.model_name == service["spec"]["model"]["name"]
    assert (options.http_port, options.host) == (container["ports"][0]["containerPort"], "0.0.0.0")
    assert options.tls_cert.endswith("tls.crt")
    assert options.tls_key.endswith("tls.key")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert httpx.get(f"http://{served.http_url}{container[probe]['httpGet']['path']}").status_code == 200


def test_an_objective_is_a_priority() -> None:
    access = Access(objectives=parse_objectives("--inference-objectives", "chat=1, batch=9"))
    assert [access.priority({OBJECTIVE_HEADER: name}) for name in ("chat", "batch", "other")] == [1, 9, 0]
    assert access.priority({}) == 0
    for text in ("chat", "chat=0", "=1", "chat=x"):
        with pytest.raises(InvalidArgumentError, match="--inference-objectives expects NAME=LEVEL"):
            parse_objectives("--inference-objectives", text)
