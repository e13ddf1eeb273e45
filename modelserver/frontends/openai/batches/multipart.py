"""The body of an upload: `multipart/form-data` (RFC 7578)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from email.message import Message

from modelserver.core.tensor import Buffer
from modelserver.frontends.llm.errors import ParameterError

_MAX_PARTS = 64
_MAX_HEAD_BYTES = 8192
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{1,70}")


@dataclass(frozen=True, slots=True)
class Part:
    """A member of the form; `filename` is None for one that is no file."""

    content: Buffer
    filename: str | None

    @property
    def text(self) -> str:
        """The content as text. Raises UnicodeDecodeError."""
        return bytes(self.content).decode()


def read_form(body: Buffer, content_type: str) -> dict[str, Part]:
    """The parts of a form by their names. Raises ParameterError for anything else."""
    header = Message()
    header["Content-Type"] = _line(content_type)
    boundary = header.get_param("boundary")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
        raise ParameterError("the body must be a form, with the Content-Type multipart/form-data; boundary=...", None)
    if not _BOUNDARY.fullmatch(boundary):
        raise ParameterError(f"the form's boundary {boundary!r:.80} is not one", None)
    text = body if isinstance(body, bytes | bytearray) else bytes(body)
    mark = b"--" + boundary.encode()
    parts: dict[str, Part] = {}
    place = text.find(mark)
    while place >= 0:
        place += len(mark)
        if text[place : place + 2] == b"--":
            return parts
        end_of_head = text.find(b"\r\n\r\n", place, place + _MAX_HEAD_BYTES)
        end = text.find(b"\r\n" + mark, max(place, end_of_head))
        if end_of_head < 0 or end < 0 or len(parts) == _MAX_PARTS:
            break
        name, filename = _disposition(text[place:end_of_head])
        parts[name] = Part(memoryview(text)[min(end_of_head + 4, end) : end], filename)
        place = end + 2
    raise ParameterError("the form is cut off or malformed", None)


def _disposition(head: bytes | bytearray) -> tuple[str, str | None]:
    """The name of a part, and that of its file."""
    for line in bytes(head).decode(errors="replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            header = Message()
            header["Content-Disposition"] = _line(value.strip())
            part = header.get_param("name", header="content-disposition")
            if isinstance(part, str):
                return part, header.get_filename()
    raise ParameterError("a part of the form has no name", None)


def _line(value: str) -> str:
    return value.replace("\r", "").replace("\n", "")
