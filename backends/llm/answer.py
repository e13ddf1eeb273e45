"""The engine's outputs, and the vectors of encoders, as the contract's tensors."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import orjson

from modelserver.backend import (
    Array,
    InferResponse,
    InternalError,
    InvalidArgumentError,
    RowResponse,
    Tensor,
)

from .contract import OUTPUTS, PREDICTED
from .generation import SequenceOutput
from .plan import TokenLogprobs
from .text.tokenizer import Tokenizer

# The `finish_reason` of a choice that goes on, as Triton's vLLM backend writes it.
_UNFINISHED = "None"
# Stands for minus infinity, which JSON cannot express.
_LOWEST_LOGPROB = -9999.0
_NAMES_AT_ONCE = 1 << 14
_NOT_FINITE = "the answer is not finite: serve the model with dtype float32 or bfloat16"
# Of the outputs beside texts that are kept.
_MAX_KNOWN = 64


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
        # The outputs beside the text are the same for nearly all tokens, unless they tell something of each.
        own = {"logprobs", "token_logprobs", "cumulative_logprob", "prompt_logprobs"}
        self._has_own = not own.isdisjoint(wants)
        self._known: dict[tuple[int, int], dict[str, Any]] = {}

    def is_worth_sending(self, output: SequenceOutput) -> bool:
        """Whether it says anything: a token may be half a character, and tokens may not be wanted."""
        return bool(output.text) or self._has_tokens or output.finish_reason is not None

    def response(self, outputs: Sequence[SequenceOutput]) -> InferResponse:
        """One response with an entry for each of these outputs, which are of different choices."""
        output = outputs[0]
        if len(outputs) != 1 or len(output.token_ids) != 1 or self._has_own or output.finish_reason is not None:
            found = [texts("text_output", [self._prefix + each.text for each in outputs]), *self._rest(outputs)]
            return InferResponse(found + self._token_ids(outputs))
        # This runs for every streamed token.
        text = self._prefix + output.text
        if not text.isascii():
            text = text.encode(errors="replace").decode()
        key = (output.choice, output.num_cached_tokens)
        rest = self._known.get(key)
        if rest is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            rest = self._known[key] = {tensor.name: tensor.data.item() for tensor in self._rest(outputs)}
        values: dict[str, Any] = {"text_output": text, **rest}
        if "token_ids" in self._wants:
            values["token_ids"] = output.token_ids[0]
        elif "choice_token_ids" in self._wants:
            values["choice_token_ids"] = orjson.dumps([[output.token_ids]])
        return RowResponse(values=values, datatypes=OUTPUTS)

    def _rest(self, outputs: Sequence[SequenceOutput]) -> Iterator[Tensor]:
        """The requested outputs besides the text and its tokens."""
        wants = self._wants
        if self._has_index:
            yield numbers("index", [output.choice for output in outputs])
        if "finish_reason" in wants:
            reasons = [
                output.finish_reason.value if output.finish_reason is not None else _UNFINISHED for output in outputs
            ]
            yield texts("finish_reason", reasons)
        if "stop_reason" in wants:
            yield documents("stop_reason", [output.stop_reason for output in outputs])
        if "cumulative_logprob" in wants:
            yield numbers("cumulative_logprob", [output.cumulative_logprob or 0.0 for output in outputs])
        yield from self._logprobs(outputs)
        if "num_input_tokens" in wants:
            yield numbers("num_input_tokens", [len(self._prompt_token_ids)])
        if "num_output_tokens" in wants:
            yield numbers("num_output_tokens", [len(output.token_ids) for output in outputs])
        if "num_cached_tokens" in wants:
            yield numbers("num_cached_tokens", [output.num_cached_tokens for output in outputs])
        for place, name in enumerate(PREDICTED):
            if name in wants and all(output.finish_reason is not None for output in outputs):
                yield numbers(name, [(output.predicted or (0, 0))[place] for output in outputs])

    def _token_ids(self, outputs: Sequence[SequenceOutput]) -> list[Tensor]:
        if "token_ids" in self._wants and len(outputs) == 1:
            return [numbers("token_ids", outputs[0].token_ids)]
        if "choice_token_ids" in self._wants:
            return [documents("choice_token_ids", [[output.token_ids for output in outputs]])]
        return []

    def _logprobs(self, outputs: Sequence[SequenceOutput]) -> Iterator[Tensor]:
        wants = self._wants
        if "logprobs" in wants:
            yield documents("logprobs", [self._by_token_id(output) for output in outputs])
        if "token_logprobs" in wants:
            entries = [
                [
                    self._entry(token_id, logprobs)
                    for token_id, logprobs in zip(output.token_ids, output.logprobs or (), strict=True)
                ]
                for output in outputs
            ]
            yield documents("token_logprobs", entries)
        if "prompt_logprobs" in wants and outputs[0].prompt_logprobs is not None:
            yield documents("prompt_logprobs", [self._prompt_entries(outputs[0].prompt_logprobs)])

    def _prompt_entries(self, logprobs: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        return [
            None if logprob is None else self._entry(token_id, logprob)
            for token_id, logprob in zip(self._prompt_token_ids, logprobs, strict=False)
        ]

    def _by_token_id(self, output: SequenceOutput) -> list[dict[str, dict[str, Any]]] | None:
        """The tokens of a choice in the form of Triton's vLLM backend: the chosen one first, then the best ones."""
        if not self._has_logprobs:
            return None
        found = []
        for token_id, logprobs in zip(output.token_ids, output.logprobs or (), strict=True):
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


