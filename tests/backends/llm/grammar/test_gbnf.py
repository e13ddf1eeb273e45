"""GBNF: what it can say, and in which line it is wrong."""

from __future__ import annotations

import pytest
from modelserver_backends.llm.grammar import Grammar, compile_grammar
from support.grammars import is_match, json_tokenizer

from modelserver.errors import InvalidArgumentError

ARITHMETIC = """
# sums of products
root  ::= sum
sum   ::= product (("+" | "-") product)*   # left to right
product ::= value ("*" value)*
value ::= [0-9]+ | "(" sum ")"
"""


def _grammar(text: str) -> Grammar:
    return compile_grammar({"grammar": text}, json_tokenizer())


@pytest.mark.parametrize(
    ("text", "expected"), [("1", True), ("1+2*(3-4)", True), ("((1))", True), ("1+", False), ("(1", False)]
)
def test_arithmetic(text: str, expected: bool) -> None:
    assert is_match(_grammar(ARITHMETIC), text) == expected


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= "a"\n| "b"', ["a", "b"], ["ab"]),
        ('root ::= "a" "b"? [c-e]{2,3}', ["acc", "abcde"], ["abc", "abcccc"]),
        ('root ::= [^"\\n]+ "."', ["xyz."], ['x".', "\n."]),
        (r'root ::= "\"\\\n\t\x41é\U0001F642"', ['"\\\n\tAé🙂'], [""]),
        ("root ::= .{2}", ["é🙂", "\n\n"], ["a"]),
        ('root ::= a-b a_2\na-b ::= "x"\na_2 ::= "y"', ["xy"], ["x"]),
        ('root ::= "a" {2} | ("b" "c"){1,}', ["aa", "bcbc"], ["a", "b"]),
        ("root ::= [-a] [a-] [\\]]", ["-a]", "a-]"], ["b-]"]),
        ('root ::= ("a" | ) "b"', ["ab", "b"], ["a"]),
        ('x ::= "1"\nroot ::= x # comment at the end', ["1"], [""]),
    ],
)
def test_syntax(grammar: str, good: list[str], bad: list[str]) -> None:
    grammar = _grammar(grammar)
    assert [text for text in good if not is_match(grammar, text)] == []
    assert [text for text in bad if is_match(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('x ::= "a"', "no rule 'root'; it has x"),
        ("x # ::=", "a rule"),
        ("# ::=", "it has none"),
        ("root = a", "Expected token"),
        ('root ::= "a', "does not end"),
        ('root ::= "a\nb"', "does not end"),
        ("root ::= [a", "does not end"),
        ('root ::= ("a"', r"'\)' is expected"),
        ('root ::= "a"\nroot ::= "b"', "line 2: .*twice|twice"),
        ('root ::= "a"{3,2}', "not possible"),
        ('root ::= "a"{x}', "is expected"),
        (r'root ::= "\q"', "is not known"),
        (r'root ::= "\ud800"', "names no character"),
        ("root ::= [b-a]", "ends before it begins"),
        ('root ::= "a" )', "a rule"),
        ("root ::= " + "(" * 200, "deep"),
        ("root ::= <x>", "a rule"),
    ],
)
def test_what_is_wrong(grammar: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        _grammar(grammar)


def test_left_recursion() -> None:
    grammar = _grammar('root ::= sum\nsum ::= sum "+" [0-9] | [0-9]')
    assert is_match(grammar, "1+2+3")
    assert not is_match(grammar, "1+")


def test_rules_that_nothing_leads_out_of_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"too intricate|no text matches"):
        _grammar('root ::= "a" root')


JSON = r"""
root ::= value
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x00-\x1f] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


def test_a_grammar_of_json() -> None:
    grammar = _grammar(JSON)
    good = ['{"a": [1, 2.5e-3, {"b": null}], "c": "\\u00e9\\n"}', "[]", '"é"', "-0"]
    bad = ["{", '{"a" 1}', "01", '"\n"', "nul"]
    assert [text for text in good if not is_match(grammar, text)] == []
    assert [text for text in bad if is_match(grammar, text)] == []


LARK = """
start: sum
sum: sum "+" NUMBER | NUMBER
NUMBER: /[0-9]+/
"""


def test_lark() -> None:
    grammar = _grammar(LARK)
    assert is_match(grammar, "1+22")
    assert not is_match(grammar, "1+")
    grammar = _grammar('start: %json {"enum": ["<x>", [1]]}  // <y>')
    assert is_match(grammar, "[1]")
    assert is_match(grammar, '"<x>"')


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("start: <[0]>", "line 1: <tokens> are not supported"),
        ('start: "a"\n  | <s>', "line 2: <tokens> are not supported"),
        ('%llguidance {"no_forcing": true}\nstart: "a"', "line 1: %llguidance is not supported"),
        ('start[max_tokens=3]: "a"', "line 1: attributes"),
        ('start: "a', "grammar: "),
        ("start: missing", "missing"),
        ('root ::= missing "a"', "'root' refers to 'missing', which is not defined"),
    ],
)
def test_what_is_wrong_in_lark(grammar: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        _grammar(grammar)
