"""The routes of files and batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from modelserver.auth.access import ApiGroup
from modelserver.errors import UnsupportedError
from modelserver.frontends.http.framing import SSE
from modelserver.frontends.llm.edge import Call, CallEdge, LaterAnswers, plain_body, query_value
from modelserver.frontends.llm.errors import Fault, ParameterError
from modelserver.frontends.llm.fields import Fields, Range
from modelserver.frontends.openai.batches.input_file import ENDPOINTS
from modelserver.frontends.openai.batches.records import BatchRecord, FileRecord
from modelserver.frontends.openai.batches.service import BATCH, BATCH_OUTPUT, BatchService
from modelserver.frontends.openai.errors import OpenAiErrors
from modelserver.frontends.openai.multipart import Part, read_form
from modelserver.frontends.openai.responses.request import read_metadata
from modelserver.planes.authorized import AnyDataPlane
from modelserver.protocol.api import Route
from modelserver.protocol.exchange import HttpExchange, HttpResponse
from modelserver.protocol.limits import HttpLimits

Document = dict[str, Any]
Record = TypeVar("Record", FileRecord, BatchRecord)

_LIFETIME = Range(3600, 30 * 24 * 3600)
_MAX_FILES, _MAX_BATCHES = 10_000, 100
_MAX_FILENAME_LEN = 255


class BatchRoutes:
    """The handlers. Without a service each call is refused, and says how to have one."""

    def __init__(self, service: BatchService | None, dataplane: AnyDataPlane, limits: HttpLimits) -> None:
        self._given = service
        self._limits = limits
        self._edge = CallEdge(dataplane, limits, errors=OpenAiErrors(), framing=SSE)
        self._later = LaterAnswers(OpenAiErrors())

    def routes(self) -> tuple[Route, ...]:
        """A file or batch belongs to its key, so that they need no more than the requests in them."""
        group = ApiGroup.INFERENCE
        return (
            Route("POST", "/v1/files", self._add_file, group),
            Route("GET", "/v1/files", self._list_files, group),
            Route("GET", "/v1/files/{file_id}", self._get_file, group),
            Route("DELETE", "/v1/files/{file_id}", self._delete_file, group),
            Route("GET", "/v1/files/{file_id}/content", self._get_content, group),
            Route("POST", "/v1/batches", self._edge.handler(self.create_batch), group),
            Route("GET", "/v1/batches", self._list_batches, group),
            Route("GET", "/v1/batches/{batch_id}", self._get_batch, group),
            Route("POST", "/v1/batches/{batch_id}/cancel", self._cancel_batch, group),
        )

    @property
    def _service(self) -> BatchService:
        """Raises UnsupportedError where there is none."""
        if self._given is None:
            raise UnsupportedError(
                "files and batches are off: start the server with --batch-directory=DIRECTORY, where it keeps them"
            )
        return self._given

    # Files.

    def _add_file(self, exchange: HttpExchange) -> None:
        self._later.begin(exchange, self._added_file(exchange, self._service))

    async def _added_file(self, exchange: HttpExchange, service: BatchService) -> Document:
        content_type = exchange.head.headers.get("content-type", "")
        form = read_form(await plain_body(exchange, self._limits), content_type)
        file = form.get("file")
        if file is None:
            raise ParameterError("'file' is missing: it must be a file", "file", Fault.MISSING)
        purpose = _text(form, "purpose")
        if purpose != BATCH:
            got = "it is missing" if purpose is None else f"got {purpose!r:.60}"
            raise ParameterError(
                f"'purpose' must be {BATCH}, the only use that this server has for files: {got}", "purpose"
            )
        lifetime_s = _form_lifetime(form)
        filename = (file.filename or "file")[:_MAX_FILENAME_LEN]
        return (await service.add_file(filename, purpose, file.content, lifetime_s)).document()

    def _list_files(self, exchange: HttpExchange) -> None:
        query = exchange.head.query
        purpose = query_value(query, "purpose")
        files = [each for each in self._service.files() if purpose in ("", each.purpose)]
        self._later.begin(exchange, _listed(query, files, _MAX_FILES, _MAX_FILES))

    def _get_file(self, exchange: HttpExchange, file_id: str) -> None:
        self._later.begin(exchange, _document(self._service.file(file_id)))

    def _delete_file(self, exchange: HttpExchange, file_id: str) -> None:
        self._later.begin(exchange, self._deleted(self._service, file_id), outlives_client=True)

    async def _deleted(self, service: BatchService, file_id: str) -> Document:
        await service.remove_file(file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    def _get_content(self, exchange: HttpExchange, file_id: str) -> None:
        self._later.begin(exchange, self._content(self._service, file_id))

    async def _content(self, service: BatchService, file_id: str) -> HttpResponse:
        is_lines = service.file(file_id).purpose in (BATCH, BATCH_OUTPUT)
        kind = "application/jsonl" if is_lines else "application/octet-stream"
        return HttpResponse(200, [("Content-Type", kind)], (await service.content(file_id),))

    # Batches.

    async def create_batch(self, call: Call) -> None:
        """Begin a batch, and answer with it. Raises ServerError."""
        fields, service = call.fields, self._service
        for name in ("input_file_id", "endpoint", "completion_window"):
            fields.need(name, "a string")
        endpoint = fields.word("endpoint", ENDPOINTS) or ""
        fields.word("completion_window", ("24h",))
        after = fields.fields("output_expires_after")
        record = await service.add_batch(
            endpoint,
            fields.text("input_file_id") or "",
            read_metadata(fields),
            None if after is None else _lifetime(after),
        )
        call.answer(record.document())

    def _list_batches(self, exchange: HttpExchange) -> None:
        self._later.begin(exchange, _listed(exchange.head.query, self._service.batches(), 20, _MAX_BATCHES))

    def _get_batch(self, exchange: HttpExchange, batch_id: str) -> None:
        self._later.begin(exchange, _document(self._service.batch(batch_id)))

    def _cancel_batch(self, exchange: HttpExchange, batch_id: str) -> None:
        self._later.begin(exchange, self._cancelled(self._service, batch_id), outlives_client=True)

    async def _cancelled(self, service: BatchService, batch_id: str) -> Document:
        return (await service.cancel(batch_id)).document()


async def _document(record: FileRecord | BatchRecord) -> Document:
    return record.document()


async def _listed(query: str, records: Sequence[Record], default: int, most: int) -> Document:
    """A page of records, the newest first unless the query says otherwise. Raises ParameterError."""
    order = query_value(query, "order") or "desc"
    if order not in ("asc", "desc"):
        raise ParameterError(f"'order' must be asc or desc, got {order!r:.60}", "order")
    text = query_value(query, "limit")
    if text and not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= most):
        raise ParameterError(f"'limit' must be a number from 1 to {most}, got {text!r:.60}", "limit")
    limit = int(text) if text else default
    # Those of one second keep the order in which they were made.
    ordered = sorted(records, key=lambda each: each.created_s)
    if order == "desc":
        ordered.reverse()
    after = query_value(query, "after")
    if after:
        place = next((place for place, each in enumerate(ordered) if each.id == after), None)
        if place is None:
            raise ParameterError(f"'after' must be the id of one of the list, got {after!r:.60}", "after")
        ordered = ordered[place + 1 :]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": [each.document() for each in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": len(ordered) > limit,
    }


def _text(form: dict[str, Part], name: str) -> str | None:
    part = form.get(name)
    if part is None:
        return None
    try:
        return part.text
    except UnicodeDecodeError:
        raise ParameterError(f"'{name}' must be a text", name) from None


def _form_lifetime(form: dict[str, Part]) -> int | None:
    """`expires_after` of a form, whose members have names such as `expires_after[seconds]`."""
    anchor, seconds = _text(form, "expires_after[anchor]"), _text(form, "expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    is_number = seconds is not None and seconds.isascii() and seconds.isdigit() and len(seconds) < 10
    given = {"anchor": anchor, "seconds": int(seconds or "") if is_number else seconds}
    return _lifetime(Fields(given, "expires_after"))


def _lifetime(after: Fields) -> int | None:
    after.need("anchor", "created_at")
    after.word("anchor", ("created_at",))
    after.need("seconds", "an integer")
    return after.integer("seconds", _LIFETIME)
