"""The automaton says of every text what trying everything says, also of rules that call each other."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from modelserver_backends.llm.grammar.automaton import DEAD, Automaton
from modelserver_backends.llm.grammar.expression import (
    Characters,
    Expression,
    Ref,
    Repeat,
    choice,
    concat,
    literal,
    one_of,
)
from modelserver_backends.llm.grammar.pace import Pace
from modelserver_backends.llm.grammar.program import ROOT, CompileLimits, Program
from support.grammars import automaton_of, ends, is_match

from modelserver.errors import InvalidArgumentError

_LEAVES = st.one_of(
    st.sampled_from([literal("a"), literal("b"), literal("ab"), literal(""), Characters(((0x61, 0x62),))]),
    st.sampled_from([concat(literal("a"), Ref(rule)) for rule in (ROOT, "one", "two")]),
    st.sampled_from([Ref("two")]),
)
_EXPRESSIONS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: concat(*parts)),
        st.lists(inner, min_size=1, max_size=3).map(choice),
        st.builds(
            lambda part, least, more: Repeat(part, least, least + more), inner, st.integers(0, 2), st.integers(0, 2)
        ),
        st.builds(lambda part, least: Repeat(part, least, None), inner, st.integers(0, 1)),
    ),
    max_leaves=6,
)
_TEXTS = ["".join(letters) for length in range(6) for letters in itertools.product("ab", repeat=length)]


def _automaton(rules: dict[str, Expression]) -> tuple[Automaton | None, str]:
    try:
        return Automaton(Program(rules)), ""
    except InvalidArgumentError as error:
        return None, error.message


@given(root=_EXPRESSIONS, one=_EXPRESSIONS, two=st.sampled_from([literal("b"), concat(literal("b"), Ref("one"))]))
@settings(max_examples=150)
def test_rules_that_call_each_other(root: Expression, one: Expression, two: Expression) -> None:
    rules = {ROOT: root, "one": one, "two": two}
    matching = {text for text in _TEXTS if len(text) in ends(root, text.encode(), 0, rules)}
    automaton, refusal = _automaton(rules)
    if automaton is None:
        assert "no text matches" in refusal
        assert not matching
        return
    assert {text for text in _TEXTS if is_match(automaton, text)} == matching
    beginnings = {text[:length] for text in matching for length in range(len(text) + 1)}
    for text in beginnings:  # what begins a match lives, and the other way round: dead ends are taken away
        number = automaton.start
        for byte in text.encode():
            number = automaton.next(number, byte)
        assert number != DEAD


def test_brackets_of_any_depth() -> None:
    automaton = automaton_of(Repeat(concat(literal("("), Ref(ROOT), literal(")")), 0, None))
    for depth in (1, 10, 500):
        assert is_match(automaton, "(" * depth + ")" * depth)
        assert not is_match(automaton, "(" * depth + ")" * (depth + 1))
    assert is_match(automaton, "(()())()")


def test_ambiguity_does_not_multiply() -> None:
    """Two ways into the same rule at every level: the stacks are shared, not counted."""
    pair = choice([concat(literal("["), Ref("x"), literal("]")), concat(literal("["), Ref("y"), literal("]"))])
    rules = {"x": choice([pair, literal("a")]), "y": choice([pair, literal("a")])}
    automaton = automaton_of(pair, **rules)
    assert is_match(automaton, "[" * 60 + "a" + "]" * 60)
    assert max(len(one.places) for one in automaton.configurations) < 20


def test_a_call_at_the_end_of_a_rule_takes_no_stack() -> None:
    automaton = automaton_of(choice([literal("a"), concat(literal("a,"), Ref(ROOT))]))
    assert is_match(automaton, "a," * 1000 + "a")
    assert len(automaton.configurations) < 10


def test_configurations_move_to_a_new_automaton() -> None:
    program = Program({ROOT: choice([literal("x"), concat(literal("("), Ref(ROOT), literal(")"))])})
    old, new = Automaton(program), Automaton(program)
    number = old.start
    for byte in b"((((x))":
        number = old.next(number, byte)
    moved = new.adopt(old, number)
    for byte in b"))":
        assert moved != DEAD
        moved = new.next(moved, byte)
    assert new.configurations[moved].is_complete
    assert new.next(moved, ord(")")) == DEAD


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({ROOT: Ref("missing")}, "'missing' is used and not defined"),
        ({ROOT: Ref(ROOT)}, "no text matches"),
        ({ROOT: choice([])}, "no text matches"),
        ({ROOT: concat(literal("a"), Ref(ROOT))}, "no text matches"),
        ({ROOT: choice([literal("a"), concat(Ref(ROOT), literal("b"))])}, "begins with itself"),
        (
            {
                ROOT: choice([literal("a"), concat(Repeat(literal("c"), 0, 1), Ref("x"))]),
                "x": choice([Ref(ROOT), literal("y")]),
            },
            "begins with itself",
        ),
        ({ROOT: Repeat(literal("abcd"), 0, 6000)}, "more than 5000 states"),
        ({ROOT: Repeat(literal("a"), 10**12, None)}, "more than 5000 states"),
        ({ROOT: concat(*[Repeat(literal("a"), 0, 1)] * 2000)}, "leaves too much out"),
        ({ROOT: Repeat(Ref("x"), 0, 2000), "x": Repeat(literal("a"), 0, 1)}, "leaves too much out"),
    ],
)
def test_what_is_refused(rules: dict[str, Expression], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Program(rules, CompileLimits(num_states=5000, num_free_steps=20_000))


def test_compiling_ends_at_its_deadline() -> None:
    with pytest.raises(InvalidArgumentError, match="takes too long"), Pace(0.0) as pace:
        Program({ROOT: literal("a")}, pace=pace)


def test_repeated_parts_are_made_once() -> None:
    part = Repeat(Repeat(literal("abc"), 0, 1000), 0, 1000)
    program = Program({ROOT: part})
    assert len(program.states) < 3000
    automaton = Automaton(program)
    assert is_match(automaton, "abc" * 100)
    assert not is_match(automaton, "abc" * 10 + "ab")


def test_what_may_be_empty_is_repeated_without_it() -> None:
    automaton = Automaton(
        Program({ROOT: concat(Repeat(Repeat(Characters(((0x61, 0x62),)), 0, 1), 3, 5000), literal("c"))})
    )
    assert is_match(automaton, "c")
    assert is_match(automaton, "ab" * 100 + "c")
    assert max(len(configuration.places) for configuration in automaton.configurations) < 10
    assert not is_match(automaton_of(Repeat(choice([literal(""), literal("a")]), 0, 3)), "aaaa")


def test_a_text_of_many_readings_goes_on_with_some() -> None:
    """Each `a` may belong to any of the copies."""
    part = concat(Repeat(Characters(((0x61, 0x62),)), 0, None), literal("a"))
    automaton = Automaton(Program({ROOT: concat(Repeat(part, 1100, 1100), literal("c"))}))
    number = automaton.start
    for _ in range(400):
        number = automaton.next(number, ord("a"))
    assert len(automaton.configurations[number].places) <= 1024
    assert automaton.next(number, ord("b")) != DEAD
    assert automaton.next(number, ord("c")) == DEAD


def test_many_texts_share_their_beginnings() -> None:
    texts = ["", "a", "ab", "abc", "b", "é", "è", *("word" + "x" * length for length in range(100))]
    automaton = automaton_of(one_of(text.encode() for text in texts))
    assert [text for text in texts if not is_match(automaton, text)] == []
    assert [text for text in ["ac", "abcd", "wor", "ê", "word" + "x" * 100] if is_match(automaton, text)] == []
    after = automaton.next(automaton.start, ord("w"))
    assert len(automaton.configurations[after].places) == 1


def test_what_cannot_be_ended_is_not_begun() -> None:
    automaton = automaton_of(choice([literal("ab"), concat(literal("ac"), choice([]))]), unused=Ref("unused"))
    after = automaton.next(automaton.start, ord("a"))
    assert automaton.next(after, ord("c")) == DEAD
    assert automaton.next(after, ord("b")) != DEAD
