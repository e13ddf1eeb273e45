"""What the Python API gives back: a request with all its choices so far, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .generation import GenerationRequest, SequenceOutput
from .plan import TokenLogprobs


@dataclass(slots=True)
class CompletionOutput:
    """One choice so far. `finish_reason` is "stop", "length", or None while it runs."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def take(self, output: SequenceOutput) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        self.cumulative_logprob = output.cumulative_logprob
        if output.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *output.logprobs]
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason.value
            self.stop_reason = output.stop_reason


@dataclass(slots=True)
class RequestOutput:
    """A request so far. `finished`: no choice runs any more. `prompt` is None for prompts that came as tokens."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = False

    @classmethod
    def of(cls, request: GenerationRequest) -> RequestOutput:
        choices = [CompletionOutput(index) for index in range(request.params.n)]
        return cls(request.request_id, request.prompt_text, request.prompt_token_ids, choices)

    def take(self, output: SequenceOutput) -> None:
        """Add what the engine has said of one choice."""
        self.outputs[output.choice].take(output)
        if output.choice == 0:
            self.num_cached_tokens = output.num_cached_tokens
            self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        if output.finish_reason is not None:
            self.finished = all(choice.finish_reason is not None for choice in self.outputs)

    def copy(self) -> RequestOutput:
        """As it is now; what comes later does not change it."""
        return replace(self, outputs=[replace(choice, token_ids=list(choice.token_ids)) for choice in self.outputs])
