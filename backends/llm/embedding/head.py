"""What makes one vector of a text's hidden states: pooling, and dense layers where the checkpoint has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from modelserver.backend import InvalidArgumentError, UnsupportedError

from ..json_fields import quote
from ..options import EngineOptions
from ..text.checkpoint_files import read_json_object
from .layout import EmbeddingLayout, pooling_of, read_layout
from .pooling import pool

# By the last part of the class's name.
_ACTIVATIONS: dict[str, Any] = {
    "GELU": torch.nn.functional.gelu,
    "Identity": lambda values: values,
    "ReLU": torch.relu,
    "SiLU": torch.nn.functional.silu,
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
}


class _Dense:
    """y = activation(x W' + b), in float32."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        entries = read_json_object(directory / "config.json")
        name = str(entries.get("activation_function") or "Tanh").rpartition(".")[2].removesuffix("()")
        if name not in _ACTIVATIONS:
            raise UnsupportedError(
                f"{directory / 'config.json'}: activation_function {quote(name)}: there are {', '.join(_ACTIVATIONS)}"
            )
        if entries.get("module_input_name", "sentence_embedding") != "sentence_embedding":
            raise UnsupportedError(f"{directory / 'config.json'}: a dense layer of each token is not supported")
        self._activation = _ACTIVATIONS[name]
        path = directory / "model.safetensors"
        if not path.is_file():
            raise InvalidArgumentError(f"no {path}: convert the layer's weights to safetensors")
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise InvalidArgumentError(f"{path} cannot be read as safetensors: {error}") from None
        if "linear.weight" not in tensors:
            raise InvalidArgumentError(f"{path} has no tensor linear.weight")
        self._weight = tensors["linear.weight"].to(device, torch.float32)
        bias = tensors.get("linear.bias")
        if bias is None and entries.get("bias", True):
            raise InvalidArgumentError(f"{path} has no tensor linear.bias, and its config.json says that it has")
        self._bias = None if bias is None else bias.to(device, torch.float32)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        if values.shape[1] != self._weight.shape[1]:
            raise InvalidArgumentError(
                f"a dense layer takes vectors of {self._weight.shape[1]} numbers, pooling gives {values.shape[1]}"
            )
        result: torch.Tensor = self._activation(torch.nn.functional.linear(values, self._weight, self._bias))
        return result


class EmbeddingHead:
    """Not normalised: a vector may be cut first. `prompt` stands before each text."""

    def __init__(
        self,
        layout: EmbeddingLayout,
        *,
        device: torch.device,
        pooling: str | None = None,
        prompt_name: str | None = None,
    ) -> None:
        self.is_normalised = layout.is_normalised
        self.is_lowercase = layout.is_lowercase
        self.prompt = layout.prompt(prompt_name)
        self._ways = layout.pooling if pooling is None else (pooling,)
        self._dense = [_Dense(directory, device) for directory in layout.dense]

    def __call__(self, hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """`hidden` [rows, tokens, hidden_size], of each row so many tokens from the left -> float32 [rows, size]."""
        vectors = pool(hidden.float(), lengths, self._ways)
        for dense in self._dense:
            vectors = dense(vectors)
        return vectors

    def text(self, text: str) -> str:
        """The text as the network is to read it."""
        text = self.prompt + text
        return text.lower() if self.is_lowercase else text


def load_head(directory: Path, options: EngineOptions, *, default: str, device: torch.device) -> EmbeddingHead:
    """That of a checkpoint, with what the options say instead. Raises ServerErrors that name the file."""
    head = EmbeddingHead(
        read_layout(directory, default=default),
        device=device,
        pooling=pooling_of(options.pooling) if options.pooling is not None else None,
        prompt_name=options.default_prompt_name,
    )
    if options.normalize is not None:
        head.is_normalised = options.normalize
    return head
