"""What the Dockerfile promises, read from it; docker/prove.sh executes it where there is bubblewrap."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tomllib
from types import ModuleType

import pytest
from support.deployment import DOCKER, ROOT
from support.tools import run_tool


def load_prove() -> ModuleType:
    """docker/prove.py: no package, as "docker" is the name of one of others."""
    spec = importlib.util.spec_from_file_location("prove", DOCKER / "prove.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["prove"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


prove = load_prove()
STAGES = prove.split_stages(prove.read_instructions(DOCKER / "Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMAGES = ("cpu", "cuda")


def last(target: str, word: str) -> str:
    return [text for name, text in STAGES[target][1] if name == word][-1]


def names(lines: list[str]) -> set[str]:
    return {re.split(r"[\[<>=~!; ]", line, maxsplit=1)[0].lower().replace("_", "-") for line in lines}


def pins() -> set[str]:
    lines = (DOCKER / "constraints.txt").read_text().splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in pinned), pinned
    return names(pinned)


@pytest.mark.parametrize("target", IMAGES)
def test_an_image_runs_as_nobody_special_under_tini(target: str) -> None:
    assert last(target, "USER") == "1000:1000"
    assert json.loads(last(target, "ENTRYPOINT")) == ["tini", "--", "modelserver"]
    assert json.loads(last(target, "CMD"))[0] == "serve"
    assert last(target, "EXPOSE").split() == ["8000", "8001", "8002"]


@pytest.mark.parametrize("target", IMAGES)
def test_an_image_is_asked_for_its_health_by_our_own_command(target: str) -> None:
    options, _, command = last(target, "HEALTHCHECK").partition("CMD ")
    assert json.loads(command) == ["modelserver", "health"]
    assert "--start-period=" in options


@pytest.mark.parametrize("target", IMAGES)
def test_an_image_says_its_version(target: str) -> None:
    arguments = [text for word, text in STAGES[target][1] if word == "ARG"]
    assert f"VERSION={PROJECT['version']}" in arguments
    assert 'org.opencontainers.image.version="${VERSION}"' in last(target, "LABEL")
    assert f'licenses="{PROJECT["license"]}"' in last(target, "LABEL")


def test_every_stage_begins_at_one_pinned_image() -> None:
    outside = {parent for parent, _ in STAGES.values() if parent not in STAGES}
    assert outside == {"python:${PYTHON_VERSION}"}
    default = prove.read_instructions(DOCKER / "Dockerfile")[0]
    assert re.fullmatch(r"PYTHON_VERSION=\d+\.\d+\.\d+-slim-\w+", default[1]), default


def test_the_image_installs_what_the_project_asks_for() -> None:
    extras = [
        line
        for extra in ("onnx", "llm", "cloud", "redis", "images")
        for line in PROJECT["optional-dependencies"][extra]
    ]
    asked = {line for line in [*PROJECT["dependencies"], *extras] if not line.startswith("torch")}
    lines = (DOCKER / "requirements.txt").read_text().splitlines()
    assert {line for line in lines if not line.startswith("#")} == asked


def test_every_dependency_is_pinned() -> None:
    required = names([line for line in (DOCKER / "requirements.txt").read_text().splitlines() if line[:1] != "#"])
    assert required - {"torch"} <= pins()
    assert "torch" in pins()


def test_the_build_context_holds_what_is_copied_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = {
        source
        for _, instructions in STAGES.values()
        for word, text in instructions
        if word == "COPY" and not text.startswith("--from=")
        for source in text.split()[:-1]
    }
    assert "*" in lines
    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)


@pytest.mark.tool("hadolint")
def test_hadolint_finds_nothing() -> None:
    run_tool("hadolint", str(DOCKER / "Dockerfile"))
