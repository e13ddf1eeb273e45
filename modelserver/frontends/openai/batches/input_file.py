"""The file that a batch reads: a line for each request, checked before the first one is sent."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

# OpenAI's, and those of vLLM's batches.
ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/moderations",
    "/v1/rerank",
    "/v1/score",
)
MAX_LINES = 50_000
_MAX_ID_LEN = 512
# Errors that are told of a file; further ones are left out.
_MAX_ERRORS = 100

Document = dict[str, Any]


class InputFileError(Exception):
    """The file cannot be a batch's; `errors` says why, as `errors.data` of a batch."""

    def __init__(self, errors: list[Document]) -> None:
        super().__init__(errors[0]["message"])
        self.errors = errors


@dataclass(frozen=True, slots=True)
class Line:
    """One request of the file: its place in it, its name, and the model that it names, if it does."""

    start: int
    end: int
    custom_id: str
    model: str | None


class InputFile:
    """The lines of a file, which stays mapped into memory. Blocks: make it in a thread."""

    def __init__(self, data: mmap.mmap | bytes, endpoint: str) -> None:
        """Raises InputFileError."""
        self._data = data
        self.lines: list[Line] = []
        errors: list[Document] = []
        names: set[str] = set()
        for number, (start, end) in enumerate(_places(data), 1):
            try:
                if len(self.lines) == MAX_LINES:
                    raise _LineError("too_many_lines", f"the file has more than {MAX_LINES} requests", None)
                line = _read(data[start:end], start, end, endpoint)
                if line is None:
                    continue
                if line.custom_id in names:
                    raise _LineError("duplicate_custom_id", f"{line.custom_id!r:.80} is there twice", "custom_id")
            except _LineError as error:
                errors.append({"code": error.code, "message": error.message, "line": number, "param": error.param})
                if len(errors) == _MAX_ERRORS or error.code == "too_many_lines":
                    break
                continue
            names.add(line.custom_id)
            self.lines.append(line)
        if not self.lines and not errors:
            errors.append({"code": "empty_file", "message": "the file has no requests", "line": None, "param": None})
        if errors:
            raise InputFileError(errors)

    def body(self, line: Line) -> bytes:
        """The body of the request, as JSON."""
        return orjson.dumps(orjson.loads(self._data[line.start : line.end])["body"])


class _LineError(Exception):
    def __init__(self, code: str, message: str, param: str | None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


def _places(data: mmap.mmap | bytes) -> Iterator[tuple[int, int]]:
    """Where each line begins and ends."""
    start = 0
    while start < len(data):
        end = data.find(b"\n", start)
        end = len(data) if end < 0 else end
        yield start, end
        start = end + 1


def _read(text: bytes, start: int, end: int, endpoint: str) -> Line | None:
    """The request of a line; None for an empty one. Raises _LineError."""
    if not text.strip():
        return None
    try:
        request = orjson.loads(text)
    except ValueError:
        raise _LineError("invalid_json_line", "the line is not JSON", None) from None
    if not isinstance(request, dict):
        raise _LineError("invalid_json_line", "the line is not an object", None)
    for name in ("custom_id", "method", "url", "body"):
        if request.get(name) is None:
            raise _LineError("missing_required_parameter", f"'{name}' is missing", name)
    custom_id, body = request["custom_id"], request["body"]
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID_LEN:
        raise _LineError("invalid_custom_id", f"'custom_id' must be a text of up to {_MAX_ID_LEN} letters", "custom_id")
    if request["method"] != "POST":
        raise _LineError("invalid_method", f"'method' must be POST, got {request['method']!r:.40}", "method")
    if request["url"] != endpoint:
        message = f"'url' must be the batch's endpoint {endpoint}, got {request['url']!r:.80}"
        raise _LineError("mismatched_url", message, "url")
    if not isinstance(body, dict):
        raise _LineError("invalid_request", "'body' must be an object", "body")
    if body.get("stream"):
        raise _LineError("invalid_request", "answers of a batch are whole: leave 'stream' out", "body.stream")
    if endpoint == "/v1/responses" and body.get("background"):
        raise _LineError("invalid_request", "answers of a batch are whole: leave 'background' out", "body.background")
    model = body.get("model")
    return Line(start, end, custom_id, model if isinstance(model, str) else None)
