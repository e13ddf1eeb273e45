"""The input and output of the engine: one request, and the outputs of its continuations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from modelserver.backend import ServerError

from .plan import TokenLogprobs
from .sampling_params import SamplingParams
from .sequence import FinishReason

if TYPE_CHECKING:
    from .lora.adapter import Adapter
    from .lora.uses import AdapterUse
    from .pictures.prompt import PromptPictures


@dataclass(slots=True, eq=False)
class GenerationRequest:
    """A prompt as tokens. `request_id` and `prompt_text` are for the caller; the engine only returns them.

    `priority`: lower goes first, where the engine schedules by priority. `cache_salt` separates prefixes that must not
    be shared. `arrival_ns` by the engine's clock; 0 is now. Not `is_streamed`: one output per choice, when it has
    ended. `pictures` are those in the prompt; `prediction` is the answer that the client expects. `adapters`
    are those that it asks for, and `adapter` what the engine has made of them.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    request_id: str = ""
    arrival_ns: int = 0
    prompt_text: str | None = None
    is_streamed: bool = True
    pictures: PromptPictures | None = None
    prediction: Sequence[int] = ()
    adapters: tuple[AdapterUse, ...] = ()
    adapter: Adapter | None = None


@dataclass(slots=True, eq=False)
class SequenceOutput:
    """The news of one choice. `text` has only complete characters, without text that may begin a stop string.

    `token_ids` and `logprobs` are those since the last output; `num_output_tokens` and `cumulative_logprob` count from
    the start. `finish_reason` is there in the last output, with what stopped it (None: end of sequence, or length).
    `prompt_logprobs` is in the first output of choice 0 only: one entry per prompt token, None for the first.
    `phases` too: when it was scheduled, and had its first and its last token (monotonic, ns); None if it had none.
    `predicted` comes with the end of a choice that had a prediction: how many tokens of it were accepted, and rejected.
    `error`: the whole request is refused after it was taken on, and this is all that comes of it.
    """

    request: GenerationRequest
    choice: int
    text: str
    token_ids: list[int]
    num_output_tokens: int
    num_cached_tokens: int
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    phases: tuple[int, int, int] | None = None
    predicted: tuple[int, int] | None = None
    error: ServerError | None = None

    def extend(self, later: SequenceOutput) -> None:
        """Take in the next output of the same choice, for a reader that is behind."""
        self.text += later.text
        self.token_ids += later.token_ids
        if self.logprobs is None:
            self.logprobs = later.logprobs
        else:
            self.logprobs += later.logprobs or ()
        self.prompt_logprobs = later.prompt_logprobs or self.prompt_logprobs
        self.num_output_tokens = later.num_output_tokens
        self.num_cached_tokens = later.num_cached_tokens
        self.cumulative_logprob = later.cumulative_logprob
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.phases, self.predicted = later.phases, later.predicted
