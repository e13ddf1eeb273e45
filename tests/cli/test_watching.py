"""The commands with which people watch a server: ps, top, logs; and doctor, manifest, completion."""

from __future__ import annotations

import json
import os
import pty
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import yaml
from support.clients import HttpClient
from support.model_files import write_identity
from support.serving import RunningServer, running_server

from modelserver.cli import doctor as doctor_command
from modelserver.cli.main import main
from modelserver.cli.manifest import Deployment, compose, kserve, kubernetes
from modelserver.cli.usage import bytes_text, duration_text, model_usages, number_text
from modelserver.errors import InvalidArgumentError
from modelserver.platform.diagnosis import Finding, FindingLevel


def run(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    captured = capsys.readouterr()
    assert (ended.value.code or 0) == status, captured
    return captured.out + captured.err


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("watched")
    write_identity(repository, "busy")
    write_identity(repository, "idle")
    (repository / "broken" / "1").mkdir(parents=True)
    (repository / "broken" / "config.pbtxt").write_text('backend: "nobody"')
    with running_server(repository, exit_on_error=False) as running:
        yield running


@pytest.fixture
def url(served: RunningServer) -> str:
    return f"--url=http://{served.http_url}"


def test_ps_shows_what_serves_and_how_busy_it_is(
    served: RunningServer, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with HttpClient(served) as client:
        for _ in range(3):
            client.infer("busy", {"INPUT0": np.zeros((2, 4), np.float32)})
    lines = run(capsys, "ps", url, "--sample=0").splitlines()
    assert lines[0].split()[:4] == ["MODEL", "VERSION", "STATE", "BACKEND"]
    assert [line.split()[0] for line in lines[1:3]] == ["busy", "idle"]
    assert "not ready, up " in lines[-2]
    assert "model 'broken' does not serve" in lines[-1]
    document = json.loads(run(capsys, "ps", url, "--all", "--json", "--sample=0.05"))
    rows = {row["name"]: row for row in document["models"]}
    assert rows["busy"]["num_requests"] >= 3
    assert rows["busy"]["mean_batch"] == 2
    assert 0 < rows["busy"]["p50_ms"] <= rows["busy"]["p99_ms"]
    assert rows["busy"]["rate"] == 0
    assert rows["idle"]["p99_ms"] is None
    assert rows["broken"]["state"] == "UNAVAILABLE"


def test_top_without_a_terminal_prints_tables_and_ends(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "top", url, "--interval=0.1", "--count=2")
    assert text.count("MODEL") == 2
    assert text.count("req/s") + text.count("REQ/S") >= 2


def test_top_in_a_terminal_shows_the_models_until_q(url: str) -> None:
    primary, secondary = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "40"}
    command = [sys.executable, "-m", "modelserver", "top", url, "--interval=0.1"]
    process = subprocess.Popen(command, stdin=secondary, stdout=secondary, stderr=secondary, env=environment)
    os.close(secondary)
    shown = b""
    try:
        while b"busy" not in shown or b"q: quit" not in shown:
            shown += os.read(primary, 65536)
        os.write(primary, b"q")
        reader = threading.Thread(target=_read_all, args=(primary,), daemon=True)
        reader.start()
        assert process.wait(20) == 0
        reader.join(5)
    finally:
        process.kill()
        process.wait()
        os.close(primary)


def _read_all(fd: int) -> None:
    try:
        while os.read(fd, 65536):
            pass
    except OSError:  # its other end is closed
        return


def test_no_server_is_told_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("ps", "top", "logs"):
        assert "no server answers" in run(capsys, command, "--url=http://127.0.0.1:9", status=1)


def test_rates_are_of_the_time_between_two_looks_and_survive_a_reset() -> None:
    def overview(success: int, counts: list[int]) -> dict[str, object]:
        row = {
            "name": "m", "version": "1", "state": "READY", "reason": "", "success": success, "fail": 0,
            "inference_count": 2 * success, "execution_count": success, "latency": {"counts": counts},
        }  # fmt: skip
        return {"latency_bounds_ms": [1.0, 2.0], "models": [row]}

    (row,) = model_usages(overview(30, [10, 20, 0]), overview(10, [10, 0, 0]), 2.0)
    assert (row.rate, row.mean_batch) == (10.0, 2.0)
    assert row.p50_ms == pytest.approx(1.5)
    (row,) = model_usages(overview(4, [4, 0, 0]), overview(10, [10, 0, 0]), 2.0)
    assert row.rate == 2.0
    (row,) = model_usages(overview(0, [0, 0, 0]))
    assert (row.rate, row.p99_ms) == (None, None)


def test_numbers_are_written_for_people() -> None:
    assert [bytes_text(size) for size in (None, 0, 1023, 1536, 300 << 20, 5 << 40)] == [
        "-", "0 B", "1023 B", "1.5 KiB", "300 MiB", "5.0 TiB",
    ]  # fmt: skip
    assert [number_text(value) for value in (None, 0.0, 0.123, 12.34, 1234.5)] == ["-", "0", "0.12", "12.3", "1234"]
    assert [duration_text(seconds) for seconds in (0, 59, 61, 3661, 90000)] == ["0s", "59s", "1m 1s", "1h 1m", "1d 1h"]


def test_logs_prints_the_newest_lines_and_follows(
    served: RunningServer, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tail = served.server.controlplane.logs.tail
    for number in range(5):
        tail.add(f"line {number}")
    assert run(capsys, "logs", url, "--lines=2").splitlines() == ["line 3", "line 4"]
    process = subprocess.Popen(
        [sys.executable, "-m", "modelserver", "logs", url, "-n", "1", "-f"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "line 4\n"
        tail.add("a new one")
        assert process.stdout.readline() == "a new one\n"
    finally:
        process.kill()
        process.communicate()


def test_doctor_finds_ports_in_use_keys_and_repositories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        words = ["--http-address=127.0.0.1", f"--grpc-port={port}", "--grpc-address=127.0.0.1", "--http-port=0"]
        words += ["--metrics-port=0", f"--model-repository={tmp_path}", f"--model-repository={tmp_path}/none"]
        words += [f"--api-keys-file={tmp_path}/keys.yaml"]
        findings = json.loads(run(capsys, "doctor", *words, "--json", status=1))
        text = run(capsys, "doctor", *words, status=1)
    found = {finding["subject"]: finding for finding in findings}
    assert found[f"grpc port {port}"]["level"] == "warning"
    assert "--grpc-port" in found[f"grpc port {port}"]["advice"]
    assert found[f"repository {tmp_path}"]["level"] == "ok"
    assert found[f"repository {tmp_path}/none"]["level"] == "problem"
    assert found["API keys"]["level"] == "problem"
    assert found["backend identity"]["level"] == "ok"
    assert found["shared memory"]["level"] == "ok"
    assert f"problem: repository {tmp_path}/none: see --model-repository" in text.splitlines()


def test_doctor_knows_a_server_of_our_own(served: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    host, _, port = served.http_url.rpartition(":")
    words = [f"--http-address={host}", f"--http-port={port}", "--grpc-port=0", "--metrics-port=0", "--json"]
    (finding,) = (row for row in json.loads(run(capsys, "doctor", *words)) if row["subject"] == f"http port {port}")
    assert finding["level"] == "ok"
    assert "in use by " in finding["found"]


def test_doctor_passes_on_what_backends_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = Finding(FindingLevel.PROBLEM, "library", "two of them", "remove one")
    monkeypatch.setattr(doctor_command, "machine_findings", lambda _: [finding])
    text = run(capsys, "doctor", status=1)
    assert "problem: library: remove one" in text


def test_manifests_say_what_was_asked_for() -> None:
    deployment = Deployment("llms", "ai", "reg.example/ms:1", 3, "s3://bucket/models", 2, "keys")
    documents = kubernetes(deployment)
    assert all(document["metadata"]["namespace"] == "ai" for document in documents)
    assert {document["metadata"]["name"] for document in documents} >= {"llms", "llms-grpc", "llms-metrics"}
    by_kind = {document["kind"]: document for document in documents}
    assert "PersistentVolumeClaim" not in by_kind
    workload = by_kind["Deployment"]
    assert workload["spec"]["replicas"] == 3
    assert workload["spec"]["selector"]["matchLabels"] == {
        "app.kubernetes.io/name": "modelserver",
        "app.kubernetes.io/instance": "llms",
    }
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "reg.example/ms:1"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    options = yaml.safe_load(by_kind["ConfigMap"]["data"]["options.yaml"])
    assert options["model-repository"] == ["s3://bucket/models"]
    assert options["api-keys-file"].startswith(
        next(mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "keys")
    )
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    volumes = workload["spec"]["template"]["spec"]["volumes"]
    assert mounted == {volume["name"] for volume in volumes}
    assert all(volume["configMap"]["name"] == "llms" for volume in volumes if "configMap" in volume)


def test_manifests_without_anything_said_are_those_of_docker(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).resolve().parent.parent.parent / "docker"
    printed = list(yaml.safe_load_all(run(capsys, "manifest", "k8s")))
    assert printed == list(yaml.safe_load_all((root / "kustomize" / "base" / "modelserver.yaml").read_text()))
    printed = list(yaml.safe_load_all(run(capsys, "manifest", "kserve")))
    assert printed == list(yaml.safe_load_all((root / "kserve" / "runtime.yaml").read_text()))


@pytest.mark.parametrize("name", ['A b"', "../x", "9lives", "x" * 64, "ends-"])
def test_names_that_kubernetes_would_refuse_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("k8s", "kserve", "compose"):
        assert "--name expects" in run(capsys, "manifest", kind, f"--name={name}", status=1)


def test_other_places_of_models() -> None:
    claim = kubernetes(Deployment(models="pvc://weights"))
    workload = next(document for document in claim if document["kind"] == "Deployment")
    (volume,) = (volume for volume in workload["spec"]["template"]["spec"]["volumes"] if volume["name"] == "models")
    assert volume["persistentVolumeClaim"]["claimName"] == "weights"
    with pytest.raises(InvalidArgumentError, match="pvc://"):
        kubernetes(Deployment(models="/srv/models"))
    service = compose(Deployment(models="/srv/models", gpus=1))["services"]["server"]
    assert "/srv/models:/models:ro" in service["volumes"]
    assert service["image"].endswith("-cuda")
    service = compose(Deployment(models="s3://bucket"))["services"]["server"]
    assert "--model-repository=s3://bucket" in service["command"]
    *_, inference_service = kserve(Deployment("m", "ns", models="pvc://models", replicas=2))
    assert inference_service["spec"]["predictor"]["model"]["storageUri"] == "pvc://models"
    jsonschema.validate(inference_service["metadata"], {"required": ["name", "namespace"]})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("modelserver serve --http-p", "--http-port="),
        ("modelserver man", "manifest"),
        ("modelserver list --js", "--json"),
    ],
)
def test_shells_complete_commands_and_the_server_s_flags(words: str, expected: str) -> None:
    variables = {"_MODELSERVER_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [sys.executable, "-m", "modelserver"], env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert expected in done.stdout.split("\n"), done


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "_MODELSERVER_COMPLETE" in run(capsys, "completion", shell)
