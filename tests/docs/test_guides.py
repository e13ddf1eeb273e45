"""The pages that lead from a file to an answer are followed word by word, and the notebooks are run."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tqdm
import transformers
from PIL import Image
from support.processes import ANY_PORTS, ServerProcess

from modelserver.backend.discovery import BUNDLED
from modelserver.cli.main import main

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What each page says, besides that its commands succeed.
PAGES = {
    "scikit-learn": r"predict\s+INT64\s+\[1, 1\]\s+0\b",
    "xgboost": r'"predictions":\s*\[',
    "hugging-face": r"label\s+BYTES\s+\[1, 1\]\s+(cat|dog)",
    "pytorch": r'"name":\s*"OUTPUT__0"',
    "qwen": r'"role":\s*"assistant"',
    "function": r'"data":\s*\[2.0,\s*4.0,\s*6.0\]',
}
QUICK = {"scikit-learn", "function"}


def write_files(name: str, directory: Path) -> None:
    """What a user of the page has already."""
    if name == "qwen":  # another network stands for it
        shutil.copytree(ROOT / "model_repository" / "tiny_chat" / "1", directory / "Qwen3-0.6B")
    if name == "hugging-face":
        tqdm.tqdm.monitor_interval = 0  # no thread
        config = transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16,
            patch_size=8, id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1},
        )  # fmt: skip
        transformers.ViTForImageClassification(config).save_pretrained(directory / "classifier")
        transformers.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(directory / "classifier")
        Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(directory / "cat.png")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in PAGES]
)
def test_every_snippet_of_a_page_works(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(name, tmp_path)
    said, kinds = "", []
    with ExitStack() as stack:
        server: ServerProcess | None = None
        for language, code in FENCE.findall((ROOT / "docs" / "guides" / f"{name}.md").read_text()):
            if language == "python":
                file = re.match(r"# (\w+\.py)\n", code)
                (tmp_path / (file[1] if file else "code.py")).write_text(code)
                exec(compile(code, name, "exec"), {"__name__": "__main__"})
                continue
            program, *words = shlex.split(code.replace("\\\n", " "))
            kinds.append(f"{program} {words[0]}")
            if words[0] == "install":
                continue
            if words[0] == "serve":
                server = ServerProcess([*words[1:], *ANY_PORTS])
                stack.callback(server.close)
                server.wait_until_started()
                server.wait_for(r"READY")
            elif program == "curl":
                assert server is not None
                words = [word.replace("localhost:8000", server.http_url) for word in words]
                done = subprocess.run(["curl", "--fail-with-body", *words], capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stdout + server.output
                said += done.stdout
            else:
                with pytest.raises(SystemExit) as ended:
                    main(words)
                printed = capsys.readouterr()
                assert not ended.value.code, printed
                said += printed.out
    assert kinds[0] == "pip install"
    assert kinds[-2:] == ["modelserver serve", "curl -s"]
    assert len(kinds) <= 4
    assert re.search(PAGES[name], said), said


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path) -> None:
    document = json.loads(path.read_text())
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    names: dict[str, Any] = {}
    shown = []
    for cell in document["cells"]:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]), path.name)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, path.name, "exec"), names)
        if last is not None:
            shown.append(eval(compile(ast.Expression(last.value), path.name, "eval"), names))
    assert any(value is not None for value in shown)


def test_the_extras_of_the_table_are_those_of_the_backends() -> None:
    named = set(re.findall(r"\| `(\w+)` \| \d", (ROOT / "docs" / "kinds.md").read_text()))
    assert named == {backend.extra for backend in BUNDLED.values() if backend.extra} | {"convert"}
