"""`/v1/images/generations`: pictures that a model makes of descriptions.

A model that draws has the input `text_input` and the output `image`: a picture's file (BYTES), or its pixels (UINT8
[height, width, 3 or 4]), of which the server makes one. Each picture is a request of its own. The responses of a
decoupled model before its last picture are drafts, which a stream shows.
"""

from __future__ import annotations

import base64
import importlib
import io
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import orjson

from modelserver.core.datatype import Datatype
from modelserver.core.long_work import long_work
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Tensor
from modelserver.errors import InternalError
from modelserver.frontends.http.framing import SSE
from modelserver.frontends.llm.edge import Call
from modelserver.frontends.llm.errors import Fault, ParameterError
from modelserver.frontends.llm.fields import MAX_INT64, Fields, Range
from modelserver.frontends.llm.models import LanguageModel, find_model
from modelserver.frontends.llm.requests import Listener, Requests
from modelserver.frontends.openai.sampling import unsupported
from modelserver.planes.authorized import AnyDataPlane

Document = dict[str, Any]

_FORMATS = ("png", "jpeg", "webp")
_QUALITIES = ("auto", "low", "medium", "high", "standard", "hd", "xhigh", "max")
_BACKGROUNDS = ("auto", "transparent", "opaque")
_SIZE = re.compile(r"([1-9]\d{0,3})x([1-9]\d{0,3})", re.ASCII)
_NUM = Range(1, 10)
_NUM_PARTIAL = Range(0, 3)
_PERCENT = Range(0, 100)
_ANY_INTEGER = Range(0, MAX_INT64)
_SCALE = Range(0, 1000)
_MAX_LEN = 32_000
# Of a picture, in pixels.
_MAX_SIDE = 4096
# Of an event that is written.
_PIECE_BYTES = 1 << 20
# Members that are the model's own inputs, where it has them.
_INTEGERS = ("seed", "steps")
_TEXTS = ("negative_prompt", "style")


class Images:
    """Serves the calls of the route."""

    def __init__(self, dataplane: AnyDataPlane) -> None:
        self._dataplane = dataplane

    async def draw(self, call: Call) -> None:
        """Answer with pictures, or with a stream of one and its drafts. Raises ServerError."""
        fields = call.fields
        model = await find_model(self._dataplane, fields.text("model"), "draws")
        inputs = _read_inputs(fields, model)
        form = fields.word("output_format", _FORMATS) or "png"
        quality = fields.integer("output_compression", _PERCENT)
        if fields.word("response_format", ("b64_json", "url")) == "url":
            raise unsupported(fields, "response_format", "pictures come as b64_json, they are not kept")
        number = fields.integer("n", _NUM) or 1
        is_streamed = fields.flag("stream")
        if is_streamed and number > 1:
            raise ParameterError("a stream has one picture: leave 'n' out", "n", Fault.INVALID_VALUE)
        requests = [call.adopt(model.request(_of_picture(inputs, at), {})) for at in range(number)]
        told = {name: fields.text(name) or "auto" for name in ("background", "quality", "size")}
        encode = partial(_encoded, form=form, quality=100 if quality is None else quality)
        most = fields.integer("partial_images", _NUM_PARTIAL) or 0
        pictures = _Pictures(call, encode, {**told, "output_format": form}, most if is_streamed else 0)
        if is_streamed:
            call.framing = SSE
        with Requests(self._dataplane, requests, pictures) as sent:
            await sent.run()
        if is_streamed:
            await pictures.send_last()
            await call.finish()
        else:
            call.answer_text(*await pictures.document(number))


