"""How much one call of OpenAI's API may ask for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpenAiLimits:
    """Bounds of one request, next to those of every HTTP body (`HttpLimits`)."""

    max_prompts: int = 2048
    max_choices: int = 128
    # Prompts times choices: each of them is text to be generated.
    max_sequences: int = 4096
    max_messages: int = 4096
    max_tools: int = 512
    max_stops: int = 64
    max_logprobs: int = 20
    max_token_ids: int = 1 << 20
