"""Events of a generation -> TGI's documents: an event for each token, or the whole text with its details."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson

from modelserver.frontends.http.framing import PreparedFrame
from modelserver.frontends.llm.answering import EventWriter, News, Prepared
from modelserver.frontends.llm.choices import Choice, Said
from modelserver.frontends.llm.edge import Call
from modelserver.frontends.llm.events import Finish, TokenLogprob, json_logprob, plain_token
from modelserver.frontends.tgi.request import TgiRequest

Document = dict[str, Any]

_NS_PER_MS = 1_000_000


class TgiDurations:
    """The durations of one call, from its arrival and from when the model got its request."""

    def __init__(self) -> None:
        self._began_ns = self._sent_ns = time.monotonic_ns()

    def note_sent(self) -> None:
        self._sent_ns = time.monotonic_ns()

    def headers(self, num_tokens: int) -> list[tuple[str, str]]:
        """The durations up to now, in milliseconds; `x-compute-time` is in seconds."""
        now_ns = time.monotonic_ns()
        total_ns, inference_ns = now_ns - self._began_ns, now_ns - self._sent_ns
        found = {
            "x-total-time": total_ns,
            "x-validation-time": self._sent_ns - self._began_ns,
            "x-inference-time": inference_ns,
            "x-time-per-token": inference_ns // max(1, num_tokens),
        }
        return [
            ("x-compute-time", f"{total_ns / 1e9:.9f}"),
            *((name, str(duration_ns // _NS_PER_MS)) for name, duration_ns in found.items()),
        ]


class TgiWriter(EventWriter):
    """Writes one text, or the best of several. `prefill` are the documents of the prompt's tokens."""

    def __init__(
        self,
        asked: TgiRequest,
        prepared: Prepared,
        call: Call,
        durations: TgiDurations,
        *,
        prefill: list[Document] | None = None,
        is_in_array: bool = False,
    ) -> None:
        self._asked = asked
        self._usage = prepared.usage
        self._framing = call.framing
        self._durations = durations
        self._prefill = prefill
        self._is_in_array = is_in_array
        (self._choices,) = prepared.choices
        self._said = {choice.number: Said() for choice in self._choices}
        self._headers = call.headers
        self._headers.append(("x-compute-characters", str(len(asked.inputs))))
        # Of a stream: the whole text so far, how many tokens were written, and the one that waits for the end.
        self._texts: list[str] = []
        self._num_written = 0
        self._last: Document | None = None
        marked = {"id": PreparedFrame.MARK, "text": PreparedFrame.MARK, "logprob": None, "special": False}
        document = {"index": PreparedFrame.MARK, "token": marked, "generated_text": None, "details": None}
        self._plain_frame = PreparedFrame(call.framing, document)

    # Streams.

    def frames(self, news: News) -> bytes:
        found = b""
        for _, events in news:
            plain = plain_token(events)
            if plain is not None:
                text, token_id = plain
                self._texts.append(text)
                self._num_written += 1
                found += self._plain_frame.with_values(self._num_written, token_id, text)
                continue
            said = Said()
            said.add(events)
            text = said.text
            if text:
                self._texts.append(text)
            tokens = _stream_tokens(text, said, self._asked.num_top)
            if said.finish is None:
                found += b"".join(map(self._token_frame, tokens))
                continue
            found += b"".join(map(self._token_frame, tokens[:-1]))
            self._last = tokens[-1] if tokens else None
            self._said[0].finish = said.finish
        return found

    def last_frames(self) -> bytes:
        self._num_written += 1
        document = {"index": self._num_written, **(self._last or {"token": {**_plain_token(""), "special": True}})}
        document["generated_text"] = self._full("".join(self._texts))
        document["details"] = None
        if self._asked.has_details:
            document["details"] = {
                "finish_reason": _reason(self._said[0].finish),
                "generated_tokens": self._usage.num_output_tokens,
                "seed": self._asked.seed,
                "input_length": self._usage.num_input_tokens,
            }
        return self._framing.frame(orjson.dumps(document))

    def _token_frame(self, token: Document) -> bytes:
        self._num_written += 1
        document = {"index": self._num_written, **token, "generated_text": None, "details": None}
        return self._framing.frame(orjson.dumps(document))

    # Whole answers.

    def note(self, news: News) -> None:
        for choice, events in news:
            self._said[choice.number].add(events)

    def document(self) -> Document | list[Document]:
        """The text, in details with the others of which it is the best."""
        best, *others = sorted(self._choices, key=_mean_logprob, reverse=True)
        written = self._sequence(best)
        found: Document = {"generated_text": written.pop("generated_text")}
        if self._asked.has_details:
            if others:
                written["best_of_sequences"] = [self._sequence(choice) for choice in others]
            found["details"] = written
        num_tokens = self._usage.num_output_tokens
        self._headers += [
            *self._durations.headers(num_tokens),
            ("x-prompt-tokens", str(self._usage.num_input_tokens)),
            ("x-generated-tokens", str(num_tokens)),
        ]
        return [found] if self._is_in_array else found

    def _sequence(self, choice: Choice) -> Document:
        said = self._said[choice.number]
        tokens = [_token(entry) for entry in said.logprobs]
        if tokens and _is_mark(tokens[-1], said):
            tokens[-1]["special"] = True
        found: Document = {
            "generated_text": self._full(said.text),
            "finish_reason": _reason(said.finish),
            "generated_tokens": choice.num_tokens or len(tokens),
            "seed": self._asked.seed,
            "prefill": self._prefill_of(choice),
            "tokens": tokens,
        }
        if self._asked.num_top:
            found["top_tokens"] = [_top_tokens(entry, self._asked.num_top) for entry in said.logprobs]
        return found

    def _prefill_of(self, choice: Choice) -> list[Document]:
        """The prompt's tokens with what the model thinks of each; of the first there is nothing to think."""
        if self._prefill is None:
            return []
        entries = choice.prompt_logprobs or []
        logprobs = [None if entry is None else json_logprob(entry) for entry in entries]
        logprobs += [None] * (len(self._prefill) - len(logprobs))
        return [{**token, "logprob": logprob} for token, logprob in zip(self._prefill, logprobs, strict=False)]

    def _full(self, text: str) -> str:
        return self._asked.inputs + text if self._asked.has_full_text else text


