"""`modelserver quantize` of language models: the result is rounded to the nearest, serves, and says how alike it is."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from modelserver_backends.llm import activation_aware, kernels, quantized_copy
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.quantization.quantized_weight import QuantizedWeight
from modelserver_backends.llm.quantization.rounded import round_by_products, round_integers
from modelserver_backends.llm.quantized_copy import compare_on_text
from safetensors.torch import load_file, save_file
from support.float_twins import assert_is_its_twin
from support.quantized_checkpoints import VALUES, Packed, float8, groups_of, meant, rounded, write_quantized
from support.tiny_checkpoints import write_checkpoint

from modelserver.cli.main import main
from modelserver.errors import AlreadyExistsError, InvalidArgumentError, UnsupportedError
from modelserver.toolkit.language_models import is_language_model, quantize_language_model


@pytest.fixture(autouse=True)
def rows_in_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels in C make rows 8 bits wide, so that greedy tokens need not be those of a float twin."""
    monkeypatch.setattr(kernels, "PACKED_KERNELS", None)


_PAIRS = (
    ("int4", "qwen3_moe"),
    ("int4", "llama"),
    ("int8", "phi3"),
    ("int8", "qwen3_moe"),
    ("fp8", "llama"),
    ("fp8", "phi3"),
)
TEXT = "the server answers every request that it is given, and then it waits for the next one to come\n" * 3


def silent(_step: str) -> None:
    pass


def integers(bits: int, group_size: int, weight: torch.Tensor) -> Packed:
    codes, scales, zeros = rounded(weight, bits, group_size, is_symmetric=True)
    return {}, meant(codes, scales, zeros, groups_of(weight.shape[1], group_size))


def floats(weight: torch.Tensor) -> Packed:
    return {}, float8(weight, (1, weight.shape[1]))[2]


def rounding(method: str):
    return {"int4": lambda one: integers(4, 32, one), "int8": lambda one: integers(8, -1, one), "fp8": floats}[method]


