"""Every kind of structured output, the cache, and the limits."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from modelserver_backends.llm.grammar import Grammar, compile_grammar
from modelserver_backends.llm.grammar.schema_terms import identity, is_equal
from modelserver_backends.llm.text.tokenizer import Tokenizer
from support.grammars import json_tokenizer, random_text
from support.tiny_tokenizers import byte_fallback, byte_level

from modelserver.errors import InvalidArgumentError


def _is_text(wanted: dict[str, Any], text: str, tokenizer: Tokenizer | None = None) -> bool:
    tokenizer = tokenizer or json_tokenizer()
    matcher = compile_grammar(wanted, tokenizer).matcher()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return all(matcher.accept(token_id) for token_id in ids) and matcher.accepts(min(tokenizer.eos_token_ids))


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        ({"json": {"type": "integer"}}, ["1", "-20"], ["1.5", "a", ""]),
        ({"json": '{"type": "integer"}'}, ["1"], ["a"]),
        ({"json": True}, ["[]", '{"a": null}', '"é"'], ["", "{", "nul"]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": "c"}]}', '{\n  "a": 1\n}'], ["[]", "1", '{"a"}', "{,}"]),
        ({"regex": r"\d{3}"}, ["123"], ["12", "1234"]),
        ({"choice": ["yes", "no", "yes please"]}, ["yes", "no", "yes please"], ["yes ", "n"]),
        ({"grammar": 'root ::= "a" b*\nb ::= "x" | "y"'}, ["a", "axyx"], ["b", "axz"]),
    ],
)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_kinds(wanted: dict[str, Any], good: list[str], bad: list[str], kind: str) -> None:
    raw = byte_level() if kind == "byte_level" else byte_fallback(is_stripped=False)
    tokenizer = Tokenizer(raw, special={"eos_token": "</s>"})
    assert [text for text in good if not _is_text(wanted, text, tokenizer)] == []
    assert [text for text in bad if _is_text(wanted, text, tokenizer)] == []


@pytest.mark.parametrize(
    "wanted", [{}, {"regex": "a", "choice": ["b"]}, {"lark": "x"}, {"json": {"a": float("nan")}, "regex": "a"}]
)
def test_one_known_kind_is_expected(wanted: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="json, json_object, regex, choice, grammar"):
        compile_grammar(wanted, json_tokenizer())


def test_the_same_again_is_remembered() -> None:
    wanted = {"json": {"type": "string", "minLength": 3}}
    grammar = compile_grammar(wanted, json_tokenizer())
    assert compile_grammar(json.loads(json.dumps(wanted)), json_tokenizer()) is grammar
    assert compile_grammar({"json": {"type": "string", "minLength": 4}}, json_tokenizer()) is not grammar
    assert compile_grammar(wanted, Tokenizer(byte_level())) is not grammar


def test_the_cache_is_bounded() -> None:
    tokenizer = Tokenizer(byte_level())
    first = compile_grammar({"regex": "a"}, tokenizer)
    for number in range(128):
        compile_grammar({"regex": f"b{number}"}, tokenizer)
    assert compile_grammar({"regex": "a"}, tokenizer) is not first


def test_threads_share_what_they_compile() -> None:
    tokenizer, found = Tokenizer(byte_level()), []

    def compile_it() -> None:
        found.append(compile_grammar({"json": {"type": "array", "items": {"type": "integer"}}}, tokenizer))

    threads = [threading.Thread(target=compile_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({id(grammar) for grammar in found}) == 1


def test_length_and_time_are_bounded() -> None:
    tokenizer = Tokenizer(byte_level())
    with pytest.raises(InvalidArgumentError, match="takes too long"):
        compile_grammar({"regex": "a"}, tokenizer, deadline_s=-1.0)
    with pytest.raises(InvalidArgumentError, match="bytes"):
        compile_grammar({"choice": ["x" * 2**20]}, tokenizer)


def test_what_nests_too_deeply_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="nest too deeply"):
        compile_grammar({"grammar": 'root ::= "a"' + "*" * 5000}, json_tokenizer())


def test_the_deadline_is_that_of_reading_a_schema_too() -> None:
    alternatives = {"oneOf": [{"const": number} for number in range(2000)]}
    with pytest.raises(InvalidArgumentError, match="takes too long"):
        compile_grammar({"json": alternatives}, json_tokenizer(), deadline_s=0.05)


@pytest.mark.parametrize("keyword", ["enum", "allOf"])
def test_long_lists_of_values_take_time_in_proportion(keyword: str) -> None:
    values = {"enum": list(range(20_000))}  # the square of it would take minutes
    schema = values if keyword == "enum" else {"allOf": [values, {"enum": list(range(10_000, 30_000))}]}
    compile_grammar({"json": schema}, json_tokenizer())


def test_values_are_known_by_what_they_are() -> None:
    values: list[Any] = [1, 1.0, True, False, 0, None, "1", "", [], [[]], [{}], {}]
    values += [[1], [True], [1.0], {"a": 1}, {"a": True}, {"a": 1.0}]
    for first in values:
        for second in values:
            assert is_equal(first, second) == (identity(first) == identity(second))


def test_what_is_right_but_cannot_be_refused_earlier() -> None:
    with pytest.raises(InvalidArgumentError, match="no text matches"):
        compile_grammar({"json": False}, json_tokenizer())


def test_any_json_is_json() -> None:
    grammar: Grammar = compile_grammar({"json": True}, json_tokenizer())
    texts = [random_text(grammar, json_tokenizer(), seed) for seed in range(150)]
    for text in texts:
        if text is not None:
            json.loads(text)
    assert sum(text is not None for text in texts) > 100
