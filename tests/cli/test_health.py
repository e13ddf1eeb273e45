"""`modelserver health`, which containers run to learn whether their server is ready."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.model_files import write_identity
from support.serving import RunningServer, running_server

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
