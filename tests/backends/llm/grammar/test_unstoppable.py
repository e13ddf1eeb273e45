"""Calls that nobody can stop: whoever waits is told in time, and those that hang are few."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from modelserver_backends.llm.grammar import compile as compiling
from modelserver_backends.llm.grammar.compile import GrammarCompiler
from modelserver_backends.llm.grammar.matcher import ProgramGrammar
from modelserver_backends.llm.grammar.unstoppable import TooManyCallsError, UnstoppableCalls
from support.grammars import json_tokenizer
from support.waiting import PATIENCE_S, until_true

from modelserver.backend import InvalidArgumentError


def test_a_result_and_an_error_are_those_of_the_function() -> None:
    calls: UnstoppableCalls[int] = UnstoppableCalls(1)
    assert calls.run("a", lambda: 1, PATIENCE_S) == 1
    with pytest.raises(ValueError, match="no number"):
        calls.run("a", lambda: int("no number"), PATIENCE_S)
    assert calls.run("b", lambda: 2, PATIENCE_S) == 2


def test_calls_that_hang_are_bounded_and_give_their_place_back() -> None:
    calls: UnstoppableCalls[bool] = UnstoppableCalls(2)
    may_end = threading.Event()
    for key in ("first", "second", "first"):  # who asks for the same again waits for the same call
        with pytest.raises(TimeoutError):
            calls.run(key, may_end.wait, 0.0)
    with pytest.raises(TooManyCallsError):
        calls.run("third", may_end.wait, PATIENCE_S)
    may_end.set()
    until_true(lambda: not any("llm-grammar-library" in each.name for each in threading.enumerate()), "the calls end")
    assert calls.run("third", may_end.wait, PATIENCE_S)


def test_a_library_that_hangs_holds_up_its_own_grammars_only(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()

    class HangingCompiler:
        def __init__(self, _tokenizer: Any) -> None: ...

        def compile(self, _structured_outputs: Any) -> None:
            may_end.wait(PATIENCE_S)

    monkeypatch.setitem(compiling._LIBRARIES, "hanging", HangingCompiler)
    compiler = GrammarCompiler(json_tokenizer())
    try:
        for number in range(compiling._MAX_LIBRARY_CALLS):
            with pytest.raises(InvalidArgumentError, match="takes too long"):
                compiler.compile({"regex": f"a{number}"}, 0.0, "hanging")
        instead = compiler.compile({"regex": "b"}, PATIENCE_S, "hanging")
        assert isinstance(instead, ProgramGrammar), "our own engine does what the library has no room for"
    finally:
        may_end.set()
    until_true(lambda: not any("llm-grammar-library" in each.name for each in threading.enumerate()), "the calls end")
    assert isinstance(compiler.compile({"regex": "a0"}, PATIENCE_S, "hanging"), ProgramGrammar)
