"""Routers on Kubernetes: their flags are the program's, and what they and KEDA ask for is there."""

from __future__ import annotations

from typing import Any

import httpx
import yaml
from support.deployment import CHART, DOCKER
from support.routing import OK, replicas, running_router
from typer.main import get_command

from modelserver.cli.main import app
from modelserver.cluster import serve_app
from modelserver.cluster.deployment import parse_deployment, read_deployment
from modelserver.options.router_options import resolve_router_options


def documents(*parts: str) -> dict[str, Any]:
    """By kind."""
    return {each["kind"]: each for each in yaml.safe_load_all(DOCKER.joinpath(*parts).read_text())}


def test_a_routers_flags_and_probes_are_there() -> None:
    found = documents("router", "router.yaml")
    spec = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["command"] == ["modelserver", "route"]
    options = resolve_router_options(container["args"], {})
    service, _, port = options.routing.discover.removeprefix("dns://").partition(":")
    chart = (CHART / "templates" / "services.yaml").read_text()
    assert service.removeprefix("modelserver") == "-metrics"
    assert "{{ $name }}-metrics" in chart
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert int(port) == ports["http"] == options.server.http_port
    assert ports["grpc"] == options.server.grpc_port
    assert ports["metrics"] == options.server.metrics_port
    assert options.server.drain_delay_secs < spec["terminationGracePeriodSeconds"]
    path = container["readinessProbe"]["httpGet"]["path"]
    gauge = documents("router", "keda.yaml")["ScaledObject"]["spec"]["triggers"][0]["metadata"]["query"]
    with replicas(lambda *_: OK) as (replica,), running_router((replica.url,)) as router:
        assert httpx.get(f"http://{router.http_url}{path}").status_code == 200
        page = httpx.get(f"http://{router.metrics_url}/metrics").text
        assert f"\n{gauge.removeprefix('sum(').removesuffix(')')} " in page


def test_what_a_ray_cluster_deploys_can_be_read(tmp_path: Any) -> None:
    found = documents("ray", "raycluster.yaml")
    (container,) = found["Job"]["spec"]["template"]["spec"]["containers"]
    commands: Any = get_command(app)
    parsed = commands.commands[container["command"][1]].make_context("deploy", list(container["args"]))
    head = found["RayCluster"]["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    ports = {each["name"]: each["containerPort"] for each in head["ports"]}
    assert parsed.params["address"] == f"ray://ray-head-svc:{ports['client']}"
    (tmp_path / "deploy.yaml").write_text(found["ConfigMap"]["data"]["deploy.yaml"])
    assert read_deployment(tmp_path / "deploy.yaml").discovery_port == ports["discovery"]


def test_what_a_ray_service_runs_is_there() -> None:
    spec = documents("ray", "rayservice.yaml")["RayService"]["spec"]
    config = yaml.safe_load(spec["serveConfigV2"])
    (application,) = config["applications"]
    assert application["import_path"] == f"{serve_app.__name__}:{serve_app.build.__name__}"
    deployment = parse_deployment(application["args"], "args")
    cluster = spec["rayClusterConfig"]
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in head["ports"]}
    assert deployment.discovery_port == ports["discovery"]
    (workers,) = cluster["workerGroupSpecs"]
    (worker,) = workers["template"]["spec"]["containers"]
    assert float(worker["resources"]["requests"]["cpu"]) >= deployment.pools[0].resources.cpus
    # No proxy of Serve's: clients ask the routers.
    assert config["proxy_location"] == "Disabled"
