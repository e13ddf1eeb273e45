"""GGUF files of every family, against the safetensors that they were made from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from modelserver_backends.llm.checkpoint import GgufCheckpoint, open_checkpoint
from modelserver_backends.llm.text.tokenizer import Tokenizer
from support.generations import generate, loaded_engine, random_prompts
from support.gguf_models import QuantizationType, write_gguf
from support.tiny_checkpoints import FAMILIES, reference_tokens, write_checkpoint

from modelserver.errors import InvalidArgumentError, UnsupportedError

# Llama's rotations that depend on the length of the text, and windows of some layers alone, have no words in GGUF, nor
# have rotations that are longer than those of latent attention.
INEXPRESSIBLE = {"llama_dynamic", "qwen2_window", "deepseek_v3"}
INEXPRESSIBLE |= {"falcon_rw", "gpt_neo"}
EXPRESSIBLE = sorted(set(FAMILIES) - INEXPRESSIBLE)


@pytest.fixture(params=EXPRESSIBLE)
def twins(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint, and the same as a GGUF file."""
    directory = checkpoint(request.param)
    return directory, write_gguf(directory, tmp_path / "model.gguf")


def test_tensors_are_the_same_bit_for_bit(twins: tuple[Path, Path]) -> None:
    with open_checkpoint(twins[0]) as expected, open_checkpoint(twins[1]) as found:
        tied = "lm_head.weight" not in found
        assert set(found.names()) == {name for name in expected.names() if name != "lm_head.weight" or not tied}
        for name in found.names():
            assert found.shape(name) == expected.shape(name)
            tensor, its = found.tensor(name), expected.tensor(name)
            if "query_key_value" in name:  # in another order
                assert torch.equal(tensor.sort(0).values, its.sort(0).values), name
            elif found.config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
                assert torch.equal(tensor + 1, its + 1)  # what a network computes with
            else:
                assert torch.equal(tensor, its), name
            assert found.module(name.rpartition(".")[0]) is not None


def test_greedy_texts_are_those_of_transformers(twins: tuple[Path, Path]) -> None:
    directory, path = twins
    prompts = random_prompts(4, longest=50)
    # transformers turns by the short factors of long rotations while a text is short.
    is_stretched = "longrope" in (directory / "config.json").read_text()
    with loaded_engine(path, max_model_len=64 if is_stretched else 128) as engine:
        found = [tokens for tokens, _ in generate(engine, prompts, 6)]
    assert found == [reference_tokens(directory, prompt, 6) for prompt in prompts]


def test_logits_are_those_of_the_safetensors(twins: tuple[Path, Path]) -> None:
    prompts = random_prompts(2, seed=3)
    logprobs = []
    for place in twins:
        with loaded_engine(place) as engine:
            logprobs.append([one for _, one in generate(engine, prompts, 4)])
    np.testing.assert_allclose(logprobs[1], logprobs[0], atol=2e-5)


@pytest.mark.parametrize("query_rank", [None, 32])
def test_matrices_of_latent_attention_by_head(query_rank: int | None, tmp_path: Path) -> None:
    """As llama.cpp's converter writes DeepSeek V3 today; V2 above is as it wrote both."""
    rope = {**FAMILIES["deepseek_v3"].values["rope_parameters"], "mscale": 1.1}
    directory = write_checkpoint(
        tmp_path / "source", "deepseek_v3", values={"rope_parameters": rope, "q_lora_rank": query_rank}
    )
    prompts = random_prompts(4, longest=50)
    with loaded_engine(write_gguf(directory, tmp_path / "model.gguf")) as engine:
        found = [tokens for tokens, _ in generate(engine, prompts, 6)]
    assert found == [reference_tokens(directory, prompt, 6) for prompt in prompts]


