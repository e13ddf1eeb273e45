"""A checkpoint in another format than Hugging Face's directories: here it lies in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import torch
from modelserver_backends.llm.checkpoint import Checkpoint, TokenizerFiles, open_checkpoint
from modelserver_backends.llm.engine import Engine
from modelserver_backends.llm.options import EngineOptions
from safetensors.torch import load_file
from support.generations import generate, random_prompts
from support.tiny_checkpoints import EOS_TOKEN_ID, reference_tokens

from modelserver.backend import UnsupportedError


class MemoryCheckpoint:
    """Has everything of a model but files."""

    place = Path("memory")
    generation_config: Mapping[str, Any] = {}
    eos_token_ids = frozenset({EOS_TOKEN_ID})
    chat_templates: Mapping[str, str] = {"default": "{{ messages[0].content }}!"}
    digest = bytes(32)

    def __init__(self, config: Mapping[str, Any], tokenizer: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.config = config
        self.tokenizer = TokenizerFiles(path=self.place, document=tokenizer)
        self._tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())

    @property
    def transformers_directory(self) -> Path:
        raise UnsupportedError("transformers reads directories only")

    def find(self, _pattern: str) -> list[str]:
        return []

    def document(self, name: str) -> Any:
        raise KeyError(name)

    def entries(self, _name: str) -> dict[str, Any]:
        return {}

    def nested(self, name: str) -> Checkpoint:
        raise KeyError(name)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def module(self, name: str) -> str | None:
        return name if any(each.startswith(f"{name}.") for each in self._tensors) else None

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name].clone()

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        return self._tensors[name][first : first + count].clone()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def in_memory(directory: Path) -> MemoryCheckpoint:
    config = json.loads((directory / "config.json").read_text())
    return MemoryCheckpoint(
        config, (directory / "tokenizer.json").read_text(), load_file(directory / "model.safetensors")
    )


def test_an_engine_is_made_of_it(checkpoint: Callable[[str], Path]) -> None:
    directory, prompts = checkpoint("qwen3"), random_prompts(3)
    options = EngineOptions(device="cpu", dtype="float32", max_model_len=128)
    engine = Engine.from_checkpoint(in_memory(directory), options)
    try:
        assert [tokens for tokens, _ in generate(engine, prompts, 6)] == [
            reference_tokens(directory, prompt, 6) for prompt in prompts
        ]
        assert engine.tokenizer is not None
        assert engine.tokenizer.apply_chat_template([{"role": "user", "content": "hello"}]) == "hello!"
    finally:
        engine.close()


def test_a_family_that_only_transformers_has_is_refused_in_its_words(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedError, match="transformers reads directories only"):
        Engine.from_checkpoint(in_memory(checkpoint("granite")), EngineOptions(device="cpu"))


def test_digests_differ_where_weights_or_configs_do(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    def digest(directory: Path) -> bytes:
        with open_checkpoint(directory) as opened:
            return opened.digest

    first = digest(checkpoint("llama"))
    assert (len(first), digest(checkpoint("llama"))) == (32, first)
    assert digest(checkpoint("qwen3")) != first
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((checkpoint("llama") / name).read_bytes())
    entries = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**entries, "rms_norm_eps": 0.5}))
    assert digest(tmp_path) != first
