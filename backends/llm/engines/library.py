"""What an engine's library is asked, token ids in and out: one class for each library."""

from __future__ import annotations

import abc
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from modelserver.backend import UnsupportedError

from ..options import EngineOptions
from ..plan import TokenLogprobs
from ..sampling_params import SamplingParams
from ..sequence import FinishReason
from . import OtherEngine


@dataclass(frozen=True, slots=True)
class OtherAdapter:
    """An adapter that a request uses. `number` is positive, and no two of an engine have the same."""

    name: str
    number: int
    place: str
    rank: int


@dataclass(frozen=True, slots=True)
class Asked:
    """One continuation. `params.n` is 1, and its seed is the choice's own.

    `stop_token_ids` are all tokens that end it, those for the end of a text included; `max_tokens` is a number.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    eos_token_ids: Sequence[int]
    stop_token_ids: Sequence[int]
    adapter: OtherAdapter | None = None
    priority: int = 0
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class News:
    """What is new of a continuation. `logprobs` are as many as tokens, or none. The last news has a `finish_reason`."""

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()


class Library(abc.ABC):
    """An engine of a library. It is made and called on one event loop.

    Engine arguments pass through as they are, but for those options that have the same meaning in all engines
    (`argument_names`: ours -> theirs).
    """

    argument_names: ClassVar[Mapping[str, str]]
    # What requests may ask of it; anything else must have its default.
    sampling_names: ClassVar[frozenset[str]]

    def __init__(self, engine: OtherEngine, options: EngineOptions) -> None:
        self.engine = engine
        self.options = options

    def arguments(self) -> dict[str, Any]:
        """Those of the model, and our options under the engine's names; the model's own win."""
        options = self.options
        given = {
            "max_model_len": options.max_model_len,
            "max_num_seqs": options.max_num_seqs,
            "max_logprobs": options.max_logprobs,
            "scheduling_policy": options.scheduling_policy,
            "tensor_parallel_size": options.tensor_parallel_size,
        }
        if options.serves_adapters:
            given |= {"enable_lora": True, "max_loras": options.num_lora_slots, "max_lora_rank": options.lora_rank}
        ours = {self.argument_names[name]: value for name, value in given.items() if name in self.argument_names}
        return ours | dict(self.engine.arguments)

    def check(self, params: SamplingParams) -> None:
        """Raise UnsupportedError, with its name, for a parameter that this engine does not have."""
        for name, default in _DEFAULTS.items():
            if name not in self.sampling_names and name not in _OURS and getattr(params, name) != default:
                raise UnsupportedError(
                    f"parameter '{name}': the engine {self.engine.name} does not have it; leave it out"
                )

    @abc.abstractmethod
    async def start(self) -> None:
        """Load the model. Raises what the library raises."""

    @abc.abstractmethod
    def generate(self, asked: Asked) -> AsyncGenerator[News]:
        """The news of a continuation until it ends. Closing the iterator before that aborts it."""

    @abc.abstractmethod
    async def stop(self) -> None:
        """End the engine and its processes."""

    @abc.abstractmethod
    def is_dead(self, error: BaseException) -> bool:
        """Whether the engine is out of order after this error of `generate`, and every request would fail."""


_DEFAULTS = {entry.name: getattr(SamplingParams(), entry.name) for entry in fields(SamplingParams)}
# What this server does itself: choices, and texts at which generation stops.
_OURS = frozenset({"n", "stop", "include_stop_str_in_output", "skip_special_tokens"})
USUAL_SAMPLING = frozenset(
    {
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "seed",
        "max_tokens",
        "min_tokens",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
        "structured_outputs",
    }
)


def logprobs_of(token_id: int, found: Mapping[int, Any], num_top: int) -> TokenLogprobs:
    """From vLLM's and TensorRT-LLM's form: by token, an object with `logprob` and `rank`."""
    own = found[token_id]
    ranked = sorted((entry.rank or 1, each, entry.logprob) for each, entry in found.items())
    return TokenLogprobs(own.logprob, own.rank or 1, tuple((each, value) for _, each, value in ranked[:num_top]))
