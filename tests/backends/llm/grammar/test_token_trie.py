"""The mask of all tokens says of each what walking through its bytes says."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from modelserver_backends.llm.grammar.automaton import DEAD, Automaton
from modelserver_backends.llm.grammar.json_schema import any_object_rules, schema_rules
from modelserver_backends.llm.grammar.program import Program
from modelserver_backends.llm.grammar.token_trie import TokenTrie
from support.grammars import json_tokenizer


def _walk(automaton: Automaton, number: int, token: bytes) -> bool:
    for byte in token:
        number = automaton.next(number, byte)
    return bool(token) and number != DEAD


@given(
    vocabulary=st.lists(st.text(alphabet='{}[]",: a1é\n', max_size=6).map(str.encode), max_size=40),
    text=st.text(alphabet='{}[]",: a1é', max_size=8),
)
@settings(max_examples=150)
def test_random_vocabularies(vocabulary: list[bytes], text: str) -> None:
    trie, automaton = TokenTrie([*vocabulary, b""]), Automaton(Program(schema_rules(True)))
    number = automaton.start
    for byte in text.encode():
        number = automaton.next(number, byte)
    expected = [_walk(automaton, number, token) for token in trie.vocabulary]
    assert trie.allowed(automaton, number).tolist() == expected


def test_a_real_vocabulary() -> None:
    tokenizer = json_tokenizer()
    trie = TokenTrie(tokenizer.visible_bytes)
    assert trie.is_byte_complete
    automaton = Automaton(Program(any_object_rules()))
    for text in ("", "{", '{"', '{"a', '{"a":', '{"a":1', '{"a":[{"é', '{"a":{}', '{"a":{}}'):
        number = automaton.start
        for byte in text.encode():
            number = automaton.next(number, byte)
        expected = [_walk(automaton, number, token) for token in trie.vocabulary]
        assert trie.allowed(automaton, number).tolist() == expected
        assert any(expected) == (text != '{"a":{}}')


def test_a_vocabulary_without_tokens() -> None:
    trie = TokenTrie([b"", b""])
    assert not trie.is_byte_complete
    automaton = Automaton(Program(any_object_rules()))
    assert trie.allowed(automaton, automaton.start).tolist() == [False, False]
