"""What the engine gave, as the contract's tensors."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from modelserver.backend import Array, InferResponse, Tensor

from .contract import OUTPUTS
from .generation import SequenceOutput
from .plan import TokenLogprobs
from .text.tokenizer import Tokenizer

# The `finish_reason` of a choice that goes on, as Triton's vLLM backend writes it.
_UNFINISHED = "None"
# Stands for minus infinity, which JSON cannot express.
_LOWEST_LOGPROB = -9999.0


@dataclass(slots=True)
class ChoiceNews:
    """What is new of a choice and not sent: of one output of the engine, or of several when its reader is slow."""

    choice: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    last: SequenceOutput | None = None

    def add(self, output: SequenceOutput) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        if output.logprobs is not None:
            self.logprobs += output.logprobs
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.last = output


class AnswerWriter:
    """Writes the responses of one request. `prefix` stands before the text of each choice.

    `has_logprobs`: the sampling parameters ask for log-probabilities; else the output `logprobs` is null, as in
    Triton's vLLM backend.
    """

    def __init__(
        self,
        wants: Collection[str],
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        prefix: str,
        has_index: bool,
        has_logprobs: bool = False,
    ) -> None:
        self._wants = wants
        self._tokenizer = tokenizer
        self._prompt_token_ids = prompt_token_ids
        self._prefix = prefix
        self._has_index = has_index or "index" in wants
        self._has_logprobs = has_logprobs
        self._has_tokens = not {"token_ids", "logprobs", "token_logprobs"}.isdisjoint(wants)

    def is_worth_sending(self, news: ChoiceNews) -> bool:
        """Whether it says anything: a token may be half a character, and nobody may ask for tokens."""
        return bool(news.text) or self._has_tokens or (news.last is not None and news.last.finish_reason is not None)

    def response(self, news: Sequence[ChoiceNews]) -> InferResponse:
        """One response with an entry for each of these choices."""
        tensors = [texts("text_output", [self._prefix + choice.text for choice in news])]
        if self._wants or self._has_index:
            self._add_wanted(tensors, news)
        return InferResponse(tensors)

    def _add_wanted(self, tensors: list[Tensor], news: Sequence[ChoiceNews]) -> None:
        wants = self._wants
        outputs = [choice.last for choice in news if choice.last is not None]
        assert len(outputs) == len(news), "there is news of each choice"
        if self._has_index:
            tensors.append(numbers("index", [choice.choice for choice in news]))
        if "finish_reason" in wants:
            reasons = [
                output.finish_reason.value if output.finish_reason is not None else _UNFINISHED for output in outputs
            ]
            tensors.append(texts("finish_reason", reasons))
        if "stop_reason" in wants:
            tensors.append(documents("stop_reason", [output.stop_reason for output in outputs]))
        if "cumulative_logprob" in wants:
            tensors.append(numbers("cumulative_logprob", [output.cumulative_logprob or 0.0 for output in outputs]))
        tensors += self._logprobs(news)
        if "num_input_tokens" in wants:
            tensors.append(numbers("num_input_tokens", [len(self._prompt_token_ids)]))
        if "num_output_tokens" in wants:
            tensors.append(numbers("num_output_tokens", [len(choice.token_ids) for choice in news]))
        if "num_cached_tokens" in wants:
            tensors.append(numbers("num_cached_tokens", [output.num_cached_tokens for output in outputs]))
        if "token_ids" in wants and len(news) == 1:
            tensors.append(numbers("token_ids", news[0].token_ids))
        elif "choice_token_ids" in wants:
            tensors.append(documents("choice_token_ids", [[choice.token_ids for choice in news]]))

    def _logprobs(self, news: Sequence[ChoiceNews]) -> Iterator[Tensor]:
        wants = self._wants
        if "logprobs" in wants:
            yield documents("logprobs", [self._by_token_id(choice) for choice in news])
        if "token_logprobs" in wants:
            entries = [
                [
                    self._entry(token_id, logprobs)
                    for token_id, logprobs in zip(choice.token_ids, choice.logprobs, strict=True)
                ]
                for choice in news
            ]
            yield documents("token_logprobs", entries)
        if "prompt_logprobs" in wants and news[0].prompt_logprobs is not None:
            yield documents("prompt_logprobs", [self._prompt_entries(news[0].prompt_logprobs)])

    def _prompt_entries(self, logprobs: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        return [
            None if logprob is None else self._entry(token_id, logprob)
            for token_id, logprob in zip(self._prompt_token_ids, logprobs, strict=False)
        ]

    def _by_token_id(self, choice: ChoiceNews) -> list[dict[str, dict[str, Any]]] | None:
        """The tokens of a choice in the form of Triton's vLLM backend: the chosen one first, then the best ones."""
        if not self._has_logprobs:
            return None
        found = []
        for token_id, logprobs in zip(choice.token_ids, choice.logprobs, strict=True):
            ranked = [(token_id, logprobs.logprob, logprobs.rank)]
            ranked += [(other, logprob, rank) for rank, (other, logprob) in enumerate(logprobs.top, 1)]
            found.append(
                {
                    str(one): {
                        "logprob": max(logprob, _LOWEST_LOGPROB),
                        "rank": rank,
                        "decoded_token": self._tokenizer.token_text(one),
                    }
                    for one, logprob, rank in ranked
                }
            )
        return found

    def _entry(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        top = [self._token(other, logprob) for other, logprob in logprobs.top]
        return {**self._token(token_id, logprobs.logprob), "rank": logprobs.rank, "top": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token_id": token_id, "token": raw.decode(errors="replace"), "bytes": list(raw), "logprob": logprob}


def tokenized(token_ids: array[int], tokenizer: Tokenizer, max_model_len: int) -> InferResponse:
    """The answer to who asks for the tokens of a text alone."""
    ids = np.frombuffer(token_ids, np.int32)
    return InferResponse(
        [
            numbers("token_ids", ids),
            Tensor("token_strs", OUTPUTS["token_strs"], tokenizer.names[ids]),
            numbers("max_model_len", [max_model_len]),
        ]
    )


def texts(name: str, values: Iterable[str]) -> Tensor:
    """A BYTES output."""
    elements = [value.encode(errors="replace") for value in values]
    array = np.empty(len(elements), object)
    array[:] = elements
    return Tensor(name, OUTPUTS[name], array)


def documents(name: str, values: Iterable[Any]) -> Tensor:
    """A BYTES output whose elements are JSON."""
    elements = [orjson.dumps(value) for value in values]
    array = np.empty(len(elements), object)
    array[:] = elements
    return Tensor(name, OUTPUTS[name], array)


def numbers(name: str, values: Sequence[float] | Array) -> Tensor:
    datatype = OUTPUTS[name]
    return Tensor(name, datatype, np.asarray(values, datatype.numpy))
