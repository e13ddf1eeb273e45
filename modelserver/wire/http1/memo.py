"""The heads that one connection has sent lately: clients repeat theirs byte for byte."""

from __future__ import annotations

import re

from modelserver.core.recognition import Memory
from modelserver.protocol.exchange import HttpHead
from modelserver.wire.http1.head import RequestHead, read_head
from modelserver.wire.limits import WireLimits

_MAX_HEADS = 8
_MAX_HEAD_BYTES = 2048

_LENGTH_LINE = re.compile(rb"(?i:\r\ncontent-length:)[ \t]*(\d+)[ \t]*\r\n")
# More digits than any body has bytes are left to the parser and its errors.
_MAX_DIGITS = 15


class HeadMemo:
    """Gives the result of `read_head` for the bytes of a head, mostly without calling it.

    A head that differs from the last one parsed in nothing but the number of its Content-Length is made from that one.
    It may hold clients' secrets, and ends with the connection.
    """

    __slots__ = ("_head", "_heads", "_is_on", "_limits", "_prefix", "_suffix")

    def __init__(self, limits: WireLimits) -> None:
        self._limits = limits
        self._is_on = limits.recognizes
        self._heads = Memory[bytes, RequestHead](_MAX_HEADS, is_on=self._is_on)
        # The last head that was parsed and announces a body: `_prefix` + digits + `_suffix`.
        self._head: RequestHead | None = None
        self._prefix = self._suffix = b""

    def get(self, data: bytes) -> RequestHead:
        """The record of a whole head. Raises RefusedError."""
        head = self._heads.known.get(data)
        if head is not None:
            return head
        head = self._of_other_length(data)
        if head is None:
            head = read_head(data, self._limits)
            if len(data) > _MAX_HEAD_BYTES or not self._is_on:
                return head
            self._keep_shape(data, head)
        self._heads.remember(data, head)
        return head

    def _keep_shape(self, data: bytes, head: RequestHead) -> None:
        line = _LENGTH_LINE.search(data)
        # Whether an upgrade is refused depends on the length, so such a head cannot be the pattern for others.
        if line is not None and "upgrade" not in head.http.headers:
            self._head, self._prefix, self._suffix = head, data[: line.start(1)], data[line.end(1) :]

    def _of_other_length(self, data: bytes) -> RequestHead | None:
        shape = self._head
        if shape is None or not (data.startswith(self._prefix) and data.endswith(self._suffix)):
            return None
        digits = data[len(self._prefix) : len(data) - len(self._suffix)]
        if not digits.isdigit() or len(digits) > _MAX_DIGITS:
            return None
        http = shape.http
        headers = {**http.headers, "content-length": digits.decode()}
        http = HttpHead(http.method, http.path, headers, http.query, http.names)
        return RequestHead(http, self._limits.max_body_bytes, is_http_1_0=shape.is_http_1_0)
