"""The rules that change a sequence's logits before a token is drawn, in vLLM's order.

Allowed token ids, banned words, no stop token before `min_tokens`, logit bias, penalties, DRY; last the samplers of
llama.cpp, which leave few tokens. Each works on one row, in
place; a token that a rule forbids gets minus infinity.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from .penalties import apply_penalties

if TYPE_CHECKING:
    from .sampler_state import SamplerState
    from .sequence import Sequence

_FORBIDDEN = float("-inf")


def apply_rules(row: torch.Tensor, sequence: Sequence, state: SamplerState, position: int) -> None:
    """All rules of one sequence on its row of logits, float32 [vocabulary]. The new token will be at `position`."""
    params = sequence.params
    num_output_tokens = position - sequence.num_prompt_tokens
    if params.allowed_token_ids is not None:
        _keep_only(row, params.allowed_token_ids)
    if state.bad_words:
        _forbid(row, _completed_words(state.bad_words, sequence.output_token_ids))
    if num_output_tokens < params.min_tokens:
        _forbid(row, state.stop_token_ids)
    if params.logit_bias:
        token_ids = torch.tensor(list(params.logit_bias), device=row.device)
        row.index_add_(0, token_ids, torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device))
    if state.counts is not None:
        apply_penalties(row, sequence, state.counts)
    if state.repetitions is not None:
        state.repetitions.apply(row, sequence.token_ids)
    if state.truncation is not None:
        state.truncation.apply(row, sequence, position)


def forbid_on_host(row: torch.Tensor, allowed: npt.NDArray[np.bool_]) -> None:
    """Keep the tokens that a boolean mask allows; ids past its end (rows are padded) are not.

    Where the other rules forbid all of them the mask wins: what it says is the form of the text, and a text that
    follows no other rule is better than none. By NumPy, because torch's masked_fill takes five times as long on a CPU.
    """
    num_tokens = min(len(allowed), len(row))
    row[num_tokens:] = _FORBIDDEN
    values = row[:num_tokens].numpy()
    values[~allowed[:num_tokens]] = _FORBIDDEN
    if values.max() == _FORBIDDEN:
        values[allowed[:num_tokens]] = 0.0


def forbid_on_device(logits: torch.Tensor, rows: Rows[int], bits: npt.NDArray[np.uint32]) -> None:
    """The same for several rows of logits [rows, vocabulary] at once, by bit masks [rows, words]: one copy to the
    device, and no read."""
    words = torch.from_numpy(bits.view(np.int32))
    words = (words.pin_memory() if logits.device.type == "cuda" else words).to(logits.device, non_blocking=True)
    size = logits.shape[1]
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((words.unsqueeze(-1) >> places) & 1).flatten(1)[:, :size].bool()
    kept = torch.nn.functional.pad(allowed, (0, size - allowed.shape[1]))
    index = torch.tensor(rows, device=logits.device)
    values = torch.where(kept, logits[index], _FORBIDDEN)
    has_any = values.amax(dim=1, keepdim=True) > _FORBIDDEN
    logits[index] = torch.where(kept & ~has_any, 0.0, values)


def _keep_only(row: torch.Tensor, token_ids: tuple[int, ...]) -> None:
    kept = torch.tensor(token_ids, dtype=torch.int64, device=row.device)
    values = row[kept]
    row.fill_(_FORBIDDEN)
    row[kept] = values


def _forbid(row: torch.Tensor, token_ids: list[int]) -> None:
    """Ids that the model has no logit for (a tokenizer may have more tokens) are forbidden as it is."""
    known = [token_id for token_id in token_ids if token_id < len(row)]
    if known:
        row.index_fill_(0, torch.tensor(known, device=row.device), _FORBIDDEN)


def _completed_words(bad_words: list[list[int]], output_token_ids: list[int]) -> list[int]:
    """The last tokens of the words whose other tokens have just been written."""
    return [
        word[-1]
        for word in bad_words
        if len(word) == 1 or (len(word) <= len(output_token_ids) + 1 and output_token_ids[1 - len(word) :] == word[:-1])
    ]
