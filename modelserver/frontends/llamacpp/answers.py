"""Events of a generation -> the documents of llama.cpp's server: events of a stream, or one document for each text."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from modelserver.frontends.http.framing import Framing, PreparedFrame
from modelserver.frontends.llamacpp.request import CompletionRequest
from modelserver.frontends.llm.answering import EventWriter, News, Prepared
from modelserver.frontends.llm.choices import Choice, Said
from modelserver.frontends.llm.edge import Call
from modelserver.frontends.llm.events import Event, Finish, Text, TokenLogprob, json_logprob, plain_token

Document = dict[str, Any]

# Requests are bound to no slots here.
_NO_SLOT = -1


class CompletionWriter(EventWriter):
    """Writes all texts of a call. `prompts` are the prompts as texts, in their order."""

    def __init__(self, asked: CompletionRequest, prepared: Prepared, call: Call, prompts: Sequence[str]) -> None:
        self._asked = asked
        self._framing = call.framing
        self._texts = [
            _Completion(asked, choice, prepared, prompts[choice.prompt])
            for choices in prepared.choices
            for choice in choices
        ]

    def frames(self, news: News) -> bytes:
        found = b""
        for choice, events in news:
            text = self._texts[choice.number]
            plain = plain_token(events) if text.is_plain else None
            if plain is not None:
                # The usual case, and the one that comes for every token.
                found += text.plain_frame(self._framing, *plain)
                continue
            text.add(events)
            if text.has_news:
                found += self._frame(text.part())
            if choice.is_finished:
                found += self._frame(self._kept(text.whole("")))
        return found

    def last_frames(self) -> bytes:
        return b""

    def note(self, news: News) -> None:
        for choice, events in news:
            self._texts[choice.number].add(events)

    def document(self) -> Document | list[Document]:
        found = [self._kept(text.whole(text.said.text)) for text in self._texts]
        return found if self._asked.is_array else found[0]

    def _frame(self, document: Document) -> bytes:
        return self._framing.frame(orjson.dumps(document))

    def _kept(self, document: Document) -> Document:
        """The members that the client wants. `a/b` takes `b` out of `a`."""
        if not self._asked.fields:
            return document
        found: Document = {}
        for path in self._asked.fields:
            value: Any = document
            *_, name = keys = path.split("/")
            for key in keys:
                value = value.get(key, _MISSING) if isinstance(value, Mapping) else _MISSING
            if value is not _MISSING:
                found[name] = value
        return found


_MISSING = object()


class _Completion:
    """One text: its events since the last time, its counts and its times."""

    def __init__(self, asked: CompletionRequest, choice: Choice, prepared: Prepared, prompt: str) -> None:
        self.said = Said()
        self._asked = asked
        self._choice = choice
        self._usage = prepared.usage
        self._model = prepared.model.answers_as
        self._prompt = prompt
        self._has_new_line = False
        self._began_ns = self._last_ns = time.monotonic_ns()
        self._first_ns: int | None = None
        self._frame: PreparedFrame | None = None
        # Whether all that an event says of a token is its text, its id and the counts.
        self.is_plain = not (asked.has_timings or asked.num_probs or asked.fields or asked.num_predict == 0)

    def plain_frame(self, framing: Framing, content: str, token_id: int) -> bytes:
        """An event of a stream for one token, where there is nothing else to say, before or after it."""
        if self._frame is None:
            mark = PreparedFrame.MARK
            self._frame = PreparedFrame(framing, self._part(mark, [mark], (mark, mark)))
        self._note_time()
        if "\n" in content:
            self._has_new_line = True
        return self._frame.with_values(content, token_id, self._num_tokens, self._num_inputs)

    def _note_time(self) -> None:
        self._last_ns = time.monotonic_ns()
        if self._first_ns is None:
            self._first_ns = self._last_ns

    def add(self, events: Sequence[Event]) -> None:
        self._note_time()
        if self._asked.num_predict == 0:
            # The prompt was to be read only.
            events = [event for event in events if isinstance(event, Finish)]
        for event in events:
            if type(event) is Text and "\n" in event.text:
                self._has_new_line = True
        self.said.add(events)

    @property
    def has_news(self) -> bool:
        return bool(self.said.text or self.said.logprobs or self.said.token_ids)

    def part(self) -> Document:
        """An event of a stream: what was said since the last one."""
        said = self.said
        found = self._part(said.text, said.token_ids, (self._num_tokens, self._num_inputs))
        if self._asked.has_timings:
            found["timings"] = self._timings()
        if self._asked.num_probs:
            found["completion_probabilities"] = probabilities(said.logprobs)
        said.forget_text()
        said.forget_tokens()
        return found

    def _part(self, content: str, tokens: Sequence[int | str], counts: tuple[int | str, int | str]) -> Document:
        return {
            "index": self._choice.number,
            "content": content,
            "tokens": tokens,
            "stop": False,
            "id_slot": _NO_SLOT,
            "tokens_predicted": counts[0],
            "tokens_evaluated": counts[1],
        }

    def whole(self, text: str) -> Document:
        """The answer, or the last event of a stream, which has no text of its own."""
        said = self.said
        stop_type, word = _stop(said.finish)
        found: Document = {
            "index": self._choice.number,
            "content": text,
            "tokens": said.token_ids if self._asked.has_tokens else [],
            "id_slot": _NO_SLOT,
            "stop": True,
            "model": self._model,
            "tokens_predicted": self._num_tokens,
            "tokens_evaluated": self._num_inputs,
            "generation_settings": self._asked.settings,
            "prompt": self._prompt,
            "has_new_line": self._has_new_line,
            "truncated": False,
            "stop_type": stop_type,
            "stopping_word": word,
            "tokens_cached": self._num_inputs + self._num_tokens,
            "timings": self._timings(),
        }
        if self._asked.num_probs and not self._asked.is_streamed:
            found["completion_probabilities"] = probabilities(said.logprobs)
        return found

    @property
    def _num_tokens(self) -> int:
        return 0 if self._asked.num_predict == 0 else self._choice.num_tokens

    @property
    def _num_inputs(self) -> int:
        return self._usage.num_inputs_of(self._choice.prompt)

    def _timings(self) -> Document:
        """Up to the last token: reading the prompt ends with the first one."""
        num_cached = self._usage.num_cached_of(self._choice.prompt)
        first_ns = self._first_ns or self._last_ns
        read_ms = (first_ns - self._began_ns) / 1e6
        said_ms = (self._last_ns - first_ns) / 1e6
        return {
            "cache_n": num_cached,
            **_rates("prompt", self._num_inputs - num_cached, read_ms),
            **_rates("predicted", self._num_tokens, said_ms),
        }


def _rates(name: str, count: int, duration_ms: float) -> Document:
    return {
        f"{name}_n": count,
        f"{name}_ms": duration_ms,
        f"{name}_per_token_ms": duration_ms / count if count else None,
        f"{name}_per_second": count * 1000 / duration_ms if duration_ms else None,
    }


def probabilities(entries: Sequence[TokenLogprob]) -> list[Document]:
    """As `completion_probabilities`."""
    return [{**_token(entry), "top_logprobs": [_token(top) for top in entry["top"] or ()]} for entry in entries]


def _token(entry: TokenLogprob) -> Document:
    return {
        "id": entry["token_id"],
        "token": entry["token"],
        "bytes": entry.get("bytes"),
        "logprob": json_logprob(entry),
    }


def _stop(finish: Finish | None) -> tuple[str, str]:
    """`stop_type` and `stopping_word`."""
    if finish is None:
        return "none", ""
    if finish.reason == "length":
        return "limit", ""
    if isinstance(finish.stop_reason, str):
        return "word", finish.stop_reason
    return "eos", ""
