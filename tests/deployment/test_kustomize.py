"""The overlays: one image each, GPUs where they say so; built by kubectl where it is there."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
import yaml
from support.deployment import DOCKER, read_yaml
from support.tools import run_tool

VERSION = tomllib.loads((DOCKER.parent / "pyproject.toml").read_text())["project"]["version"]
OVERLAYS = {"cpu": f"{VERSION}-cpu", "gpu": f"{VERSION}-cuda"}


def built(overlay: str) -> dict[str, Any]:
    text = run_tool("kubectl", "kustomize", str(DOCKER / "kustomize" / "overlays" / overlay))
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_changes_the_image_that_the_base_has(overlay: str) -> None:
    directory = DOCKER / "kustomize" / "overlays" / overlay
    changes = read_yaml(directory / "kustomization.yaml")
    assert changes["images"] == [{"name": "modelserver", "newTag": OVERLAYS[overlay]}]
    for resource in changes["resources"]:
        assert (directory / resource).exists()
    documents = yaml.safe_load_all((DOCKER / "kustomize" / "base" / "modelserver.yaml").read_text())
    (deployment,) = [document for document in documents if document["kind"] == "Deployment"]
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"].startswith("modelserver:")
    assert "lifecycle" not in deployment["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.tool("kubectl")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubectl_builds_an_overlay(overlay: str) -> None:
    manifests = built(overlay)
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == f"modelserver:{OVERLAYS[overlay]}"
    assert ("nvidia.com/gpu" in json.dumps(pod)) == (overlay == "gpu")
    assert {document["metadata"].get("namespace", "modelserver") for document in manifests.values()} == {"modelserver"}
    assert manifests["Namespace"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
