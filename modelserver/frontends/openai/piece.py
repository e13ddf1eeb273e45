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

    `finish_reason` is empty while the choice goes on. The counts are of the whole request and choice so far.
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


def _json(value: Any) -> Any:
    if not value or value == b"null":
        return None
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise InternalError(f"an output of the model is not JSON: {error}, got {value!r:.60}") from error


# Of the outputs that are fields of a piece by their name.
_READERS: dict[str, Callable[[Any], Any]] = {
    "finish_reason": _text,
    "stop_reason": _json,
    "logprobs": _json,
    "prompt_logprobs": _json,
    "cumulative_logprob": float,
    "num_input_tokens": int,
    "num_output_tokens": int,
    "num_cached_tokens": int,
}
