"""`/v2/systemsharedmemory/...` and `/v2/cudasharedmemory/...`: regions that clients register."""

from __future__ import annotations

import base64
import binascii
from functools import partial
from typing import TYPE_CHECKING, Any

from modelserver.auth.access import ApiGroup
from modelserver.core.documents import beginning
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.http.body import answer_errors
from modelserver.frontends.http.json_body import with_object
from modelserver.platform.cuda import HANDLE_BYTES
from modelserver.protocol.api import Route
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import bare_response, json_response

if TYPE_CHECKING:
    from modelserver.planes.authorized import AnyDataPlane

_MAX_UINT64 = 2**64 - 1


class Regions:
    """Answers the shared memory extensions. Called from the event loop thread."""

    def __init__(self, dataplane: AnyDataPlane, limits: HttpLimits) -> None:
        self._dataplane = dataplane
        self._limits = limits

    def routes(self) -> tuple[Route, ...]:
        """The routes of both kinds, for one region and for all."""
        return tuple(
            Route(method, f"/v2/{kind}sharedmemory{region}/{verb}", call, ApiGroup.SHARED_MEMORY)
            for kind, verbs in (
                ("system", (self.status, self.unregister, self.register)),
                ("cuda", (self.cuda_status, self.cuda_unregister, self.cuda_register)),
            )
            for method, verb, call in zip(
                ("GET", "POST", "POST"), ("status", "unregister", "register"), verbs, strict=True
            )
            for region in (("", "/region/{region}") if verb != "register" else ("/region/{region}",))
        )

    def register(self, exchange: HttpExchange, region: str) -> None:
        """`{"key": ..., "offset": ..., "byte_size": ...}`; no offset is 0."""

        def answer(document: dict[str, Any]) -> None:
            key = document.get("key")
            if not isinstance(key, str):
                raise _missing("key", "a string", key)
            offset = _size(document, "offset") if "offset" in document else 0
            self._dataplane.shared_memory.register(region, key, offset, _size(document, "byte_size"))
            exchange.respond(bare_response(exchange.head.headers.get("accept"), {}))

        self._dataplane.shared_memory.check_allowed()
        with_object(exchange, self._limits, answer)

    def unregister(self, exchange: HttpExchange, region: str = "") -> None:
        """Clients unregister all regions before they know whether any exist."""
        self._dataplane.shared_memory.unregister(region)
        exchange.respond(bare_response(exchange.head.headers.get("accept"), {}))

    def status(self, exchange: HttpExchange, region: str = "") -> None:
        rows = self._dataplane.shared_memory.statuses(region)
        document = [
            {"name": row.name, "key": row.key, "offset": row.offset, "byte_size": row.num_bytes} for row in rows
        ]
        exchange.respond(json_response(document))

    def cuda_register(self, exchange: HttpExchange, region: str) -> None:
        """`{"raw_handle": {"b64": ...}, "device_id": ..., "byte_size": ...}`."""

        def answer(document: dict[str, Any]) -> None:
            handle = _handle(document)
            device_id, num_bytes = _size(document, "device_id"), _size(document, "byte_size")

            def respond(_: None) -> None:
                exchange.respond(bare_response(exchange.head.headers.get("accept"), {}))

            then = partial(answer_errors, exchange, respond)
            self._dataplane.shared_memory.register_cuda(region, handle, device_id, num_bytes, then)

        self._dataplane.shared_memory.check_allowed()
        with_object(exchange, self._limits, answer)

    def cuda_unregister(self, exchange: HttpExchange, region: str = "") -> None:
        """As `unregister`."""
        self._dataplane.shared_memory.unregister(region, is_cuda=True)
        exchange.respond(bare_response(exchange.head.headers.get("accept"), {}))

    def cuda_status(self, exchange: HttpExchange, region: str = "") -> None:
        rows = self._dataplane.shared_memory.cuda_statuses(region)
        document = [{"name": row.name, "device_id": row.device_id, "byte_size": row.num_bytes} for row in rows]
        exchange.respond(json_response(document))


def _size(document: dict[str, Any], name: str) -> int:
    value = document.get(name)
    if type(value) is not int or not 0 <= value <= _MAX_UINT64:
        raise _missing(name, "an unsigned integer", value)
    return value


def _handle(document: dict[str, Any]) -> bytes:
    outer = document.get("raw_handle")
    text = outer.get("b64") if isinstance(outer, dict) else None
    if not isinstance(text, str):
        raise _missing("raw_handle", 'an object {"b64": "..."}', outer)
    try:
        handle = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        handle = b""
    if len(handle) != HANDLE_BYTES:
        raise InvalidArgumentError("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
    return handle


def _missing(name: str, expected: str, got: object) -> InvalidArgumentError:
    if got is None:
        return InvalidArgumentError(f"Shared memory register request has no '{name}' field; it must be {expected}")
    return InvalidArgumentError(
        f"shared memory register request: '{name}' must be {expected}, got {beginning(got, 40)}"
    )
