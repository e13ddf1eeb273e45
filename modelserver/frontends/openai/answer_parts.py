"""What the answers to chats and completions have in common: the fields around choices, frames of tokens, usage, and
log-probabilities."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from modelserver.frontends.http.framing import Framing, PreparedFrame
from modelserver.frontends.llm.answering import EventWriter, News, Prepared
from modelserver.frontends.llm.choices import Choice, Usage
from modelserver.frontends.llm.errors import ParameterError
from modelserver.frontends.llm.events import Text, TokenLogprob, json_logprob
from modelserver.frontends.llm.fields import Fields


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How a call wants its answer written. `num_returned` of the choices are answered, the best ones."""

    num_returned: int = 1
    has_usage: bool = False
    has_continuous_usage: bool = False
    names_tokens_by_id: bool = False


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


class Envelope:
    """What every answer and every chunk of a call has around its choices: its id, kind, time and model."""

    def __init__(self, answer_id: str, kind: str, created_s: int, model: str) -> None:
        """`kind` is the `object` of the answer."""
        self._fields = {
            "id": answer_id,
            "object": kind,
            "created": created_s,
            "model": model,
            "system_fingerprint": fingerprint(model),
        }

    def around(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        """The answer, or a chunk of it in a stream that has usage, null in most of them."""
        return {**self._fields, "choices": choices, "usage": usage}

    def around_part(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A chunk of a stream without usage."""
        return {**self._fields, "choices": [choice]}


class ChoicesWriter(EventWriter):
    """All choices of a call, as their events come. Most frames differ from others of their choice in the text only."""

    def __init__(self, options: AnswerOptions, prepared: Prepared, envelope: Envelope, framing: Framing) -> None:
        self._options = options
        self._usage = prepared.usage
        self._envelope = envelope
        self._framing = framing
        # Of a choice, when it has begun: frames of chunks in which only the text changes.
        self._text_frames: list[PreparedFrame | None] = [None] * sum(map(len, prepared.choices))

    def text_frame(self, choice: Choice) -> PreparedFrame | None:
        return self._text_frames[choice.number]

    def frames(self, news: News) -> bytes:
        if len(news) == 1:
            choice, events = news[0]
            frame = self._text_frames[choice.number]
            if frame is not None and len(events) == 1 and type(events[0]) is Text:
                # The usual case, and the one that comes for every token.
                return frame.with_text(events[0].text)
        return self._other_frames(news)

    @abc.abstractmethod
    def _other_frames(self, news: News) -> bytes:
        """As `frames`, of anything."""

    def last_frames(self) -> bytes:
        if not self._options.has_usage:
            return b""
        return self._framing.frame(orjson.dumps(self._envelope.around([], usage_document(self._usage))))

    def _around(self, part: dict[str, Any]) -> dict[str, Any]:
        """A chunk of the stream."""
        if not self._options.has_usage:
            return self._envelope.around_part(part)
        usage = usage_document(self._usage) if self._options.has_continuous_usage else None
        return self._envelope.around([part], usage)

    def _prepare_frame(self, choice: Choice, marked: Callable[[], dict[str, Any]], *, has_tokens: bool) -> None:
        """From now on only the text changes, which `marked` has as PreparedFrame.MARK, unless chunks tell of tokens."""
        if self._text_frames[choice.number] is None and not (
            choice.is_finished or has_tokens or self._options.has_continuous_usage
        ):
            self._text_frames[choice.number] = PreparedFrame(self._framing, self._around(marked()))


def fingerprint(model: str) -> str:
    """Names what answers: equal for equal models, as clients compare it between calls with a seed."""
    return "fp_" + hashlib.blake2s(model.encode(), digest_size=5).hexdigest()


def usage_document(usage: Usage) -> dict[str, Any]:
    """As `usage` of an answer."""
    num_inputs, num_outputs = usage.num_input_tokens, usage.num_output_tokens
    document: dict[str, Any] = {
        "prompt_tokens": num_inputs,
        "completion_tokens": num_outputs,
        "total_tokens": num_inputs + num_outputs,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }
    details = {}
    if usage.num_reasoning_tokens is not None:
        details["reasoning_tokens"] = min(num_outputs, usage.num_reasoning_tokens)
    if usage.num_predicted is not None:
        details["accepted_prediction_tokens"], details["rejected_prediction_tokens"] = usage.num_predicted
    if details:
        document["completion_tokens_details"] = details
    return document


def chat_logprobs(entries: Sequence[TokenLogprob], *, by_id: bool) -> list[dict[str, Any]]:
    """As `logprobs.content` of a chat choice; `by_id` names tokens `token_id:7`."""
    return [
        {**_chat_entry(entry, by_id=by_id), "top_logprobs": [_chat_entry(top, by_id=by_id) for top in entry["top"]]}
        for entry in entries
    ]


def _chat_entry(entry: TokenLogprob, *, by_id: bool) -> dict[str, Any]:
    return {"token": _token(entry, by_id=by_id), "logprob": json_logprob(entry), "bytes": entry.get("bytes")}


class CompletionLogprobs:
    """The `logprobs` of completions: parallel lists, with the offset of each token in the text so far."""

    def __init__(self, *, by_id: bool) -> None:
        self._by_id = by_id
        self._offset = 0

    def take(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Of tokens that follow those of the last call."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(entry["token"])
        by_id = self._by_id
        return {
            "tokens": [_token(entry, by_id=by_id) for entry in entries],
            "token_logprobs": [json_logprob(entry) for entry in entries],
            "top_logprobs": [_top(entry, by_id=by_id) for entry in entries],
            "text_offset": offsets,
        }


def prompt_entries(entries: Sequence[TokenLogprob | None], prompt: str) -> list[TokenLogprob]:
    """The entries of a prompt, of whose first token nothing is known but that it is what is left of the text."""
    rest = sum(len(entry["token"]) for entry in entries if entry is not None)
    first = {"token": prompt[: max(0, len(prompt) - rest)], "token_id": None, "logprob": None, "top": None}
    return [first if entry is None else entry for entry in entries]


def prompt_logprobs_document(entries: Sequence[TokenLogprob | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's `prompt_logprobs`: for each token an object by token id, null for the first."""
    if entries is None:
        return None
    return [None if entry is None else _by_token_id(entry) for entry in entries]


def _by_token_id(entry: TokenLogprob) -> dict[str, Any]:
    found = {}
    for rank, token in enumerate(entry["top"], 1):
        found[str(token["token_id"])] = {
            "logprob": json_logprob(token),
            "rank": token.get("rank", rank),
            "decoded_token": token["token"],
        }
    found[str(entry["token_id"])] = {
        "logprob": json_logprob(entry),
        "rank": entry.get("rank"),
        "decoded_token": entry["token"],
    }
    return found


def _top(entry: TokenLogprob, *, by_id: bool) -> dict[str, Any] | None:
    if entry["top"] is None:
        return None
    found = {_token(top, by_id=by_id): json_logprob(top) for top in entry["top"]}
    found.setdefault(_token(entry, by_id=by_id), json_logprob(entry))
    return found


def _token(entry: TokenLogprob, *, by_id: bool) -> str:
    if by_id and entry["token_id"] is not None:
        return f"token_id:{entry['token_id']}"
    token: str = entry["token"]
    return token