def prefill_documents(ids: Sequence[int], pieces: Sequence[bytes]) -> list[Document]:
    """The tokens of a prompt."""
    return [
        {"id": token_id, "text": piece.decode(errors="replace"), "logprob": None}
        for token_id, piece in zip(ids, pieces, strict=True)
    ]


def _stream_tokens(text: str, said: Said, num_top: int) -> list[Document]:
    """The tokens of a piece of text. The texts of those that are not special are the piece, as clients add them up."""
    entries = said.logprobs
    tokens = [_token(entry) for entry in entries] or [_plain_token("", token_id) for token_id in said.token_ids]
    if not tokens:
        return [{"token": _plain_token(text)}] if text else []
    written = tokens
    if _is_mark(tokens[-1], said) and not (text and len(tokens) == 1):
        tokens[-1]["special"] = True
        written = tokens[:-1]
    if written and "".join(token["text"] for token in written) != text:
        # Text that was held back before, or characters of several tokens.
        for token in written:
            token["text"] = ""
        written[-1]["text"] = text
    found: list[Document] = [{"token": token} for token in tokens]
    if num_top:
        for document, entry in zip(found, entries, strict=False):
            document["top_tokens"] = _top_tokens(entry, num_top)
    return found


def _is_mark(last: Document, said: Said) -> bool:
    """Whether the last token is the mark of the end, which is not a part of the text."""
    finish = said.finish
    if finish is None or finish.reason != "stop" or isinstance(finish.stop_reason, str):
        return False
    return not (last["text"] and said.text.endswith(last["text"]))


def _token(entry: TokenLogprob) -> Document:
    return {"id": entry["token_id"], "text": entry["token"], "logprob": json_logprob(entry), "special": False}


def _plain_token(text: str, token_id: int = 0) -> Document:
    """Of a model that does not tell its tokens."""
    return {"id": token_id, "text": text, "logprob": None, "special": False}


def _top_tokens(entry: TokenLogprob, num_top: int) -> Sequence[Document]:
    return [_token(top) for top in (entry["top"] or ())[:num_top]]


def _reason(finish: Finish | None) -> str:
    if finish is None or finish.reason != "length":
        is_stopped = finish is not None and isinstance(finish.stop_reason, str)
        return "stop_sequence" if is_stopped else "eos_token"
    return "length"


def _mean_logprob(choice: Choice) -> float:
    return choice.cumulative_logprob / max(1, choice.num_tokens)
