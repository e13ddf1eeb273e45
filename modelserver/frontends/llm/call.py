"""What a model is asked to generate, in no API's words; and the input tensors that say it to the model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from modelserver.frontends.llm.tools import Tools

if TYPE_CHECKING:
    from modelserver.frontends.llm.pictures import Picture

# A text, or its token ids.
Prompt = str | list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """One call: prompts to continue, or a conversation to answer.

    - `conversation` is what chat templates take: `messages`, and perhaps `tools`, `documents`, `add_generation_prompt`,
      `continue_final_message` and `chat_template_kwargs`. Without one there are `prompts`.
    - `pictures` are those of each prompt, whose text has a mark in the place of each; none: no prompt has any.
    - `sampling` has the names of vLLM's sampling parameters; `structured_outputs` in it says what the text must be.
    - `suffix` is what follows the text that is to be generated, for models that fill in the middle.
    - `prediction` is the answer that the client expects, which makes it come sooner where it is right.
    - `num_choices` is how many continuations each prompt gets.
    - `tools` may be called, or must; `has_reasoning`: reasoning is told, where the model's can be told apart.
    - `has_token_ids`: the tokens of the text are told. `adds_special_tokens` None: as usual for what was given.
    - `ranks_choices`: the choices' cumulative log-probabilities are needed, to tell which are the best.
    - `is_counted`: the number of tokens is told, and that of reasoning among them.
    """

    prompts: tuple[Prompt, ...] = ()
    pictures: tuple[tuple[Picture, ...], ...] = ()
    conversation: dict[str, Any] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    suffix: str = ""
    prediction: str = ""
    num_choices: int = 1
    tools: Tools = field(default_factory=Tools)
    echo: str = ""
    is_streamed: bool = False
    has_reasoning: bool = True
    has_token_ids: bool = False
    ranks_choices: bool = False
    is_counted: bool = True
    adds_special_tokens: bool | None = None

    @property
    def num_prompts(self) -> int:
        return len(self.prompts) or 1

    @property
    def num_logprobs(self) -> int | None:
        """How many log-probabilities each token gets beside its own; None: none are wanted."""
        count: int | None = self.sampling.get("logprobs")
        return count

    @property
    def num_prompt_logprobs(self) -> int | None:
        count: int | None = self.sampling.get("prompt_logprobs")
        return count

    @property
    def is_structured(self) -> bool:
        """Whether the text is constrained."""
        return "structured_outputs" in self.sampling

    @property
    def is_thinking_disabled(self) -> bool:
        """Whether the client told the template that the model should not reason."""
        kwargs = (self.conversation or {}).get("chat_template_kwargs", {})
        return kwargs.get("enable_thinking") is False or kwargs.get("thinking") is False


def common_inputs(call: GenerateCall, offered: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The input tensors that say how to generate: those that the model must have, and those it may have.

    `offered` are the names of the model's inputs.
    """
    needed: dict[str, Any] = {}
    if call.suffix:
        needed["suffix"] = call.suffix
    wanted: dict[str, Any] = {
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_stop_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_num_cached_tokens": True,
    }
    if call.is_streamed:
        wanted["stream"] = True
    if call.prediction:
        wanted["prediction"] = call.prediction
    # A model that takes no parameters is asked plainly, as long as the client has no wishes of its own.
    has_wishes = any(name != "max_tokens" for name in call.sampling)
    (needed if has_wishes else wanted)["sampling_parameters"] = call.sampling
    if call.num_logprobs is not None:
        # The bytes of tokens are in `token_logprobs` only, which Triton's vLLM backend does not have.
        name = "return_token_logprobs"
        needed[name if name in offered else "return_logprobs"] = True
    if call.num_prompt_logprobs is not None:
        needed["return_prompt_logprobs"] = True
    if call.has_token_ids:
        needed["return_token_ids"] = True
    if call.ranks_choices:
        needed["return_cumulative_logprob"] = True
    return needed, wanted
