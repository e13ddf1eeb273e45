"""`run`, `serve` and `create` with files and directories of any kind."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.onnx_models import onnx_model, value

from modelserver.cli.main import main

Shell = Callable[..., tuple[str, str]]


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.setenv("MODELSERVER_STORE", str(tmp_path / "store"))
    monkeypatch.setattr("modelserver.cli.run.DEFAULT_URL", "http://127.0.0.1:1")

    def run(*arguments: str, piped: str = "", status: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped.encode())))
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        assert (ended.value.code or 0) == status, captured
        return captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of models in files of their own names."""
    import skops.io
    from sklearn.linear_model import LinearRegression

    root = tmp_path_factory.mktemp("files")
    model = LinearRegression().fit([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], [0.5, 1.5, 2.5])
    skops.io.dump(model, root / "prices.skops")
    (root / "copy.onnx").write_bytes(onnx_model([value("x", ["n", 2])], [value("y", ["n", 2])]).SerializeToString())
    (root / "README.md").write_text("Two models.")
    (root / "train.py").write_text("print('trained')")
    return root


@pytest.mark.parametrize("given", ["[[1, 1]]", "input-0=[1, 1]", '{"input-0": [[1, 1]]}'])
def test_a_file_is_asked(shell: Shell, files: Path, given: str) -> None:
    said, _ = shell("run", str(files / "prices.skops"), given)
    assert "predict" in said
    assert "3.5" in said


def test_the_input_may_be_a_file_or_piped(shell: Shell, files: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "row.npy", np.ones((1, 2), "f4"))
    assert "1 1" in shell("run", str(files / "copy.onnx"), str(tmp_path / "row.npy"))[0]
    assert "2 3" in shell("run", str(files / "copy.onnx"), piped="[[2, 3]]")[0]
    assert "expected JSON numbers" in shell("run", str(files / "copy.onnx"), "hello", status=1)[1]


def test_a_directory_of_files_holds_a_model_for_each(shell: Shell, files: Path) -> None:
    rows = json.loads(shell("list", "--model-repository", str(files), "--json")[0])
    assert [row["name"] for row in rows] == ["copy", "prices"]
    said = shell("run", str(files), "[[1, 1]]", status=1)[1]
    assert "holds 2 models; name the path of one: copy, prices" in said


def test_a_stored_file_is_asked_by_its_name(shell: Shell, files: Path) -> None:
    shell("create", "prices", "--from", str(files / "prices.skops"))
    assert "3.5" in shell("run", "prices", "[[1, 1]]")[0]


def test_a_file_that_is_not_there_is_not_looked_for_in_registries(shell: Shell) -> None:
    assert "there is no file 'prices.onnx'" in shell("run", "prices.onnx", "[[1, 1]]", status=1)[1]


def test_a_path_is_not_asked_of_a_server(shell: Shell, files: Path) -> None:
    path = str(files / "prices.skops")
    said = shell("run", path, "[[1, 1]]", "--url", "127.0.0.1:9", status=1)[1]
    assert "is a path, and --url (MODELSERVER_URL, OLLAMA_HOST) names the server to ask" in said


def test_what_cannot_be_served_is_named_with_the_way_out(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "net.h5").write_bytes(b"HDF")
    (tmp_path / "notes.md").write_text("")
    for path in (tmp_path, tmp_path / "net.h5"):
        assert "net.h5' cannot be served: for a TensorFlow model" in shell("check", str(path), status=1)[1]
    (tmp_path / "net.mlmodel").write_bytes(b"Core ML")
    assert "Core ML runs on Apple's systems only" in shell("run", str(tmp_path / "net.mlmodel"), status=1)[1]


def test_weights_alone_say_what_to_do(shell: Shell, tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 1).state_dict(), tmp_path / "net.pt")
    said, _ = shell("check", str(tmp_path / "net.pt"), status=1)
    assert "holds 2 weights and no program (a state_dict): write the module with 'modelserver convert FILE.py" in said


