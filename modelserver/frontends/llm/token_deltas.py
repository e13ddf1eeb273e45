"""What one response of a language model says of each choice that it has news of: tensors -> `TokenDelta`s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from modelserver.core.response import InferResponse, RowResponse
from modelserver.errors import InternalError
from modelserver.frontends.llm.events import TokenLogprob

# The `finish_reason` of a choice that goes on: models write "None", as Triton's vLLM backend does, or nothing.
UNFINISHED = (b"None", "None", b"", "")


@dataclass(slots=True)
class TokenDelta:
    """News of one choice: text and tokens since the last ones. What the model does not tell is None or empty.

    `finish_reason` is empty while the choice goes on. `num_output_tokens` counts the new tokens; `num_input_tokens` and
    `num_cached_tokens` are of the whole request. `num_predicted` comes with the end: how many tokens of the client's
    prediction were accepted, and rejected.
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
    num_predicted: tuple[int, int] | None = None


def read_deltas(response: InferResponse) -> list[TokenDelta]:
    """The news in a response without error. Raises InternalError when it is not what a language model sends."""
    row: dict[str, Any] = {}
    if type(response) is RowResponse:
        row = response.values
    else:
        for tensor in response.outputs:
            if tensor.data.size != 1:
                return _read_columns({each.name: each.data.ravel().tolist() for each in response.outputs})
            row[tensor.name] = tensor.data.item()
    # The usual case, and the one that comes for every streamed token: one choice, and at most one token.
    if "text_output" not in row:
        return []
    delta = _read(row)
    if "token_ids" in row and "choice_token_ids" not in row:
        delta.token_ids = [row["token_ids"]]
    elif "choice_token_ids" in row:
        (delta.token_ids,) = _token_ids({name: [value] for name, value in row.items()}, 1)
    return [delta]


def _read_columns(columns: dict[str, list[Any]]) -> list[TokenDelta]:
    """Of several choices, or tokens."""
    num_rows = len(columns.get("text_output", ()))
    if num_rows > 1 and not columns.get("index"):
        columns["index"] = list(range(num_rows))
    deltas = [
        # What is the same for all rows has only one entry.
        _read({name: column[row if row < len(column) else 0] for name, column in columns.items() if column})
        for row in range(num_rows)
    ]
    for delta, ids in zip(deltas, _token_ids(columns, num_rows), strict=False):
        delta.token_ids = ids
    return deltas


def _read(row: dict[str, Any]) -> TokenDelta:
    """One choice's entry of each output."""
    get = row.get
    text = row["text_output"]
    delta = TokenDelta(
        get("index") or 0,
        text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text),
        cumulative_logprob=float(get("cumulative_logprob", 0.0)),
        num_input_tokens=get("num_input_tokens"),
        num_output_tokens=get("num_output_tokens"),
        num_cached_tokens=get("num_cached_tokens"),
    )
    reason = get("finish_reason")
    if reason and reason not in UNFINISHED:
        delta.finish_reason = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        if (num_accepted := get("num_accepted_prediction_tokens")) is not None:
            delta.num_predicted = num_accepted, get("num_rejected_prediction_tokens") or 0
    if (value := get("stop_reason", b"null")) != b"null":
        delta.stop_reason = _json(value)
    # Only `token_logprobs` has the bytes of tokens.
    if value := get("token_logprobs") or get("logprobs"):
        delta.logprobs = _logprobs(value)
    if value := get("prompt_logprobs"):
        delta.prompt_logprobs = _json(value)
    return delta


def _token_ids(columns: dict[str, list[Any]], num_rows: int) -> list[list[int] | None]:
    """The new tokens: of the only choice in `token_ids`, of several as a list of lists in `choice_token_ids`."""
    by_choice = columns.get("choice_token_ids")
    if by_choice:
        return _json(by_choice[0]) or [None] * num_rows
    return [columns.get("token_ids") if num_rows == 1 else None] * num_rows


def _logprobs(value: Any) -> list[TokenLogprob] | None:
    """Entries as `TokenLogprob` says, or as Triton's vLLM backend writes them: an object by token id each."""
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
