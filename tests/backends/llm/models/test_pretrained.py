"""Checkpoints that transformers loads at the same time, as several models of one server are."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.models.pretrained import load_pretrained
from support.tiny_encoders import write_encoder
from transformers import AutoModelForCausalLM, BertModel, PreTrainedModel

# How long a network waits for another to be built beside it, which must not be.
_PATIENCE_S = 0.3


def test_loads_at_the_same_time_leave_transformers_as_it_was(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreTrainedModel, "tie_weights", PreTrainedModel.tie_weights)  # put back whatever happens
    encoder, is_first_built, is_second_begun = write_encoder(tmp_path / "bert", "bert"), Event(), Event()

    class First(BertModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            is_second_begun.wait(_PATIENCE_S)

    class Second(BertModel):
        def __init__(self, config: Any) -> None:
            is_second_begun.set()
            super().__init__(config)
            is_first_built.wait(_PATIENCE_S)

    def load(kind: type[BertModel], dtype: torch.dtype) -> None:
        load_pretrained(kind, open_checkpoint(encoder), "bert", unused="pooler.", dtype=dtype)
        is_first_built.set()

    try:
        with ThreadPoolExecutor() as pool:
            for loading in [pool.submit(load, First, torch.bfloat16), pool.submit(load, Second, torch.float32)]:
                loading.result()
        assert torch.get_default_dtype() is torch.float32
        load_pretrained(
            AutoModelForCausalLM, open_checkpoint(checkpoint("llama_tied_biased")), "llama", dtype=torch.float32
        )
    finally:
        torch.set_default_dtype(torch.float32)
