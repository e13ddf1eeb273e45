"""Questions of the router's own to replicas: whether they are ready; and to a source of replicas, line by line."""

from __future__ import annotations

from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import orjson

from modelserver.client.call_error import CallError
from modelserver.client.http_pool import http_lines
from modelserver.endpoints.endpoint import Endpoint, EndpointState
from modelserver.errors import UnavailableError
from modelserver.router.replicas import Replicas

_MAX_BYTES = 64 * 1024
_HEADERS = {"user-agent": "modelserver-router", "accept": "application/json"}


async def probe(replicas: Replicas, endpoint: Endpoint) -> EndpointState:
    """Whether a replica is ready; its load is noted. Raises UnavailableError when it does not answer."""
    call = await replicas.replica(endpoint).http.open("GET", "/v2/health/ready", _HEADERS)
    try:
        await call.wait_for_head()
        body = await call.read(_MAX_BYTES)
    except CallError as error:
        if call.head is None:
            raise
        body = error.body
    finally:
        call.close()
    is_ready = call.head is not None and call.head.status < 300
    document = _document(body)
    in_hand = document.get("inflight_requests")
    if isinstance(in_hand, int):
        replicas.endpoints.report_load(endpoint, in_hand)
    if is_ready:
        return EndpointState.READY
    # A server that is not ready may serve some of its models.
    is_degraded = document.get("state") == EndpointState.DEGRADED.value
    return EndpointState.DEGRADED if is_degraded else EndpointState.STARTING


def _document(body: bytes) -> dict[str, object]:
    """What a replica says besides its status; servers of other kinds say nothing."""
    try:
        document = orjson.loads(body)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


async def open_lines(replicas: Replicas, url: str) -> AsyncIterator[bytes]:
    """The lines of the document at `url`, which goes on for as long as it is read. Raises UnavailableError."""
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    pool = replicas.pool(f"{parts.scheme}://{parts.netloc}", default_port=443 if parts.scheme == "https" else 80)
    try:
        async for line in http_lines(pool, target, {"accept": "application/x-ndjson"}):
            yield line
    except CallError as error:
        raise UnavailableError(f"cannot read {url}: {error.message}") from None
