"""Checkpoints that transformers would load and that would write nonsense, or nothing, are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from modelserver_backends.llm import kernels
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.models.attention_trial import check_equal
from modelserver_backends.llm.models.transformers_model import load_transformers
from safetensors.torch import load_file, save_file
from support.generations import generate, loaded_engine, random_prompts
from support.tiny_checkpoints import reference_tokens, write_checkpoint

from modelserver.backend import InvalidArgumentError, ServerError, UnsupportedError


def refusal(directory: Path) -> ServerError:
    config = json.loads((directory / "config.json").read_text())
    with pytest.raises(ServerError) as caught:
        load_transformers(open_checkpoint(directory), config, dtype=torch.float32, device=torch.device("cpu"))
    return caught.value


def test_weights_that_are_missing_are_named(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    directory = tmp_path / "granite"
    shutil.copytree(checkpoint("granite"), directory)
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    error = refusal(directory)
    assert isinstance(error, InvalidArgumentError)
    assert "lacks 1 of its weights: model.layers.0.mlp.up_proj.weight" in error.message


def test_an_encoder_is_no_causal_model(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertForMaskedLM(BertConfig(vocab_size=50, **sizes)).save_pretrained(tmp_path)
    error = refusal(tmp_path)
    assert isinstance(error, UnsupportedError)
    assert "looks at tokens that come later" in error.message


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}))
    (tmp_path / "own.py").write_text("raise SystemExit('this was run')")
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert isinstance(refusal(tmp_path), UnsupportedError)


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("diffllama", "attends more than once"),
        ("falcon", "cannot be exchanged"),
        ("bloom", "0 of the 1 layers"),
        ("mpt", "does not run on blocks"),
    ],
)
def test_what_does_not_run_on_blocks_is_refused(model_type: str, words: str, tmp_path: Path) -> None:
    """Bare errors of transformers' code, and answers that differ from the model's own.

    Falcon, Bloom and MPT have networks of ours, which is why none of them comes here in service.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    wanted = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = AutoConfig.for_model(model_type, vocab_size=50)
    for name, value in (wanted | {"rotary_dim": 8, "num_key_value_heads": 2}).items():
        if hasattr(config, name):
            setattr(config, name, value)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    error = refusal(tmp_path)
    assert isinstance(error, UnsupportedError)
    assert words in error.message
    assert "\n" not in error.message


