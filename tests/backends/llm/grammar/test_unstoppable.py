"""Calls that nobody can stop: whoever waits is told in time, and those that hang are few."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from modelserver_backends.llm.grammar import compile as compiling
from modelserver_backends.llm.grammar.compile import GrammarCompiler, TooManyCallsError, UnstoppableCalls
from support.grammars import json_tokenizer
from support.waiting import PATIENCE_S, until_true

from modelserver.backend import CancelledError, InvalidArgumentError, UnavailableError


def test_a_result_and_an_error_are_those_of_the_function() -> None:
    calls: UnstoppableCalls[int] = UnstoppableCalls(1)
    assert calls.run("a", lambda _: 1, PATIENCE_S) == 1
    with pytest.raises(ValueError, match="no number"):
        calls.run("a", lambda _: int("no number"), PATIENCE_S)
    assert calls.run("b", lambda _: 2, PATIENCE_S) == 2


def test_calls_that_hang_are_bounded_and_give_their_place_back() -> None:
    calls: UnstoppableCalls[bool] = UnstoppableCalls(2)
    may_end = threading.Event()

    def hang(_: threading.Event) -> bool:
        return may_end.wait(PATIENCE_S)

    for key in ("first", "second", "first"):  # who asks for the same again waits for the same call
        with pytest.raises(TimeoutError):
            calls.run(key, hang, 0.0)
    with pytest.raises(TooManyCallsError):
        calls.run("third", hang, PATIENCE_S)
    may_end.set()
    until_true(lambda: not any("llm-grammar-library" in each.name for each in threading.enumerate()), "the calls end")
    assert calls.run("third", hang, PATIENCE_S)


def test_a_call_that_is_no_longer_wanted_is_told_so_and_others_may_still_have_it() -> None:
    calls: UnstoppableCalls[str] = UnstoppableCalls(1)
    is_begun, may_end, num_begun = threading.Event(), threading.Event(), 0

    def work(is_abandoned: threading.Event) -> str:
        nonlocal num_begun
        num_begun += 1
        is_begun.set()
        if num_begun > 1:
            return "done"
        assert is_abandoned.wait(PATIENCE_S)
        assert may_end.wait(PATIENCE_S)
        raise CancelledError("not wanted")

    is_cancelled = threading.Event()
    threading.Thread(target=lambda: (is_begun.wait(), is_cancelled.set())).start()
    with pytest.raises(CancelledError, match="was cancelled"):
        calls.run("a", work, PATIENCE_S, is_cancelled)
    threading.Timer(0.05, may_end.set).start()
    assert calls.run("a", work, PATIENCE_S) == "done"


def test_a_library_that_hangs_holds_up_its_own_grammars_only(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()

    class HangingCompiler:
        LIBRARY = "llguidance"

        def __init__(self, _tokenizer: Any) -> None: ...

        def compile(self, _asked: Any, _pace: Any) -> None:
            may_end.wait(PATIENCE_S)

    monkeypatch.setitem(compiling.ENGINES, "hanging", HangingCompiler)
    compiler = GrammarCompiler(json_tokenizer())
    try:
        for number in range(compiling._MAX_LIBRARY_CALLS):
            with pytest.raises(InvalidArgumentError, match="takes too long"):
                compiler.compile({"regex": f"a{number}"}, 0.01, "hanging")
        with pytest.raises(UnavailableError, match="8 grammars are being compiled"):
            compiler.compile({"regex": "b"}, PATIENCE_S, "guidance")
        assert compiler.compile({"choice": ["b"]}, PATIENCE_S, "hanging")
    finally:
        may_end.set()
    until_true(lambda: not any("llm-grammar-library" in each.name for each in threading.enumerate()), "the calls end")
    assert compiler.compile({"regex": "a0"}, PATIENCE_S, "hanging"), "llguidance gets what another engine leaves"
