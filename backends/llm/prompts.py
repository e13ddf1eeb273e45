"""Prompts as the Python API takes them: text, tokens, or conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from modelserver.backend import InvalidArgumentError

from .generation import GenerationRequest
from .json_fields import quote
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .text.tokenizer import Tokenizer

# Text, token ids, or a mapping with "prompt" or "prompt_token_ids" (and "cache_salt"), as vLLM has it.
Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


def make_request(
    prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer | None, *, add_special_tokens: bool = True
) -> GenerationRequest:
    """Raises InvalidArgumentError for what is no prompt, and for text without a tokenizer."""
    cache_salt = ""
    given: Any = prompt
    if isinstance(prompt, Mapping):
        cache_salt = str(prompt.get("cache_salt") or "")
        given = prompt.get("prompt", prompt.get("prompt_token_ids"))
        if given is None:
            raise InvalidArgumentError("a prompt that is a mapping must have 'prompt' or 'prompt_token_ids'")
    if isinstance(given, str):
        if tokenizer is None:
            raise InvalidArgumentError("a prompt of text needs a tokenizer, and this model has none; give token ids")
        token_ids = tokenizer.encode(given, add_special_tokens=add_special_tokens)
        return GenerationRequest(token_ids, params, cache_salt=cache_salt, prompt_text=given)
    if not isinstance(given, Sequence) or not all(isinstance(token, int) for token in given):
        raise InvalidArgumentError(f"a prompt must be text or a list of token ids, got {quote(given)}")
    return GenerationRequest(list(given), params, cache_salt=cache_salt)


def is_conversation(messages: Sequence[Any]) -> bool:
    """Whether these are the messages of one conversation, and not several conversations."""
    return bool(messages) and isinstance(messages[0], Mapping)