# Each method and each family; the other pairs are slow.
@pytest.mark.parametrize(
    ("method", "family"),
    [
        pytest.param(method, family, marks=() if (method, family) in _PAIRS else pytest.mark.slow)
        for method in ("int4", "int8", "fp8")
        for family in ("llama", "phi3", "qwen3_moe")
    ],
)
def test_a_checkpoint_is_rounded_and_serves(method: str, family: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", family, values=VALUES)
    _, twin = write_quantized(source, tmp_path, rounding(method), {})
    outcome = quantize_language_model(str(source), tmp_path / "models" / "small", method, silent)
    written = tmp_path / "models" / "small" / "1"
    assert outcome.figures["bytes_after"] < outcome.figures["bytes_before"]
    assert (written / "tokenizer.json").is_file()
    assert_is_its_twin(written, twin)


def test_the_command_says_how_alike_they_are_on_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a model directory, whose weights lie in shards."""
    made = write_checkpoint(tmp_path / "repository" / "large" / "1", "llama", values=VALUES)
    tensors = sorted(load_file(made / "model.safetensors").items())
    (made / "model.safetensors").unlink()
    places = {}
    for index, part in enumerate((tensors[::2], tensors[1::2])):
        save_file(dict(part), made / f"model-{index}.safetensors", metadata={"format": "pt"})
        places |= {name: f"model-{index}.safetensors" for name, _ in part}
    (made / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (tmp_path / "text.txt").write_text(TEXT)
    arguments = [str(made.parent), str(tmp_path / "repository" / "small"), "--text", str(tmp_path / "text.txt")]

    def figures(*words: str) -> dict[str, float]:
        with pytest.raises(SystemExit) as ended:
            main(["quantize", *arguments, *words, "--json"])
        assert ended.value.code in (None, 0)
        return json.loads(capsys.readouterr().out)

    fine = figures("--method", "int8")
    assert fine["modules"] == 14
    assert fine["perplexity_after"] == pytest.approx(fine["perplexity_before"], rel=0.05)
    assert fine["agreement"] > 0.9
    assert 0 < fine["divergence"] < 0.01
    assert figures("--method", "int4", "--force")["divergence"] > fine["divergence"]


def test_a_calibration_text_makes_layers_lose_less_on_it() -> None:
    """Rows whose inputs go together: errors of one are made up for by others."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 256, generator=generator)
    rows = torch.randn(2000, 64, generator=generator) @ torch.randn(64, 256, generator=generator)
    rows += 0.1 * torch.randn(2000, 256, generator=generator)
    rows[:, 7] = 0.0
    exact = rows @ weight.T

    def error(rounded: QuantizedWeight) -> float:
        return float((rows @ rounded.dequantized().T - exact).norm() / exact.norm())

    guided = round_by_products(weight, rows.T @ rows / len(rows), 4, 32)
    assert guided.codes.shape == weight.shape
    assert error(guided) < 0.6 * error(round_integers(weight, 4, 32))


@pytest.mark.slow
def test_what_a_text_shows_makes_a_trained_model_lose_less_on_another() -> None:
    """The smallest margins are half of those measured: chance gives none of them."""
    paragraphs = [text for text in topics.values() if len(text) > 2000]
    calibration, held_out = "\n".join(paragraphs[::2])[:4000], "\n".join(paragraphs[1::2])[:2500]
    source = Path(__file__).parents[2] / "model_repository" / "tiny_chat" / "1"
    divergence = {}
    for method, text in (("int4", None), ("awq", calibration), ("gptq", calibration)):
        with tempfile.TemporaryDirectory() as target, open_checkpoint(source) as checkpoint:
            quantized_copy.write_quantized_copy(checkpoint, Path(target), method.replace("gptq", "int4"), text)
            divergence[method] = compare_on_text(source, Path(target), held_out).divergence
    assert divergence["gptq"] < 0.75 * divergence["int4"]
    assert divergence["awq"] < 0.95 * divergence["int4"]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_int4_by_a_calibration_text_serves(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_copy, "_PRODUCT_BYTES", 1 << 15)  # the text is read several times
    source = write_checkpoint(tmp_path / "source", family, values=VALUES)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    found = {}
    for calibration in (None, text):
        outcome = quantize_language_model(
            str(source), tmp_path / "small", "int4", silent, text=text, calibration=calibration, force=True
        )
        found[calibration] = outcome.figures
    assert found[text]["bytes_after"] == found[None]["bytes_after"]
    assert found[text]["divergence"] < found[None]["divergence"]


@pytest.mark.parametrize("family", ["llama_tied_biased", "phi3", "gemma2", "olmo2", "qwen2_moe"])
def test_awq_moves_scales_into_what_makes_the_inputs(family: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", family, values=VALUES)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    figures = {
        method: quantize_language_model(
            str(source), tmp_path / method, method, silent, text=text, calibration=text if method == "awq" else None
        ).figures
        for method in ("int8", "int4", "awq")
    }
    assert figures["awq"]["bytes_after"] == figures["int4"]["bytes_after"]
    assert figures["int8"]["divergence"] < figures["awq"]["divergence"] < 1.2 * figures["int4"]["divergence"]
    before, after = (load_file(place / "model.safetensors") for place in (source, tmp_path / "awq" / "1"))
    norms = [name for name in before if name.endswith("norm.weight") and not torch.equal(before[name], after[name])]
    assert bool(norms) == (family != "olmo2")  # which has no norm before its layers


def test_awq_is_refused_where_it_would_change_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = activation_aware._links

    def wrong(*arguments):
        return [replace(link, maker="norm") if link.is_norm else link for link in links(*arguments)]

    monkeypatch.setattr(activation_aware, "_links", wrong)
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.raises(UnsupportedError, match="awq is not possible for llama"):
        quantize_language_model(str(source), tmp_path / "small", "awq", silent, calibration=tmp_path / "text.txt")
    with pytest.raises(InvalidArgumentError, match="awq needs a text"):
        quantize_language_model(str(source), tmp_path / "small", "awq", silent)


def test_layers_whose_inputs_have_no_whole_groups_stay_in_floats(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", values={**VALUES, "intermediate_size": 80})
    outcome = quantize_language_model(str(source), tmp_path / "small", "int4", silent)
    assert sorted(note.split()[0] for note in outcome.notes) == [
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
    ]
    assert "model.layers.0.mlp.down_proj.weight" in load_file(tmp_path / "small" / "1" / "model.safetensors")


def test_what_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    with pytest.raises(InvalidArgumentError, match="'static' of a language model: expected int4, int8, fp8, awq"):
        quantize_language_model(str(source), tmp_path / "small", "static", silent)
    quantize_language_model(str(source), tmp_path / "small", "fp8", silent)
    with pytest.raises(UnsupportedError, match="are quantized already"):
        quantize_language_model(str(tmp_path / "small"), tmp_path / "smaller", "int4", silent)
    with pytest.raises(AlreadyExistsError, match="is there already"):
        quantize_language_model(str(source), tmp_path / "small", "fp8", silent)
    foreign = write_checkpoint(tmp_path / "foreign", "opt")
    with pytest.raises(UnsupportedError, match="weights of opt cannot be quantized"):
        quantize_language_model(str(foreign), tmp_path / "other", "int8", silent)
    assert not (tmp_path / "other").exists()
    assert not is_language_model(str(tmp_path / "nowhere"))
