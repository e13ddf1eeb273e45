"""Grammars that take their time: the engine goes on meanwhile, and what is wrong with one is told in the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import modelserver_backends.llm.grammar as grammar_package
import modelserver_backends.llm.grammar_queue as grammar_queue
import pytest
from modelserver_backends.llm import LLM
from modelserver_backends.llm.engine import Engine, GenerationRequest, SequenceOutput
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.sampling_params import SamplingParams
from modelserver_backends.llm.sequence import FinishReason
from modelserver_backends.llm.text.tokenizer import Tokenizer
from support.checkpoints import tokenizer_of
from support.fake_runner import EOS, ScriptedRunner
from support.llm_integrity import check_integrity
from support.tiny_checkpoints import VOCAB_SIZE, write_tokenizer
from support.waiting import until_true

from modelserver.backend import InternalError, InvalidArgumentError


class SlowCompiler:
    """Compiles when it `may`; `error` is raised instead. `cancelled` has what is set when a grammar is given up."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.error: Exception | None = None
        self.compile = grammar_package.compile_grammar
        self.cancelled: list[threading.Event] = []

    def __call__(self, structured_outputs: Any, tokenizer: Tokenizer, **options: Any) -> Any:
        self.cancelled.append(options["is_cancelled"])
        assert self.may.wait(20)
        if self.error is not None:
            raise self.error
        return self.compile(structured_outputs, tokenizer)


@pytest.fixture
def slow(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> SlowCompiler:
    compiler = SlowCompiler()
    monkeypatch.setattr(grammar_package, "compile_grammar", compiler)
    monkeypatch.setattr(grammar_queue, "PATIENCE_S", 0.0)
    return compiler


@pytest.fixture
def engine(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(grammar_queue, "PATIENCE_S", 20.0)  # on a machine that is busy, too
    write_tokenizer(tmp_path)
    tokenizer = tokenizer_of(tmp_path)
    script = tokenizer.encode("yes", add_special_tokens=False)
    engine = Engine(options=EngineOptions(), runner=ScriptedRunner(script, vocab_size=VOCAB_SIZE), tokenizer=tokenizer)
    yield engine
    check_integrity(engine)
    assert engine.statistics.kv_cache_usage == 0
    engine.close()


def request(**params: Any) -> GenerationRequest:
    return GenerationRequest([5, 6, 7], SamplingParams(**params))


def run(engine: Engine) -> list[SequenceOutput]:
    outputs: list[SequenceOutput] = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def test_a_quick_grammar_is_there_at_once(engine: Engine) -> None:
    engine.add(request(structured_outputs={"choice": ["yes", "no"]}))
    assert engine.statistics.num_waiting == 1
    outputs = run(engine)
    assert "".join(output.text for output in outputs) == "yes"
    assert outputs[-1].finish_reason is FinishReason.STOP


def test_a_sequence_ends_with_its_grammar_even_if_the_end_of_sequence_is_ignored(engine: Engine) -> None:
    engine.add(request(structured_outputs={"choice": ["yes"]}, ignore_eos=True, max_tokens=9))
    outputs = run(engine)
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert EOS not in outputs[-1].token_ids


def test_a_bad_grammar_is_refused_at_once(engine: Engine) -> None:
    with pytest.raises(InvalidArgumentError):
        engine.add(request(structured_outputs={"regex": "("}))
    assert not engine.has_work


def test_others_go_on_while_a_grammar_is_compiled(engine: Engine, slow: SlowCompiler) -> None:
    waits, goes_on = request(structured_outputs={"choice": ["yes"]}), request()
    engine.add(waits)
    engine.add(goes_on)
    outputs: list[SequenceOutput] = []
    while engine.is_running(goes_on):
        outputs += engine.step()
    assert {output.request for output in outputs} == {goes_on}
    assert engine.is_running(waits)
    assert engine.has_work
    assert engine.step() == []
    slow.may.set()
    late = run(engine)
    assert {output.request for output in late} == {waits}
    assert "".join(output.text for output in late) == "yes"


@pytest.mark.parametrize(
    ("error", "expected"),
    [(InvalidArgumentError("too large"), InvalidArgumentError), (RuntimeError("a bug"), InternalError)],
)
def test_what_is_refused_late_has_an_error_for_its_only_output(
    engine: Engine, slow: SlowCompiler, error: Exception, expected: type[Exception]
) -> None:
    slow.error = error
    asked = request(structured_outputs={"choice": ["yes"]}, n=2)
    engine.add(asked)
    slow.may.set()
    (output,) = run(engine)
    assert output.request is asked
    assert isinstance(output.error, expected)
    assert str(error) in str(output.error)


def test_the_python_api_raises_it(engine: Engine, slow: SlowCompiler) -> None:
    slow.error = InvalidArgumentError("too large")
    threading.Timer(0.05, slow.may.set).start()
    with pytest.raises(InvalidArgumentError, match="too large"):
        LLM.over(engine).generate([[5, 6]], SamplingParams(structured_outputs={"choice": ["yes"]}))
    assert not engine.has_work


@pytest.mark.parametrize("is_reset", [False, True])
def test_who_leaves_while_the_grammar_is_compiled_is_forgotten(
    engine: Engine, slow: SlowCompiler, is_reset: bool
) -> None:
    asked = request(structured_outputs={"choice": ["yes"]})
    engine.add(asked)
    if is_reset:
        engine.reset()
    else:
        engine.abort(asked)
    assert not engine.has_work
    until_true(lambda: all(each.is_set() for each in slow.cancelled), "the compiler is told")
    slow.may.set()
    assert run(engine) == []


def test_close_ends_the_threads(engine: Engine, slow: SlowCompiler) -> None:
    engine.add(request(structured_outputs={"choice": ["yes"]}))
    slow.may.set()
    engine.close()
    until_true(lambda: not any("llm-grammar" in thread.name for thread in threading.enumerate()), "the threads end")
