"""The page that leads from a file to an answer is followed word by word."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import tqdm
import transformers
from PIL import Image

from modelserver.backend.discovery import BUNDLED
from modelserver.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "kinds.md").read_text()
SNIPPETS = re.findall(r"^```(python|sh)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def write_classifier(directory: Path) -> None:
    tqdm.tqdm.monitor_interval = 0  # no thread
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8,
        id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1},
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(directory / "classifier")
    transformers.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(directory / "classifier")
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(directory / "cat.png")


def test_every_snippet_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_classifier(tmp_path)
    said = []
    for kind, code in SNIPPETS:
        if kind == "python":
            exec(compile(code, "kinds.md", "exec"), {})
            continue
        program, *words = shlex.split(code)
        assert program == "modelserver"
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert not ended.value.code, capsys.readouterr()
        said.append(capsys.readouterr().out)
    assert [kind for kind, _ in SNIPPETS] == ["python", "sh", "python", "sh", "sh"]
    for answer in said[:2]:
        assert re.search(r"predict\s+INT64\s+\[1, 1\]\s+0\b", answer)
    assert re.search(r"label\s+BYTES\s+\[1, 1\]\s+(cat|dog)", said[2])


def test_the_extras_of_the_table_are_those_of_the_backends() -> None:
    named = set(re.findall(r"\| `(\w+)` \| \d", PAGE))
    assert named == {backend.extra for backend in BUNDLED.values() if backend.extra} | {"convert"}
