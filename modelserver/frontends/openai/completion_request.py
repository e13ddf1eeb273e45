"""The body of `POST /v1/completions`, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from modelserver.frontends.llm.call import GenerateCall, Prompt
from modelserver.frontends.llm.errors import ParameterError
from modelserver.frontends.llm.fields import MAX_INT64, Fields, Range
from modelserver.frontends.openai.answer_parts import AnswerOptions, read_stream_options
from modelserver.frontends.openai.limits import MAX_CHOICES, MAX_LOGPROBS, MAX_PROMPTS, MAX_SEQUENCES, MAX_TOKEN_IDS
from modelserver.frontends.openai.sampling import TOKEN_ID, read_choices, read_sampling
from modelserver.frontends.openai.structure import read_structure

_DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """What the model is asked, and how the answer is written.

    `has_text` False: only the prompt is to be echoed, with its log-probabilities if these are wanted.
    """

    call: GenerateCall
    options: AnswerOptions
    is_echoed: bool = False
    has_text: bool = True


def read_completion(fields: Fields) -> CompletionRequest:
    """Raises ParameterError for the first thing that is wrong."""
    prompts = read_prompts(fields, "prompt")
    is_echoed = fields.flag("echo")
    is_streamed, has_usage, is_continuous = read_stream_options(fields)
    sampling = read_sampling(fields)
    num_returned, num_choices = _read_choices(fields, is_streamed=is_streamed)
    if len(prompts) * num_choices > MAX_SEQUENCES:
        raise ParameterError(
            f"{len(prompts)} prompts with {num_choices} choices each are over the limit of "
            f"{MAX_SEQUENCES} texts in one request",
            "prompt",
        )
    max_tokens = fields.integer("max_tokens", Range(0 if is_echoed else 1, MAX_INT64))
    if max_tokens is None:
        max_tokens = _DEFAULT_MAX_TOKENS
    # Models generate at least one token; it is left out where it is not wanted.
    sampling["max_tokens"] = max(1, max_tokens)
    _read_logprobs(fields, sampling, is_echoed=is_echoed, is_streamed=is_streamed)
    structure = read_structure(fields)
    if structure is not None:
        sampling["structured_outputs"] = structure
    if num_choices > 1:
        sampling["n"] = num_choices
    return CompletionRequest(
        call=GenerateCall(
            prompts=tuple(prompts),
            sampling=sampling,
            suffix=fields.text("suffix") or "",
            num_choices=num_choices,
            is_streamed=is_streamed,
            has_token_ids=fields.flag("return_token_ids"),
            ranks_choices=num_choices > num_returned,
            adds_special_tokens=None if fields.flag("add_special_tokens", True) else False,
        ),
        options=AnswerOptions(
            num_returned=num_returned,
            has_usage=has_usage,
            has_continuous_usage=is_continuous,
            names_tokens_by_id=fields.flag("return_tokens_as_token_ids"),
        ),
        is_echoed=is_echoed,
        has_text=max_tokens > 0,
    )


def read_prompts(fields: Fields, name: str) -> list[Prompt]:
    """A string, an array of strings, the token ids of one text, or an array of those. Raises ParameterError."""
    expected = "a string, an array of strings, an array of token ids, or an array of arrays of token ids"
    fields.need(name, expected)
    value = fields.document[name]
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise fields.wrong(name, expected, value)
    if not value:
        raise fields.wrong(name, "an array that is not empty", value)
    if type(value[0]) is int:
        return [fields.integers(name, MAX_TOKEN_IDS, TOKEN_ID) or []]
    fields.items(name, MAX_PROMPTS)
    if isinstance(value[0], str):
        return list(fields.texts(name, MAX_PROMPTS) or ())
    if not isinstance(value[0], list):
        raise fields.wrong(f"{name}[0]", "a string, a token id or an array of token ids", value[0])
    return [_read_token_ids(fields, f"{name}[{index}]", item) for index, item in enumerate(value)]


def _read_token_ids(fields: Fields, name: str, item: Any) -> list[int]:
    if not isinstance(item, list):
        raise fields.wrong(name, "an array of token ids", item)
    if not item:
        raise fields.wrong(name, "an array that is not empty", item)
    ids = Fields({name: item}).integers(name, MAX_TOKEN_IDS, TOKEN_ID)
    assert ids is not None, "it is there"
    return ids


def _read_choices(fields: Fields, *, is_streamed: bool) -> tuple[int, int]:
    """How many choices are answered, and of how many they are the best."""
    num_returned = read_choices(fields)
    best_of = fields.integer("best_of", Range(0, MAX_CHOICES)) or num_returned
    if best_of < num_returned:
        raise ParameterError(f"'best_of' must be at least n, got {best_of} for n {num_returned}", "best_of")
    if best_of > num_returned and is_streamed:
        raise ParameterError("'best_of' cannot be streamed: the best is known at the end only", "best_of")
    return num_returned, best_of


def _read_logprobs(fields: Fields, sampling: dict[str, Any], *, is_echoed: bool, is_streamed: bool) -> None:
    logprobs = fields.integer("logprobs", Range(0, MAX_LOGPROBS))
    prompt_logprobs = fields.integer("prompt_logprobs", Range(0, MAX_LOGPROBS))
    if prompt_logprobs is not None and is_streamed:
        raise ParameterError("'prompt_logprobs' cannot be streamed", "prompt_logprobs")
    if logprobs is not None:
        sampling["logprobs"] = logprobs
        if is_echoed and prompt_logprobs is None:
            prompt_logprobs = logprobs
    if prompt_logprobs is not None:
        sampling["prompt_logprobs"] = prompt_logprobs
