"""Dashboard and rules ask for what the server really tells: compared with a scrape of it, example models loaded."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.certificates import Authority
from support.deployment import CHART, DOCKER, ROOT, metrics_of, read_yaml
from support.model_files import write_identity
from support.python_models import write_model as write_python_model
from support.serving import RunningServer, running_server
from support.tools import run_tool
from support.waiting import until_true

from modelserver.telemetry.gpu import GpuMemory, GpuReading, gpu_families
from tests.support.metrics_pages import render_text

DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text())
GROUPS = read_yaml(CHART / "files" / "alerts.yaml")["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = {
    **{f"panel {panel['title']}, {target['refId']}": target["expr"] for panel in PANELS for target in panel["targets"]},
    **{f"rule {rule.get('alert') or rule.get('record')}": rule["expr"] for rule in RULES},
}


def post(server: RunningServer, path: str, document: object) -> None:
    request = urllib.request.Request(f"http://{server.http_url}{path}", json.dumps(document).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200


def ask_tiny_chat(server: RunningServer) -> None:
    message = {"role": "user", "content": "hello"}
    post(server, "/v1/chat/completions", {"model": "tiny_chat", "messages": [message], "max_tokens": 8})


def metrics(server: RunningServer) -> str:
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


@pytest.fixture(scope="module")
def scrape(server: RunningServer) -> str:
    """The metrics of a server that has answered a model and a language model."""
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}
    post(server, "/v2/models/identity/infer", {"inputs": [tensor]})
    ask_tiny_chat(server)
    return metrics(server)


@pytest.fixture(scope="module")
def second_scrape(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The metrics of a server that has front processes, TLS, quotas, a cache, a canary, a shadow, a model in a process
    of its own, and models on demand."""
    root = tmp_path_factory.mktemp("second")
    write_identity(root, "split", versions=(1, 2), more="version_policy { all { } }")
    write_identity(root, "cached", more="response_cache { enable: true }")
    write_python_model(root, "class TritonPythonModel:\n    def execute(self, requests): return []\n")
    pair = Authority(root.parent).pair("server")
    tls = {"grpc_use_ssl": True, "grpc_server_cert": str(pair.certificate), "grpc_server_key": str(pair.key)}
    for name in ("turn", "about"):
        words = {"load_on_demand": "true", "resident_bytes": "60"}.items()
        more = "".join(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in words)
        write_identity(root, name, more=more)
    (root / "tiny_chat").symlink_to(ROOT / "model_repository" / "tiny_chat")
    options: dict[str, Any] = {"on_demand_memory_budget": 100, "cache_config": ("local,size=100000",), **tls}
    limits = "requests_per_second=1000,tokens_per_second=1000"
    with running_server(root, callers_by="address", caller_limits=limits, wire_processes=2, **options) as second:
        post(second, "/v2/repository/models/split/traffic", {"weights": {"1": 1}, "shadows": {"2": 1}})
        tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}
        for name in ("split", "cached", "cached", "turn", "about"):
            post(second, f"/v2/models/{name}/infer", {"inputs": [tensor]})
        ask_tiny_chat(second)
        until_true(lambda: "modelserver_shadow_requests_total{" in metrics(second), "the copy was compared")
        return metrics(second)


def of_gpus() -> str:
    """What a server tells of a GPU, which the machine of the test need not have."""
    reading = GpuReading(0, "GPU-1", "card", GpuMemory(100, 50), 0.5, 70.0, 300.0, 1000.0, (9, 0))
    return render_text(gpu_families([reading])).decode()


@pytest.fixture(scope="module")
def told(scrape: str, second_scrape: str) -> dict[str, set[str]]:
    """The names of samples and families, each with the labels it has been seen with."""
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(scrape + second_scrape + of_gpus()):
        for suffix in {"counter": ["", "_total"], "histogram": ["_bucket", "_count", "_sum"]}.get(family.type, [""]):
            labels.setdefault(family.name + suffix, set())
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


@pytest.mark.parametrize("query", QUERIES)
def test_every_metric_of_a_query_is_told_by_the_server(query: str, told: dict[str, set[str]]) -> None:
    records = {rule["record"] for rule in RULES if "record" in rule}
    names = metrics_of(QUERIES[query]) - records
    assert names <= set(told), QUERIES[query]
    assert names or metrics_of(QUERIES[query]) or "up{" in QUERIES[query]


@pytest.mark.parametrize("query", QUERIES)
def test_every_label_of_a_selector_is_one_that_the_metric_has(query: str, told: dict[str, set[str]]) -> None:
    of_prometheus = {"job", "instance", "namespace", "pod"}
    for name, selector in re.findall(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}", QUERIES[query]):
        wanted = set(re.findall(r"(\w+)\s*[=!]~?", selector)) - of_prometheus
        if told.get(name):  # a family without samples has shown no labels yet
            assert wanted <= told[name], f"{name}: {wanted}"


def test_a_metric_that_there_is_not_is_found_missing(told: dict[str, set[str]]) -> None:
    names = metrics_of('sum by (model) (rate(nv_inference_invented{model=~"$model"}[5m])) / 1e6')
    assert names == {"nv_inference_invented"}
    assert not names <= set(told)


@pytest.mark.parametrize(
    "path", [CHART / "templates" / "autoscaling.yaml", ROOT / "docs" / "operations.md"], ids=lambda path: path.name
)
def test_what_scales_the_server_is_told_by_it(path: Path, told: dict[str, set[str]]) -> None:
    names = set(re.findall(r"\b(nv_\w+)\{", path.read_text()))
    assert {"nv_inference_pending_request_count", "nv_inference_queue_duration_us"} <= names
    assert names <= set(told)


def test_the_endpoint_picker_of_the_gateway_finds_its_gauges(told: dict[str, set[str]]) -> None:
    for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        assert "model_name" in told[name]


def test_panels_have_ids_of_their_own_and_ask_the_chosen_source() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24


def test_variables_of_queries_are_defined() -> None:
    defined = {variable["name"] for variable in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    used = {name for query in QUERIES.values() for name in re.findall(r"\$(\w+)", query)}
    assert used <= defined


def test_every_alert_is_tested_raised_and_not_raised() -> None:
    tested = read_yaml(DOCKER / "prometheus" / "alerts_test.yaml")["tests"]
    alerts = {rule["alert"] for rule in RULES if "alert" in rule}
    raised = {case["alertname"] for test in tested for case in test["alert_rule_test"] if case["exp_alerts"]}
    quiet = {case["alertname"] for case in tested[0]["alert_rule_test"] if not case["exp_alerts"]}
    assert raised == alerts
    assert quiet == alerts


def test_every_alert_says_what_is_wrong_and_how_bad_it_is() -> None:
    for rule in RULES:
        if "alert" in rule:
            assert rule["labels"]["severity"] in {"critical", "warning", "info"}
            assert set(rule["annotations"]) == {"summary", "description"}


@pytest.mark.tool("promtool")
def test_promtool_accepts_rules_and_their_tests() -> None:
    run_tool("promtool", "check", "rules", str(CHART / "files" / "alerts.yaml"))
    run_tool("promtool", "test", "rules", str(DOCKER / "prometheus" / "alerts_test.yaml"))


@pytest.mark.tool("promtool")
def test_promtool_parses_every_query_of_the_dashboard(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": query.replace("$__rate_interval", "5m")}
        for number, query in enumerate(QUERIES.values())
    ]
    path = tmp_path / "panels.json"  # JSON is YAML
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    run_tool("promtool", "check", "rules", str(path))
