"""Log-probabilities of tokens: the model's entries -> the two forms that OpenAI has for them.

An entry is `{"token_id", "token", "bytes", "logprob", "rank", "top": [{"token_id", "token", "bytes", "logprob"}]}`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modelserver.frontends.llm.pieces import TokenLogprob

# What stands for minus infinity, which JSON cannot say.
_LOWEST = -9999.0


def chat_logprobs(entries: Sequence[TokenLogprob], *, by_id: bool) -> list[dict[str, Any]]:
    """As `logprobs.content` of a chat choice; `by_id` names tokens `token_id:7`."""
    return [
        {**_chat_entry(entry, by_id=by_id), "top_logprobs": [_chat_entry(top, by_id=by_id) for top in entry["top"]]}
        for entry in entries
    ]


def _chat_entry(entry: TokenLogprob, *, by_id: bool) -> dict[str, Any]:
    return {"token": _token(entry, by_id=by_id), "logprob": _value(entry), "bytes": entry.get("bytes")}


class CompletionLogprobs:
    """The `logprobs` of completions: parallel lists, with the offset of each token in the text so far."""

    def __init__(self, *, by_id: bool) -> None:
        self._by_id = by_id
        self._offset = 0

    def take(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Of tokens that follow those of the last call."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(entry["token"])
        by_id = self._by_id
        return {
            "tokens": [_token(entry, by_id=by_id) for entry in entries],
            "token_logprobs": [_value(entry) for entry in entries],
            "top_logprobs": [_top(entry, by_id=by_id) for entry in entries],
            "text_offset": offsets,
        }


def prompt_entries(entries: Sequence[TokenLogprob | None], prompt: str) -> list[TokenLogprob]:
    """The entries of a prompt, of whose first token nothing is known but that it is what is left of the text."""
    rest = sum(len(entry["token"]) for entry in entries if entry is not None)
    first = {"token": prompt[: max(0, len(prompt) - rest)], "token_id": None, "logprob": None, "top": None}
    return [first if entry is None else entry for entry in entries]


def prompt_logprobs_document(entries: Sequence[TokenLogprob | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's `prompt_logprobs`: for each token an object by token id, null for the first."""
    if entries is None:
        return None
    return [None if entry is None else _by_token_id(entry) for entry in entries]


def _by_token_id(entry: TokenLogprob) -> dict[str, Any]:
    found = {}
    for rank, token in enumerate(entry["top"], 1):
        found[str(token["token_id"])] = {
            "logprob": _value(token),
            "rank": token.get("rank", rank),
            "decoded_token": token["token"],
        }
    found[str(entry["token_id"])] = {
        "logprob": _value(entry),
        "rank": entry.get("rank"),
        "decoded_token": entry["token"],
    }
    return found


def _top(entry: TokenLogprob, *, by_id: bool) -> dict[str, Any] | None:
    if entry["top"] is None:
        return None
    found = {_token(top, by_id=by_id): _value(top) for top in entry["top"]}
    found.setdefault(_token(entry, by_id=by_id), _value(entry))
    return found


def _token(entry: TokenLogprob, *, by_id: bool) -> str:
    if by_id and entry["token_id"] is not None:
        return f"token_id:{entry['token_id']}"
    token: str = entry["token"]
    return token


def _value(entry: TokenLogprob) -> float | None:
    value: float | None = entry["logprob"]
    return None if value is None else max(value, _LOWEST)