def test_weights_and_the_class_of_their_module_are_served(shell: Shell, tmp_path: Path) -> None:
    torch.save({"state_dict": {"line.weight": torch.tensor([[2.0, 3.0]])}}, tmp_path / "net.pt")
    module = "self.line = torch.nn.Linear(2, 1, bias=False)"
    (tmp_path / "net.py").write_text(f"""
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        {module}
    def forward(self, x):
        return self.line(x)
""")
    words = (
        "convert",
        f"{tmp_path}/net.py:Net",
        str(tmp_path / "models" / "net"),
        "--to",
        "pt2",
        "--input",
        "x:FP32:2",
    )
    shell(*words, "--weights", str(tmp_path / "net.pt"))
    assert "[1, 1]  5" in shell("run", str(tmp_path / "models" / "net"), "[[1, 1]]")[0]
    torch.save({"other": torch.ones(1)}, tmp_path / "net.pt")
    said = shell(*words, "--force", "--weights", str(tmp_path / "net.pt"), status=1)[1]
    assert "net.pt' does not fit the module" in said
    (tmp_path / "net.pt").write_bytes(b"junk")
    said = shell(*words, "--force", "--weights", str(tmp_path / "net.pt"), status=1)[1]
    assert "is not a state_dict" in said


def test_a_file_becomes_a_directory_of_a_repository(shell: Shell, files: Path, tmp_path: Path) -> None:
    torch.jit.script(torch.nn.Linear(2, 1)).save(tmp_path / "line.pt")
    into = ("--model-repository", str(tmp_path / "models"))
    said, _ = shell("create", "costs", "--from", str(files / "prices.skops"), *into)
    assert f"created {tmp_path}/models/costs of backend sklearn" in said
    shell("create", "line", "--from", str(tmp_path / "line.pt"), *into, "--input", "input:FP32:2")
    shell("check", str(tmp_path / "models"))
    assert "3.5" in shell("run", str(tmp_path / "models" / "costs"), "[[1, 1]]")[0]
    shutil.copytree(tmp_path / "models" / "costs", tmp_path / "models" / "renamed")
    shell("check", str(tmp_path / "models" / "renamed"))
    assert "there already" in shell("create", "line", "--from", str(tmp_path / "line.pt"), *into, status=1)[1]
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "notes.md").write_text("")
    (tmp_path / "net.onnx").write_bytes(b"junk")
    torch.save(torch.nn.Linear(2, 1).state_dict(), tmp_path / "net.pt")
    for name, why in {
        "line.pt": "say them for each argument of forward(input)",
        "net.onnx": f"{tmp_path}/models/other/1/model.onnx (4 bytes) is not an ONNX file",
        "net.pt": "the file by --weights",
        "gone.pt": "there is no file and no directory",
        "files": "is no model that a backend recognises (it holds notes.md)",
    }.items():
        assert why in shell("create", "other", "--from", str(tmp_path / name), *into, status=1)[1]
    assert not (tmp_path / "models" / "other").exists()


def test_a_directory_is_asked_by_its_bare_name(
    shell: Shell, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that are no path by their looks, a model of the store would come first."""
    (tmp_path / "houses").mkdir()
    shutil.copy(files / "prices.skops", tmp_path / "houses" / "model.skops")
    monkeypatch.chdir(tmp_path)
    assert "3.5" in shell("run", "houses", "[[1, 1]]")[0]
    (tmp_path / "houses" / "model.skops").write_bytes(b"junk")
    said = shell("run", "houses", "[[1, 1]]", status=1)[1]
    assert said.count("scikit-learn cannot read it") == 1


def test_what_no_backend_serves_does_not_get_into_the_store(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "lone.safetensors").write_bytes(b"")
    assert "weights alone" in shell("create", "lone", "--from", str(tmp_path / "lone.safetensors"), status=1)[1]
    (tmp_path / "net.xml").write_text("<net/>")
    (tmp_path / "net.bin").write_bytes(b"w")
    assert "copying net.bin" in shell("create", "net", "--from", str(tmp_path / "net.xml"))[1]


def test_the_weights_of_a_checkpoint_stand_for_it(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text('{"architectures": ["NoSuchForCausalLM"]}')
    (tmp_path / "tiny" / "model.safetensors").write_bytes(b"")
    said, _ = shell("check", str(tmp_path / "tiny" / "model.safetensors"), status=1)
    assert "config.json has no model_type" in said
    shutil.rmtree(tmp_path / "tiny")
