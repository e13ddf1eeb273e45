"""The commands of the store as a user types them, and the way from nothing to an answer."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.gguf_models import write_gguf
from support.model_sources import MODEL, FakeHost
from support.serving import running_server
from support.tiny_checkpoints import write_checkpoint

from modelserver.cli.main import main
from modelserver.cli.store import _Bars
from modelserver.store.store import Store
from modelserver.store.task import Progress

Shell = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("weights")
    return write_gguf(write_checkpoint(directory / "source"), directory / "tiny.gguf")


@pytest.fixture
def shell(store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Runs a command on the store, with `piped` as its input; no server runs at the default address."""
    monkeypatch.setenv("MODELSERVER_STORE", str(store.directory))
    monkeypatch.setattr("modelserver.cli.run.DEFAULT_URL", "http://127.0.0.1:1")

    def run(*arguments: str, piped: str = "", status: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        assert (ended.value.code or 0) == status, captured
        return captured.out, captured.err

    return run


def test_a_model_is_pulled_and_asked(
    shell: Shell, store: Store, host: FakeHost, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELSERVER_REGISTRY", host.address)  # in place of Ollama's
    host.add_model("library/tiny", {MODEL: weights.read_bytes()}, tag="1m")
    out, err = shell("pull", "tiny:1m")
    assert out == "tiny:1m\n"
    assert err.splitlines()[0] == "pulling manifest"
    assert err.splitlines()[-1] == "success"
    said, _ = shell("run", "tiny:1m", "hi", "--max-tokens", "3", "--temperature", "0")
    assert said.strip()
    again, _ = shell("run", "tiny:1m", "--max-tokens", "3", "--temperature", "0", piped="hi")
    assert again == said


def test_run_pulls_what_is_absent(
    shell: Shell, store: Store, host: FakeHost, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELSERVER_REGISTRY", host.address)
    host.add_model("library/tiny", {MODEL: weights.read_bytes()})
    said, err = shell("run", "tiny", "hi", "--max-tokens", "3")
    assert said.strip()
    assert "success" in err
    assert store.find("tiny")
    assert "model 'none:latest' does not exist" in shell("run", "none", "hi", status=1)[1]


def test_run_serves_a_path(shell: Shell, store: Store, weights: Path) -> None:
    for path in (weights, weights.parent / "source"):
        said, _ = shell("run", str(path), "hi", "--max-tokens", "3")
        assert said.strip()
    assert store.models() == []


def test_run_asks_a_server_that_has_the_model(
    shell: Shell, store: Store, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server(weights) as served:
        monkeypatch.setattr("modelserver.cli.run.DEFAULT_URL", f"http://{served.http_url}")
        said, _ = shell("run", "tiny", "hi", "--max-tokens", "3")
    assert said.strip()
    assert store.models() == []


def test_models_are_listed_copied_shown_and_removed(shell: Shell, weights: Path) -> None:
    shell("create", "tiny", "--from", str(weights), "--system", "Be brief.")
    shell("cp", "tiny", "me/mine:v1")
    rows = json.loads(shell("ls", "--json")[0])
    assert [row["name"] for row in rows] == ["tiny:latest", "me/mine:v1"]
    out, _ = shell("ls")
    assert [line.split()[0] for line in out.splitlines()] == ["NAME", "tiny:latest", "me/mine:v1"]
    shown, _ = shell("show", "me/mine:v1", "--url", "http://127.0.0.1:1")
    assert "backend llm" in shown
    assert "FROM me/mine:v1\nSYSTEM Be brief." in shown
    assert shell("rm", "tiny", "me/mine:v1")[0] == "removed tiny:latest\nremoved me/mine:v1\n"
    assert json.loads(shell("ls", "--json")[0]) == []
    assert "model 'tiny:latest' not found" in shell("rm", "tiny", status=1)[1]


def test_a_model_is_made_by_a_modelfile(shell: Shell, store: Store, weights: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(weights.read_bytes())
    (tmp_path / "Modelfile").write_text('''FROM ./tiny.gguf
TEMPLATE """{{ .System }}
{{ .Prompt }}"""
SYSTEM Be brief.
PARAMETER stop "END"
PARAMETER num_predict 2
MESSAGE user hello
LICENSE free
''')
    assert shell("create", "mine", "-f", str(tmp_path / "Modelfile"))[0] == "created mine:latest\n"
    described = store.describe("mine")
    assert (described.template, described.system) == ("{{ .System }}\n{{ .Prompt }}", "Be brief.")
    assert described.parameters == {"stop": ["END"], "num_predict": 2}
    assert (list(described.messages), described.licenses) == ([{"role": "user", "content": "hello"}], ["free"])
    shell("create", "yours", "-f", "-", piped="FROM mine\nPARAMETER num_predict 1\n")
    assert store.describe("yours").parameters == {"stop": ["END"], "num_predict": 1}
    assert shell("run", "yours", "hi")[0] != shell("run", "mine", "hi")[0]  # one token, and two
    assert "(line 1)" in shell("create", "x", "-f", "-", piped="FORM mine\n", status=1)[1]


def test_a_modelfile_names_adapters_and_a_draft_model(
    shell: Shell, store: Store, weights: Path, tmp_path: Path
) -> None:
    from support.tiny_adapters import write_adapter

    peft = write_adapter(weights.parent / "source", tmp_path / "peft")
    lines = f"FROM {weights}\nPARAMETER temperature 0\nPARAMETER num_predict 8\n"
    shell("create", "plain", "-f", "-", piped=lines)
    shell("create", "tuned", "-f", "-", piped=f"{lines}ADAPTER {peft}\nDRAFT {weights}\n")
    shell("create", "few", "--from", "plain", "--quantize", "Q8_0")
    assert store.describe("few").config["file_type"] == "Q8_0"
    assert shell("run", "tuned", "hi")[0] != shell("run", "plain", "hi")[0]
    assert shell("run", "few", "hi")[0].strip()
    assert "Q3_K_M" in shell("create", "x", "--from", "plain", "-q", "Q3_K_M", status=1)[1]
    assert "no file and no directory" in shell("create", "x", "-f", "-", piped=f"{lines}DRAFT ./gone\n", status=1)[1]


def test_show_says_why_a_model_cannot_be_served(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "alien.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    shell("create", "alien", "--from", str(tmp_path / "alien.gguf"))
    document = json.loads(shell("show", "alien", "--json", "--url", "http://127.0.0.1:1")[0])
    assert "GGUF" in document["problems"][0]


def test_a_model_is_stopped(shell: Shell, store: Store, weights: Path) -> None:
    shell("create", "me/tiny", "--from", str(weights))
    with running_server((), store=str(store.directory)) as served:
        url = f"--url=http://{served.http_url}"
        shell("run", "me/tiny", "hi", url, "--max-tokens", "1")
        assert [model.name for model in served.server.repository.models()] == ["me~tiny"]
        assert shell("stop", "me/tiny", url)[0] == "stopping me/tiny\n"
        assert served.server.repository.models() == ()


def test_a_server_without_a_repository_serves_the_store(
    shell: Shell, store: Store, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MODELSERVER_STORE")
    monkeypatch.setenv("OLLAMA_MODELS", str(store.directory))
    assert "the model store" in shell("serve", status=2)[1]
    shell("create", "tiny", "--from", str(weights))
    found: list[str] = []
    monkeypatch.setattr("modelserver.cli.serve.run", lambda options: found.append(options.store) or 0)
    shell("serve")
    assert found == [str(store.directory)]


def test_progress_on_a_terminal_is_a_bar_for_each_blob() -> None:
    from rich.console import Console
    from rich.progress import Progress as RichProgress

    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with RichProgress(console=console) as bars:
        screen = _Bars(bars)
        for completed in (0, 50, 100):
            screen.show(Progress("pulling 0123", "sha256:0123", 100, completed))
        screen.show(Progress("success"))
        (row,) = bars.tasks
        assert (row.description, row.completed, row.total) == ("pulling 0123", 100, 100)
    assert "success" in console.file.getvalue()  # type: ignore[attr-defined]
