"""What is compared: an answer as flat facts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from support.differential.target import HttpReply, RpcReply, Target


@dataclass(frozen=True)
class Case:
    """`ask` asks one server and tells what it saw: nested dicts and lists, of which each leaf is a fact."""

    name: str
    ask: Callable[[Target], Any]
    # Why Triton cannot be asked: it would end, or never answer.
    deadly: str = ""


@dataclass
class Comparison:
    """Of one case: how many facts there were, and those that differ, by path: (Triton's, ours)."""

    num_facts: int
    differences: dict[str, tuple[Any, Any]] = field(default_factory=dict)


_ABSENT = "(absent)"


def compare(theirs: Any, ours: Any) -> Comparison:
    left, right = dict(flatten(theirs)), dict(flatten(ours))
    paths = list(dict.fromkeys([*left, *right]))
    comparison = Comparison(len(paths))
    for path in paths:
        pair = (left.get(path, _ABSENT), right.get(path, _ABSENT))
        if not _is_same(*pair):
            comparison.differences[path] = pair
    return comparison


def _is_same(theirs: Any, ours: Any) -> bool:
    """1 is 1.0, as JSON has only numbers, and is not true; not-a-number is itself."""
    if {type(theirs), type(ours)} == {int, float}:
        return bool(theirs == ours)
    return repr(theirs) == repr(ours)


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each leaf by its path, keys and positions joined by dots."""
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if not parts or not value:
        yield path or ".", value
        return
    for key, part in parts:
        yield from flatten(part, f"{path}.{key}" if path else str(key))


def phrases(text: str, wanted: Sequence[str]) -> dict[str, bool]:
    """Which of these an error text has, whatever the case."""
    return {phrase: re.search(phrase, text, re.IGNORECASE) is not None for phrase in wanted}


def http_facts(reply: HttpReply, *wanted: str) -> dict[str, Any]:
    """Status, kind of body and the document. Of an error body, which of the wanted phrases its text has."""
    document = reply.document()
    facts: dict[str, Any] = {"status": reply.status}
    if reply.status >= 400 and isinstance(document, dict) and "error" in document:
        return facts | {"keys": sorted(document), "says": phrases(str(document["error"]), wanted)}
    if reply.body:
        facts["type"] = reply.headers.get("content-type", "").partition(";")[0]
        facts["body"] = document
    if reply.blobs:
        facts["blobs"] = reply.blobs.hex()
    return facts


def rpc_facts(reply: RpcReply, *wanted: str) -> dict[str, Any]:
    """Status and the reply, or which of the wanted phrases its text has."""
    if reply.code != "OK":
        return {"code": reply.code, "says": phrases(reply.text, wanted)}
    return {"code": reply.code, "reply": reply.document()}