def test_positions_that_are_not_those_of_the_tokens_are_noticed(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps hold tokens of several sequences: a network that counts them through would be right for one alone."""
    from transformers.models.granite.modeling_granite import GraniteModel

    own_forward = GraniteModel.forward

    def counted_through(self: Any, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return own_forward(self, *args, **kwargs)

    monkeypatch.setattr(GraniteModel, "forward", counted_through)
    error = refusal(checkpoint("granite"))
    assert isinstance(error, UnsupportedError)
    assert "logits on blocks differ" in error.message


@pytest.mark.parametrize("no_rope_layers", [[1, 0, 1], [1, 1, 1]])
def test_chunks_that_begin_within_a_trial(no_rope_layers: list[int], tmp_path: Path) -> None:
    """And, where all layers have them, blocks of chunks that have ended are given back."""
    write_checkpoint(tmp_path, "llama4", values={"attention_chunk_size": 6, "no_rope_layers": no_rope_layers})
    prompts = random_prompts(6)
    options = {"max_num_batched_tokens": 24, "max_num_seqs": 6, "num_gpu_blocks_override": 50}
    with loaded_engine(tmp_path, block_size=3, **options) as engine:
        assert engine.runner.window == (6 if all(no_rope_layers) else None)
        found = [tokens for tokens, _ in generate(engine, prompts, 8)]
    assert found == [reference_tokens(tmp_path, prompt, 8) for prompt in prompts]
    with pytest.raises(UnsupportedError, match="blocks of 32 do not fill"), loaded_engine(tmp_path):
        pass


def test_a_language_model_within_one_that_sees_pictures(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Llama4Config, Llama4ForConditionalGeneration

    alone = checkpoint("llama4")
    text = json.loads((alone / "config.json").read_text())
    sizes = dict.fromkeys(("hidden_size", "vision_output_dim", "projector_input_dim", "projector_output_dim"), 16)
    vision = {**sizes, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 28}
    model = Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=vision))
    model.language_model.load_state_dict(AutoModelForCausalLM.from_pretrained(alone).state_dict())
    model.save_pretrained(tmp_path)
    prompt = list(range(10, 50))
    with loaded_engine(tmp_path) as engine:
        assert generate(engine, [prompt], 8)[0][0] == reference_tokens(alone, prompt, 8)


def _write_mxfp4(packed: Path, plain: Path) -> None:
    """gpt-oss as it is published: 16 steps between -6 and 6, two in a byte, and an exponent for each 32 of them; and
    with experts in floats of the same values.
    """

    write_checkpoint(plain, "gpt_oss", values={"hidden_size": 64, "intermediate_size": 64})
    shutil.copytree(plain, packed)
    config = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    steps = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    steps = torch.cat((steps, -steps))
    tensors = load_file(plain / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    stored = dict(tensors)
    for name in [name for name in tensors if name.endswith((".gate_up_proj", ".down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)
        halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
        values = steps[halves.long()] * 2.0 ** (scales[..., None].float() - 127)
        tensors[name] = values.flatten(-2).transpose(1, 2).contiguous()
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del stored[name]
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})


def test_experts_in_mxfp4_are_unpacked_where_no_kernels_multiply_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "PACKED_KERNELS", None)
    packed, plain, prompt = tmp_path / "packed", tmp_path / "plain", list(range(10, 30))
    _write_mxfp4(packed, plain)
    with loaded_engine(packed) as engine:
        assert generate(engine, [prompt], 8)[0][0] == reference_tokens(plain, prompt, 8)


if kernels.PACKED_KERNELS is not None:

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_experts_in_mxfp4_stay_packed(dtype: str, tmp_path: Path) -> None:
        """They multiply rows in 8 bits, so they give nearly the same as the experts in floats."""

        packed, plain = tmp_path / "packed", tmp_path / "plain"
        _write_mxfp4(packed, plain)
        prompts, found, experts = random_prompts(4), [], []
        for directory in (packed, plain):
            with loaded_engine(directory, dtype=dtype) as engine:
                found.append([logprobs[0] for _, logprobs in generate(engine, prompts, 1)])
                modules = engine.runner._network._model.modules()
                experts.append([module for module in modules if type(module).__name__.endswith("Experts")])
        assert not [name for module in experts[0] for name, _ in module.named_parameters()]
        assert found[0] == pytest.approx(found[1], abs=0.05)
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(7, 64, generator=generator).to(getattr(torch, dtype))
        chosen = torch.rand(7, 4, generator=generator).argsort(dim=1)[:, :2]
        weights = torch.rand(7, 2, generator=generator).to(rows.dtype)
        assert len(experts[0]) == len(experts[1]) > 1
        for mine, theirs in zip(*experts, strict=True):
            with torch.inference_mode():
                mixed, expected = (each(rows, chosen, weights).float() for each in (mine, theirs))
            assert (mixed - expected).norm() < 0.02 * expected.norm()


def test_logits_that_differ_are_no_trial_passed() -> None:

    expected = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    check_equal(expected + 1e-4, expected, is_exact=True)
    of_padding = torch.cat((torch.zeros_like(expected[:1]), expected))  # whose embedding is zero
    check_equal(of_padding, of_padding, is_exact=True)
    one_token = expected.clone()
    one_token[3] = 0.0
    check_equal(one_token, expected, is_exact=False)  # in half precision another expert may be chosen for a token
    for found in (expected.roll(1, 0), expected * torch.nan):
        with pytest.raises(UnsupportedError, match="logits on blocks differ"):
            check_equal(found, expected, is_exact=False)
