"""Other engines in the place of ours: vLLM, SGLang and TensorRT-LLM, each in an environment of its model's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The names of `engine` in model.json -> the Python package.
ENGINES: Mapping[str, str] = {"vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "tensorrt_llm"}


@dataclass(frozen=True, slots=True)
class OtherEngine:
    """Which engine a model asks for, what it loads (a directory, or a name that it knows), and its own arguments."""

    name: str
    model: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
