"""Precision, device and length of a network, by its options."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.models import load
from modelserver_backends.llm.models.load import choose_device, choose_dtype, load_network
from modelserver_backends.llm.options import EngineOptions
from safetensors.torch import load_file, save_file
from support.checkpoints import network_of
from support.generations import generate, loaded_engine
from support.tiny_checkpoints import reference_logprobs, write_checkpoint

from modelserver.backend import InvalidArgumentError, UnavailableError, UnsupportedError

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "bloom", "qwen2_moe", "deepseek_v3"])
def test_half_precision_says_nearly_the_same(dtype: str, family: str, checkpoint: Callable[[str], Path]) -> None:
    directory, prompt = checkpoint(family), list(range(20, 50))
    with loaded_engine(directory, dtype=dtype) as engine:
        tokens, logprobs = generate(engine, [prompt], 4)[0]
    exact = reference_logprobs(directory, prompt + tokens)[len(prompt) - 1 : -1]
    assert logprobs == pytest.approx([float(row[token]) for row, token in zip(exact, tokens, strict=True)], abs=0.5)


def test_auto_is_what_the_checkpoint_says_unless_that_is_slow_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(major=8))
    assert choose_dtype("auto", "float32", CPU) == torch.float32
    assert choose_dtype("auto", "float16", CPU) == torch.float32
    assert choose_dtype("auto", "torch.bfloat16", torch.device("cuda")) == torch.bfloat16
    assert choose_dtype("auto", "torch.bfloat16", torch.device("cuda"), has_codes=True) == torch.bfloat16
    assert choose_dtype("auto", "bfloat16", CPU, has_codes=True) == torch.float32
    assert choose_dtype("bfloat16", "bfloat16", CPU, has_codes=True) == choose_dtype("bfloat16", "float32", CPU)
    assert choose_dtype("half", "float32", CPU) == torch.float16
    with pytest.raises(InvalidArgumentError, match="dtype 'int4' is not supported"):
        choose_dtype("int4", "float32", CPU)


LOADED = """
import resource, sys, torch
from pathlib import Path
from modelserver_backends.llm.models.linear import can_pack
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.models.load import load_network
from modelserver_backends.llm.options import EngineOptions

directory, dtype = Path(sys.argv[1]), sys.argv[2]
can_pack(torch.float32)
for quantization in sys.argv[3:]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    options = EngineOptions(device="cpu", dtype=dtype, quantization=quantization or None)
    loaded = load_network(open_checkpoint(directory), options)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    torch.manual_seed(0)
    rows = torch.randn(64, 512, dtype=loaded.kv_layout.dtype)
    few, many = loaded.network.logits(rows[:2]), loaded.network.logits(rows)
    assert torch.allclose(few, many[:2], rtol=0.05, atol=0.05 * many.abs().max().item())
    print(loaded.kv_layout.dtype, grown / (directory / "model.safetensors").stat().st_size, many.abs().sum().item())
"""
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 50 MB in bfloat16."""
    values = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "vocab_size": 4000}
    directory = write_checkpoint(tmp_path_factory.mktemp("large") / "llama", "llama", values=values)
    weights = load_file(directory / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, directory / "model.safetensors")
    return directory


def load_apart(
    directory: Path, dtype: str, quantizations: Sequence[str] = ("",), **environment: str
) -> list[tuple[str, float, float]]:
    """In a process of its own, one load after the other.

    For each the precision, the growth of the process' peak as a multiple of the file, and a sum of logits.
    """
    command = [sys.executable, "-c", LOADED, str(directory), dtype, *quantizations]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    return [(name, float(peak), float(total)) for name, peak, total in rows]


def test_a_checkpoint_takes_little_more_than_its_weights_while_it_is_loaded(large: Path) -> None:
    [(name, peak, _)] = load_apart(large, "float32")
    assert name == "torch.float32"
    assert peak < 2.6  # the weights in float32 are 2 times the file


