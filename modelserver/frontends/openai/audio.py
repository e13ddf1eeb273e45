"""`/v1/audio/transcriptions` and `/v1/audio/translations`: files of sound, written down by a model."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from modelserver.core.long_work import at_once, finish, long_work
from modelserver.core.response import InferResponse
from modelserver.errors import InternalError
from modelserver.frontends.http.body import MAX_BYTES_ON_LOOP
from modelserver.frontends.llm.edge import Call, CallEdge, plain_body
from modelserver.frontends.llm.errors import Fault, ParameterError
from modelserver.frontends.llm.fields import Fields, Range
from modelserver.frontends.llm.models import LanguageModel, find_model
from modelserver.frontends.llm.requests import Listener, Requests
from modelserver.frontends.openai.multipart import Part, form_slices
from modelserver.planes.authorized import AnyDataPlane
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.limits import HttpLimits

_FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
_WITH_SEGMENTS = ("srt", "verbose_json", "vtt")
_TEMPERATURE = Range(0, 1)
_MAX_TEXT_BYTES = 16 * 1024
# Members that are arrays with and without [] after their name.
_ARRAYS = ("timestamp_granularities", "include")
_FLAGS = {"true": True, "false": False}
# An array of a segment's numbers, by the name of the output.
_NUMBERS = ("start", "end", "avg_logprob", "no_speech_prob")


class FormEdge(CallEdge):
    """Calls whose bodies are forms: files are `Part`s of the document, and names that end in [] are arrays."""

    async def read(self, exchange: HttpExchange, limits: HttpLimits) -> tuple[dict[str, Any], int]:
        body = await plain_body(exchange, limits)
        slices = form_slices(body, exchange.head.headers.get("content-type", ""))
        parts = finish(slices) if len(body) <= MAX_BYTES_ON_LOOP else await long_work().run(slices)
        document: dict[str, Any] = {}
        for name, part in parts:
            if name == "file":
                document[name] = part
            elif (bare := name.removesuffix("[]")) != name or bare in _ARRAYS:
                document.setdefault(bare, []).append(_text(name, part))
            else:
                document[name] = _value(name, _text(name, part))
        return document, len(body)


class Audio:
    """Serves the calls of the routes."""

    def __init__(self, dataplane: AnyDataPlane) -> None:
        self._dataplane = dataplane

    async def transcribe(self, call: Call) -> None:
        """Answer with what is said, in the language in which it is said. Raises ServerError."""
        await self._serve(call, "transcribe")

    async def translate(self, call: Call) -> None:
        """Answer with what is said, in English. Raises ServerError."""
        await self._serve(call, "translate")

    async def _serve(self, call: Call, task: str) -> None:
        fields = call.fields
        fields.need("file", "a file of sound")
        model = await find_model(self._dataplane, fields.text("model"), "transcribes")
        form = fields.word("response_format", _FORMATS) or "json"
        is_streamed = _read_options(fields, model, form)
        needed: dict[str, Any] = {name: fields.text(name) for name in ("language", "prompt") if fields.text(name)}
        if task != "transcribe":
            needed["task"] = task
        temperature = fields.number("temperature", _TEMPERATURE)
        granularities = fields.texts("timestamp_granularities", 2) or ["segment"]
        if "word" in granularities:
            needed["word_timestamps"] = True
        inputs = {**needed, **({"temperature": temperature} if temperature else {}), "audio": (await _file(fields),)}
        request = call.adopt(model.request(inputs, {"stream": is_streamed}))
        transcript = _Transcript(call if is_streamed else None)
        with Requests(self._dataplane, [request], transcript) as sent:
            await sent.run()
        if is_streamed:
            done = {"type": "transcript.text.done", "text": transcript.text}
            await call.finish(call.framing.frame(orjson.dumps(done)))
        elif form == "json":
            call.answer({"text": transcript.text, "usage": transcript.usage()})
        elif form == "verbose_json":
            call.answer(_verbose(transcript, task, temperature or 0.0, granularities))
        elif form == "text":
            call.answer_plain(transcript.text + "\n")
        else:
            call.answer_plain(_subtitles(transcript.segments, is_srt=form == "srt"))


@dataclass(frozen=True, slots=True)
class _Segment:
    """`start` and `end` in seconds; `seek` in frames of 10 ms."""

    text: str
    tokens: Sequence[int]
    seek: int
    start: float
    end: float
    avg_logprob: float
    no_speech_prob: float


class _Transcript(Listener):
    """Gathers what the responses of a model say; with a `call`, sends it on as events of a stream."""

    def __init__(self, call: Call | None) -> None:
        self._call = call
        self._texts: list[str] = []
        self.segments: list[_Segment] = []
        self.words: list[dict[str, Any]] = []
        self.language = ""
        self.seconds = 0.0

    @property
    def text(self) -> str:
        """What was said so far."""
        return "".join(self._texts).strip()

    def usage(self) -> dict[str, Any]:
        """OpenAI's bill of a model that is paid by duration: whole seconds."""
        return {"type": "duration", "seconds": -int(-self.seconds // 1)}

    def hear(self, prompt: int, response: InferResponse) -> bool:  # noqa: ARG002  # there is one request
        outputs = {tensor.name: tensor.data.reshape(-1).tolist() for tensor in response.outputs}
        if not outputs:
            return True
        if not outputs.get("text"):
            raise InternalError("the model answered without the output 'text'")
        delta = outputs["text"][0].decode("utf-8", "replace")
        if not self._texts:
            delta = delta.lstrip()
        self.language = outputs.get("language", [b""])[0].decode()
        self.seconds = outputs.get("duration", [0.0])[0]
        for index, text in enumerate(outputs.get("segment_text", ())):
            numbers = {name: outputs[f"segment_{name}"][index] for name in _NUMBERS}
            tokens, seek = orjson.loads(outputs["segment_tokens"][index]), outputs["segment_seek"][index]
            self.segments.append(_Segment(text.decode("utf-8", "replace"), tokens, seek, **numbers))
        for index, word in enumerate(outputs.get("word_text", ())):
            start, end = (round(outputs[f"word_{side}"][index], 2) for side in ("start", "end"))
            self.words.append({"word": word.decode("utf-8", "replace").strip(), "start": start, "end": end})
        if not delta:
            return True
        self._texts.append(delta)
        event = {"type": "transcript.text.delta", "delta": delta}
        return self._call is None or self._call.send(self._call.framing.frame(orjson.dumps(event)))

    async def wait_for_room(self) -> None:
        if self._call is not None:
            await self._call.wait_for_room()


def _read_options(fields: Fields, model: LanguageModel, form: str) -> bool:
    """Whether the answer is a stream. Raises ParameterError for what this model, or this server, cannot do."""
    granularities = fields.texts("timestamp_granularities", 2) or []
    for each in granularities:
        if each not in ("segment", "word"):
            raise ParameterError(
                f"'timestamp_granularities' must be segment or word, got {each!r:.60}",
                "timestamp_granularities",
                Fault.INVALID_VALUE,
            )
        if each == "word" and not ("word_timestamps" in model.inputs and "word_start" in model.outputs):
            raise ParameterError(
                f"the model '{model.name}' tells no times of words",
                "timestamp_granularities",
                Fault.UNSUPPORTED_PARAMETER,
            )
    if granularities and form != "verbose_json":
        raise ParameterError(
            "'timestamp_granularities' needs the response_format verbose_json",
            "timestamp_granularities",
            Fault.INVALID_VALUE,
        )
    if fields.has("include"):
        raise ParameterError("'include' is not supported", "include", Fault.UNSUPPORTED_PARAMETER)
    if form in _WITH_SEGMENTS and "segment_start" not in model.outputs:
        raise ParameterError(
            f"the model '{model.name}' tells no times, which {form} needs",
            "response_format",
            Fault.UNSUPPORTED_PARAMETER,
        )
    is_streamed = fields.flag("stream")
    if is_streamed and form in _WITH_SEGMENTS:
        raise ParameterError(
            f"a stream has no response_format {form}: use json or text", "response_format", Fault.INVALID_VALUE
        )
    return is_streamed


async def _file(fields: Fields) -> bytes:
    """The bytes of the file, copied beside the event loop. Raises ParameterError for an empty file."""
    part = fields.document["file"]
    if not len(part.content):
        raise ParameterError("'file' is empty: it must be a file of sound", "file", Fault.INVALID_VALUE)
    return await long_work().run(at_once(part.copy))


def _text(name: str, part: Part) -> str:
    if len(part.content) > _MAX_TEXT_BYTES:
        raise ParameterError(
            f"'{name:.60}' has {len(part.content)} bytes, at most {_MAX_TEXT_BYTES} are allowed", name[:60]
        )
    try:
        return part.text
    except UnicodeDecodeError:
        raise ParameterError(f"'{name:.60}' must be a text", name[:60]) from None


def _value(name: str, text: str) -> Any:
    """A member of a form as JSON has it, by its name: forms know texts only."""
    if name == "stream":
        return _FLAGS.get(text.lower(), text)
    if name == "temperature":
        try:
            return float(text)
        except ValueError:
            return text
    return text


def _verbose(transcript: _Transcript, task: str, temperature: float, granularities: Sequence[str]) -> dict[str, Any]:
    segments = [
        {
            "id": index,
            "seek": each.seek,
            "start": round(each.start, 2),
            "end": round(each.end, 2),
            "text": each.text,
            "tokens": each.tokens,
            "temperature": temperature,
            "avg_logprob": each.avg_logprob,
            "compression_ratio": _compression(each.text.encode()),
            "no_speech_prob": each.no_speech_prob,
        }
        for index, each in enumerate(transcript.segments)
    ]
    return {
        "task": task,
        "language": transcript.language,
        "duration": transcript.seconds,
        "text": transcript.text,
        **({"segments": segments} if "segment" in granularities else {}),
        **({"words": transcript.words} if "word" in granularities else {}),
        "usage": transcript.usage(),
    }


def _compression(text: bytes) -> float:
    """How often a text repeats itself: a high ratio is a sign of a model that is caught in a loop."""
    return len(text) / len(zlib.compress(text))


def _subtitles(segments: Sequence[_Segment], *, is_srt: bool) -> str:
    mark = "," if is_srt else "."
    found = [] if is_srt else ["WEBVTT\n"]
    for number, each in enumerate(segments, 1):
        # An arrow or a line break would end the subtitle.
        text = " ".join(each.text.replace("-->", "->").split())
        lines = [f"{_clock(each.start, mark)} --> {_clock(each.end, mark)}", text, ""]
        found.append("\n".join([str(number), *lines] if is_srt else lines))
    return "\n".join(found) + "\n" if found else ""


def _clock(seconds: float, mark: str) -> str:
    """Such as 01:02:03,450."""
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{second:02d}{mark}{milliseconds:03d}"
