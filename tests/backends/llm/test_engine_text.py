"""What text comes of tokens: stop strings, hidden tokens, half characters; over a runner that says what it is told."""

from __future__ import annotations

from typing import Any

import pytest
from modelserver_backends.llm.engine import Engine, GenerationRequest
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.sampling_params import SamplingParams
from modelserver_backends.llm.sequence import FinishReason
from modelserver_backends.llm.text.tokenizer import Tokenizer
from support.checkpoints import tokenizer_of
from support.fake_runner import EOS, Collected, ScriptedRunner, collect
from support.llm_integrity import check_integrity
from support.tiny_checkpoints import VOCAB_SIZE, write_tokenizer

TEXT = "the model of a server waits äöü € for hello world"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return tokenizer_of(directory)


def answer(
    tokenizer: Tokenizer,
    script: str | list[int],
    *,
    is_streamed: bool = True,
    is_asynchronous: bool = False,
    **params: Any,
) -> Collected:
    tokens = tokenizer.encode(script, add_special_tokens=False) if isinstance(script, str) else script
    runner = ScriptedRunner(tokens, num_blocks=64, vocab_size=VOCAB_SIZE, is_asynchronous=is_asynchronous)
    engine = Engine(options=EngineOptions(), runner=runner, tokenizer=tokenizer)
    request = GenerationRequest(
        tokenizer.encode("a prompt"), SamplingParams(**{"max_tokens": 100, **params}), is_streamed=is_streamed
    )
    engine.add(request)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    check_integrity(engine)
    assert engine.statistics.kv_cache_usage == 0
    return collect(outputs)[request, 0]


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_all_deltas_are_the_text(tokenizer: Tokenizer, is_streamed: bool, is_asynchronous: bool) -> None:
    found = answer(tokenizer, TEXT, is_streamed=is_streamed, is_asynchronous=is_asynchronous)
    assert found.text == TEXT
    assert found.last.finish_reason is FinishReason.STOP
    assert found.token_ids[-1] == EOS
    assert not any("\ufffd" in output.text for output in found.outputs)
    assert (len(found.outputs) == 1) != is_streamed


def test_half_a_character_at_the_end_is_told(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("so €", add_special_tokens=False)
    found = answer(tokenizer, [*tokens[:-1], EOS])
    assert found.text == "so \ufffd"


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize(
    ("stop", "is_included", "text", "reason"),
    [
        ("server", False, "the model of a ", "server"),
        ("server", True, "the model of a server", "server"),
        ("rver wai", False, "the model of a se", "rver wai"),
        (["nothing", "ö", "waits"], False, "the model of a server ", "waits"),
        ("ö", False, "the model of a server waits ä", "ö"),
        ("€", True, "the model of a server waits äöü €", "€"),
        ("t", False, "", "t"),
        ("never", False, TEXT, None),
    ],
)
def test_stop_strings(
    tokenizer: Tokenizer, stop: Any, is_included: bool, text: str, reason: str | None, is_streamed: bool
) -> None:
    found = answer(tokenizer, TEXT, is_streamed=is_streamed, stop=stop, include_stop_str_in_output=is_included)
    assert (found.text, found.last.finish_reason, found.last.stop_reason) == (text, FinishReason.STOP, reason)
    assert tokenizer.decode(found.token_ids).startswith(text.rstrip("\ufffd"))


def test_a_stop_string_counts_for_more_than_the_length(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("the model", add_special_tokens=False)
    found = answer(tokenizer, "the model of", stop="model", max_tokens=len(tokens))
    assert (found.text, found.last.finish_reason) == ("the ", FinishReason.STOP)


def test_what_was_held_back_comes_with_the_length(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("the model", add_special_tokens=False)
    found = answer(tokenizer, "the model of", stop="model or", max_tokens=len(tokens))
    assert (found.text, found.last.finish_reason) == ("the model", FinishReason.LENGTH)


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    first = tokenizer.encode("the model of the", add_special_tokens=False)
    found = answer(tokenizer, "the model of the model", stop="model", min_tokens=len(first))
    assert found.text == "the model of the "


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize(("is_included", "text"), [(False, "the model"), (True, "the model of")])
def test_the_text_of_a_stop_token(tokenizer: Tokenizer, is_included: bool, text: str, is_streamed: bool) -> None:
    tokens = tokenizer.encode("the model of a server", add_special_tokens=False)
    of = tokenizer.encode("the model of", add_special_tokens=False)[-1]
    found = answer(
        tokenizer, tokens, is_streamed=is_streamed, stop_token_ids=[of], include_stop_str_in_output=is_included
    )
    assert (found.text, found.last.stop_reason, found.token_ids[-1]) == (text, of, of)


@pytest.mark.parametrize(("is_included", "text"), [(False, "hello"), (True, "hello<|eos|>")])
def test_the_end_of_sequence_is_no_text(tokenizer: Tokenizer, is_included: bool, text: str) -> None:
    found = answer(tokenizer, "hello", skip_special_tokens=False, include_stop_str_in_output=is_included)
    assert found.text == text


def test_special_tokens_are_hidden_or_shown(tokenizer: Tokenizer) -> None:
    script = tokenizer.encode("hello<|im_end|> world", add_special_tokens=False)
    assert answer(tokenizer, script).text == "hello world"
    assert answer(tokenizer, script, skip_special_tokens=False).text == "hello<|im_end|> world"
