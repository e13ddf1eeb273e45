"""Patterns match what Python's `re` says they match, and what cannot be a grammar is refused by name."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from modelserver_backends.llm.grammar import Grammar, compile_grammar
from support.grammars import is_match, json_tokenizer

from modelserver.errors import InvalidArgumentError

_ATOMS = st.sampled_from(
    ["a", "b", "é", "[ab]", "[^a]", ".", r"\d", r"\.", r"[b-c\-]", "(?:ab)", "(a|bé)", "🙂", r"\x61", r"[^\s]"]
)
_COUNTS = st.sampled_from(["", "*", "+", "?", "{2}", "{1,2}", "{0,}", "+?", "*?"])
_PATTERNS = st.lists(st.tuples(_ATOMS, _COUNTS).map("".join), min_size=1, max_size=4).map("".join)
_ALTERNATIVES = st.lists(_PATTERNS, min_size=1, max_size=3).map("|".join)
_TEXTS = st.text(alphabet="abcé🙂.1-", max_size=6)


def _grammar(pattern: str) -> Grammar:
    return compile_grammar({"regex": pattern}, json_tokenizer())


def _is_match_in_json(grammar: Grammar, text: str) -> bool:
    return is_match(grammar, json.dumps(text, ensure_ascii=False))


@given(_ALTERNATIVES, st.lists(_TEXTS, min_size=5, max_size=20))
@settings(max_examples=150)
def test_a_whole_text(pattern: str, texts: list[str]) -> None:
    grammar = _grammar(pattern)
    for text in texts:
        assert is_match(grammar, text) == (re.fullmatch(pattern, text) is not None), text


@given(_PATTERNS, st.sampled_from(["", "^"]), st.sampled_from(["", "$"]), st.lists(_TEXTS, min_size=5, max_size=20))
@settings(max_examples=100)
@example("a", "^", "", ["ab", "ba", "a"])
def test_a_pattern_in_a_text(pattern: str, start: str, end: str, texts: list[str]) -> None:
    pattern = start + pattern + end
    grammar = compile_grammar({"json": {"type": "string", "pattern": pattern}}, json_tokenizer())
    for text in texts:
        assert _is_match_in_json(grammar, text) == (re.search(pattern, text) is not None), text


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"[^\s]", "aé", " \u00a0\x1f"),
        (r"[^\S]", " \t", "a\u00a0"),
        (r"[^\d]", "a", "1"),
        (r"[^\D]", "1", "aé"),
        (r"[^\W]", "a_", "-é"),
        (r"[^\w\s]", "-", "a \u3000"),
        (r"[\W\d]", "-1", "aé"),
        (r"\W", "-", "aé"),
        (r"[[&&a]", "[&a", "b"),
        (r"[a~~-]", "a~-", "b"),
        (r"[\b]", "\b", "b"),
    ],
)
def test_classes(pattern: str, good: str, bad: str) -> None:
    """What engines disagree on is on neither side."""
    grammar = _grammar(pattern)
    assert [character for character in good + bad if is_match(grammar, character)] == list(good)


def test_all_characters_leave_none() -> None:
    with pytest.raises(InvalidArgumentError, match="no text matches"):
        _grammar(r"[^\s\S]")


def test_errors_show_little_of_long_patterns() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        _grammar("(" * 5000)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        (r"\w+", ["aZ_09"], ["", "a-b", "é"]),
        (r"\W", [".", " "], ["a", "_"]),
        (r"\D\S", ["ab", "-é"], ["1b", "a ", "a\u2003"]),
        (r"[\w.-]+@[\w-]+\.com", ["a.b-c@d.com"], ["@d.com"]),
        (r"(?P<year>\d{4})-(?P<month>0[1-9]|1[0-2])", ["2024-12"], ["2024-13", "24-1"]),
        (r"^abc$", ["abc"], ["xabc", "abcx"]),
        (r"^abc\Z", ["abc"], ["xabc", "abcx"]),
        (r"^a|b$", ["a", "b"], ["ax", "xb"]),
        (r"[]a]+", ["]a]"], ["b"]),
        (r"[a\]b^-]+", ["]^-"], ["c"]),
        (r"[^\n]", ["a"], ["\n"]),
        (r"\t\n\r\f\v\0\x41é\U0001F642", ["\t\n\r\f\v\0Aé🙂"], [""]),
        (r"a{,2}", ["", "aa"], ["aaa"]),
        (r"\{\}\$\^\|\/", ["{}$^|/"], ["{"]),
        (r"(a|)b", ["ab", "b"], ["a"]),
        (r"", [""], ["a"]),
        (r"()", [""], ["a"]),
        (r"\p{Lu}(?i:b)", ["ÉB", "Ab"], ["ab"]),
    ],
)
def test_syntax(pattern: str, matching: list[str], other: list[str]) -> None:
    grammar = _grammar(pattern)
    assert [text for text in matching if not is_match(grammar, text)] == []
    assert [text for text in other if is_match(grammar, text)] == []


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        (r"a\b", "word boundaries are not supported"),
        (r"(a)\1", "backreferences are not supported"),
        (r"(?=a)", "look-around"),
        (r"(?!a)", "look-around"),
        (r"(?<=a)", "look-around"),
        (r"a++", "possessive"),
        (r"*a", "missing expression"),
        (r"a{2,1}", "invalid repetition count"),
        (r"a{x}", "valid decimal"),
        (r"a{", "unclosed"),
        (r"(a", "unclosed group"),
        (r"a)", "unopened group"),
        (r"[a", "does not end"),
        (r"a\\"[:-1], "a backslash stands at the end"),
        (r"[b-a]", "invalid character class range"),
        (r"a^b", "elsewhere than at the beginning"),
        (r"a$b", "elsewhere than at the end"),
        (r"\ud800", "not a Unicode scalar value"),
        (r"\xg1", "invalid hexadecimal"),
        (r"a{200000}", "200000"),
        ("(" * 2000 + "a" + ")" * 2000, "nest"),
    ],
)
def test_what_is_refused(pattern: str, what: str) -> None:
    with pytest.raises(InvalidArgumentError, match=what):
        _grammar(pattern)


def test_inside_a_json_string_characters_are_escaped_where_they_must_be() -> None:
    grammar = compile_grammar({"json": {"type": "string", "pattern": r'^a"\\\t\n.$'}}, json_tokenizer())
    assert is_match(grammar, r'"a\"\\\t\né"')
    assert not is_match(grammar, r'"a\"\\\t\n\né"')
    assert not is_match(grammar, '"a\\"\\\\\t\\né"')