def test_texts_and_templates_are_the_same(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    directory = checkpoint("llama")
    with open_checkpoint(directory) as one, open_checkpoint(write_gguf(directory, tmp_path / "a.gguf")) as other:
        expected, found = Tokenizer.from_checkpoint(one), Tokenizer.from_checkpoint(other)
        assert (other.chat_templates, other.eos_token_ids) == (one.chat_templates, found.eos_token_ids)
    assert found.special_tokens.items() <= expected.special_tokens.items()
    assert found.special_ids == expected.special_ids
    for text in (
        "hello world",
        "  the  model\n\n of 1234 things, don't!",
        "<|im_start|>user\nhi<|im_end|>",
        "Ünïcödé 語",
    ):
        ids = expected.encode(text)
        assert found.encode(text) == ids
        assert found.decode(ids) == expected.decode(ids)
    messages = [{"role": "user", "content": "hello"}]
    assert found.apply_chat_template(messages) == expected.apply_chat_template(messages)


def test_files_that_were_split(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    directory = checkpoint("qwen3")
    (tmp_path / "whole").mkdir()
    first = write_gguf(directory, tmp_path / "m.gguf", split=3)
    assert first.name == "m-00001-of-00003.gguf"
    with open_checkpoint(tmp_path) as found, open_checkpoint(directory) as expected:
        assert found.place == first
        with GgufCheckpoint(write_gguf(directory, tmp_path / "whole" / "m.gguf")) as whole:
            assert found.config == whole.config
        for name in expected.names():
            assert torch.equal(found.tensor(name), expected.tensor(name))
    (tmp_path / "m-00002-of-00003.gguf").rename(tmp_path / "b")
    (tmp_path / "m-00003-of-00003.gguf").rename(tmp_path / "m-00002-of-00003.gguf")
    with pytest.raises(InvalidArgumentError, match=r"m-00003-of-00003\.gguf cannot be read"):
        open_checkpoint(tmp_path).names()
    (tmp_path / "b").rename(tmp_path / "m-00003-of-00003.gguf")
    with pytest.raises(InvalidArgumentError, match=r"m-00002.* says that it is not the file 2 of 3"):
        open_checkpoint(tmp_path).names()
    with pytest.raises(InvalidArgumentError, match=r"name the first, which ends in -00001-of-00003\.gguf"):
        GgufCheckpoint(tmp_path / "m-00002-of-00003.gguf").names()


def test_which_file_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "mmproj-model.gguf").touch()
    (tmp_path / "a.Q4_K_M.gguf").touch()
    assert open_checkpoint(tmp_path).place == tmp_path / "a.Q4_K_M.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(InvalidArgumentError, match=r"several GGUF files \(a\.Q4_K_M\.gguf, b\.gguf\)"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.gguf").touch()
    assert open_checkpoint(tmp_path).place == tmp_path / "model.gguf"
    (tmp_path / "config.json").write_text("{}")
    assert open_checkpoint(tmp_path).place == tmp_path


def test_digests_differ_where_files_do(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    path = write_gguf(checkpoint("llama"), tmp_path / "a.gguf")
    with open_checkpoint(path) as one, open_checkpoint(path) as again:
        digest = one.digest
        assert (len(digest), again.digest) == (32, digest)
        assert one.num_bytes == sum(4 * np.prod(one.shape(name), dtype=int) for name in one.names())
    other = write_gguf(checkpoint("llama"), tmp_path / "b.gguf", type_of=lambda *_: QuantizationType.F16)
    with open_checkpoint(other) as opened:
        assert opened.digest != digest
        assert opened.config["dtype"] == "float16"
        assert opened.tensor("lm_head.weight").dtype is torch.float16


def _with_bytes(path: Path, old: bytes, new: bytes) -> Path:
    content = path.read_bytes()
    assert len(old) == len(new)
    assert old in content
    path.write_bytes(content.replace(old, new))
    return path


def test_what_no_family_has_is_refused_by_name(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    path = write_gguf(checkpoint("llama"), tmp_path / "a.gguf")
    broken = _with_bytes(path, b"blk.0.ffn_norm", b"blk.0.ffn_mean")
    with pytest.raises(
        UnsupportedError, match=r"blk\.0\.ffn_mean\.weight, a F32 of shape \[48\], has no place in a llama"
    ):
        open_checkpoint(broken).names()
    broken = _with_bytes(path, b"blk.1.", b"blk.7.")
    with pytest.raises(UnsupportedError, match=r"tensor blk\."):
        open_checkpoint(broken).names()
    path = write_gguf(checkpoint("llama"), tmp_path / "b.gguf")
    with pytest.raises(UnsupportedError, match="the architecture 'rwkv6', which is not read from GGUF"):
        _ = open_checkpoint(_with_bytes(path, struct_text("llama"), struct_text("rwkv6"))).config


def struct_text(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


def test_shapes_that_do_not_fit_are_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    directory = tmp_path / "hf"
    directory.mkdir()
    source = checkpoint("llama")
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((source / name).read_bytes())
    entries = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**entries, "intermediate_size": 64}))
    path = write_gguf(directory, tmp_path / "a.gguf")
    with (
        pytest.raises(InvalidArgumentError, match=r"mlp\.down_proj\.weight of shape \[48, 80\], and its metadata say"),
        loaded_engine(path),
    ):
        pass
