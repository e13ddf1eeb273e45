"""compose.yaml: what it mounts exists, what it runs is confined, what it scrapes is ours."""

from __future__ import annotations

import pytest
from support.deployment import DOCKER, read_yaml
from support.tools import run_tool

COMPOSE = read_yaml(DOCKER / "compose.yaml")
SERVICES = COMPOSE["services"]


def test_every_file_that_is_mounted_exists() -> None:
    mounts = [mount for service in SERVICES.values() for mount in service["volumes"] if mount.startswith(".")]
    assert len(mounts) >= 4
    for mount in mounts:
        assert (DOCKER / mount.split(":")[0]).exists(), mount


def test_every_named_volume_is_declared() -> None:
    named = {
        mount.split(":")[0] for service in SERVICES.values() for mount in service["volumes"] if mount[0] not in "./$"
    }
    assert named == set(COMPOSE["volumes"])


def test_the_server_can_write_to_its_volumes_only_and_has_time_to_drain() -> None:
    server = SERVICES["server"]
    assert server["read_only"] is True
    assert server["cap_drop"] == ["ALL"]
    exit_timeout_s = next(int(word.partition("=")[2]) for word in server["command"] if "exit-timeout" in word)
    assert int(server["stop_grace_period"].removesuffix("s")) > exit_timeout_s + 5


@pytest.mark.parametrize("service", SERVICES)
def test_ports_are_open_to_this_machine_only_and_images_are_pinned(service: str) -> None:
    for port in SERVICES[service]["ports"]:
        assert port.startswith(("127.0.0.1:", "${MODELSERVER_BIND:-127.0.0.1}:"))
    tag = SERVICES[service]["image"].partition(":")[2]
    assert tag
    assert tag != "latest"


def test_prometheus_scrapes_the_metrics_port_and_reads_the_rules() -> None:
    prometheus = read_yaml(DOCKER / "prometheus" / "prometheus.yaml")
    assert prometheus["scrape_configs"][0]["static_configs"][0]["targets"] == ["server:8002"]
    assert any(mount.endswith("/" + prometheus["rule_files"][0] + ":ro") for mount in SERVICES["prometheus"]["volumes"])


def test_grafana_finds_its_dashboard_where_it_is_mounted() -> None:
    provider = read_yaml(DOCKER / "grafana" / "provisioning" / "dashboards" / "modelserver.yaml")["providers"][0]
    targets = [mount.split(":")[1] for mount in SERVICES["grafana"]["volumes"]]
    assert any(target.startswith(provider["options"]["path"] + "/") for target in targets)


@pytest.mark.tool("check-jsonschema")
def test_compose_files_have_the_right_form() -> None:
    files = [str(DOCKER / name) for name in ("compose.yaml", "compose.gpu.yaml")]
    run_tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", *files)
