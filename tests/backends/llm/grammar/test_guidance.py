"""What llguidance is asked for: texts that are valid, in bounded time, whatever a request says."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
from modelserver_backends.llm.grammar import allowed_mask, compile_grammar
from modelserver_backends.llm.grammar import compile as compiling
from support.grammars import check_texts, is_match, json_tokenizer

from modelserver.errors import InvalidArgumentError, UnsupportedError

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "multipleOf": 5}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "schema",
    [
        PERSON,
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        {"enum": ["a", 1]},
        {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 3},
        {
            "type": "object",
            "patternProperties": {"^x": {"type": "null"}, "^y": {"type": "boolean"}},
            "maxProperties": 3,
        },
    ],
)
def test_texts_are_valid(schema: Any) -> None:
    assert check_texts(compile_grammar({"json": schema}, json_tokenizer()), schema) > 5


def test_any_object() -> None:
    grammar = compile_grammar({"json_object": True}, json_tokenizer())
    assert check_texts(grammar, {"type": "object"})


def test_matchers_of_one_grammar_are_apart() -> None:
    grammar, tokenizer = compile_grammar({"regex": "a|b"}, json_tokenizer()), json_tokenizer()
    first, second = grammar.matcher(), grammar.matcher()
    assert first.accept(tokenizer.encode("a")[0])
    assert second.accept(tokenizer.encode("b")[0])
    assert first.is_terminated


@pytest.mark.parametrize(("blanks", "is_allowed"), [("", True), (" ", True), ("\n" + " " * 16, True), ("  ", False)])
def test_blanks_between_elements_are_bounded(blanks: str, is_allowed: bool) -> None:
    asked = {"json": {"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]}}
    text = f'{{{blanks}"a":{blanks}[1,{blanks}2]{blanks}}}'
    assert is_match(compile_grammar(asked, json_tokenizer()), text) == is_allowed
    compact = compile_grammar({**asked, "disable_any_whitespace": True}, json_tokenizer())
    assert is_match(compact, text) == (not blanks)
    assert not is_match(compile_grammar(asked, json_tokenizer()), "{\n" + " " * 17 + '"a":[]}')


def test_a_key_is_not_written_otherwise() -> None:
    """By an escape a key that is named could come again, with a value that it may not have."""
    schema = {"properties": {"ab": {"type": "null"}}, "additionalProperties": True}
    assert not is_match(compile_grammar({"json": schema}, json_tokenizer()), '{"\\u0061b":1}')
    assert is_match(compile_grammar({"json": {"const": "a\u0001"}}, json_tokenizer()), '"a\\u0001"')


def test_parts_of_a_schema_without_a_text_are_left_out() -> None:
    never = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 2}}, "required": ["a"]}
    schema = {"anyOf": [never, {"type": "array", "items": never}, {"properties": {"x": never, "y": {"type": "null"}}}]}
    grammar = compile_grammar({"json": schema}, json_tokenizer())
    assert [text for text in ("[]", "{}", '{"y":null}') if not is_match(grammar, text)] == []
    assert not is_match(grammar, "[{}]")


HOSTILE: dict[str, dict[str, Any]] = {
    "many properties": {"json": {"properties": {f"p{number}": {"type": "integer"} for number in range(20_000)}}},
    "many patterns": {
        "json": {"properties": {f"p{n}": {"type": "string", "pattern": f"x{n}[a-z]*y"} for n in range(8_000)}}
    },
    "many alternatives": {"json": {"anyOf": [{"properties": {f"p{n}": {"const": n}}} for n in range(10_000)]}},
    "nested repetitions": {"regex": "((((a{1000}){1000}){1000}){1000}){1000}"},
    "a long repetition": {"json": {"type": "string", "minLength": 10**9}},
    "many states": {"regex": "(a|b)*a(a|b){1000}(c|d)*c(c|d){1000}"},
    "conditions": {
        "json": {"allOf": [{"if": {"required": [f"a{n}"]}, "then": {"required": [f"b{n}"]}} for n in range(60)]}
    },
    "a deep grammar": {"grammar": "root ::= " + "(" * 90 + '"a"' + ")*" * 90},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_hostile_is_compiled_or_refused_in_time(name: str) -> None:
    """And if it is taken, its first steps are bounded, too."""
    try:
        grammar = compile_grammar(HOSTILE[name], json_tokenizer(), deadline_s=4.0)
    except InvalidArgumentError:
        return
    matcher = grammar.matcher()
    for _ in range(4):
        following = np.flatnonzero(allowed_mask(matcher))
        assert len(following), "a text that has not ended can go on"
        assert matcher.accept(int(following[0]))
        if matcher.is_terminated:
            break


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        compiling.importlib.util,
        "find_spec",
        lambda name: None if name in ("llguidance", "xgrammar") else find_spec(name),
    )
    with pytest.raises(UnsupportedError, match=r"needs llguidance.*pip install llguidance or 'modelserver-py\[llm\]'"):
        compile_grammar({"regex": "abc"}, json_tokenizer())
    with pytest.raises(UnsupportedError, match="needs xgrammar"):
        compile_grammar({"json": {"type": "null"}}, json_tokenizer(), engine="xgrammar")
    assert is_match(compile_grammar({"choice": ["a"]}, json_tokenizer()), "a")


def test_engines_are_known_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match="'outlines' is none of guidance, xgrammar"):
        compile_grammar({"regex": "abcd"}, json_tokenizer(), engine="outlines")
