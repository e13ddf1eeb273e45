"""The body of an upload: `multipart/form-data` (RFC 7578)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from email.message import Message

from modelserver.core.long_work import Slices, finish
from modelserver.core.tensor import Buffer
from modelserver.frontends.llm.errors import ParameterError

_MAX_PARTS = 64
_MAX_HEAD_BYTES = 8192
# A file is searched for the next boundary in pieces.
_PIECE_BYTES = 1 << 20
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{1,70}")


@dataclass(frozen=True, slots=True)
class Part:
    """A member of the form; `filename` is None unless it is a file."""

    content: Buffer
    filename: str | None

    @property
    def text(self) -> str:
        """The content as text. Raises UnicodeDecodeError."""
        return self.copy().decode()

    def copy(self) -> bytes:
        """The content."""
        return bytes(self.content)


def read_form(body: Buffer, content_type: str) -> dict[str, Part]:
    """The parts of a form by their names. Raises ParameterError for anything else."""
    return dict(finish(form_slices(body, content_type)))


def form_slices(body: Buffer, content_type: str) -> Slices[list[tuple[str, Part]]]:
    """The parts of a form with their names, as long work: files may be large. Raises as `read_form` does."""
    mark = b"--" + _boundary(content_type).encode()
    parts: list[tuple[str, Part]] = []
    place = yield from _find(body, mark, 0)
    while place >= 0:
        place += len(mark)
        if body[place : place + 2] == b"--":
            return parts
        head, has_head, _ = bytes(body[place : place + _MAX_HEAD_BYTES]).partition(b"\r\n\r\n")
        end_of_head = place + len(head)
        end = (yield from _find(body, b"\r\n" + mark, end_of_head)) if has_head else -1
        if end < 0 or len(parts) == _MAX_PARTS:
            break
        name, filename = _disposition(head)
        parts.append((name, Part(memoryview(body)[min(end_of_head + 4, end) : end], filename)))
        place = end + 2
    raise ParameterError("the form is cut off or malformed", None)


def _boundary(content_type: str) -> str:
    header = Message()
    header["Content-Type"] = _line(content_type)
    boundary = header.get_param("boundary")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
        raise ParameterError("the body must be a form, with the Content-Type multipart/form-data; boundary=...", None)
    if not _BOUNDARY.fullmatch(boundary):
        raise ParameterError(f"the form's boundary {boundary!r:.80} is not one", None)
    return boundary


def _find(body: Buffer, mark: bytes, start: int) -> Slices[int]:
    """Where `mark` is next, or -1."""
    for place in range(start, len(body), _PIECE_BYTES):
        yield
        found = bytes(body[place : place + _PIECE_BYTES + len(mark) - 1]).find(mark)
        if found >= 0:
            return place + found
    return -1


def _disposition(head: bytes) -> tuple[str, str | None]:
    """The name of a part, and that of its file."""
    for line in head.decode(errors="replace").split("\r\n"):
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
