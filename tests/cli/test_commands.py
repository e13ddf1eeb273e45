"""The commands as a user types them: what they print, and how they fail."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from support.model_files import write_identity, write_model
from support.serving import RunningServer, running_server

from modelserver.cli.main import COMMANDS, app, main
from modelserver.telemetry import gpu

ROOT = Path(__file__).resolve().parent.parent.parent


class Shell:
    """Runs commands in this process and keeps what they print."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *arguments: str, status: int = 0) -> tuple[str, str]:
        """Standard output and error of one command, which must end with `status`."""
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = self._capsys.readouterr()
        assert (ended.value.code or 0) == status, captured
        return captured.out, captured.err

    def json(self, *arguments: str, status: int = 0) -> Any:
        return json.loads(self.run(*arguments, "--json", status=status)[0])


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


def url_of(server: RunningServer) -> str:
    return f"--url=http://{server.http_url}"


def test_without_arguments_the_help_is_shown(shell: Shell) -> None:
    out, err = shell.run(status=2)
    for command in ("serve", "check", "list", "show", "load", "unload", "infer", "bench", "version"):
        assert f"  {command} " in out + err


def test_an_unknown_command_or_option_is_a_usage_error_with_a_hint(shell: Shell) -> None:
    assert "'list'" in shell.run("lst", status=2)[1]
    assert "--json" in shell.run("list", "--jsn", status=2)[1]


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_is_an_option_too(shell: Shell, option: str) -> None:
    assert shell.run(option) == shell.run("version")


def test_check_accepts_the_example_models(shell: Shell, model_repository: Path) -> None:
    document = shell.json("check", str(model_repository))
    assert document["valid"]
    assert {model["name"] for model in document["models"]} >= {"identity", "digits_onnx", "add_sub"}
    out, _ = shell.run("check", str(model_repository))
    assert "ok    identity: identity, versions 1" in out
    assert out.splitlines()[-1].endswith("models, 0 wrong")


def test_check_reports_every_problem_with_its_place(shell: Shell, tmp_path: Path) -> None:
    write_identity(tmp_path)
    config = 'backend: "identity"\nmax_batchsize: 4\ninput [ { name: "a", data_type: TYPE_FLOAT, dims: [ 1 ] } ]\n'
    write_model(tmp_path, "wrong", config)
    document = shell.json("check", str(tmp_path), status=1)
    assert not document["valid"]
    problems = {model["name"]: model["problems"] for model in document["models"]}
    assert problems["identity"] == []
    assert [problem["line"] for problem in problems["wrong"]] == [2, 3]
    out, _ = shell.run("check", str(tmp_path), status=1)
    assert "WRONG wrong: 2 problems" in out
    assert f"{tmp_path}/wrong/config.pbtxt:2:1" in out
    assert "max_batch_size" in out
    assert out.splitlines()[-1] == "2 models, 1 wrong"


@pytest.mark.parametrize("num_gpus", [0, 2])
def test_check_judges_gpus_by_those_of_the_machine(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_gpus: int
) -> None:
    (tmp_path / "dev").mkdir()
    for number in range(num_gpus):
        (tmp_path / "dev" / f"nvidia{number}").touch()
    monkeypatch.setattr(gpu, "DEVICE_FILES", tmp_path / "dev")
    tensor = '{ name: "a" data_type: TYPE_FP32 dims: 1 }'
    group = "instance_group { kind: KIND_GPU gpus: 1 }"
    write_model(tmp_path / "models", "m", f'backend: "identity" input {tensor} output {tensor} {group}')
    out, _ = shell.run("check", str(tmp_path / "models"), status=0 if num_gpus else 1)
    assert ("instance_group[0]" in out) is (num_gpus == 0)


def test_check_of_a_path_that_is_not_there_says_so(shell: Shell, tmp_path: Path) -> None:
    assert "nothing at that path" in shell.run("check", str(tmp_path / "missing"), status=1)[1]


def test_check_takes_what_the_server_is_allowed(shell: Shell, tmp_path: Path) -> None:
    tensor = '{ name: "a" data_type: TYPE_FP32 dims: 1 }'
    directory = write_model(tmp_path, "m", f'backend: "own" input {tensor} output {tensor}')
    identity = ROOT / "backends" / "identity" / "__init__.py"
    (directory / "own.py").write_text(identity.read_text())
    assert "unknown backend 'own'" in shell.run("check", str(tmp_path), status=1)[0]
    shell.run("check", str(tmp_path), "--allow-model-backends")


