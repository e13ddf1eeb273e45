"""`/v1/audio/speech`: texts read aloud by a model, as files of sound.

A model that speaks has the input `text_input` and the output `audio`. The output is a file (BYTES), or samples from -1
to 1 (FP32) of which the server makes one. A decoupled model may answer piece by piece.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import io
import struct
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import orjson

from modelserver.core.datatype import Datatype
from modelserver.core.long_work import long_work
from modelserver.core.response import InferResponse
from modelserver.errors import InternalError, ServerError
from modelserver.frontends.http.framing import SSE, Framing
from modelserver.frontends.llm.edge import Call
from modelserver.frontends.llm.errors import Fault, ParameterError
from modelserver.frontends.llm.fields import Fields, Range
from modelserver.frontends.llm.models import find_model
from modelserver.frontends.llm.requests import Listener, Requests
from modelserver.frontends.openai.sampling import unsupported
from modelserver.planes.authorized import AnyDataPlane

_TYPES: Mapping[str, str] = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}
# Of the library that writes them: its names of a format and of what is in it.
_WRITTEN: Mapping[str, tuple[str, str]] = {
    "mp3": ("MP3", "MPEG_LAYER_III"),
    "opus": ("OGG", "OPUS"),
    "flac": ("FLAC", "PCM_16"),
}
# Of samples these are sent as they come.
_PLAIN = ("wav", "pcm")
_SPEED = Range(0.25, 4.0)
# OpenAI's PCM has this rate, too.
_DEFAULT_RATE = 24_000
_MAX_LEN = 1 << 16
_LENGTH_UNKNOWN = 0xFFFFFFFF
# Pieces up to this are sent where they come.
_MAX_BYTES_ON_LOOP = 1 << 18


class Speech:
    """Serves the calls of the route."""

    def __init__(self, dataplane: AnyDataPlane) -> None:
        self._dataplane = dataplane

    async def speak(self, call: Call) -> None:
        """Answer with sound, piece by piece where it is made so. Raises ServerError."""
        fields = call.fields
        text = _read_text(fields)
        model = await find_model(self._dataplane, fields.text("model"), "speaks")
        form = fields.word("response_format", tuple(_TYPES)) or "mp3"
        is_events = fields.word("stream_format", ("audio", "sse")) == "sse"
        instructions, speed = fields.text("instructions"), fields.number("speed", _SPEED)
        needed: dict[str, Any] = {"text_input": text}
        if instructions:
            needed["instructions"] = instructions
        if speed is not None and speed != 1.0:
            needed["speed"] = speed
        makes_files = model.output_type("audio") is Datatype.BYTES
        if makes_files and "response_format" not in model.inputs and fields.has("response_format"):
            raise ParameterError(
                f"the model '{model.name}' makes files of one format: leave 'response_format' out", "response_format"
            )
        if not makes_files and form == "aac":
            raise ParameterError("'response_format' aac is not served for this model", "response_format")
        for name in needed:
            if name not in model.inputs:
                raise unsupported(fields, name, f"the model '{model.name}' has no input '{name}'")
        # Clients always name a voice, so a model with one voice need not have the input.
        voice = _read_voice(fields)
        wanted = {"response_format": form, **({} if voice is None else {"voice": voice})}
        request = call.adopt(model.request(needed, wanted))
        rate = model.parameters.get("sample_rate", "")
        call.framing = SSE if is_events else Framing(_TYPES[form], b"", b"")
        writer = _Sound(call, form, int(rate) if rate.isdigit() else _DEFAULT_RATE, is_events=is_events)
        try:
            with Requests(self._dataplane, [request], writer) as sent:
                await sent.run()
            await writer.finish()
        except ServerError:
            if is_events or not call.is_begun:
                raise
            # There is no place for words in a file.
            call.abort()


class _Sound(Listener):
    """Sends pieces of sound as they come, but for formats of which a file is made at the end."""

    def __init__(self, call: Call, form: str, rate: int, *, is_events: bool) -> None:
        self._call = call
        self._form = form
        self._rate = rate
        self._is_events = is_events
        self._num_inputs = 0
        self._has_sound = self._has_header = False
        # What is left for the end: samples, or pieces of a file.
        self._samples: list[np.ndarray[Any, Any]] = []
        self._pieces: list[bytes] = []

    def hear(self, prompt: int, response: InferResponse) -> bool:  # noqa: ARG002  # there is one request
        has_room = True
        for tensor in response.outputs:
            data = tensor.data.reshape(-1)
            if tensor.name == "sample_rate" and data.size:
                self._rate = int(data[0])
            elif tensor.name == "num_input_tokens" and data.size:
                self._num_inputs = int(data[0])
        for tensor in response.outputs:
            if tensor.name != "audio" or not tensor.data.size:
                continue
            self._has_sound = True
            data = tensor.data.reshape(-1)
            if tensor.datatype is Datatype.BYTES:
                self._pieces += data.tolist()
                if sum(map(len, self._pieces)) <= _MAX_BYTES_ON_LOOP:
                    pieces, self._pieces = self._pieces, []
                    has_room = self._send(b"".join(pieces))
            elif self._form in _PLAIN and not self._samples and data.size <= _MAX_BYTES_ON_LOOP // 4:
                size = 2 * data.size if response.is_final else None
                has_room = self._send(self._header(size) + _pcm(data))
            else:
                self._samples.append(data)
        return has_room

    async def wait_for_room(self) -> None:
        await self._call.wait_for_room()

    async def finish(self) -> None:
        """Send what is left. Raises InternalError for a model that made no sound, and ParameterError for a format that
        no library is there for."""
        if not self._has_sound:
            raise InternalError("the model answered without the output 'audio'")
        if self._samples and self._form in _PLAIN:
            header = self._header(2 * sum(piece.size for piece in self._samples))
            self._pieces += [header, *await long_work().compute(partial(list, map(_pcm, self._samples)))]
        elif self._samples:
            work = partial(_file, self._samples, self._form, self._rate)
            self._pieces.append(await long_work().compute(work))
        for piece in self._pieces:
            for start in range(0, len(piece), _MAX_BYTES_ON_LOOP):
                self._send(piece[start : start + _MAX_BYTES_ON_LOOP])
                await self._call.wait_for_room()
                await asyncio.sleep(0)
        if self._is_events:
            usage = {"input_tokens": self._num_inputs, "output_tokens": 0, "total_tokens": self._num_inputs}
            done = {"type": "speech.audio.done", "usage": usage}
            await self._call.finish(self._call.framing.frame(orjson.dumps(done)))
        else:
            await self._call.finish()

    def _send(self, piece: bytes) -> bool:
        if not self._is_events:
            return self._call.send(piece)
        delta = {"type": "speech.audio.delta", "audio": base64.b64encode(piece).decode()}
        return self._call.send(self._call.framing.frame(orjson.dumps(delta)))

    def _header(self, size: int | None) -> bytes:
        """Of a WAV file, before its first piece; `size` None: how many bytes follow is not known yet."""
        if self._form != "wav" or self._has_header:
            return b""
        self._has_header = True
        rate = self._rate
        whole, size = (_LENGTH_UNKNOWN, _LENGTH_UNKNOWN) if size is None else (36 + size, size)
        return (
            struct.pack("<4sI4s4sI", b"RIFF", whole, b"WAVE", b"fmt ", 16)
            + struct.pack("<HHIIHH", 1, 1, rate, 2 * rate, 2, 16)
            + struct.pack("<4sI", b"data", size)
        )


def _read_text(fields: Fields) -> str:
    fields.need("input", "a text")
    text = fields.text("input") or ""
    if not text.strip() or len(text) > _MAX_LEN:
        raise ParameterError(
            f"'input' must be a text of at most {_MAX_LEN} characters, got {len(text)}", "input", Fault.INVALID_VALUE
        )
    return text


def _read_voice(fields: Fields) -> str | None:
    """The name of a voice, or its id."""
    if isinstance(fields.document.get("voice"), dict):
        named = fields.fields("voice")
        assert named is not None, "it is there"
        named.need("id", "the id of a voice")
        return named.text("id")
    return fields.text("voice")


def _pcm(samples: np.ndarray[Any, Any]) -> bytes:
    """Samples from -1 to 1 as 16-bit numbers."""
    scaled = np.clip(np.nan_to_num(samples.astype(np.float32)), -1.0, 1.0) * 32767.0
    sound: bytes = np.rint(scaled).astype("<i2").tobytes()
    return sound


def _file(pieces: list[np.ndarray[Any, Any]], form: str, rate: int) -> bytes:
    """A whole file of one channel. Raises ParameterError without the library for it."""
    try:
        soundfile: Any = importlib.import_module("soundfile")
    except (ImportError, OSError):
        raise ParameterError(
            f"'response_format' {form} needs the library soundfile on the server (pip install 'modelserver-py[audio]')"
            ": ask for wav or pcm",
            "response_format",
        ) from None
    container, kind = _WRITTEN[form]
    file = io.BytesIO()
    samples = np.clip(np.nan_to_num(np.concatenate(pieces).astype(np.float32)), -1.0, 1.0)
    try:
        soundfile.write(file, samples, rate, format=container, subtype=kind)
    except (soundfile.SoundFileError, ValueError) as error:
        raise ParameterError(f"{form} cannot have {rate} samples a second: {error}", "response_format") from None
    return file.getvalue()
