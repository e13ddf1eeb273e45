"""The options of a measurement of a language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from modelserver.bench.options import LoadOptions, ReportOptions
from modelserver.bench.work import EndpointType
from modelserver.client.address import Address

DEFAULT_PATHS = {
    EndpointType.CHAT: "/v1/chat/completions",
    EndpointType.COMPLETIONS: "/v1/completions",
}


class Target(StrEnum):
    """The figures that a good request keeps below a limit, in milliseconds."""

    TTFT = "ttft"
    # The mean over a request.
    ITL = "itl"
    LATENCY = "latency"


@dataclass(frozen=True, slots=True)
class Length:
    """A number of tokens that varies: mean and standard deviation."""

    mean: float
    deviation: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Prompts of `input_tokens` words, or those of a file; `output_tokens` None leaves the length to the model."""

    file: Path | None = None
    num_prompts: int = 100
    input_tokens: Length = field(default_factory=lambda: Length(128))
    output_tokens: Length | None = field(default_factory=lambda: Length(128))
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LlmOptions:
    """A run of prompts."""

    model: str
    address: Address
    endpoint_type: EndpointType = EndpointType.CHAT
    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    is_streaming: bool = True
    # Added to the body of every request.
    extra: Mapping[str, Any] = field(default_factory=dict)
    prompts: PromptOptions = field(default_factory=PromptOptions)
    load: LoadOptions = field(default_factory=LoadOptions)
    # 0: four for each that is in flight, at least twenty.
    num_requests: int = 0
    num_warmup_requests: int = 0
    goodput: Mapping[Target, float] = field(default_factory=dict)
    report: ReportOptions = field(default_factory=ReportOptions)
    notes: tuple[str, ...] = ()
