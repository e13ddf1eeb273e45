"""`modelserver health`, which containers run to learn whether their server is ready."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.certificates import Authority
from support.keys import KeyFile
from support.model_files import write_identity
from support.serving import RunningServer, running_server

from modelserver.auth.api_keys import Scope
from modelserver.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["health", *arguments])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out + captured.err


@pytest.mark.parametrize(("arguments", "word"), [((), "ready"), (("--live",), "live")])
def test_a_ready_server_is_ready_and_live(
    server: RunningServer, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], word: str
) -> None:
    assert run(capsys, f"--url=http://{server.http_url}", *arguments) == (0, f"{word}\n")


def test_a_server_without_one_of_its_models_is_live_but_not_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_identity(tmp_path)
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "config.pbtxt").write_text("max_batch_size: many")
    with running_server(tmp_path) as running:
        url = f"--url=http://{running.http_url}"
        status, printed = run(capsys, url)
        assert (status, "error" in printed) == (1, True)
        assert run(capsys, url, "--live")[0] == 0


def test_a_server_that_does_not_answer_is_not_ready(capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = run(capsys, "--url=http://127.0.0.1:9")
    assert status == 1
    assert "no server answers" in printed


def test_tls_with_a_certificate_and_a_key_of_the_client(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a server asks for both, a probe shows both."""
    authority, keys = Authority(tmp_path), KeyFile(tmp_path / "keys.yaml")
    pair, client = authority.pair("server"), authority.pair("client")
    key = keys.add("ops", Scope.ADMIN)
    write_identity(tmp_path / "models")
    options = {
        "tls_cert": str(pair.certificate),
        "tls_key": str(pair.key),
        "tls_client_ca": str(authority.certificate),
        "api_keys_file": str(keys.path),
    }
    with running_server(tmp_path / "models", **options) as running:
        url = f"--url=https://{running.http_url}"
        status, printed = run(capsys, url)
        assert (status, "certificate" in printed.lower()) == (1, True)
        monkeypatch.setenv("MODELSERVER_CA_FILE", str(authority.certificate))
        status, printed = run(capsys, url)
        assert (status, "MODELSERVER_CLIENT_CERT" in printed) == (1, True), "the server asks for a certificate"
        monkeypatch.setenv("MODELSERVER_CLIENT_CERT", str(client.certificate))
        monkeypatch.setenv("MODELSERVER_CLIENT_KEY", str(client.key))
        assert run(capsys, url) == (0, "ready\n")
        monkeypatch.setenv("MODELSERVER_API_KEY", key)
        monkeypatch.setenv("MODELSERVER_URL", url.removeprefix("--url="))
        with pytest.raises(SystemExit) as ended:
            main(["list"])
        assert not ended.value.code
        assert "identity" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["MODELSERVER_CA_FILE", "MODELSERVER_CLIENT_CERT"])
def test_a_file_that_is_no_good_is_named_with_its_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "/nowhere.pem")
    status, printed = run(capsys, "--url=https://127.0.0.1:9")
    assert (status, name in printed, "/nowhere.pem" in printed) == (1, True, True)
