"""The bounds of one call of Ollama's API, next to those of every HTTP body (`HttpLimits`)."""

from __future__ import annotations

MAX_MESSAGES = 4096
MAX_TOOLS = 512
MAX_TOOL_CALLS = 512
MAX_IMAGES = 64
MAX_INPUTS = 2048
MAX_LOGPROBS = 20
MAX_CONTEXT = 1 << 22
