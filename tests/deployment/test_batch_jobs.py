"""The Jobs of offline batches: their commands are the program's, and their exit codes are those that it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.deployment import DOCKER, read_yaml
from typer.main import get_command

from modelserver.cli.batch import EXIT_TO_BE_CONTINUED
from modelserver.cli.main import app

JOBS = sorted((DOCKER / "batch").glob("*.yaml"))


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_jobs_command_can_be_read_and_its_exit_codes_are_known(path: Path) -> None:
    job: Any = read_yaml(path)
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    program, name = container["command"]
    assert program == "modelserver"
    arguments = [each.replace("$(JOB_COMPLETION_INDEX)", "0") for each in container["args"]]
    commands: Any = get_command(app)
    parsed = commands.commands[name].make_context(name, arguments)
    assert parsed.params["grace"] < job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    if parsed.params["shard"]:
        assert parsed.params["shard"] == f"0/{job['spec']['completions']}"
        assert job["spec"]["completionMode"] == "Indexed"
    codes = [rule["onExitCodes"] for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert [EXIT_TO_BE_CONTINUED] in [code["values"] for code in codes]
    assert {code["containerName"] for code in codes} == {container["name"]}
    mounts = {each["name"] for each in container["volumeMounts"]}
    assert mounts == {each["name"] for each in job["spec"]["template"]["spec"]["volumes"]}
