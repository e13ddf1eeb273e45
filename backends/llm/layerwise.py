"""A network computed on a text layer by layer, so that one layer at a time is in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from modelserver.backend import InvalidArgumentError, UnsupportedError

from .attention.chunked import make_sdpa
from .attention.kv_blocks import KvBlocks
from .checkpoint import Checkpoint, HfCheckpoint, text_config
from .models.build import DecoderBuilder
from .models.families import find_family
from .models.load import attention_spec
from .models.weights import Weights
from .quantization.scheme import FloatScheme, Scheme
from .step_context import StepContext
from .text.tokenizer import Tokenizer

_WINDOW = 512
_NUM_WINDOWS = 8
# Rows whose logits are made at once.
_ROWS = 256
_CPU = torch.device("cpu")


class ChangedCheckpoint(HfCheckpoint):
    """A checkpoint some of whose tensors are replaced by those of `changed`, of the same shapes."""

    def __init__(self, checkpoint: HfCheckpoint) -> None:
        super().__init__(checkpoint.place)
        self.changed: dict[str, torch.Tensor] = {}

    def tensor(self, name: str) -> torch.Tensor:
        changed = self.changed.get(name)
        return super().tensor(name) if changed is None else changed

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        changed = self.changed.get(name)
        return super().rows(name, first, count) if changed is None else changed[first : first + count]


@dataclass(slots=True)
class _Window:
    """Tokens that are one sequence. `hidden` [tokens, hidden_size] is what the next layer gets."""

    token_ids: list[int]
    hidden: torch.Tensor
    step: StepContext


class LayerwiseNetwork:
    """The decoder of a checkpoint on a CPU, which computes in float32. Each layer is made when it is computed.

    `text` is read up to its first 4096 tokens, in windows of 512. UnsupportedError for a family that runs on
    transformers' network; InvalidArgumentError for a text of fewer than two tokens, and as the checkpoint raises it.
    """

    def __init__(self, checkpoint: Checkpoint, text: str, scheme: Scheme | None = None) -> None:
        entries = text_config(checkpoint)
        family = find_family(entries["model_type"])
        if family is None:
            raise UnsupportedError(f"{entries['model_type']} runs on transformers' network, not layer by layer")
        self.config = family.config_of(checkpoint)
        self.names = family.names
        self._family, self._checkpoint = family, checkpoint
        self._scheme = scheme or FloatScheme()
        windows = windows_of(checkpoint, text)
        layout = family.kv_layout(self.config, torch.float32, num_ranks=1)
        # Sequences that are computed as wholes use no blocks.
        attention = make_sdpa(KvBlocks(layout, num_blocks=1, block_size=1, device=_CPU), attention_spec(self.config))
        with torch.inference_mode():
            frame = self._build(self._scheme)
            frame.config = replace(self.config, num_layers=0)
            self._decoder = family.network(frame, max_len=max(map(len, windows)))
            self._windows: list[_Window] = []
            for token_ids in windows:
                positions = torch.from_numpy(np.arange(len(token_ids)))
                step = StepContext(
                    positions=positions, attention=attention, inputs=attention.prepare_fresh([len(token_ids)])
                )
                hidden = self._decoder.embedded(torch.tensor(token_ids), step)
                self._windows.append(_Window(token_ids, hidden, step))

    def layer_prefix(self, index: int) -> str:
        return self.names.layer.format(index) + "."

    def observe(self, index: int, scheme: Scheme) -> None:
        """Compute a layer that `scheme` makes, for what that sees; its result is dropped."""
        self._computed(index, scheme)

    def results(self, index: int) -> list[torch.Tensor]:
        """What a layer makes of each window, [tokens, hidden_size]."""
        return self._computed(index, self._scheme)

    def advance(self, index: int) -> None:
        """Compute a layer; the next one gets its result."""
        for window, hidden in zip(self._windows, self._computed(index, self._scheme), strict=True):
            window.hidden = hidden

    def finish(self) -> Self:
        """Compute all layers."""
        for index in range(self.config.num_layers):
            self.advance(index)
        return self

    def predictions(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """After the last layer: float32 logits [rows, vocab_size] and the tokens that follow, some rows at a time."""
        for window in self._windows:
            targets = torch.tensor(window.token_ids[1:]).split(_ROWS)
            for hidden, following in zip(window.hidden[:-1].split(_ROWS), targets, strict=True):
                with torch.inference_mode():
                    logits = self._decoder.logits(self._decoder.normalised(hidden))
                yield logits, following

    def _computed(self, index: int, scheme: Scheme) -> list[torch.Tensor]:
        with torch.inference_mode():
            layer = self._family.layer(self._build(scheme), index)
            return [layer(window.hidden.clone(), window.step) for window in self._windows]

    def _build(self, scheme: Scheme) -> DecoderBuilder:
        weights = Weights(
            self._checkpoint,
            scheme,
            dtype=torch.float32,
            device=_CPU,
            is_transposed=self.names.is_transposed,
        )
        return DecoderBuilder(self.config, self.names, weights)


def windows_of(checkpoint: Checkpoint, text: str) -> list[list[int]]:
    """The first tokens of a text in pieces. InvalidArgumentError for a text of fewer than two."""
    token_ids = Tokenizer.from_checkpoint(checkpoint).encode(text)[: _WINDOW * _NUM_WINDOWS]
    windows = [token_ids[start : start + _WINDOW] for start in range(0, len(token_ids), _WINDOW)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise InvalidArgumentError("the text to compare on has fewer than two tokens")
    return windows
