"""A whole engine with random weights writes what it is asked to write: every text that ends by itself is valid."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from modelserver_backends.llm import LLM, SamplingParams
from support.tiny_checkpoints import write_checkpoint

from modelserver.errors import InvalidArgumentError

SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "size": {"type": "integer", "minimum": 3, "maximum": 40},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["ok", "size"],
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory, "llama")
    llm = LLM(directory, num_gpu_blocks_override=200, max_num_seqs=16)
    yield llm
    llm.close()


def _texts(llm: LLM, wanted: dict[str, Any] | None, **params: Any) -> list[tuple[str, str]]:
    """Text and finish reason of three choices."""
    sampling = SamplingParams(n=3, seed=5, structured_outputs=wanted, **{"max_tokens": 90, **params})
    (output,) = llm.generate(["Say it: "], sampling)
    return [(choice.text, choice.finish_reason) for choice in output.outputs]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3, "repetition_penalty": 1.3}])
def test_json(llm: LLM, params: dict[str, Any]) -> None:
    for text, reason in _texts(llm, {"json": SCHEMA}, **params):
        assert reason == "stop"
        value = json.loads(text)
        assert isinstance(value["ok"], bool)
        assert 3 <= value["size"] <= 40
        assert set(value) <= {"ok", "size", "tags"}


def test_json_without_blanks(llm: LLM) -> None:
    for text, reason in _texts(llm, {"json": SCHEMA, "disable_any_whitespace": True}, temperature=2.0):
        assert reason == "stop"
        assert text == json.dumps(json.loads(text), separators=(",", ":"))
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    only_blanks = dict.fromkeys(tokenizer.encode(" \n", add_special_tokens=False), 100.0)
    sampling = {"structured_outputs": {"json_object": True}, "max_tokens": 60, "logit_bias": only_blanks}
    (wandering,) = llm.generate(["Say it: "], SamplingParams(temperature=0, **sampling))
    assert max(map(len, re.findall(r"\s+", wandering.outputs[0].text)), default=0) <= 17


def test_other_kinds(llm: LLM) -> None:
    for text, reason in _texts(llm, {"choice": ["yes", "no"]}):
        assert (text in ("yes", "no"), reason) == (True, "stop")
    for text, reason in _texts(llm, {"regex": r"[a-f]{3}-\d+"}):
        assert re.fullmatch(r"[a-f]{3}-\d*", text)
        assert reason in ("stop", "length")
    for text, _ in _texts(llm, {"grammar": 'root ::= "(" root ")" | "x"'}):
        assert set(text) <= set("(x)")


def test_neighbours_without_a_grammar_are_not_touched(llm: LLM) -> None:
    alone = _texts(llm, None, max_tokens=10)
    free = SamplingParams(n=3, seed=5, max_tokens=10)
    bound = SamplingParams(n=2, seed=1, max_tokens=30, structured_outputs={"json": SCHEMA})
    first, second = llm.generate(["Say it: ", "And: "], [free, bound])
    assert [(choice.text, choice.finish_reason) for choice in first.outputs] == alone
    assert all(choice.text.startswith("{") for choice in second.outputs)


def test_a_schema_that_is_not_supported_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidArgumentError, match="'format' is not supported"):
        _texts(llm, {"json": {"not": {"format": "date"}}})