def test_check_names_a_backend_setting_that_is_none(shell: Shell, tmp_path: Path) -> None:
    write_identity(tmp_path)
    assert "--backend-config option format is" in shell.run("check", str(tmp_path), "--backend-config=x", status=1)[1]


def test_check_names_the_directory_that_cannot_be_read(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("closed", "open"):
        write_identity(tmp_path, name)
    scandir = os.scandir

    def scandir_unless_closed(path: Any) -> Any:
        if Path(path) == tmp_path / "closed" / "1":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scandir_unless_closed)
    out, _ = shell.run("check", str(tmp_path), status=1)
    assert f"cannot be read: {tmp_path}/closed/1: Permission denied" in out
    assert out.splitlines()[-1] == "2 models, 1 wrong"


def test_list_shows_the_index_of_the_server(shell: Shell, server: RunningServer) -> None:
    rows = shell.json("list", url_of(server))
    assert {"name": "identity", "version": "1", "state": "READY", "reason": ""} in rows
    out, _ = shell.run("list", url_of(server))
    assert out.splitlines()[0].split() == ["MODEL", "VERSION", "STATE", "REASON"]
    assert ["identity", "1", "READY"] in [line.split() for line in out.splitlines()]


def test_list_and_show_read_a_repository_without_a_server(shell: Shell, tmp_path: Path) -> None:
    write_identity(tmp_path)
    write_model(tmp_path, "wrong", "backend: 3")
    states = {row["name"]: row["state"] for row in shell.json("list", f"--model-repository={tmp_path}")}
    assert states == {"identity": "VALID", "wrong": "INVALID"}
    shown = shell.json("show", "identity", f"--model-repository={tmp_path}")
    assert shown["config"]["backend"] == "identity"
    assert "config.pbtxt:1" in shell.run("show", "wrong", f"--model-repository={tmp_path}", status=1)[1]
    assert "did you mean 'identity'" in shell.run("show", "identit", f"--model-repository={tmp_path}", status=1)[1]


def test_show_has_tensors_config_and_statistics(shell: Shell, server: RunningServer) -> None:
    document = shell.json("show", "identity", url_of(server))
    assert document["config"]["max_batch_size"] == 64
    assert document["inputs"][0]["name"] == "INPUT0"
    assert document["statistics"][0]["version"] == "1"
    out, _ = shell.run("show", "identity", url_of(server))
    assert "identity: backend identity, versions 1" in out
    assert "INPUT0" in out


@pytest.mark.parametrize("command", [("show", "identty"), ("infer", "identty", "--input=x=1")])
def test_the_nearest_model_is_suggested(shell: Shell, server: RunningServer, command: tuple[str, ...]) -> None:
    _, err = shell.run(*command, url_of(server), status=1)
    assert err.count("did you mean") == 1
    assert "did you mean 'identity'?" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", [("show", ""), ("load", ""), ("unload", ""), ("infer", "", "--input=x=1")])
def test_an_empty_model_name_is_no_name(shell: Shell, server: RunningServer, command: tuple[str, ...]) -> None:
    assert shell.run(*command, url_of(server), status=1)[1] == "error: the name of the model is empty\n"


def test_a_port_that_speaks_no_http_is_named(shell: Shell, tmp_path: Path) -> None:
    with running_server(tmp_path, wire="grpcio") as served:
        url = f"http://{served.grpc_url}"
        _, err = shell.run("list", f"--url={url}", status=1)
    assert err == f"error: {url} does not answer in HTTP: is it the gRPC port? --url takes the HTTP one\n"


def test_a_port_that_serves_grpc_only_says_so(shell: Shell, tmp_path: Path) -> None:
    with running_server(tmp_path, shared_ports=False) as served:
        _, err = shell.run("list", f"--url=http://{served.grpc_url}", status=1)
    assert "this port serves gRPC and no HTTP: see --http-port and --shared-ports" in err


