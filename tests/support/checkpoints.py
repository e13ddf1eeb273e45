"""What the llm backend makes of a checkpoint's directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from modelserver_backends.llm.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from modelserver_backends.llm.embedding.encoder import Encoder
    from modelserver_backends.llm.models.load import LoadedNetwork
    from modelserver_backends.llm.options import EngineOptions
    from modelserver_backends.llm.text.tokenizer import Tokenizer


def tokenizer_of(directory: Path) -> Tokenizer:
    from modelserver_backends.llm.text.tokenizer import Tokenizer

    return Tokenizer.from_checkpoint(open_checkpoint(directory))


def encoder_of(directory: Path, options: EngineOptions) -> Encoder:
    from modelserver_backends.llm.embedding.encoder import Encoder

    with open_checkpoint(directory) as checkpoint:
        return Encoder.from_checkpoint(checkpoint, options)


def network_of(directory: Path, options: EngineOptions) -> LoadedNetwork:
    from modelserver_backends.llm.models.load import load_network

    with open_checkpoint(directory) as checkpoint:
        return load_network(checkpoint, options)
