"""GBNF: what it can say, and in which line it is wrong."""

from __future__ import annotations

import pytest
from modelserver_backends.llm.grammar.automaton import Automaton
from modelserver_backends.llm.grammar.ebnf import grammar_rules
from modelserver_backends.llm.grammar.program import Program
from support.grammars import is_match

from modelserver.errors import InvalidArgumentError

ARITHMETIC = """
# sums of products
root  ::= sum
sum   ::= product (("+" | "-") product)*   # left to right
product ::= value ("*" value)*
value ::= [0-9]+ | "(" sum ")"
"""


def _automaton(text: str) -> Automaton:
    return Automaton(Program(grammar_rules(text)))


@pytest.mark.parametrize(
    ("text", "expected"), [("1", True), ("1+2*(3-4)", True), ("((1))", True), ("1+", False), ("(1", False)]
)
def test_arithmetic(text: str, expected: bool) -> None:
    assert is_match(_automaton(ARITHMETIC), text) == expected


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
    automaton = _automaton(grammar)
    assert [text for text in good if not is_match(automaton, text)] == []
    assert [text for text in bad if is_match(automaton, text)] == []


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('x ::= "a"', "no rule 'root'; it has x"),
        ("", "it has none"),
        ("root = a", "line 1: a rule"),
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
        grammar_rules(grammar)


def test_left_recursion_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="'sum' begins with itself"):
        Program(grammar_rules('root ::= sum\nsum ::= sum "+" [0-9] | [0-9]'))
