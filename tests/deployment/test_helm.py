"""The chart: its values against its schema, its files against each other; rendered where helm's library is."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support.deployment import CHART, DOCKER, ROOT, read_yaml
from support.tools import run_tool

from modelserver.options.sources import read_file
from modelserver.options.table import option_table

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = read_yaml(CHART / "values.yaml")
VARIANTS = {"default": {}} | {
    path.stem: read_yaml(path) for path in sorted((ROOT / "tests" / "deployment" / "values").glob("*.yaml"))
}
TEMPLATES = sorted((CHART / "templates").iterdir())
NAME = "models-modelserver"
helm = pytest.mark.tool("helm_python")


def merged(base: Any, over: Any) -> Any:
    """Values as helm merges them: mappings by key, anything else replaced."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return base | {key: merged(base.get(key), part) for key, part in over.items()}


@cache
def rendered(variant: str, release: str = "models") -> dict[tuple[str, str], Any]:
    """The manifests of the chart by kind and name."""
    from helm_python.chart import Chart

    files = Chart.load(str(CHART)).render(VARIANTS[variant], name=release, namespace="serving")
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    documents = [document for text in texts for document in yaml.safe_load_all(text) if document]
    return {(document["kind"], document["metadata"]["name"]): document for document in documents}


def pod_of(variant: str) -> Any:
    return rendered(variant)["Deployment", NAME]["spec"]["template"]["spec"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_values_have_the_form_of_the_schema(variant: str) -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(merged(VALUES, VARIANTS[variant]), SCHEMA)


@pytest.mark.parametrize(
    "wrong",
    [
        {"replica": 3},
        {"image": {"tag": "latest"}},
        {"image": {"digest": "sha256:12"}},
        {"model": {"source": "nfs"}},
        {"model": {"source": "s3"}},
        {"model": {"source": "oci"}},
        {"ports": {"http": 80}},
        {"gpu": {"count": 0}},
        {"options": {"--http-port": 1}},
        {"autoscaling": {"kind": "hpa", "minReplicas": 0}},
        {"podDisruptionBudget": {"maxUnavailable": 0}},
        {"monitoring": {"serviceMonitor": {"authorization": {"secret": "s", "key": ""}}}},
        {"monitoring": {"serviceMonitor": {"authorization": {"credentials": "key"}}}},
        {"monitoring": {"serviceMonitor": {"tlsConfig": {"caFile": "/ca.crt"}}}},
    ],
    ids=str,
)
def test_values_that_are_wrong_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(merged(VALUES, wrong), SCHEMA)


def test_templates_use_values_that_there_are_and_all_of_them_are_used() -> None:
    text = "\n".join(path.read_text() for path in TEMPLATES)
    for dotted in set(re.findall(r"\.Values\.([A-Za-z0-9.]+)", text)):
        place: Any = VALUES
        for part in dotted.rstrip(".").split("."):
            assert part in place, dotted
            place = place[part]
    for key in VALUES:
        assert f".Values.{key}" in text, key


def test_options_that_the_chart_sets_are_options_of_the_server() -> None:
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    names = {name.replace("-", "_") for name in re.findall(r'(?:\$known|dict|" )\s*"([a-z]+(?:-[a-z]+)+)"', helpers)}
    assert "http_address" in names
    assert names <= {option.name for option in option_table()}


@helm
def test_helm_lints_the_chart() -> None:
    from helm_python import lint

    assert lint(str(CHART))["errors"] == []


@helm
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_options_file_is_one_that_the_server_reads(variant: str, tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(rendered(variant)["ConfigMap", NAME]["data"]["options.yaml"])
    options = read_file(path)
    assert options["http_port"] == 8000
    assert options["log_format"] == "json"


@helm
@pytest.mark.tool("kubernetes_validate")
@pytest.mark.parametrize("variant", VARIANTS)
def test_manifests_are_what_kubernetes_defines(variant: str) -> None:
    """From the oldest version that the chart takes on; volumes of images are younger."""
    import kubernetes_validate

    (oldest,) = re.findall(r">=(1\.\d+)\.0-0", read_yaml(CHART / "Chart.yaml")["kubeVersion"])
    versions = ["1.33"] if variant == "keda" else [oldest, "1.33"]
    foreign = {"ServiceMonitor", "PrometheusRule", "ScaledObject"}
    checked = [document for (kind, _), document in rendered(variant).items() if kind not in foreign]
    for document in checked:
        for version in versions:
            kubernetes_validate.validate(document, version, strict=True)
    assert len(checked) >= 8


@helm
@pytest.mark.parametrize("variant", VARIANTS)
def test_services_and_policies_select_the_pods_and_name_their_ports(variant: str) -> None:
    manifests = rendered(variant)
    labels = manifests["Deployment", NAME]["spec"]["template"]["metadata"]["labels"]
    ports = {port["name"] for port in pod_of(variant)["containers"][0]["ports"]}
    services = [document["spec"] for (kind, _), document in manifests.items() if kind == "Service"]
    assert len(services) == 3
    for spec in services:
        assert spec["selector"].items() <= labels.items()
        assert {port["targetPort"] for port in spec["ports"]} <= ports
    assert manifests["Service", f"{NAME}-grpc"]["spec"]["clusterIP"] == "None"
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        spec = manifests[kind, NAME]["spec"]
        assert (spec.get("selector") or spec["podSelector"])["matchLabels"].items() <= labels.items()


@helm
def test_liveness_does_not_depend_on_models() -> None:
    container = pod_of("default")["containers"][0]
    assert container["livenessProbe"]["httpGet"]["path"] == "/v2/health/live"
    assert container["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready"
    startup = container["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] >= VALUES["probes"]["loadSeconds"]


@helm
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_pod_has_the_time_that_its_server_takes_to_stop(variant: str) -> None:
    """The server says itself that it leaves: kubelet sends SIGTERM at once, and kills not before all is unloaded."""
    options = yaml.safe_load(rendered(variant)["ConfigMap", NAME]["data"]["options.yaml"])
    pod = pod_of(variant)
    assert options["drain-delay-secs"] >= 1
    assert pod["terminationGracePeriodSeconds"] >= options["drain-delay-secs"] + options["exit-timeout-secs"] + 10
    assert isinstance(pod["terminationGracePeriodSeconds"], int)
    assert "lifecycle" not in pod["containers"][0]


@helm
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_mount_has_its_volume(variant: str) -> None:
    pod = pod_of(variant)
    mounted = [mount["name"] for mount in pod["containers"][0]["volumeMounts"]]
    assert sorted(mounted) == sorted(volume["name"] for volume in pod["volumes"])
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True


@helm
def test_gpus_are_asked_for_and_tolerated_and_chosen() -> None:
    pod = pod_of("full")
    assert pod["containers"][0]["resources"]["limits"] == {"memory": "16Gi", "nvidia.com/gpu": 2}
    assert pod["nodeSelector"] == {"kubernetes.io/arch": "amd64", "nvidia.com/gpu.product": "NVIDIA-L4"}
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert pod["containers"][0]["image"].endswith("-cuda")


@helm
def test_models_come_from_where_the_values_say() -> None:
    volumes = {v: {volume["name"]: volume for volume in pod_of(v)["volumes"]} for v in VARIANTS}
    assert volumes["default"]["models"]["persistentVolumeClaim"]["claimName"] == f"{NAME}-models"
    assert volumes["keda"]["models"]["image"]["reference"] == "registry.example.org/models:1"
    assert "models" not in volumes["full"]
    assert "s3://models/production" in rendered("full")["ConfigMap", NAME]["data"]["options.yaml"]


@helm
def test_replicas_are_left_to_whoever_scales() -> None:
    assert rendered("default")["Deployment", NAME]["spec"]["replicas"] == VALUES["replicas"]
    for variant, kind in (("full", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")):
        assert "replicas" not in rendered(variant)["Deployment", NAME]["spec"]
        assert rendered(variant)[kind, NAME]["spec"]["scaleTargetRef"]["name"] == NAME


@helm
def test_prometheus_has_the_key_and_the_certificates_that_the_server_wants() -> None:
    (keyed,) = rendered("full")["ServiceMonitor", NAME]["spec"]["endpoints"]
    assert keyed["authorization"] == {"type": "Bearer", "credentials": {"name": "prometheus-key", "key": "key"}}
    assert keyed["scheme"] == "https"
    assert keyed["tlsConfig"] == VARIANTS["full"]["monitoring"]["serviceMonitor"]["tlsConfig"]
    (mutual,) = rendered("keda")["ServiceMonitor", NAME]["spec"]["endpoints"]
    assert "authorization" not in mutual
    assert mutual["tlsConfig"]["serverName"] == f"{NAME}-metrics.serving.svc"
    assert mutual["tlsConfig"]["keySecret"] == {"name": "server-tls", "key": "tls.key"}


@helm
@pytest.mark.tool("promtool")
def test_promtool_parses_the_queries_that_keda_asks(tmp_path: Path) -> None:
    triggers = rendered("keda")["ScaledObject", NAME]["spec"]["triggers"]
    rules = [{"record": f"keda:{number}", "expr": each["metadata"]["query"]} for number, each in enumerate(triggers)]
    path = tmp_path / "keda.json"  # JSON is YAML
    path.write_text(json.dumps({"groups": [{"name": "keda", "rules": rules}]}))
    run_tool("promtool", "check", "rules", str(path))
    assert len(rules) == 2


@helm
def test_the_rules_and_the_dashboard_are_those_of_the_files() -> None:
    rules = rendered("full")["PrometheusRule", NAME]["spec"]
    assert rules == read_yaml(CHART / "files" / "alerts.yaml")
    told = rendered("full")["ConfigMap", f"{NAME}-dashboard"]["data"]["modelserver.json"]
    assert json.loads(told) == json.loads((CHART / "files" / "dashboard.json").read_text())


@helm
def test_the_base_of_kustomize_is_the_chart_with_its_defaults() -> None:
    base = {
        (document["kind"], document["metadata"]["name"]): document
        for document in yaml.safe_load_all((DOCKER / "kustomize" / "base" / "modelserver.yaml").read_text())
    }
    chart = {key: part for key, part in rendered("default", "modelserver").items() if key[0] != "Pod"}
    assert set(base) == set(chart)
    for key, document in chart.items():
        if key[0] == "Deployment":
            document["spec"]["template"]["metadata"] = base[key]["spec"]["template"]["metadata"]
        assert base[key].get("spec") == document.get("spec"), key
        assert base[key].get("data") == document.get("data"), key
