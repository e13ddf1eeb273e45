"""The engine as a library, in the manner of vLLM: `LLM(model=directory).generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from modelserver.backend import InvalidArgumentError, UnavailableError

from .checkpoint import open_checkpoint
from .engine import Engine
from .generation import GenerationRequest, SequenceOutput
from .json_fields import quote
from .lora.uses import AdapterUse
from .options import EngineOptions
from .plan import TokenLogprobs
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .text.tokenizer import Tokenizer

# Text, token ids, or a mapping with "prompt" or "prompt_token_ids" (and "cache_salt"), as vLLM has it, and "lora_name".
Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


def make_request(
    prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer | None, *, add_special_tokens: bool = True
) -> GenerationRequest:
    """Raises InvalidArgumentError for a prompt of another type, and for text without a tokenizer."""
    cache_salt = ""
    adapters: tuple[AdapterUse, ...] = ()
    given: Any = prompt
    if isinstance(prompt, Mapping):
        cache_salt = str(prompt.get("cache_salt") or "")
        if (name := prompt.get("lora_name")) is not None:
            adapters = (AdapterUse(str(name)),)
        given = prompt.get("prompt", prompt.get("prompt_token_ids"))
        if given is None:
            raise InvalidArgumentError("a prompt that is a mapping must have 'prompt' or 'prompt_token_ids'")
    if isinstance(given, str):
        if tokenizer is None:
            raise InvalidArgumentError("a prompt of text needs a tokenizer, and this model has none; give token ids")
        token_ids = tokenizer.encode(given, add_special_tokens=add_special_tokens)
        return GenerationRequest(token_ids, params, cache_salt=cache_salt, prompt_text=given, adapters=adapters)
    if not isinstance(given, Sequence) or not all(isinstance(token, int) for token in given):
        raise InvalidArgumentError(f"a prompt must be text or a list of token ids, got {quote(given)}")
    return GenerationRequest(list(given), params, cache_salt=cache_salt, adapters=adapters)


def is_conversation(messages: Sequence[Any]) -> bool:
    """Whether these are the messages of one conversation, and not several conversations."""
    return bool(messages) and isinstance(messages[0], Mapping)


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
        """The current state, which later outputs do not change."""
        return replace(self, outputs=[replace(choice, token_ids=list(choice.token_ids)) for choice in self.outputs])


class LLM:
    """A model of a directory, on the caller's thread. `options` are EngineOptions: `max_model_len=2048`,
    `dtype="float32"`.

    Raises ServerErrors that name the file or the option. One thread at a time may call it; `close` it, or use `with`.
    Later calls raise UnavailableError.
    """

    is_closed = False

    def __init__(self, model: str | Path, **options: Any) -> None:
        chosen = EngineOptions.from_parameters(options)
        with open_checkpoint(Path(model)) as checkpoint:
            self.engine = Engine.from_checkpoint(checkpoint, chosen)

    @classmethod
    def over(cls, engine: Engine) -> Self:
        """The same over an engine that is there already; it is closed with this."""
        llm = cls.__new__(cls)
        llm.engine = engine
        return llm

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt, all side by side; in their order. A list of numbers is one prompt.

        `sampling_params`: one for all, or one for each. Raises InvalidArgumentError, and then nothing is generated.
        """
        listed = _listed(prompts)
        tokenizer = self.engine.tokenizer
        return self._run(
            make_request(prompt, params, tokenizer)
            for prompt, params in zip(listed, _each(sampling_params, len(listed)), strict=True)
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, by the model's own chat template."""
        tokenizer = self._tokenizer()
        conversations: Sequence[Any] = [messages] if is_conversation(messages) else messages
        prompts = [
            tokenizer.apply_chat_template(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self._run(
            make_request(prompt, params, tokenizer, add_special_tokens=False)
            for prompt, params in zip(prompts, _each(sampling_params, len(prompts)), strict=True)
        )

    def close(self) -> None:
        """Give back what the model holds."""
        if not self.is_closed:
            self.is_closed = True
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise InvalidArgumentError("a conversation needs a tokenizer, and this model has none")
        return self.engine.tokenizer

    def _run(self, requests: Iterable[GenerationRequest]) -> list[RequestOutput]:
        if self.is_closed:
            raise UnavailableError("the engine is closed")
        engine = self.engine
        taken: dict[GenerationRequest, RequestOutput] = {}
        try:
            for number, request in enumerate(requests):
                request.request_id = str(number)
                request.is_streamed = False
                engine.add(request)
                taken[request] = RequestOutput.of(request)
            while engine.has_work:
                for output in engine.step():
                    if output.error is not None:
                        raise output.error
                    taken[output.request].take(output)
        finally:
            # Of those that have ended nothing is left to abort.
            for request in taken:
                engine.abort(request)
        return list(taken.values())


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]  # a list of numbers is one prompt
    if not isinstance(prompts, Sequence):
        raise InvalidArgumentError(f"prompts must be a prompt or a list of prompts, got {quote(prompts)}")
    return list(prompts)  # type: ignore[arg-type]


def _each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(entry, SamplingParams) for entry in params):
        raise InvalidArgumentError(f"sampling_params must be SamplingParams, or a list of them, got {quote(params)}")
    if len(params) != count:
        raise InvalidArgumentError(f"there are {count} prompts and {len(params)} sampling_params; give one, or as many")
    return params