def tokenized(
    token_ids: array[int], tokenizer: Tokenizer, max_model_len: int, outputs: Collection[str] | None
) -> InferResponse:
    """The answer to a request for the tokens of a text: the `outputs` that it names, or all but `token_bytes`."""
    ids = np.frombuffer(token_ids, np.int32)
    response = InferResponse([numbers("token_ids", ids), numbers("max_model_len", [max_model_len])])
    if outputs is None or "token_strs" in outputs:
        names = np.empty(len(ids), object)
        for start in range(0, len(ids), _NAMES_AT_ONCE):  # other threads get their turn in between
            names[start : start + _NAMES_AT_ONCE] = tokenizer.names[ids[start : start + _NAMES_AT_ONCE]]
        response.outputs.insert(1, Tensor("token_strs", OUTPUTS["token_strs"], names))
    if outputs is not None and "token_bytes" in outputs:
        pieces = np.empty(len(ids), object)
        for start in range(0, len(ids), _NAMES_AT_ONCE):
            pieces[start : start + _NAMES_AT_ONCE] = tokenizer.pieces[ids[start : start + _NAMES_AT_ONCE]]
        response.outputs.append(Tensor("token_bytes", OUTPUTS["token_bytes"], pieces))
    return response


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


def embedded(
    vector: np.ndarray[Any, np.dtype[np.float32]],
    *,
    num_tokens: int,
    dimensions: int | None,
    is_normalised: bool,
) -> InferResponse:
    """The response: the vector of a text of `num_tokens`, or its first `dimensions`; of length one if normalised."""
    if dimensions is not None and dimensions > len(vector):
        error = InvalidArgumentError(f"input 'dimensions': expected at most {len(vector)}, got {dimensions}")
        return InferResponse(error=error)
    part = vector[:dimensions]
    length = float(np.linalg.norm(part))
    if not np.isfinite(length):
        return InferResponse(error=InternalError(_NOT_FINITE))
    if is_normalised and length:
        part = part / length
    return InferResponse([numbers("embedding", part), numbers("num_input_tokens", [num_tokens])])


def token_rows(name: str, rows: np.ndarray[Any, np.dtype[np.float32]]) -> InferResponse:
    """The response to a text of which each token has a row [tokens, size]."""
    if not np.isfinite(rows).all():
        return InferResponse(error=InternalError(_NOT_FINITE))
    return InferResponse([numbers(name, rows), numbers("num_input_tokens", [len(rows)])])


def classified(
    scores: np.ndarray[Any, np.dtype[np.float32]], labels: Sequence[str], *, num_tokens: int
) -> InferResponse:
    """The response to a text, or to one of which each token has a row of scores: with the highest label of each."""
    if not np.isfinite(scores).all():
        return InferResponse(error=InternalError(_NOT_FINITE))
    best = np.atleast_1d(scores.argmax(axis=-1))
    return InferResponse(
        [
            numbers("token_scores" if scores.ndim > 1 else "scores", scores),
            texts("label", [labels[index] for index in best]),
            numbers("num_input_tokens", [num_tokens]),
        ]
    )
