"""Large language models: paged KV cache, continuous batching, chunked prefill and prefix caching, on torch.

The Python API is here: `LLM`, `AsyncLLM`, `SamplingParams`. Importing the package imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .backend import LlmBackend

if TYPE_CHECKING:
    from .async_engine import AsyncLLM
    from .llm import LLM, CompletionOutput, RequestOutput
    from .options import EngineOptions
    from .sampling_params import SamplingParams

BACKEND = LlmBackend

__all__ = ["BACKEND", "LLM", "AsyncLLM", "CompletionOutput", "EngineOptions", "RequestOutput", "SamplingParams"]

_MODULES = {
    "AsyncLLM": "async_engine",
    "CompletionOutput": "llm",
    "EngineOptions": "options",
    "LLM": "llm",
    "RequestOutput": "llm",
    "SamplingParams": "sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