def test_infer_prints_a_table_or_json(shell: Shell, server: RunningServer) -> None:
    out, _ = shell.run("infer", "identity", "--input", "INPUT0=[1, 2.5]", url_of(server))
    assert out.splitlines()[0] == "identity, version 1"
    assert out.splitlines()[2].split() == ["OUTPUT0", "FP32", "[1,", "2]", "1", "2.5"]
    document = shell.json("infer", "identity", "-i", "INPUT0=[1, 2.5]", url_of(server))
    assert document["outputs"] == [{"name": "OUTPUT0", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.5]}]


def test_infer_reads_arrays_and_asks_for_outputs_and_versions(
    shell: Shell, server: RunningServer, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 8, 8), np.float32))
    arguments = ("infer", "digits_onnx", f"--input=image=@{tmp_path / 'x.npy'}", "--output=digit", "--version=1")
    document = shell.json(*arguments, url_of(server))
    assert [(output["name"], output["shape"]) for output in document["outputs"]] == [("digit", [2, 1])]


def test_infer_sends_a_picture(shell: Shell, server: RunningServer) -> None:
    picture = ROOT / "docs" / "images" / "digit-7.png"
    document = shell.json("infer", "digits_preprocess", f"--input=picture=@{picture}", url_of(server))
    assert document["outputs"][0]["shape"] == [1, 8, 8]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--input=INPUT1=1"], "no input 'INPUT1'; did you mean 'INPUT0'?"),
        (["--input=INPUT0=1", "--input=INPUT0=2"], "'INPUT0' more than once"),
        (["--input=INPUT0=1", "--output=nothing"], "unexpected inference output 'nothing'"),
        (["--input=INPUT0=1", "--version=9"], "9"),
    ],
)
def test_what_infer_cannot_send_is_explained(
    shell: Shell, server: RunningServer, arguments: list[str], part: str
) -> None:
    _, err = shell.run("infer", "identity", *arguments, url_of(server), status=1)
    assert part in err


def test_load_and_unload_change_the_server(shell: Shell, tmp_path: Path) -> None:
    write_identity(tmp_path)
    with running_server(tmp_path, model_control_mode="explicit") as running:
        assert shell.run("load", "identity", url_of(running))[0] == "loaded identity\n"
        assert shell.json("list", url_of(running))[0]["state"] == "READY"
        config = tmp_path / "override.json"
        replacement = shell.json("show", "identity", url_of(running))["config"] | {"max_batch_size": 3}
        config.write_text(json.dumps(replacement))
        shell.run("load", "identity", f"--config={config}", url_of(running))
        assert shell.json("show", "identity", url_of(running))["config"]["max_batch_size"] == 3
        shell.run("unload", "identity", url_of(running))
        assert shell.json("list", url_of(running))[0]["state"] != "READY"
        assert "identity" in shell.run("load", "identiti", url_of(running), status=1)[1]


def test_versions_are_loaded_and_unloaded_one_by_one(shell: Shell, tmp_path: Path) -> None:
    write_identity(tmp_path, versions=(1, 2, 3))
    with running_server(tmp_path, model_control_mode="explicit") as running:
        shell.run("load", "identity", "--version=1", url_of(running))
        shell.run("load", "identity", "--version=2", url_of(running))
        assert shell.json("show", "identity", url_of(running))["versions"] == ["1", "2"]
        shell.run("unload", "identity", "--version=2", url_of(running))
        assert shell.json("show", "identity", url_of(running))["versions"] == ["1"]


def test_an_override_is_kept_and_forgotten(shell: Shell, tmp_path: Path) -> None:
    write_identity(tmp_path / "models")
    options = {"model_control_mode": "explicit", "override_directory": str(tmp_path / "kept")}
    config = tmp_path / "override.json"
    with running_server(tmp_path / "models", load_model=("identity",), **options) as running:
        replacement = shell.json("show", "identity", url_of(running))["config"] | {"max_batch_size": 3}
        config.write_text(json.dumps(replacement))
        shell.run("load", "identity", f"--config={config}", "--persist", url_of(running))
    with running_server(tmp_path / "models", **options) as running:
        assert "overridden, also after a restart: max_batch_size: 8 -> 3" in shell.run("list", url_of(running))[0]
        shell.run("load", "identity", "--no-persist", url_of(running))
        assert shell.json("list", url_of(running))[0]["reason"] == ""


