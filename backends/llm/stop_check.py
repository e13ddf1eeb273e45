"""Whether a sequence ends with the token it has just got, in vLLM's order. Stop strings are the text stream's."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from .sequence import FinishReason, Sequence


def find_stop(sequence: Sequence, token_id: int, eos_token_ids: AbstractSet[int]) -> FinishReason | None:
    """End of sequence, then stop tokens (which are the `stop_reason`), then length; before `min_tokens` length only."""
    params = sequence.params
    num_tokens = len(sequence.token_ids)
    if num_tokens - sequence.num_prompt_tokens >= params.min_tokens:
        if token_id in eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        if token_id in params.stop_token_ids:
            sequence.stop_reason = token_id
            return FinishReason.STOP
    return FinishReason.LENGTH if num_tokens >= sequence.max_num_tokens else None
