"""KServe's runtimes: their form, and that what they start serves what KServe mounts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support.clients import HttpClient
from support.deployment import DOCKER, ROOT
from support.serving import running_server
from support.tools import tool

from modelserver.options.sources import resolve_options

RUNTIMES = {
    runtime["metadata"]["name"]: runtime
    for runtime in yaml.safe_load_all((DOCKER / "kserve" / "runtime.yaml").read_text())
}
SERVICES = list(yaml.safe_load_all((DOCKER / "kserve" / "inferenceservice.yaml").read_text()))
MODELS = ROOT / "model_repository"


def container(name: str) -> Any:
    (only,) = RUNTIMES[name]["spec"]["containers"]
    return only


def closed(schema: Any) -> Any:
    """A schema of Kubernetes as one of JSON Schema that refuses unknown fields, which the API server would drop."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    literal = ("required", "enum", "default")
    result = {key: part if key in literal else closed(part) for key, part in schema.items()}
    if "properties" in result and not result.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    return result


@cache
def crd_validator(plural: str, version: str) -> jsonschema.Draft7Validator:
    text = (Path(tool("kserve-crds")) / f"serving.kserve.io_{plural}.yaml").read_text()
    definition = yaml.load(text, yaml.CSafeLoader)  # megabytes: Python's own loader takes most of a minute
    (found,) = [entry for entry in definition["spec"]["versions"] if entry["name"] == version]
    schema = closed(found["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft7Validator(schema)


@pytest.mark.tool("kserve-crds")
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_runtime_is_what_kserve_defines(runtime: str) -> None:
    validator = crd_validator("clusterservingruntimes", "v1alpha1")
    validator.validate(RUNTIMES[runtime])
    assert not validator.is_valid(RUNTIMES[runtime] | {"spec": {**RUNTIMES[runtime]["spec"], "invented": 1}})


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_runtime_starts_the_server_with_options_that_it_has(runtime: str) -> None:
    command, *arguments = container(runtime)["args"]
    options = resolve_options([word.replace("{{.Name}}", "digits") for word in arguments], {}).options
    assert command == "serve"
    assert options.model_repository == ("/mnt/models",)
    ports = {port["containerPort"] for port in container(runtime)["ports"]}
    assert ports == {options.http_port}
    assert RUNTIMES[runtime]["spec"]["annotations"]["prometheus.kserve.io/port"] == str(options.metrics_port)
    # KServe leaves a pod the 30 s that Kubernetes gives to one.
    assert options.drain_delay_secs >= 5
    assert options.drain_delay_secs + options.exit_timeout_secs <= 25


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_only_liveness_does_not_ask_for_the_models(runtime: str) -> None:
    paths = {
        kind: container(runtime)[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")
    }
    assert paths == {"startup": "/v2/health/ready", "readiness": "/v2/health/ready", "liveness": "/v2/health/live"}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_runtime_is_confined_and_has_the_name_that_kserve_wants(runtime: str) -> None:
    assert container(runtime)["name"] == "kserve-container"
    context = container(runtime)["securityContext"]
    assert (context["runAsUser"], context["readOnlyRootFilesystem"], context["capabilities"]) == (
        1000,
        True,
        {"drop": ["ALL"]},
    )
    mounted = {mount["name"] for mount in container(runtime)["volumeMounts"]}
    assert mounted == {volume["name"] for volume in RUNTIMES[runtime]["spec"]["volumes"]}


def test_no_format_is_chosen_automatically_for_both_runtimes() -> None:
    formats = [
        (entry["name"], entry.get("priority"))
        for runtime in RUNTIMES.values()
        for entry in runtime["spec"]["supportedModelFormats"]
        if entry.get("autoSelect")
    ]
    assert len({name for name, _ in formats}) == len(formats)


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service["metadata"]["name"])
def test_an_example_asks_for_a_format_that_its_runtime_has(service: Any) -> None:
    model = service["spec"]["predictor"]["model"]
    runtime = RUNTIMES[model["runtime"]]["spec"]
    assert model["modelFormat"]["name"] in {entry["name"] for entry in runtime["supportedModelFormats"]}
    assert model["protocolVersion"] in runtime["protocolVersions"]


@pytest.mark.tool("kserve-crds")
@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service["metadata"]["name"])
def test_an_example_is_what_kserve_defines(service: Any) -> None:
    crd_validator("inferenceservices", "v1beta1").validate(service)


def mount(tmp_path: Path, storage: Path) -> Path:
    """What KServe's sidecar for images makes: /mnt/models is a symbolic link to where the files are."""
    link = tmp_path / "models"
    link.symlink_to(storage, target_is_directory=True)
    return link


def test_one_model_is_served_under_the_name_of_its_service(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    (storage / "model.onnx").write_bytes(next((MODELS / "digits_onnx").rglob("*.onnx")).read_bytes())
    storage.chmod(0o555)
    with running_server(mount(tmp_path, storage), model_name="digits") as server, HttpClient(server) as client:
        assert client.is_model_ready("digits")


def test_a_repository_is_served_under_the_names_of_its_models(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    (storage / "mine").symlink_to(MODELS / "identity", target_is_directory=True)
    with running_server(mount(tmp_path, storage)) as server, HttpClient(server) as client:
        assert client.is_model_ready("mine")
