"""What completions and chat have in common: how a call wants its answer, and what that asks of the model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from modelserver.frontends.llm.errors import ParameterError
from modelserver.frontends.llm.fields import Fields


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """`sampling` is the model's object; the rest is how the answer is written.

    `num_logprobs` None: none are wanted. `num_returned` of `num_choices` are answered, the best ones.
    """

    sampling: dict[str, Any] = field(default_factory=dict)
    num_choices: int = 1
    num_returned: int = 1
    is_streamed: bool = False
    has_usage: bool = False
    has_continuous_usage: bool = False
    has_token_ids: bool = False
    names_tokens_by_id: bool = False

    @property
    def num_logprobs(self) -> int | None:
        count: int | None = self.sampling.get("logprobs")
        return count

    @property
    def num_prompt_logprobs(self) -> int | None:
        count: int | None = self.sampling.get("prompt_logprobs")
        return count


def read_stream_options(fields: Fields) -> tuple[bool, bool, bool]:
    """Whether the answer is streamed, with usage at its end, and with usage in every chunk. Raises ParameterError."""
    is_streamed = fields.flag("stream")
    options = fields.fields("stream_options")
    if options is None:
        return is_streamed, False, False
    if not is_streamed:
        raise ParameterError("'stream_options' is only allowed with stream: true", "stream_options")
    has_usage = options.flag("include_usage")
    is_continuous = options.flag("continuous_usage_stats")
    options.flag("include_obfuscation")
    return is_streamed, has_usage, has_usage and is_continuous


def generation_inputs(options: GenerationOptions, offered: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The input tensors that say how to generate: those that the model must have, and those it may have.

    `offered` are the names of the model's inputs.
    """
    needed: dict[str, Any] = {}
    wanted: dict[str, Any] = {
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_stop_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_num_cached_tokens": True,
    }
    if options.is_streamed:
        wanted["stream"] = True
    # A model that takes no parameters is asked plainly, as long as the client has no wishes of its own.
    has_wishes = any(name != "max_tokens" for name in options.sampling)
    (needed if has_wishes else wanted)["sampling_parameters"] = options.sampling
    if options.num_logprobs is not None:
        # The bytes of tokens are in `token_logprobs` only, which Triton's vLLM backend does not have.
        name = "return_token_logprobs"
        needed[name if name in offered else "return_logprobs"] = True
    if options.num_prompt_logprobs is not None:
        needed["return_prompt_logprobs"] = True
    if options.has_token_ids:
        needed["return_token_ids"] = True
    if options.num_choices > options.num_returned:
        needed["return_cumulative_logprob"] = True
    return needed, wanted
