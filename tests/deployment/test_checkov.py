"""checkov's policies for the Dockerfile and for what Kubernetes is given; what is not ours to follow has a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.deployment import DOCKER
from support.tools import run_tool

FILES = ("Dockerfile", "kustomize/base/modelserver.yaml", "kserve/runtime.yaml")
DELIBERATE = {
    "CKV_K8S_11": "a limit of CPU throttles batches, and requests share the CPUs fairly",
    "CKV_K8S_15": "tags are versions, which do not change",
    "CKV_K8S_21": "the overlays, helm's --namespace and kubectl's choose the namespace",
    "CKV_K8S_40": "the image's user is 1000, as volumes of models mostly have it",
    "CKV_K8S_43": "whoever builds the image knows its digest: image.digest of the chart",
}


@pytest.mark.slow
@pytest.mark.tool("checkov")
def test_checkov_finds_what_is_deliberate_and_nothing_else() -> None:
    files = [str(DOCKER / name) for name in FILES]
    words = ["--skip-download", "--compact", "--output", "json", "--file", *files]
    told: list[dict[str, Any]] = json.loads(run_tool("checkov", *words, timeout_s=180, statuses=(0, 1)))
    assert {part["check_type"] for part in told} == {"dockerfile", "kubernetes"}
    assert all(part["summary"]["passed"] > 50 and not part["summary"]["parsing_errors"] for part in told)
    failed = {check["check_id"] for part in told for check in part["results"]["failed_checks"]}
    assert failed == set(DELIBERATE)
