"""Makes one vector of a text's hidden states: pooling, and dense layers if the checkpoint has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from modelserver.backend import InvalidArgumentError, UnsupportedError

from ..checkpoint import Checkpoint
from ..json_fields import quote
from ..options import EngineOptions
from .layout import EmbeddingLayout, pooling_of, read_layout

# Stands for what padding has where the largest is looked for.
_LEAST = -1e9


def pool(hidden: torch.Tensor, lengths: torch.Tensor, ways: Sequence[str]) -> torch.Tensor:
    """`hidden` float32 [rows, tokens, size] with `lengths` [rows] from the left -> [rows, size * len(ways)].

    The contents of padding do not matter.
    """
    mask = (torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None])[..., None]
    pooled = [_pool(hidden, lengths, mask, way) for way in ways]
    return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)


def _pool(hidden: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor, way: str) -> torch.Tensor:
    counts = lengths[:, None].to(hidden.dtype)
    match way:
        case "cls":
            return hidden[:, 0]
        case "last":
            return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]
        case "max":
            return hidden.masked_fill(~mask, _LEAST).amax(dim=1)
        case "mean":
            return hidden.masked_fill(~mask, 0.0).sum(dim=1) / counts
        case "mean_sqrt_len":
            return hidden.masked_fill(~mask, 0.0).sum(dim=1) / counts.sqrt()
        case "weightedmean":
            weights = torch.arange(1, hidden.shape[1] + 1, device=hidden.device, dtype=hidden.dtype)[:, None]
            return (hidden.masked_fill(~mask, 0.0) * weights).sum(dim=1) / (counts * (counts + 1) / 2)
        case _:
            raise AssertionError(f"no way of pooling: {way}")


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

    def __init__(self, module: Checkpoint, device: torch.device) -> None:
        path, entries = module.place / "config.json", module.entries("config.json")
        name = str(entries.get("activation_function") or "Tanh").rpartition(".")[2].removesuffix("()")
        if name not in _ACTIVATIONS:
            raise UnsupportedError(f"{path}: activation_function {quote(name)}: there are {', '.join(_ACTIVATIONS)}")
        if entries.get("module_input_name", "sentence_embedding") != "sentence_embedding":
            raise UnsupportedError(f"{path}: a dense layer of each token is not supported")
        self._activation = _ACTIVATIONS[name]
        with module:
            if "linear.weight" not in module:
                raise InvalidArgumentError(f"{module.place} has no tensor linear.weight")
            self._weight = module.tensor("linear.weight").to(device, torch.float32)
            has_bias = "linear.bias" in module
            if not has_bias and entries.get("bias", True):
                raise InvalidArgumentError(
                    f"{module.place} has no tensor linear.bias, and its config.json says that it has"
                )
            self._bias = module.tensor("linear.bias").to(device, torch.float32) if has_bias else None

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        if values.shape[1] != self._weight.shape[1]:
            raise InvalidArgumentError(
                f"a dense layer takes vectors of {self._weight.shape[1]} numbers, pooling gives {values.shape[1]}"
            )
        result: torch.Tensor = self._activation(torch.nn.functional.linear(values, self._weight, self._bias))
        return result


class EmbeddingHead:
    """Not normalised: a vector may be cut first. `prompt` stands before each text. `dense` has the layout's modules."""

    def __init__(
        self,
        layout: EmbeddingLayout,
        dense: Sequence[Checkpoint] = (),
        *,
        device: torch.device,
        pooling: str | None = None,
        prompt_name: str | None = None,
    ) -> None:
        self.is_normalised = layout.is_normalised
        self.is_lowercase = layout.is_lowercase
        self.prompt = layout.prompt(prompt_name)
        self._ways = layout.pooling if pooling is None else (pooling,)
        self._dense = [_Dense(module, device) for module in dense]

    def __call__(self, hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """`hidden` [rows, tokens, hidden_size], with the tokens of each row at the left -> float32 [rows, size]."""
        vectors = pool(hidden.float(), lengths, self._ways)
        for dense in self._dense:
            vectors = dense(vectors)
        return vectors

    def text(self, text: str | bytes) -> str | bytes:
        """The text as the network is to read it. Raises InvalidArgumentError for bytes that are not UTF-8."""
        if isinstance(text, bytes):
            if not self.is_lowercase:
                return b"".join((self.prompt.encode(), text))  # which lets other threads run while it copies
            try:
                text = str(text, "utf-8")
            except UnicodeDecodeError as error:
                raise InvalidArgumentError(f"the text is not UTF-8: {error.reason}") from None
        text = self.prompt + text
        return text.lower() if self.is_lowercase else text


def load_head(checkpoint: Checkpoint, options: EngineOptions, *, default: str, device: torch.device) -> EmbeddingHead:
    """That of a checkpoint, with what the options say instead. Raises ServerErrors that name the file."""
    layout = read_layout(checkpoint, default=default)
    head = EmbeddingHead(
        layout,
        [checkpoint.nested(name) for name in layout.dense],
        device=device,
        pooling=pooling_of(options.pooling) if options.pooling is not None else None,
        prompt_name=options.default_prompt_name,
    )
    if options.normalize is not None:
        head.is_normalised = options.normalize
    return head
