"""What one response of a language model says of each choice that it has news of: tensors -> `Piece`s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
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
    columns = {tensor.name: tensor.data.reshape(-1) for tensor in response.outputs}
    texts = columns.get("text_output")
    if texts is None:
        return []
    indexes = columns.get("index")
    pieces = [
        Piece(row if indexes is None else int(_entry(indexes, row) or 0), _text(text)) for row, text in enumerate(texts)
    ]
    for row, piece in enumerate(pieces):
        _fill(piece, columns, row)
    _share_token_ids(pieces, columns)
    return pieces


def _fill(piece: Piece, columns: dict[str, np.ndarray[Any, Any]], row: int) -> None:
    for name, column in columns.items():
        value = _entry(column, row)
        if value is None:
            continue
        match name:
            case "finish_reason":
                piece.finish_reason = _text(value)
            case "stop_reason":
                piece.stop_reason = _json(name, value)
            case "logprobs":
                piece.logprobs = _json(name, value)
            case "prompt_logprobs":
                piece.prompt_logprobs = _json(name, value)
            case "cumulative_logprob":
                piece.cumulative_logprob = float(value)
            case "num_input_tokens":
                piece.num_input_tokens = int(value)
            case "num_output_tokens":
                piece.num_output_tokens = int(value)
            case "num_cached_tokens":
                piece.num_cached_tokens = int(value)


def _share_token_ids(pieces: list[Piece], columns: dict[str, np.ndarray[Any, Any]]) -> None:
    """The new tokens: of the only choice in `token_ids`, of several in `choice_token_ids`."""
    by_choice, flat = columns.get("choice_token_ids"), columns.get("token_ids")
    if by_choice is not None and len(by_choice):
        rows = _json("choice_token_ids", by_choice[0]) if len(by_choice) < len(pieces) else None
        for row, piece in enumerate(pieces):
            piece.token_ids = rows[row] if rows is not None else _row_of_ids(by_choice, row)
    elif flat is not None and len(pieces) == 1:
        pieces[0].token_ids = flat.tolist()


def _row_of_ids(column: np.ndarray[Any, Any], row: int) -> list[int]:
    ids = _json("choice_token_ids", column[row])
    # One choice whose list of lists is the whole column.
    return ids[0] if ids and isinstance(ids[0], list) else ids


def _entry(column: np.ndarray[Any, Any], row: int) -> Any:
    """The entry of a choice; what is the same for all has only one."""
    if row < len(column):
        return column[row]
    return column[0] if len(column) else None


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _json(name: str, value: Any) -> Any:
    text = value if isinstance(value, bytes) else str(value).encode()
    if not text:
        return None
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InternalError(f"the model's output '{name}' is not JSON: {error}") from error
