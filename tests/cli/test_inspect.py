"""`modelserver inspect`: what a file is, without a server and without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from modelserver_backends.tensorrt.sidecar import file_sha256, write_sidecar
from safetensors.torch import load_file, save_file
from support.engines import batching_engine, plan_bytes
from support.gguf_models import write_gguf
from support.tiny_checkpoints import write_checkpoint

from modelserver.cli.main import main

_OPTIONS = {
    "precision": "keep", "opt_level": 0, "tf32": True, "sparse": False, "targets": ["sm86", "sm120"], "plugins": [],
    "timing_cache": "",
}  # fmt: skip
_BUILT = {"onnx": "m.onnx", "flavour": "tensorrt_rtx", "options": _OPTIONS}


def run(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> tuple[str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *arguments])
    captured = capsys.readouterr()
    assert (ended.value.code or 0) == status, captured
    return captured.out, captured.err


def document(capsys: pytest.CaptureFixture[str], path: Path) -> Any:
    return json.loads(run(capsys, str(path), "--json")[0])


def test_an_onnx_file(capsys: pytest.CaptureFixture[str], model_repository: Path) -> None:
    path = model_repository / "digits_onnx/1/model.onnx"
    found = document(capsys, path)
    assert (found["kind"], found["opset"], found["bytes"]) == ("ONNX model", 17, path.stat().st_size)
    assert found["inputs"] == [{"name": "image", "datatype": "FP32", "shape": ["batch", 8, 8]}]
    out, _ = run(capsys, str(path))
    assert "image  FP32      [batch, 8, 8]" in out


def test_a_gguf_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_gguf(write_checkpoint(tmp_path / "source"), tmp_path / "tiny.gguf")
    found = document(capsys, path)
    assert (found["kind"], found["architecture"], found["tokenizer"]) == ("GGUF model", "llama", "gpt2 (gpt-2)")
    assert found["types"] == [{"type": "F32", "tensors": len(found["tensors"]), "bytes": 4 * found["parameters"]}]
    assert {"name": "blk.0.ffn_up.weight", "type": "F32", "shape": [80, 48], "bytes": 15360} in found["tensors"]
    assert "note" not in found
    assert {"kind": "ffn_up", "form": "F32", "layers": 2, "bytes": 30720} in found["kinds"]
    assert {"name": "blk.1.ffn_up", "form": "F32", "bytes": 15360} in found["layers"]
    out, _ = run(capsys, str(path))
    assert "context length: 512" in out
    path.write_bytes(path.read_bytes().replace(b"blk.0.ffn_up", b"blk.0.ffn_xx"))
    assert "cannot be served: " in document(capsys, path)["note"]
    path.write_bytes(path.read_bytes()[:1000])
    assert "more than a file of 1000 bytes can hold" in run(capsys, str(path), status=1)[1]


def test_a_gguf_file_whose_layers_do_not_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_gguf(write_checkpoint(tmp_path / "source"), tmp_path / "tiny.gguf")
    swapped = path.read_bytes().replace(b"blk.0.attn_k.", b"blk.0.attn_x.").replace(b"blk.0.attn_q.", b"blk.0.attn_k.")
    path.write_bytes(swapped.replace(b"blk.0.attn_x.", b"blk.0.attn_q."))
    note = document(capsys, path)["note"]
    assert note.startswith("it cannot be served: ")
    assert "layers.0.self_attn.q_proj.weight of shape" in note


def test_a_gguf_file_in_parts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    whole = document(capsys, write_gguf(source, tmp_path / "tiny.gguf"))
    first = write_gguf(source, tmp_path / "tiny.gguf", split=3)
    found = document(capsys, first)
    assert found["files"] == [f"tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert {each["name"] for each in found["tensors"]} == {each["name"] for each in whole["tensors"]}
    assert (found["parameters"], found["model_type"]) == (whole["parameters"], "llama")
    assert found["bytes"] == sum((tmp_path / name).stat().st_size for name in found["files"])
    assert "files: tiny-00001-of-00003.gguf, tiny-00002-of-00003.gguf" in run(capsys, str(first))[0]
    (tmp_path / "tiny-00002-of-00003.gguf").unlink()
    found = document(capsys, first)
    assert "tiny-00002-of-00003.gguf cannot be read" in found["note"]
    assert len(found["tensors"]) < len(whole["tensors"])


def test_a_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "source")
    found = document(capsys, directory)
    assert (found["kind"], found["model_type"], found["tokenizer"]) == ("checkpoint", "llama", "tokenizer.json")
    assert {"kind": "up_proj", "form": "F32", "layers": 2, "bytes": 30720} in found["kinds"]
    assert sum(layer["bytes"] for layer in found["layers"]) == sum(each["bytes"] for each in found["types"])
    path, up = directory / "model.safetensors", "model.layers.0.mlp.up_proj"
    tensors = load_file(path)
    del tensors[f"{up}.weight"]
    tensors[f"{up}.qweight"] = torch.zeros(6, 80, dtype=torch.int32)
    tensors[f"{up}.scales"] = torch.zeros(1, 80, dtype=torch.float16)
    save_file(tensors, path)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 48}
    (directory / "config.json").write_text(json.dumps(config))
    found = document(capsys, directory)
    assert "layers.0.mlp.up_proj.qzeros" in found["note"]
    layers = found["layers"]
    assert {"name": up, "form": "gptq: I32, F16", "bytes": 4 * 480 + 2 * 80} in layers
    assert {"name": "model.layers.1.mlp.up_proj", "form": "F32", "bytes": 15360} in layers
    out, _ = run(capsys, str(directory))
    assert "quantization: method gptq, bits 4, group size 48\n" in out
    assert "gptq: I32, F16  1" in out
    path.write_bytes(path.read_bytes()[:1000])
    assert f"{path}: " in run(capsys, str(directory), status=1)[1]


def test_an_exported_program_and_a_torchscript_file(capsys: pytest.CaptureFixture[str], model_repository: Path) -> None:
    found = document(capsys, model_repository / "digits_export/1/model.pt2")
    assert found["max_batch_size"] == 64
    assert found["inputs"] == [{"name": "image", "datatype": "FP32", "shape": ["batch", 8, 8]}]
    assert "forward takes: image" in document(capsys, model_repository / "digits_torchscript/1/model.pt")["note"]


def test_a_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = tmp_path / "any.bin"  # known by its first bytes, whatever its name
    plan.write_bytes(plan_bytes("tensorrt_rtx", (1, 7, 1, 116)))
    found = document(capsys, plan)
    assert found["built_with"] == "TensorRT for RTX 1.7.1.116"
    assert found["architectures"] == ["sm80", "sm86", "sm89", "sm120", "sm121"]
    assert "on a GPU only" in found["note"]
    write_sidecar(plan, batching_engine(8), file_sha256(plan), _BUILT)
    found = document(capsys, plan)
    assert found["inputs"] == [{"name": "in", "datatype": "FP32", "shape": [-1, 16]}]
    assert found["profiles"] == ["in:1x16/4x16/8x16"]
    out, _ = run(capsys, str(plan))
    assert "profile 0: in:1x16/4x16/8x16" in out
    assert "built onnx: m.onnx" in out
    assert "built options: precision keep, opt level 0, tf32 true, targets sm86, sm120\n" in out
    plan.write_bytes(plan_bytes("tensorrt_rtx", (1, 7, 1, 117)))
    assert "its checksum differs" in document(capsys, plan)["note"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.plan", b"rubbish", "at least 28 bytes, got 7"),
        ("a.onnx", b"rubbish", "expected an ONNX model"),
        ("a.txt", b"rubbish", "expected a file .plan, .onnx"),
    ],
)
def test_other_files(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert said in run(capsys, str(tmp_path / name), status=1)[1]


def test_what_is_no_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "No such file" in run(capsys, str(tmp_path / "a.plan"), status=1)[1]
    assert "is a directory" in run(capsys, str(tmp_path), status=1)[1]
