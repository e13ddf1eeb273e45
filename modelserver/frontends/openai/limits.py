"""How much one call of OpenAI's API may ask for, next to the bounds of every HTTP body (`HttpLimits`)."""

from __future__ import annotations

from typing import Final

MAX_PROMPTS: Final = 2048
MAX_CHOICES: Final = 128
# Prompts times choices: each of them is text to be generated.
MAX_SEQUENCES: Final = 4096
MAX_MESSAGES: Final = 4096
MAX_TOOLS: Final = 512
MAX_STOPS: Final = 64
MAX_LOGPROBS: Final = 20
MAX_TOKEN_IDS: Final = 1 << 20
