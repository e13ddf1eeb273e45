"""`convert`, `quantize` and `tune` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.digit_samples import write_digit_samples
from support.model_files import write_identity

from modelserver.cli.main import main
from modelserver.config.pbtxt import parse_pbtxt


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def command(*words: object, status: int = 0) -> tuple[str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        captured = capsys.readouterr()
        assert (ended.value.code or 0) == status, captured
        return captured.out, captured.err

    return command


def test_convert_and_quantize_print_what_changed(run: Any, model_repository: Path, tmp_path: Path) -> None:
    training, held_out = write_digit_samples(tmp_path)
    source = model_repository / "digits_onnx"
    out, _ = run("convert", source, tmp_path / "repo/half", "--to", "fp16", "--data", held_out)
    for text in ("size", "latency, 1 row", "accuracy, 120 samples", "SAME ANSWER", "is ready: modelserver serve"):
        assert text in out
    out, _ = run("quantize", source, tmp_path / "repo/int8", "--calibration", training, "--data", held_out)
    assert "note: in integers: 3 Gemm" in out
    out, _ = run("quantize", source, tmp_path / "repo/int8", "--data", held_out, "--force", "--json")
    document = json.loads(out)
    assert document["size_bytes"]["after"] < document["size_bytes"]["before"]
    assert document["accuracy"]["after"] > 0.9
    run("check", tmp_path / "repo")


def test_mistakes_are_explained(run: Any, model_repository: Path, tmp_path: Path) -> None:
    source = model_repository / "digits_onnx"
    assert "there already" in run("convert", source, source, "--to", "fp16", status=1)[1]
    assert "--to" in run("convert", source, tmp_path / "x", status=2)[1]
    assert "pt3" in run("convert", source, tmp_path / "x", "--to", "pt3", status=2)[1]
    assert "--input expects" in run("convert", source, tmp_path / "x", "--to", "fp16", "--input", "a", status=1)[1]
    assert "no model at" in run("quantize", tmp_path / "absent", tmp_path / "x", status=1)[1]
    assert "real inputs" in run("quantize", source, tmp_path / "x", "--method", "static", status=1)[1]
    assert "--threads expects" in run("tune", "m", "--threads", "a", status=1)[1]
    assert "--serve-flag is for" in run("tune", "m", "--serve-flag", "--x", status=1)[1]
    there = tmp_path / "there.pbtxt"
    there.write_text("")
    assert "--force" in run("tune", "m", "-o", there, status=1)[1]
    for words in (("-o", tmp_path / "none/x"), ("--html", tmp_path / "none/x.html"), ("-o", tmp_path, "--force")):
        assert "in a directory that exists" in run("tune", "m", *words, status=1)[1]
    out_of_the_way = ("-o", tmp_path / "best.pbtxt")
    absent = run("tune", "m", "--model-repository", tmp_path / "none", *out_of_the_way, status=1)[1]
    assert "--model-repository: directory" in absent


def test_tune_on_a_server_of_its_own(run: Any, tmp_path: Path) -> None:
    repository = tmp_path / "repo"
    directory = write_identity(repository, "slow", execute_delay_ms=3)
    text = (directory / "config.pbtxt").read_text()
    config, page = tmp_path / "best.pbtxt", tmp_path / "report.html"
    out, err = run(
        *("tune", "slow", "--model-repository", repository, "--shape", "INPUT0:2", "--concurrency", "4"),
        *("--window-ms", "60", "--instances", "1,2", "--batch-sizes", "8", "--delays-us", "0", "--max-trials", "3"),
        *("-o", config, "--html", page, "--percentile", "0", "--latency-ms", "500"),
    )
    assert "RANK" in out
    assert err == "", "progress is for terminals"
    for column in ("BEFORE", "size", "inferences/s", "mean latency, 4 in flight", "SAME ANSWER"):
        assert column in out
    assert "looked for: the most inferences per second with mean latency up to 500 ms" in out
    assert f"its config is in {config}" in out
    assert parse_pbtxt(config.read_text()).config.name == "slow"
    assert "<h1>Tuning of slow</h1>" in page.read_text()
    assert (directory / "config.pbtxt").read_text() == text
    assert [path.name for path in repository.iterdir()] == ["slow"]
