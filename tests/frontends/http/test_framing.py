"""Frames of documents, and those that are prepared but for a text."""

from __future__ import annotations

import json

import orjson
import pytest

from modelserver.frontends.http.framing import NDJSON, SSE, SSE_DONE, Framing, PreparedFrame


def test_server_sent_events() -> None:
    assert SSE.frame(b"{}") == b"data: {}\n\n"
    assert SSE.frame(b"{}", "ping") == b"event: ping\ndata: {}\n\n"
    assert SSE.end == b""
    assert SSE_DONE.end == b"data: [DONE]\n\n"
    assert dict(SSE.headers)["Content-Type"].startswith("text/event-stream")


def test_lines_have_no_names() -> None:
    assert NDJSON.frame(b"{}", "ping") == b"{}\n"
    assert NDJSON.error({"error": "x"}) == b'{"error":"x"}\n'
    assert dict(NDJSON.headers)["Content-Type"] == "application/x-ndjson"


def test_an_error_has_the_name_that_the_api_gives_it() -> None:
    named = Framing(SSE.content_type, SSE.before, SSE.after, error_name="error")
    assert named.error({"type": "error"}) == b'event: error\ndata: {"type":"error"}\n\n'
    assert SSE.error({"error": {}}) == b'data: {"error":{}}\n\n'


@pytest.mark.parametrize("framing", [SSE, NDJSON])
@pytest.mark.parametrize("text", ["", "a", 'quotes " and \\', "line\nbreak", "é中😀", "\x00text\x00", "</script>"])
def test_a_prepared_frame_is_the_frame_of_its_document(framing: Framing, text: str) -> None:
    document = {"id": "x", "choices": [{"index": 0, "delta": {"content": PreparedFrame.MARK}, "end": None}]}
    prepared = PreparedFrame(framing, document)
    whole = json.loads(json.dumps(document).replace(json.dumps(PreparedFrame.MARK), json.dumps(text)))
    assert prepared.with_text(text) == framing.frame(orjson.dumps(whole))
