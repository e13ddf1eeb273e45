"""What of a request should lead it to a certain replica: its sequence or session, or a beginning that it shares.

Bytes are searched, not parsed: a wrong guess costs a replica's cache, never the answer.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from modelserver.core.tensor import Buffer
from modelserver.endpoints.endpoint import Endpoint, hash64
from modelserver.endpoints.learned_prefixes import BLOCK_BYTES, MAX_BLOCKS, chained_blocks

SESSION_HEADER: Final = "x-session-id"
# Last segments of the paths whose requests have a prompt.
_PROMPTED: Final = frozenset(
    {"chat", "completion", "completions", "generate", "generate_stream", "messages", "responses"}
)
# The first of these members is where a prompt begins; in front of it are the model and its settings.
_PROMPT: Final = re.compile(rb'"(?:messages|prompt|inputs?|text_input|system|instructions|contents)"\s*:\s*')
_MODEL: Final = re.compile(rb'"(?:model|cache_salt)"\s*:\s*"([^"\\]{1,200})"')
_SEQUENCE: Final = re.compile(rb'"sequence_id"\s*:\s*("[^"\\]{1,200}"|\d+)')
_NO_SEQUENCE: Final = frozenset({b"0", b'""'})
# A line that Claude Code begins its prompts with, and that differs from request to request.
_VOLATILE: Final = re.compile(rb'x-anthropic-billing-header:[^"\\]*(?:\\n)?')
_VOLATILE_WITHIN: Final = 1024
# The key of a map's entry in protobuf: field 1, 11 bytes; its value is field 2, a message.
_SEQUENCE_ENTRY: Final = b"\x0a\x0bsequence_id\x12"
# Where settings may stand: in front of the tensors, or behind numbers in JSON.
_SEARCHED_BYTES: Final = 4096
_PROMPT_WITHIN: Final = 64 * 1024
# A stateless key is made of the first of these sizes that the prompt fills.
_KEY_BYTES: Final = (4096, 1024)
_MAX_SESSIONS: Final = 65_536


def has_prompt(path: str) -> bool:
    """Whether requests of this path have a prompt."""
    return path.rpartition("/")[2] in _PROMPTED


def sequence_of_json(body: Buffer, json_length: int) -> bytes:
    """The sequence that the JSON of an infer request names, or b""; `json_length` is 0 where all of it is JSON."""
    view = memoryview(body)
    head = bytes(view[: min(json_length or _SEARCHED_BYTES, _SEARCHED_BYTES)])
    found = _SEQUENCE.search(head)
    if found is None and not json_length and len(view) > _SEARCHED_BYTES:
        found = _SEQUENCE.search(bytes(view[-_SEARCHED_BYTES:]))
    return found[1] if found is not None and found[1] not in _NO_SEQUENCE else b""


def sequence_of_message(message: Buffer) -> bytes:
    """The sequence that a ModelInferRequest names, as the bytes of its value, or b""."""
    data = bytes(memoryview(message)[:_SEARCHED_BYTES])
    at = data.find(_SEQUENCE_ENTRY)
    if at < 0:
        return b""
    start = at + len(_SEQUENCE_ENTRY) + 1
    value = data[start : start + data[start - 1]] if start <= len(data) else b""
    # A field's tag and a zero, or an empty text.
    return b"" if len(value) < 2 or value[1:] == b"\0" else value


class Prompt:
    """The beginning of a prompt: `key` for the stateless choice, and the chained hashes of its blocks."""

    __slots__ = ("blocks", "key")

    def __init__(self, key: bytes, blocks: Sequence[int]) -> None:
        self.key = key
        self.blocks = blocks


def prompt_of(body: Buffer) -> Prompt | None:
    """The prompt of a JSON document; None where there is none."""
    view = memoryview(body)
    head = bytes(view[:_PROMPT_WITHIN])
    found = _PROMPT.search(head)
    if found is None:
        return None
    text = bytes(view[found.end() : found.end() + BLOCK_BYTES * MAX_BLOCKS])
    volatile = _VOLATILE.search(text, 0, _VOLATILE_WITHIN)
    if volatile is not None:
        text = text[: volatile.start()] + text[volatile.end() :]
    # The model and the salt of its cache may stand on either side.
    scope = b"\0".join(_MODEL.findall(head, 0, found.start() + _SEARCHED_BYTES)[:2])
    size = next((size for size in _KEY_BYTES if len(text) >= size), len(text))
    return Prompt(scope + b"\0" + text[:size], chained_blocks(scope, text))


class PinnedSessions:
    """The replicas of sequences and sessions, so that they stay where they began when others join.

    Holds the last 65,536; another router, or this one after a restart, finds the same replica by the key's hash.
    """

    def __init__(self) -> None:
        self._places: OrderedDict[int, Endpoint] = OrderedDict()

    def find(self, key: bytes) -> Endpoint | None:
        """Where the session is, as far as this router knows."""
        return self._places.get(hash64(key))

    def pin(self, key: bytes, endpoint: Endpoint) -> None:
        """The session is on this replica from now on."""
        number = hash64(key)
        self._places[number] = endpoint
        self._places.move_to_end(number)
        if len(self._places) > _MAX_SESSIONS:
            self._places.popitem(last=False)
