"""What one response of a language model says of each choice that it has news of: tensors -> `Piece`s."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from modelserver.core.response import InferResponse
from modelserver.errors import InternalError

TokenLogprob = dict[str, Any]


@dataclass(slots=True)
class Piece:
    """News of one choice: text and tokens since the last piece. What the model does not tell is None or empty.

    `finish_reason` is empty while the choice goes on. `num_output_tokens` counts the new tokens; `num_input_tokens` and
    `num_cached_tokens` are of the whole request.
    """

    choice: int
    text: str = ""
    finish_reason: str = ""
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None
    token_ids: list[int] | None = None
    cumulative_logprob: float = 0.0
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


def read_pieces(response: InferResponse) -> list[Piece]:
    """The news in a response without error. Raises InternalError when it is not what a language model sends."""
    columns: dict[str, list[Any]] = {tensor.name: tensor.data.ravel().tolist() for tensor in response.outputs}
    if "token_logprobs" in columns:
        columns["logprobs"] = columns.pop("token_logprobs")
    texts = columns.get("text_output")
    if texts is None:
        return []
    indexes = columns.get("index")
    pieces = [
        Piece(row if indexes is None else _entry(indexes, row) or 0, _text(text)) for row, text in enumerate(texts)
    ]
    for name, column in columns.items():
        read = _READERS.get(name)
        if read is not None:
            for row, piece in enumerate(pieces):
                value = _entry(column, row)
                if value is not None:
                    setattr(piece, name, read(value))
    _share_token_ids(pieces, columns)
    return pieces


def _share_token_ids(pieces: list[Piece], columns: dict[str, list[Any]]) -> None:
    """The new tokens: of the only choice in `token_ids`, of several as a list of lists in `choice_token_ids`."""
    by_choice = columns.get("choice_token_ids")
    if by_choice:
        for piece, ids in zip(pieces, _json(by_choice[0]), strict=False):
            piece.token_ids = ids
    elif len(pieces) == 1:
        pieces[0].token_ids = columns.get("token_ids")


def _entry(column: list[Any], row: int) -> Any:
    """The entry of a choice; what is the same for all has only one."""
    if row < len(column):
        return column[row]
    return column[0] if column else None


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _finish_reason(value: Any) -> str:
    """Models write "None", as Triton's vLLM backend does, or nothing while a choice goes on."""
    text = _text(value)
    return "" if text == "None" else text


def _logprobs(value: Any) -> list[TokenLogprob] | None:
    """Entries as `logprobs.py` describes them, or as Triton's vLLM backend writes them: an object by token id each."""
    entries: list[TokenLogprob] | None = _json(value)
    return entries and [entry if "token" in entry else _from_token_ids(entry) for entry in entries]


def _from_token_ids(by_token_id: dict[str, dict[str, Any]]) -> TokenLogprob:
    """The chosen token comes first. It is one of the best ones too, unless its rank is too high for that."""
    tokens = [
        {
            "token_id": int(token_id),
            "token": told.get("decoded_token") or "",
            "bytes": list((told.get("decoded_token") or "").encode()),
            "logprob": told["logprob"],
            "rank": told.get("rank"),
        }
        for token_id, told in by_token_id.items()
    ]
    if not tokens:
        raise InternalError("an entry of the model's output 'logprobs' has no token")
    top = sorted(tokens, key=lambda token: token["rank"] or 0)
    if (tokens[0]["rank"] or 0) > len(tokens) - 1:
        top.remove(tokens[0])
    return {**tokens[0], "top": top}


def _json(value: Any) -> Any:
    if not value or value == b"null":
        return None
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise InternalError(f"an output of the model is not JSON: {error}, got {value!r:.60}") from error


# Of the outputs that are fields of a piece by their name.
_READERS: dict[str, Callable[[Any], Any]] = {
    "finish_reason": _finish_reason,
    "stop_reason": _json,
    "logprobs": _logprobs,
    "prompt_logprobs": _json,
    "cumulative_logprob": float,
    "num_input_tokens": int,
    "num_output_tokens": int,
    "num_cached_tokens": int,
}
