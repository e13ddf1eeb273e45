"""Server-sent events, cut anyhow, and what those of three kinds of servers say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelserver.bench.llm.player import EventReader, read_chunk
from modelserver.bench.work import EndpointType


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("step", [1, 2, 5, 1000])
def test_events_cut_anyhow(step: int, line_end: bytes) -> None:
    raw = b": a comment\n\ndata: one\n\nevent: x\ndata:two\ndata: lines\n\ndata: [DONE]\n\n".replace(b"\n", line_end)
    reader = EventReader()
    found = [data for at in range(0, len(raw), step) for data in reader.feed(raw[at : at + step])]
    assert found == [b"one", b"two\nlines", b"[DONE]"]


@pytest.mark.parametrize(
    ("kind", "document", "has_text"),
    [
        (EndpointType.CHAT, {"choices": [{"delta": {"content": "a"}}]}, True),
        (EndpointType.CHAT, {"choices": [{"delta": {"reasoning_content": "a"}}]}, True),
        (EndpointType.CHAT, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}, False),
        (EndpointType.CHAT, {"choices": [{"message": {"content": "whole"}}]}, True),
        (EndpointType.COMPLETIONS, {"choices": [{"text": "a"}]}, True),
        (EndpointType.COMPLETIONS, {"choices": [{"text": "", "finish_reason": "stop"}]}, False),
        (EndpointType.GENERATE, {"model_name": "m", "text_output": "a"}, True),
        (EndpointType.GENERATE, {"model_name": "m", "text_output": ""}, False),
    ],
)
def test_text(kind: EndpointType, document: dict[str, Any], has_text: bool) -> None:
    chunk = read_chunk(kind, json.dumps(document).encode())
    assert (chunk.has_text, chunk.error) == (has_text, "")


def test_usage_and_the_end() -> None:
    chunk = read_chunk(EndpointType.CHAT, b'{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 8}}')
    assert (chunk.input_tokens, chunk.output_tokens, chunk.has_text) == (3, 8, False)
    assert read_chunk(EndpointType.CHAT, b"[DONE]").is_done


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"nonsense", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"error": "out of memory"}', "out of memory"),
        (b'{"error": {"message": "too long"}}', "too long"),
    ],
)
def test_errors(data: bytes, error: str) -> None:
    assert error in read_chunk(EndpointType.CHAT, data).error