class _Pictures(Listener):
    """Keeps the newest picture of each request; those before it are drafts, of which `num_drafts` are sent."""

    def __init__(self, call: Call, encode: Callable[[Tensor], bytes], told: Document, num_drafts: int) -> None:
        self._call = call
        self._encode = encode
        self._told = told
        self._num_drafts = num_drafts
        self._num_sent = 0
        self._num_inputs = 0
        self._newest: dict[int, Tensor] = {}
        self._drafts: list[Tensor] = []

    def hear(self, prompt: int, response: InferResponse) -> bool:
        for tensor in response.outputs:
            if tensor.name == "num_input_tokens" and tensor.data.size:
                self._num_inputs += int(tensor.data.reshape(-1)[0])
            elif tensor.name == "image" and tensor.data.size:
                if prompt in self._newest and self._num_sent + len(self._drafts) < self._num_drafts:
                    self._drafts.append(self._newest[prompt])
                self._newest[prompt] = tensor
        return not self._drafts

    async def wait_for_room(self) -> None:
        """Send drafts."""
        drafts, self._drafts = self._drafts, []
        for draft in drafts:
            await self._send("image_generation.partial_image", draft, partial_image_index=self._num_sent)
            self._num_sent += 1

    async def send_last(self) -> None:
        """Send the event with the picture. Raises InternalError where there is none."""
        await self._send("image_generation.completed", self._picture(0), usage=self._usage())

    async def document(self, number: int) -> list[bytes]:
        """The JSON text of the whole answer, with that number of pictures, in parts: it may have many megabytes.

        Raises InternalError where a picture is missing.
        """
        pictures = [self._picture(prompt) for prompt in range(number)]
        told = {name: value for name, value in self._told.items() if value != "auto"}
        rest = orjson.dumps({"created": self._call.created_s, **told, "usage": self._usage()})
        parts: list[bytes] = []
        for picture in pictures:
            opening = b',{"b64_json":"' if parts else b'{"data":[{"b64_json":"'
            parts += [opening, await long_work().compute(partial(self._encode, picture)), b'"}']
        return [*parts, b"],", rest[1:]]

    async def _send(self, kind: str, picture: Tensor, **members: Any) -> None:
        """Send an event with a picture. It is made beside the event loop, and written piece by piece."""

        def made() -> list[bytes]:
            text = self._encode(picture).decode()
            event = {"type": kind, "b64_json": text, "created_at": self._call.created_s, **self._told, **members}
            frame = self._call.framing.frame(orjson.dumps(event), kind)
            return [frame[start : start + _PIECE_BYTES] for start in range(0, len(frame), _PIECE_BYTES)]

        for piece in await long_work().compute(made):
            if not self._call.send(piece):
                await self._call.wait_for_room()

    def _picture(self, prompt: int) -> Tensor:
        if prompt not in self._newest:
            raise InternalError("the model answered without the output 'image'")
        return self._newest[prompt]

    def _usage(self) -> Document:
        details = {"image_tokens": 0, "text_tokens": self._num_inputs}
        return {
            "input_tokens": self._num_inputs,
            "input_tokens_details": details,
            "output_tokens": 0,
            "total_tokens": self._num_inputs,
        }


def _read_inputs(fields: Fields, model: LanguageModel) -> dict[str, Any]:
    """The model's inputs. Raises ParameterError for a member that would change the picture and the model lacks."""
    fields.need("prompt", "a text")
    prompt = fields.text("prompt") or ""
    if not prompt.strip() or len(prompt) > _MAX_LEN:
        raise ParameterError(
            f"'prompt' must be a text of at most {_MAX_LEN} characters, got {len(prompt)}",
            "prompt",
            Fault.INVALID_VALUE,
        )
    found: dict[str, Any] = {"text_input": prompt}
    size = fields.text("size") or "auto"
    if size != "auto":
        numbers = _SIZE.fullmatch(size)
        if numbers is None or max(map(int, numbers.groups())) > _MAX_SIDE:
            raise fields.wrong(
                "size", f"auto, or a width and a height of at most {_MAX_SIDE} pixels such as 1024x1024", size
            )
        found |= {"width": int(numbers[1]), "height": int(numbers[2])}
    for name in _INTEGERS:
        found[name] = fields.integer(name, _ANY_INTEGER)
    found["guidance"] = fields.number("guidance", _SCALE)
    for name in _TEXTS:
        found[name] = fields.text(name)
    for name, words in (("quality", _QUALITIES), ("background", _BACKGROUNDS)):
        word = fields.word(name, words)
        # What a model does not offer is its own choice.
        found[name] = word if name in model.inputs and word != "auto" else None
    given = {name: value for name, value in found.items() if value is not None}
    for name in given:
        if name not in model.inputs:
            member = "size" if name in ("width", "height") else name
            raise unsupported(fields, member, f"the model '{model.name}' has no input '{name}'")
    return given


def _of_picture(inputs: Document, at: int) -> Document:
    """The inputs of picture number `at`: each has a seed of its own."""
    return {**inputs, "seed": (inputs["seed"] + at) & MAX_INT64} if "seed" in inputs else inputs


def _encoded(picture: Tensor, *, form: str, quality: int) -> bytes:
    """The base64 of a picture's file in that format. Raises InternalError for what is no picture.

    A model's own file stays as it is if it has the format already.
    """
    if picture.datatype is Datatype.BYTES:
        file: bytes = picture.data.reshape(-1)[0]
        if _MARKS[form](file):
            return base64.b64encode(file)
    try:
        library: Any = importlib.import_module("PIL.Image")
    except ImportError:
        raise InternalError(
            "pictures need the library Pillow on the server: pip install 'modelserver-py[images]'"
        ) from None
    try:
        if picture.datatype is Datatype.BYTES:
            image = library.open(io.BytesIO(file))
        else:
            pixels = picture.data
            shape = pixels.shape[-3:]
            image = library.fromarray(np.ascontiguousarray(pixels.reshape(shape)))
        if form == "jpeg":
            image = image.convert("RGB")
        found = io.BytesIO()
        image.save(found, form.upper(), **({} if form == "png" else {"quality": quality}))
    except (OSError, ValueError, TypeError, IndexError) as error:
        raise InternalError(f"the model's output 'image' is no picture: {error}") from None
    return base64.b64encode(found.getbuffer())


# How files of a format begin.
_MARKS: Mapping[str, Callable[[bytes], bool]] = {
    "png": lambda file: file.startswith(b"\x89PNG\r\n\x1a\n"),
    "jpeg": lambda file: file.startswith(b"\xff\xd8\xff"),
    "webp": lambda file: file[:4] == b"RIFF" and file[8:12] == b"WEBP",
}