def test_load_with_files_replaces_the_models(shell: Shell, tmp_path: Path, model_repository: Path) -> None:
    shutil.copytree(model_repository / "digits_onnx", tmp_path / "digits_onnx")
    local = model_repository / "digits_versions" / "1" / "model.onnx"
    with running_server(tmp_path, model_control_mode="explicit") as running:
        config = tmp_path / "config.json"
        config.write_text(json.dumps({"backend": "onnxruntime"}))
        shell.run("load", "digits_onnx", f"--config={config}", f"--file=7/model.onnx={local}", url_of(running))
        assert shell.json("show", "digits_onnx", url_of(running))["versions"] == ["7"]
        _, err = shell.run("load", "digits_onnx", "--file=nonsense", url_of(running), status=1)
        assert "--file expects <version>/<path>=<local file>" in err


def test_a_server_that_is_not_there_is_named_with_what_to_do(shell: Shell) -> None:
    _, err = shell.run("list", "--url=http://127.0.0.1:1", status=1)
    assert "http://127.0.0.1:1" in err
    assert "modelserver serve" in err
    assert "Traceback" not in err
    assert "--url expects" in shell.run("list", "--url=ftp://x", status=1)[1]


def test_debug_shows_the_traceback_wherever_it_stands() -> None:
    with pytest.raises(Exception, match="connection refused"):
        main(["list", "--url=http://127.0.0.1:1", "--debug"])


def test_version_is_of_the_program_and_of_the_server(shell: Shell, server: RunningServer) -> None:
    assert shell.run("version")[0].startswith("modelserver ")
    document = shell.json("version", url_of(server))
    assert document["server"]["name"] == "triton"
    assert "statistics" in document["server"]["extensions"]


def test_serve_explains_its_flags_and_where_values_come_from(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MODELSERVER_GRPC_PORT", "7")
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))  # a store without models
    out, _ = shell.run("serve", "--help")
    assert "--model-repository, --model-store=DIRECTORY" in out
    out, _ = shell.run("serve", "--print-config", "--http-port=5", "--log-info=0")
    rows = [line.split(maxsplit=2) for line in out.splitlines()]
    assert ["--http-port", "5", "flag"] in rows
    assert ["--grpc-port", "7", "environment MODELSERVER_GRPC_PORT"] in rows
    assert ["--log-info", "false", "flag"] in rows
    assert ["--metrics-port", "8002", "default"] in rows
    assert "--model-repository is missing" in shell.run("serve", status=2)[1]


def test_tritonserver_has_the_defaults_of_triton(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="tritonserver")
    monkeypatch.setattr(sys, "argv", ["tritonserver", "--print-config", "--allow-client-shm=false"])
    with pytest.raises(SystemExit):
        script.load()()
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert ["--exit-on-error", "true", "program"] in rows
    assert ["--host", "0.0.0.0", "program"] in rows
    assert ["--allow-client-shm", "false", "flag"] in rows


@pytest.mark.parametrize(
    "words", [["--help"], ["health", "--url=http://127.0.0.1:1"], ["list", "--url=http://127.0.0.1:1"]]
)
def test_what_only_asks_a_server_imports_nothing_heavy(words: list[str]) -> None:
    program = (
        "import sys; from modelserver.cli.main import COMMANDS, app, main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: print('\\nIMPORTED', *sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    imported = {name.partition(".")[0] for name in ran.stdout.rpartition("IMPORTED")[2].split()}
    assert "modelserver" in imported
    assert not imported & {"asyncio", "grpc", "numpy", "onnxruntime", "rich", "torch", "yaml"}


def test_the_help_says_of_each_command_what_the_command_says() -> None:
    listed = {name: line for name, (_, line) in COMMANDS.items()}
    for name, line in listed.items():
        command = typer.main.get_group(app).commands[name]
        assert (command.help or "").startswith(line.rstrip("."))


def test_output_that_goes_to_no_terminal_is_plain() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "modelserver.cli.main", "list", "--url=http://127.0.0.1:1"],
        capture_output=True,
        check=False,
    )
    assert ran.returncode == 1
    assert b"\x1b" not in ran.stdout + ran.stderr
