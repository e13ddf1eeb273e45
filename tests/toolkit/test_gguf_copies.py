"""Language models as GGUF files, and back: `modelserver quantize --method q4_k_m` and `modelserver convert`."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from modelserver_backends.llm import kernels
from modelserver_backends.llm.calibration import measured_importance
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.checkpoint.gguf_blocks import unpack_rows
from modelserver_backends.llm.checkpoint.gguf_metadata import metadata_of
from modelserver_backends.llm.checkpoint.gguf_types import BY_NAME
from modelserver_backends.llm.checkpoint.gguf_writing import write_gguf
from modelserver_backends.llm.quantization.gguf_encoding import encode_rows
from modelserver_backends.llm.text.tokenizer import Tokenizer
from support.generations import generate, loaded_engine, random_prompts
from support.gguf_models import write_gguf as write_gguf_twin
from support.tiny_checkpoints import FAMILIES, reference_tokens, write_checkpoint
from support.tiny_tokenizers import KINDS, write_tokenizer

from modelserver.cli.main import main
from modelserver.errors import InvalidArgumentError, UnsupportedError
from modelserver.toolkit.language_models import convert_language_model, is_language_model, quantize_language_model

# Rows of whole blocks of 256.
VALUES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
TEXT = "the server answers every request that it is given, and then it waits for the next one to come\n" * 3
UNWRITTEN = {"llama_dynamic", "qwen2_window", "llama_linear", "qwen3_moe", "deepseek_v2", "deepseek_v3"}
UNWRITTEN |= {"bloom", "falcon", "falcon_7b", "falcon_rw", "mpt", "gpt_neo"}
# Rotations of V3 that GGUF has words for.
V3_ROPE = {**FAMILIES["deepseek_v3"].values["rope_parameters"], "mscale": 1.1}
WRITTEN = sorted(set(FAMILIES) - UNWRITTEN)
ERRORS = {"Q8_0": 0.006, "Q6_K": 0.02, "Q5_0": 0.045, "Q4_K": 0.075, "Q4_0": 0.09}


def silent(_step: str) -> None:
    pass


def relative_error(found: torch.Tensor, exact: torch.Tensor, counts: torch.Tensor | float = 1.0) -> float:
    return float((counts * (found - exact).square()).sum().sqrt() / (counts * exact.square()).sum().sqrt())


@pytest.mark.parametrize("kind", ERRORS)
def test_blocks_are_near_what_they_stand_for_and_read_alike_elsewhere(kind: str) -> None:
    weight = torch.randn(24, 512, generator=torch.Generator().manual_seed(0))
    weight[3, 256:] = 0.0
    weight[4] = 0.0
    weight[5, 7] = 40.0
    encoded = encode_rows(BY_NAME[kind], weight)
    found = unpack_rows(BY_NAME[kind], encoded)
    theirs = gguf.quants.dequantize(encoded.numpy(), gguf.GGMLQuantizationType[kind])
    assert np.array_equal(theirs, found.numpy())
    assert relative_error(found[8:], weight[8:]) < ERRORS[kind]
    assert not found[4].any()


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q4_0", "Q5_0"])
def test_importance_moves_the_error_to_where_it_does_not_count(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 512, generator=generator)
    importance = torch.rand(512, generator=generator) ** 8
    importance[17] = 0.0
    plain = unpack_rows(BY_NAME[kind], encode_rows(BY_NAME[kind], weight))
    guided = unpack_rows(BY_NAME[kind], encode_rows(BY_NAME[kind], weight, importance))
    assert relative_error(guided, weight, importance) < 0.95 * relative_error(plain, weight, importance)
    assert guided[:, 17].any()


def tensor_names(directory: Path) -> set[str]:
    """What the package calls the tensors of a checkpoint."""
    twin = write_gguf_twin(directory, directory / "twin.gguf")
    names = {tensor.name for tensor in gguf.GGUFReader(twin).tensors}
    twin.unlink()
    return names


@pytest.mark.parametrize("family", WRITTEN)
def test_a_checkpoint_becomes_gguf_and_comes_back(family: str, tmp_path: Path) -> None:
    comes_back(write_checkpoint(tmp_path / "source", family), family, tmp_path)


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("deepseek_v2", {}),
        ("deepseek_v3", {"rope_parameters": V3_ROPE, "q_lora_rank": 32, "num_nextn_predict_layers": 0}),
    ],
)
def test_latent_attention_becomes_gguf_and_comes_back(family: str, values: dict[str, object], tmp_path: Path) -> None:
    """The file has keys and values by head; the config that comes back says what the first said."""
    source = write_checkpoint(tmp_path / "source", family, values=values)
    comes_back(source, family, tmp_path)
    reader = gguf.GGUFReader(tmp_path / "models" / "one" / "1" / "model.gguf")
    shapes = {tensor.name: tensor.shape.tolist()[::-1] for tensor in reader.tensors}
    config = json.loads((source / "config.json").read_text())
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    assert shapes["blk.1.attn_k_b.weight"] == [heads, rank, config["qk_nope_head_dim"]]
    assert shapes["blk.1.attn_v_b.weight"] == [heads, config["v_head_dim"], rank]
    fields = {key.removeprefix("deepseek2."): field.contents() for key, field in reader.fields.items()}
    theirs = gguf.GGUFReader(write_gguf_twin(source, tmp_path / "twin.gguf"))
    if family == "deepseek_v3":
        for key in (key for key in theirs.fields if key.startswith("deepseek2.")):
            assert fields[key.removeprefix("deepseek2.")] == pytest.approx(theirs.fields[key].contents()), key
    quantize_language_model(str(source), tmp_path / "small", "q8_0", silent)
    with loaded_engine(tmp_path / "small" / "1", max_model_len=64) as engine:
        assert len(generate(engine, random_prompts(2, longest=40), 4)) == 2


def comes_back(source: Path, family: str, tmp_path: Path) -> None:
    prompts = random_prompts(2, longest=40)
    convert_language_model(str(source), tmp_path / "models" / "one", "gguf", silent)
    file = tmp_path / "models" / "one" / "1" / "model.gguf"
    convert_language_model(str(file), tmp_path / "models" / "two", "safetensors", silent)
    stored = {tensor.name for tensor in gguf.GGUFReader(file).tensors}
    if family != "deepseek_v2":  # of which the twin is as it once was
        assert stored == tensor_names(source) - ({"output.weight"} if "output.weight" not in stored else set())
    for place in (file, tmp_path / "models" / "two" / "1"):
        with open_checkpoint(source) as expected, open_checkpoint(place) as found:
            for name in found.names():
                if name.endswith(("k_b_proj.weight", "v_b_proj.weight")):
                    continue  # together in the safetensors
                offset = 1 if "gemma" in family and name.endswith("norm.weight") else 0  # of what is computed with
                assert torch.equal(found.tensor(name) + offset, expected.tensor(name) + offset), name
            assert found.chat_templates == expected.chat_templates
            assert found.eos_token_ids >= expected.eos_token_ids
            theirs, ours = Tokenizer.from_checkpoint(expected), Tokenizer.from_checkpoint(found)
            assert ours.encode(TEXT) == theirs.encode(TEXT)
        with loaded_engine(place, max_model_len=64) as engine:
            answers = [tokens for tokens, _ in generate(engine, prompts, 4)]
        assert answers == [reference_tokens(source, prompt, 4) for prompt in prompts]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_unstripped"])
def test_the_fields_of_llama_cpp_say_the_same_of_texts(kind: str, tmp_path: Path) -> None:
    """Also without the tokenizer.json that is in the file besides, which our reader prefers."""
    source = write_checkpoint(tmp_path / "source", "llama")
    write_tokenizer(source, KINDS[kind]())
    with open_checkpoint(source) as checkpoint:
        expected = Tokenizer.from_checkpoint(checkpoint)
        metadata = metadata_of(checkpoint, "llama")
    assert metadata["tokenizer.ggml.model"] == ("gpt2" if kind == "byte_level" else "llama")
    del metadata["tokenizer.huggingface.json"]
    write_gguf(tmp_path / "fields.gguf", metadata, [], [])
    with open_checkpoint(tmp_path / "fields.gguf") as checkpoint:
        found = Tokenizer.from_checkpoint(checkpoint)
    for text in (TEXT, "  two  spaces\n\nand <|im_start|>user 1234 été 語", "x"):
        assert found.encode(text) == expected.encode(text)
        assert found.decode(found.encode(text)) == expected.decode(expected.encode(text))


def test_another_reader_finds_the_same_metadata_and_tensors(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "qwen3", values=VALUES)
    quantize_language_model(str(source), tmp_path / "small", "q4_k_m", silent)
    reader = gguf.GGUFReader(tmp_path / "small" / "1" / "model.gguf")
    fields = {key: field.contents() for key, field in reader.fields.items()}
    config = json.loads((source / "config.json").read_text())
    assert fields["general.architecture"] == "qwen3"
    assert fields["qwen3.embedding_length"] == config["hidden_size"]
    assert fields["tokenizer.ggml.model"] == "gpt2"
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert len(fields["tokenizer.ggml.tokens"]) == config["vocab_size"]
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.0.attn_q.weight"] == "Q4_K"
    assert kinds["output.weight" if "output.weight" in kinds else "token_embd.weight"] == "Q6_K"
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    with open_checkpoint(source) as expected:
        for tensor in reader.tensors:
            if tensor.name == "blk.1.ffn_up.weight":
                found = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
                assert relative_error(found, expected.tensor("layers.1.mlp.up_proj.weight")) < ERRORS["Q4_K"]


def test_the_command_reports_the_loss_of_each_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", values=VALUES)
    (tmp_path / "text.txt").write_text(TEXT)

    def figures(*words: str) -> dict[str, float]:
        arguments = [str(source), str(tmp_path / "small"), "--force", "--text", str(tmp_path / "text.txt"), "--json"]
        with pytest.raises(SystemExit) as ended:
            main(["quantize", *arguments, *words])
        assert ended.value.code in (None, 0)
        return json.loads(capsys.readouterr().out)

    found = {method: figures("--method", method) for method in ("q8_0", "q6_k", "q4_k_m")}
    sizes = [one["bytes_after"] for one in found.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert found["q8_0"]["divergence"] < found["q6_k"]["divergence"] < found["q4_k_m"]["divergence"]
    assert found["q8_0"]["agreement"] > 0.9
    guided = figures("--method", "q4_k_m", "--calibration", str(tmp_path / "text.txt"))
    assert guided["bytes_after"] == found["q4_k_m"]["bytes_after"]
    assert guided["divergence"] < found["q4_k_m"]["divergence"]


def test_importance_is_that_of_the_rows_of_each_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PACKED_KERNELS", None)
    with open_checkpoint(write_checkpoint(tmp_path, "qwen3_moe")) as checkpoint:
        found = measured_importance(checkpoint, TEXT)
        for name, squares in found.items():
            assert squares.shape == checkpoint.shape(f"{name}.weight")[1:]
            assert (squares >= 0).all()
        assert squares.any()
    queries, keys = found["layers.0.self_attn.q_proj"], found["layers.0.self_attn.k_proj"]
    assert torch.equal(queries, keys)
    # What a norm leaves has a mean square of about one, times its weight.
    assert 0.1 < float(queries.mean()) < 10.0
    assert not any(name.startswith(("lm_head", "embed_tokens")) for name in found)
    assert any(".experts." in name for name in found)


def test_what_gguf_has_no_words_for_is_refused(tmp_path: Path) -> None:
    for family, message in (
        ("opt", "GGUF files of opt are not written"),
        ("llama_dynamic", "'dynamic' cannot be"),
    ):
        source = write_checkpoint(tmp_path / family, family)
        with pytest.raises(UnsupportedError, match=message):
            convert_language_model(str(source), tmp_path / "out", "gguf", silent)
    source = write_checkpoint(tmp_path / "llama", "llama")
    quantize_language_model(str(source), tmp_path / "small", "q8_0", silent)
    with pytest.raises(UnsupportedError, match="quantized already"):
        quantize_language_model(str(tmp_path / "small"), tmp_path / "out", "q4_0", silent)
    (tmp_path / "text").write_text(TEXT)
    with pytest.raises(InvalidArgumentError, match="fp8 is rounded to the nearest"):
        quantize_language_model(str(source), tmp_path / "out", "fp8", silent, calibration=tmp_path / "text")
    with pytest.raises(InvalidArgumentError, match="holds no checkpoint"):
        convert_language_model(str(tmp_path / "nothing"), tmp_path / "out", "gguf", silent)
    assert not (tmp_path / "out").exists()
    assert is_language_model(str(tmp_path / "small" / "1" / "model.gguf"))