def test_layers_say_what_they_take(large: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each part of memory once."""
    caplog.set_level(logging.INFO)
    layers = network_of(large, EngineOptions(device="cpu", dtype="bfloat16", max_model_len=64)).layers
    kinds = [layer.kind for layer in layers]
    assert kinds.count("q_proj, k_proj, v_proj") == kinds.count("down_proj") == 6
    assert kinds.count("embed_tokens") == 1
    lines = [record.getMessage() for record in caplog.records if "linear layers of" in record.getMessage()]
    taken = sum(layer.num_bytes for layer in layers if layer.kind == "down_proj") / 1e6
    assert next(line for line in lines if line.startswith(f"linear layers of {large}: down_proj: ")).endswith(
        f" {taken:.1f} MB"
    )


def test_a_processor_without_bfloat16_computes_in_float32(large: Path) -> None:
    (name, _, total), (quantized_name, _, quantized_total) = load_apart(large, "bfloat16", ("", "int8"), **AVX2)
    assert name == quantized_name == "torch.float32"
    assert quantized_total == pytest.approx(total, rel=0.02)


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(InvalidArgumentError, match="'abacus' is not a device"):
        choose_device("abacus")
    if not torch.cuda.is_available():
        with pytest.raises(UnavailableError, match="torch finds no GPU"):
            choose_device("cuda")


def test_a_network_is_loaded_on_its_own_gpu(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel runs on the thread's GPU, wherever its tensors lie, and schemes try kernels out while they load."""
    chosen: list[torch.device] = []

    def stop(*_: object, **__: object) -> None:
        raise InvalidArgumentError("far enough")

    monkeypatch.setattr(load, "choose_device", lambda _asked: torch.device("cuda:1"))
    monkeypatch.setattr(load, "choose_dtype", stop)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    with open_checkpoint(checkpoint("llama")) as opened, pytest.raises(InvalidArgumentError, match="far enough"):
        load_network(opened, EngineOptions(device="cuda:1"))
    assert chosen == [torch.device("cuda:1")]


def test_what_sees_pictures_too_describes_its_language_model_inside(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = tmp_path / "qwen3_5"
    shutil.copytree(checkpoint("qwen3_5"), directory)
    entries = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": entries}))
    loaded = network_of(directory, EngineOptions(device="cpu"))
    assert (loaded.max_model_len, loaded.kv_layout.dtype) == (512, torch.float32)
    assert loaded.states is not None
    assert loaded.eos_token_ids == {1}


def test_more_positions_than_there_are(checkpoint: Callable[[str], Path]) -> None:
    with (
        pytest.raises(InvalidArgumentError, match="max_model_len 513 is more than the 512 positions"),
        loaded_engine(checkpoint("llama"), max_model_len=513),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_backend": "triton"}, "attention_backend triton needs a GPU"),
        ({"attention_backend": "flashinfer"}, "attention_backend flashinfer needs a GPU"),
        ({"quantization": "gptq"}, "quantization 'gptq' is not supported"),
    ],
)
def test_what_cannot_run_here_is_refused(
    options: dict[str, str], message: str, checkpoint: Callable[[str], Path]
) -> None:
    with pytest.raises(UnsupportedError, match=message), loaded_engine(checkpoint("llama"), **options):
        pass


def test_a_foreign_network_has_no_quantization(checkpoint: Callable[[str], Path]) -> None:
    with (
        pytest.raises(UnsupportedError, match="not supported for granite"),
        loaded_engine(checkpoint("granite"), quantization="int8"),
    ):
        pass


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3", "phi3", "gemma2", "olmo2", "gpt2", "falcon", "bloom", "mpt", "gpt_neo", "mixtral", "qwen2_moe"],
)
def test_tensors_of_another_shape_than_the_config_says_are_refused(
    family: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each tensor in its turn is a row short, or too long: served, it would fail in each request, or read beyond."""
    directory = tmp_path / family
    shutil.copytree(checkpoint(family), directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "layers.1." in name or ".h.1." in name or "experts.1." in name:  # as those of the first
            continue
        for other in (tensor[:-1], torch.cat((tensor, tensor[:1]))):
            save_file(tensors | {name: other.contiguous()}, file, metadata={"format": "pt"})
            with pytest.raises(InvalidArgumentError) as caught:
                network_of(directory, EngineOptions())
            inner = name.removeprefix("model.").removeprefix("transformer.")
            assert f"has {inner} of shape {list(other.shape)}" in caught.value.message
            assert f"config.json says {list(tensor.shape)}" in caught.value.message
