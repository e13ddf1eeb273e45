"""What responses of language models say of their choices."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from modelserver.core.datatype import Datatype
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Tensor
from modelserver.errors import InternalError
from modelserver.frontends.llm.token_deltas import TokenDelta, read_deltas


def response(**columns: list[Any]) -> InferResponse:
    tensors = []
    for name, values in columns.items():
        if isinstance(values[0] if values else b"", bytes):
            data: np.ndarray[Any, Any] = np.empty(len(values), object)
            data[:] = values
            tensors.append(Tensor(name, Datatype.BYTES, data))
        else:
            tensors.append(Tensor(name, Datatype.INT32, np.array(values, np.int32)))
    return InferResponse(tensors)


def test_the_least_is_text() -> None:
    assert read_deltas(response(text_output=[b"a", "é".encode()])) == [TokenDelta(0, "a"), TokenDelta(1, "é")]
    assert read_deltas(response(text_output=[b"\xff"])) == [TokenDelta(0, "\ufffd")]
    assert read_deltas(response()) == []


def test_everything_of_one_choice() -> None:
    deltas = read_deltas(
        response(
            text_output=[b"a b"],
            index=[3],
            finish_reason=[b"stop"],
            stop_reason=[b'"END"'],
            logprobs=[b'[{"token": "a"}]'],
            prompt_logprobs=[b"[null]"],
            num_input_tokens=[7],
            num_output_tokens=[2],
            num_cached_tokens=[1],
            cumulative_logprob=[-2],
            token_ids=[5, 6],
        )
    )
    assert deltas == [TokenDelta(3, "a b", "stop", "END", [{"token": "a"}], [5, 6], -2.0, 7, 2, 1, [None])]


def test_what_several_choices_share_is_said_once() -> None:
    deltas = read_deltas(
        response(
            text_output=[b"a", b"b"],
            num_input_tokens=[7],
            num_output_tokens=[1, 2],
            stop_reason=[b"null", b"9"],
            choice_token_ids=[b"[[1], [2, 3]]"],
        )
    )
    assert [(each.choice, each.num_input_tokens, each.num_output_tokens) for each in deltas] == [(0, 7, 1), (1, 7, 2)]
    assert [(each.stop_reason, each.token_ids) for each in deltas] == [(None, [1]), (9, [2, 3])]


def test_the_log_probabilities_of_tritons_vllm_backend_are_known() -> None:
    def told(logprob: float, rank: int, text: str) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": text}

    document = [{"7": told(-3.0, 9, "é"), "5": told(-0.1, 1, "a"), "6": told(-2.0, 2, "b")}, {"8": told(-1.0, 1, "c")}]
    raw = json.dumps(document).encode()
    (delta,) = read_deltas(response(text_output=[b"x"], finish_reason=[b"None"], logprobs=[raw]))
    assert delta.finish_reason == ""
    assert delta.logprobs is not None
    first, second = delta.logprobs
    assert (first["token_id"], first["token"], first["bytes"], first["rank"]) == (7, "é", [195, 169], 9)
    assert [token["token_id"] for token in first["top"]] == [5, 6]
    assert (second["token_id"], second["top"]) == (8, [])


def test_what_is_no_json_is_the_model_s_fault() -> None:
    with pytest.raises(InternalError, match="not JSON"):
        read_deltas(response(text_output=[b"a"], logprobs=[b"{"]))
