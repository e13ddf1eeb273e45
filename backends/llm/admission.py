"""Checks of requests that depend on the model. SamplingParams checks the rest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from modelserver.backend import Array, InvalidArgumentError

from .generation import GenerationRequest
from .sampling_params import SamplingParams


def check_request(
    request: GenerationRequest, *, vocab_size: int, max_model_len: int, max_logprobs: int, has_text: bool
) -> None:
    """Raises InvalidArgumentError. `max_model_len`: by the model, its options, and what the KV pool holds."""
    params = request.params
    prompt = request.prompt_token_ids
    check_length(len(prompt), True, max_tokens=params.max_tokens, max_model_len=max_model_len)
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise InvalidArgumentError(f"the prompt has token id {wrong}; this model's are 0 to {vocab_size - 1}")
    for name, ids in (("logit_bias", params.logit_bias), ("allowed_token_ids", params.allowed_token_ids or ())):
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidArgumentError(
                    f"parameter '{name}' has token id {token_id}; this model's are 0 to {vocab_size - 1}"
                )
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > max_logprobs:
            raise InvalidArgumentError(
                f"parameter '{name}' must be at most {max_logprobs} (the model's option max_logprobs), got {count}"
            )
    if not has_text:
        for name in ("stop", "bad_words", "structured_outputs", "dry_multiplier"):
            if getattr(params, name):
                raise InvalidArgumentError(f"parameter '{name}' needs text, and this model has no tokenizer")


def max_num_tokens(request: GenerationRequest, max_model_len: int) -> int:
    """How many tokens, prompt and output, a choice of a request that was checked may come to."""
    max_tokens = request.params.max_tokens
    return len(request.prompt_token_ids) + max_tokens if max_tokens is not None else max_model_len


def check_length(num_prompt_tokens: int, is_all: bool, *, max_tokens: int | None, max_model_len: int) -> None:
    """Check that the prompt and the tokens to generate fit the model. Raises InvalidArgumentError.

    Not `is_all`: more tokens may follow.
    """
    if not num_prompt_tokens and is_all:
        raise InvalidArgumentError("the prompt is empty; at least one token is needed")
    if num_prompt_tokens >= max_model_len:
        raise InvalidArgumentError(
            f"the prompt has {_count(num_prompt_tokens, is_all)} tokens; this model has room for "
            f"{max_model_len} tokens, prompt and output together, so a prompt may have {max_model_len - 1}"
        )
    if max_tokens is not None and num_prompt_tokens + max_tokens > max_model_len:
        raise InvalidArgumentError(
            f"the prompt has {_count(num_prompt_tokens, is_all)} tokens and max_tokens is {max_tokens}; this model has "
            f"room for {max_model_len} tokens, prompt and output together, so max_tokens may be "
            f"{'' if is_all else 'at most '}{max_model_len - num_prompt_tokens} with this prompt"
        )


def _count(num_tokens: int, is_all: bool) -> str:
    return str(num_tokens) if is_all else f"at least {num_tokens}"


def check_embedded_length(num_tokens: int, is_all: bool, *, max_model_len: int, use: str = "embed") -> None:
    """Raise InvalidArgumentError if a text to `use` has too many tokens."""
    if num_tokens > max_model_len or (is_all and not num_tokens):
        raise InvalidArgumentError(
            f"the text to {use} has {_count(num_tokens, is_all)} tokens, and this model takes 1 to {max_model_len}"
        )


def check_token_ids(token_ids: Sequence[int] | Array, vocab_size: int) -> None:
    """Whether the model has all of them, which were given as they are. Raises InvalidArgumentError."""
    given = np.asarray(token_ids)
    is_wrong = (given < 0) | (given >= vocab_size)
    if is_wrong.any():
        wrong = given[is_wrong.argmax()]
        raise InvalidArgumentError(
            f"input 'input_ids': token {wrong} is outside the model's vocabulary (0 to {vocab_size - 1})"
        )


def check_dimensions(dimensions: int | None) -> None:
    """Whether an embedding can have this number of dimensions; the most shows when it is computed.

    Raises InvalidArgumentError.
    """
    if dimensions is not None and dimensions < 1:
        raise InvalidArgumentError(f"input 'dimensions': expected 1 or more, got {dimensions}")


def is_host_bound(params: SamplingParams) -> bool:
    """Whether choosing a token needs the ones before on the host: such a sequence cannot be a step ahead of it."""
    return (
        params.structured_outputs is not None
        or params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or bool(params.bad_words)
        or params.dry_multiplier > 0.0
        or params.mirostat != 0
    )
