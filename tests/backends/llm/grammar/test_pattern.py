"""Patterns match what Python's `re` says they match, and what cannot be an automaton is refused by name."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from modelserver_backends.llm.grammar.character_sets import written_in_json, written_plainly
from modelserver_backends.llm.grammar.expression import length_bounds
from modelserver_backends.llm.grammar.pattern import parse_pattern, parse_search
from support.grammars import automaton_of, is_match

from modelserver.errors import InvalidArgumentError

_ATOMS = st.sampled_from(
    ["a", "b", "é", "[ab]", "[^a]", ".", r"\d", r"\.", r"[b-c\-]", "(?:ab)", "(a|bé)", "🙂", r"\x61", r"[^\s]"]
)
_COUNTS = st.sampled_from(["", "*", "+", "?", "{2}", "{1,2}", "{0,}", "+?", "*?"])
_PATTERNS = st.lists(st.tuples(_ATOMS, _COUNTS).map("".join), min_size=1, max_size=4).map("".join)
_ALTERNATIVES = st.lists(_PATTERNS, min_size=1, max_size=3).map("|".join)
_TEXTS = st.text(alphabet="abcé🙂.1-", max_size=6)


@given(_ALTERNATIVES, st.lists(_TEXTS, min_size=5, max_size=20))
@settings(max_examples=150)
def test_a_whole_text(pattern: str, texts: list[str]) -> None:
    automaton = automaton_of(parse_pattern(pattern))
    for text in texts:
        assert is_match(automaton, text) == (re.fullmatch(pattern, text) is not None), text


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"[^\s]", "aé", " \u00a0\x1f"),
        (r"[^\S]", " \t", "a\u00a0"),
        (r"[^\d]", "a", "1"),
        (r"[^\D]", "1", "aé"),
        (r"[^\W]", "a_", "-é"),
        (r"[^\w\s]", "-", "a \u3000"),
    ],
)
def test_classes_in_negated_classes(pattern: str, good: str, bad: str) -> None:
    """What engines disagree on is on neither side."""
    automaton = automaton_of(parse_pattern(pattern))
    assert [character for character in good + bad if is_match(automaton, character)] == list(good)


def test_all_characters_leave_none() -> None:
    with pytest.raises(InvalidArgumentError, match="no text matches"):
        automaton_of(parse_pattern(r"[^\s\S]"))


def test_errors_show_little_of_long_patterns() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_pattern("(" * 5000)
    assert len(str(caught.value)) < 400


@given(_PATTERNS, st.sampled_from(["", "^"]), st.sampled_from(["", "$"]), st.lists(_TEXTS, min_size=5, max_size=20))
@settings(max_examples=100)
@example("a", "^", "", ["ab", "ba", "a"])
def test_a_pattern_in_a_text(pattern: str, start: str, end: str, texts: list[str]) -> None:
    pattern = start + pattern + end
    automaton = automaton_of(parse_search(pattern, written_plainly))
    for text in texts:
        assert is_match(automaton, text) == (re.search(pattern, text) is not None), text


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        (r"\w+", ["aZ_09"], ["", "a-b", "é"]),
        (r"\W", [".", " "], ["a", "_"]),
        (r"\D\S", ["ab", "-é"], ["1b", "a ", "a\u2003"]),
        (r"[\w.-]+@[\w-]+\.com", ["a.b-c@d.com"], ["@d.com"]),
        (r"(?P<year>\d{4})-(?P<month>0[1-9]|1[0-2])", ["2024-12"], ["2024-13", "24-1"]),
        (r"^abc$", ["abc"], ["xabc", "abcx"]),
        (r"[]a]+", ["]a]"], ["b"]),
        (r"[a\]b^-]+", ["]^-"], ["c"]),
        (r"[^\n]", ["a"], ["\n"]),
        (r"\t\n\r\f\v\0\x41é\U0001F642", ["\t\n\r\f\v\0Aé🙂"], [""]),
        (r"a{,2}", ["", "aa"], ["aaa"]),
        (r"\{\}\$\^\|\/", ["{}$^|/"], ["{"]),
        (r"(a|)b", ["ab", "b"], ["a"]),
        (r"", [""], ["a"]),
        (r"()", [""], ["a"]),
    ],
)
def test_syntax(pattern: str, matching: list[str], other: list[str]) -> None:
    automaton = automaton_of(parse_pattern(pattern))
    assert [text for text in matching if not is_match(automaton, text)] == []
    assert [text for text in other if is_match(automaton, text)] == []


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        (r"a\b", r"escape \\b"),
        (r"(a)\1", r"escape \\1"),
        (r"(?=a)", "looks around"),
        (r"(?!a)", "looks around"),
        (r"(?<=a)", "looks around"),
        (r"(?i)a", "sets flags"),
        (r"a++", "possessive"),
        (r"a**", "a repetition of a"),
        (r"*a", "repeats nothing"),
        (r"a{2,1}", "2 to 1"),
        (r"a{x}", "begins no"),
        (r"a{", "begins no"),
        (r"(a", "without"),
        (r"a)", "without"),
        (r"[a", "an end where more"),
        (r"a\\"[:-1], "an end where more"),
        (r"[b-a]", "range of characters"),
        (r"a^b", "not at the start"),
        (r"a$b", "not at the end"),
        (r"^a|b", "anchors beside"),
        (r"a|b$", "anchors beside"),
        (r"\p{L}", r"escape \\p"),
        (r"\ud800", "names no character"),
        (r"\xg1", "names no character"),
        (r"a{200000}", "200000"),
        ("(" * 200 + "a" + ")" * 200, "deep"),
    ],
)
def test_what_is_refused(pattern: str, what: str) -> None:
    with pytest.raises(InvalidArgumentError, match=what):
        parse_pattern(pattern)


def test_inside_a_json_string_characters_are_escaped_where_they_must_be() -> None:
    automaton = automaton_of(parse_search(r'^a"\\\x01\n.$', written_in_json))
    assert is_match(automaton, r"a\"\\\u0001\né")
    assert not is_match(automaton, r"a\"\\\u0001\n\né")
    assert not is_match(automaton, 'a"\\\x01\né')


@given(_ALTERNATIVES)
@settings(max_examples=60)
def test_length_bounds(pattern: str) -> None:
    least, most = length_bounds(parse_pattern(pattern))
    for text in ("", "a", "ab", "abé", "aabb", "bé1a.", "ababab"):
        if re.fullmatch(pattern, text):
            assert least <= len(text)
            assert most is None or len(text) <= most
