"""Files that cannot be written any more: the log, traces, copies of models from object stores."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil
import pytest
from support.asking import ask, index, infer, wait_for
from support.cloud import s3_server
from support.model_files import write_identity
from support.processes import serving_process

FULL = "/dev/full"


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([f"--log-file={FULL}"], id="log"),
        pytest.param([f"--log-file={FULL}", "--log-format=json", "--log-verbose=1"], id="log per request"),
        pytest.param(
            [f"--trace-config=triton,file={FULL}", "--trace-config=level=TIMESTAMPS", "--trace-config=rate=1"],
            id="trace",
        ),
    ],
)
def test_requests_are_answered_all_the_same(tmp_path: Path, flags: list[str]) -> None:
    write_identity(tmp_path)
    with serving_process(tmp_path, *flags) as server:
        port = server.port("HTTP") if "--log-format=json" not in flags else port_of(server.process.pid)
        url = f"127.0.0.1:{port}"
        for value in range(50):
            assert infer(url, float(value)) == (200, float(value))
        assert ask(url, "GET", "/v2/health/ready")[0] == 200
        server.signal()
        assert server.wait() == 0


def test_a_log_goes_on_when_there_is_room_again(tmp_path: Path) -> None:
    """The limit on a file's size stands for the end of the disk: lines are lost, requests are not."""
    log = tmp_path / "log"
    write_identity(tmp_path / "models")
    with serving_process(tmp_path / "models", f"--log-file={log}", "--log-verbose=1") as server:
        server.wait_until_started()
        pid, url = server.process.pid, server.http_url
        assert infer(url, 1.0) == (200, 1.0)
        wait_for(lambda: "identity" in log.read_text(), "lines are written")
        limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (log.stat().st_size, limits[1]))
        for value in range(20):
            assert infer(url, float(value)) == (200, float(value))
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        num_bytes = log.stat().st_size
        wait_for(lambda: infer(url, 2.0)[0] == 200 and log.stat().st_size > num_bytes, "lines are written again")
        server.signal()
        assert server.wait() == 0
    assert "stopped" in log.read_text()


@pytest.mark.slow
def test_a_copy_of_a_model_that_does_not_fit_fails_its_load_and_fits_later(tmp_path: Path) -> None:
    """What is half copied is not served, and is copied anew."""
    with s3_server() as s3:
        s3.write_model("far", extra="")
        s3.write("models/far/1/weights", bytes(1 << 20))
        flags = [
            "--model-control-mode=explicit",
            f"--cloud-cache-directory={tmp_path / 'copies'}",
        ]
        (tmp_path / "near").mkdir()
        write_identity(tmp_path / "near")
        before = ["env", "AWS_ACCESS_KEY_ID=key", "AWS_SECRET_ACCESS_KEY=secret", "AWS_DEFAULT_REGION=us-east-1"]
        with serving_process(
            tmp_path / "near", f"--model-repository=s3://http://{s3.address}/bucket/models", *flags, before=before
        ) as server:
            server.wait_until_started()
            pid, url = server.process.pid, server.http_url
            limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
            status, answer = ask(url, "POST", "/v2/repository/models/far/load", b"{}")
            assert status >= 400
            assert "File too large" in answer["error"], answer
            assert ask(url, "POST", "/v2/repository/models/identity/load", b"{}")[0] == 200
            assert infer(url, 1.0) == (200, 1.0)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
            assert ask(url, "POST", "/v2/repository/models/far/load", b"{}")[0] == 200
            assert index(url)["far"][0] == "READY"


def port_of(pid: int) -> int:
    """A log in JSON prints no table, and this one is lost: the port that answers HTTP."""
    found: list[int] = []

    def has_port() -> bool:
        listening = [each.laddr.port for each in psutil.Process(pid).net_connections("tcp") if each.status == "LISTEN"]
        for port in listening:
            if ask(f"127.0.0.1:{port}", "GET", "/v2/health/ready")[0] == 200:
                found.append(port)
                return True
        return False

    wait_for(has_port, "the server is ready")
    return found[0]
