"""A language model as the server drives it, without a server."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from modelserver_backends.llm.backend import LlmBackend
from modelserver_backends.llm.instance import LlmInstance
from modelserver_backends.llm.text.tokenizer import Tokenizer
from support.contexts import context_of, loaded, request_of
from support.llm_integrity import check_integrity
from support.llm_models import arrays, write_llm
from support.recorder import Recorder

from modelserver.backend import (
    DeviceKind,
    InferRequest,
    InstanceGroupKind,
    ModelConfig,
    ModelInstanceGroup,
    Placement,
    ResponseSender,
)
from modelserver.errors import InvalidArgumentError
from modelserver.execution.model import Model

PROMPT = "the model of a server answers"
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path]) -> LlmBackend:
    root = tmp_path_factory.mktemp("llm")
    write_llm(root, "m", checkpoint("llama"))
    parameters = {"num_threads": "1", "block_size": "8", "max_num_seqs": "4", "num_gpu_blocks_override": "65"}
    config = ModelConfig(name="m", backend="llm", parameters=parameters)
    made = loaded(LlmBackend, context_of(root / "m", config=config))
    assert isinstance(made, LlmBackend)
    return made


LONG = "<|im_start|>" * 400  # a token each


@pytest.fixture
def instance(backend: LlmBackend) -> Iterator[LlmInstance]:
    made = backend.create_instance(Placement("m_0", DeviceKind.MODEL))
    yield made
    made.close()


def add(instance: LlmInstance, **inputs: Any) -> tuple[InferRequest, Recorder]:
    recorder = Recorder()
    request = request_of(**arrays(**{"sampling_parameters": GREEDY, **inputs}))
    request.own_sender = ResponseSender(recorder)
    instance.add(request)
    request.own_sender = None
    return request, recorder


def finish(instance: LlmInstance) -> None:
    while instance.has_work:
        instance.step()
    check_integrity(instance.engine)
    assert instance.engine.statistics.kv_cache_usage == 0


def test_streams_bring_what_one_answer_has(instance: LlmInstance) -> None:
    _, whole = add(instance, text_input=PROMPT, exclude_input_in_output=True, return_token_ids=True)
    _, stream = add(instance, text_input=PROMPT, stream=True, return_token_ids=True, return_finish_reason=True)
    finish(instance)
    assert len(whole.responses) == 1
    assert len(stream.responses) == 8
    assert stream.text == whole.text
    assert stream.column("token_ids") == whole.column("token_ids")
    assert stream.column("finish_reason") == [b"None"] * 7 + [b"length"]
    assert stream.is_ended
    assert whole.is_ended


def test_a_slow_reader_gets_fewer_responses_and_the_same_text(instance: LlmInstance) -> None:
    _, quick = add(instance, text_input=PROMPT, stream=True)
    _, slow = add(instance, text_input=PROMPT, stream=True, return_token_ids=True, return_logprobs=True)
    instance.step()
    slow.has_room = False
    for _ in range(4):
        instance.step()
    assert len(slow.responses) == 1
    slow.has_room = True
    finish(instance)
    assert slow.text == quick.text
    assert len(slow.column("token_ids")) == 8
    assert len(slow.responses) < 8


def test_half_characters_are_sent_with_the_other_half(instance: LlmInstance) -> None:
    parameters = {"max_tokens": 3, "temperature": 0, "allowed_token_ids": instance._tokenizer.encode("é")[:1]}
    _, stream = add(instance, text_input="x", stream=True, sampling_parameters=parameters)
    _, tokens = add(instance, text_input="x", stream=True, sampling_parameters=parameters, return_token_ids=True)
    finish(instance)
    assert len(tokens.responses) == 3
    assert len(stream.responses) <= len(tokens.responses)
    assert stream.text == tokens.text


def test_choices_of_a_stream_are_told_apart(instance: LlmInstance) -> None:
    parameters = {"max_tokens": 5, "n": 3, "seed": 1, "ignore_eos": True}
    _, stream = add(instance, text_input=PROMPT, stream=True, sampling_parameters=parameters, return_token_ids=True)
    _, whole = add(instance, text_input=PROMPT, sampling_parameters=parameters, exclude_input_in_output=True)
    finish(instance)
    texts = [b"", b"", b""]
    for index, text in zip(stream.column("index"), stream.column("text_output"), strict=True):
        texts[index] += text
    assert texts == whole.column("text_output")
    assert whole.column("index") == [0, 1, 2]


def test_an_abort_frees_the_blocks_at_once(instance: LlmInstance) -> None:
    request, gone = add(instance, text_input=PROMPT, stream=True)
    _, stays = add(instance, text_input=PROMPT, stream=True)
    instance.step()
    num_sent = len(gone.responses)
    instance.abort(request)
    assert instance.engine.statistics.num_running == 1
    finish(instance)
    assert len(gone.responses) == num_sent
    assert stays.is_ended
    instance.abort(request)


def test_a_failed_step_leaves_nothing_behind(instance: LlmInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    request, _ = add(instance, text_input=PROMPT)
    instance.step()

    def fail(_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(instance.engine.runner, "launch", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            instance.step()
    instance.abort(request)
    assert not instance.has_work
    _, after = add(instance, text_input=PROMPT)
    finish(instance)
    assert after.is_ended


def test_there_is_room_for_as_many_to_wait_as_can_run(instance: LlmInstance) -> None:
    for _ in range(8):
        add(instance, text_input=PROMPT)
        if not instance.has_room:
            break
    assert instance.engine.statistics.num_waiting == 4
    instance.step()
    assert instance.has_room
    finish(instance)


def test_there_is_room_for_as_many_texts_to_embed_as_a_step_can_take(instance: LlmInstance) -> None:
    most = instance.engine.options.max_num_batched_tokens
    recorders = []
    while instance.has_room and len(recorders) <= most:
        recorders.append(add(instance, input_ids=[9], operation="embed")[1])
    assert len(recorders) == most
    instance.step()
    assert instance.has_room
    assert all(recorder.is_ended for recorder in recorders)


class _Held:
    """A tokenizer that reads texts when it is let."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.is_let = Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, *args: Any, **options: Any) -> list[int]:
        return self.encode_array(*args, **options).tolist()

    def encode_array(self, *args: Any, **options: Any) -> array[int]:
        assert self.is_let.wait(60)
        return self._tokenizer.encode_array(*args, **options)


@pytest.fixture
def held(instance: LlmInstance) -> Iterator[_Held]:
    """The instance's tokenizer, from now on."""
    instance._tokenizer = held = _Held(instance._tokenizer)  # type: ignore[assignment]
    yield held
    held.is_let.set()


def test_nobody_waits_for_a_long_text(instance: LlmInstance, held: _Held) -> None:
    _, generated = add(instance, input_ids=[5, 6, 7])
    asked: list[dict[str, Any]] = [
        {"text_input": LONG, "exclude_input_in_output": True},
        {"text_input": LONG, "operation": "embed"},
        {"text_input": LONG, "operation": "tokenize"},
        {"text_input": LONG * 2},
        {"text_input": LONG * 2, "operation": "embed"},
    ]
    recorders = [add(instance, **inputs)[1] for inputs in asked[:4]]
    assert not instance.has_room  # the model's queue keeps the others
    gone, dropped = add(instance, **asked[4])
    while not generated.is_ended:
        instance.step()
    assert not any(recorder.is_ended for recorder in recorders)
    instance.abort(gone)
    held.is_let.set()
    recorders.append(add(instance, **asked[4])[1])
    finish(instance)
    errors = [recorder.error for recorder in recorders]
    assert errors[:3] == [None, None, None]
    assert recorders[2].column("token_ids") == [2] * 400
    assert errors[3] is not None
    assert "the prompt has at least 800 tokens; this model has room for 512" in errors[3].message
    assert errors[4] is not None
    assert "the text to embed has at least 800 tokens, and this model takes 1 to 512" in errors[4].message
    assert not dropped.responses


def test_a_long_text_that_cannot_be_read_fails_alone(instance: LlmInstance, held: _Held) -> None:
    held.encode = None  # type: ignore[assignment]
    _, recorder = add(instance, text_input=LONG)
    _, generated = add(instance, input_ids=[5, 6, 7])
    finish(instance)
    assert recorder.error is not None
    assert "reading the text failed: TypeError" in recorder.error.message
    assert generated.error is None


def test_a_long_text_is_not_read_on_once_its_client_has_left(
    instance: LlmInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[Any] = []
    is_reading, goes_on, is_over = Event(), Event(), Event()
    original = Tokenizer.encode

    def encode(tokenizer: Tokenizer, text: str, *args: Any, check_length: Any, **options: Any) -> list[int]:
        def check(num_tokens: int, is_all: bool) -> None:
            parts.append(num_tokens)
            if num_tokens:
                is_reading.set()
                assert goes_on.wait(60)
            check_length(0, is_all)  # as if it fitted

        try:
            return original(tokenizer, text, *args, check_length=check, **options)
        finally:
            is_over.set()

    monkeypatch.setattr(Tokenizer, "encode", encode)
    request, recorder = add(instance, text_input="some words, " * 20_000)
    assert is_reading.wait(60)
    num_parts = len(parts)
    instance.abort(request)
    goes_on.set()
    assert is_over.wait(60)
    assert len(parts) == num_parts
    assert not recorder.responses
    assert not instance.has_work


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_read(instance: LlmInstance) -> None:
    longest = max(len(instance._tokenizer.token_bytes(token_id)) for token_id in range(instance._tokenizer.vocab_size))
    _, recorder = add(instance, text_input="x" * (512 * (longest + 20)))
    _, embedded = add(instance, text_input="a word " * 10_000, operation="embed")
    finish(instance)
    assert recorder.error is not None
    assert "the prompt has at least " in recorder.error.message
    assert embedded.error is not None
    assert "the text to embed has at least " in embedded.error.message


def test_an_empty_prompt_is_the_beginning_of_a_text(instance: LlmInstance) -> None:
    _, empty = add(instance, text_input="", return_num_input_tokens=True)
    finish(instance)
    assert empty.error is None
    assert empty.column("num_input_tokens") == [1]
    with pytest.raises(InvalidArgumentError, match="the prompt is empty"):
        add(instance, input_ids=[])


def test_long_texts_give_what_short_ones_do(instance: LlmInstance) -> None:
    recorders = [
        add(instance, exclude_input_in_output=True, **prompt)[1]
        for prompt in ({"text_input": LONG}, {"input_ids": [2] * 400})
    ]
    finish(instance)
    assert recorders[0].text == recorders[1].text != ""


def test_many_texts_share_a_step_and_fewer_while_something_is_generated(instance: LlmInstance) -> None:
    def embed() -> list[Recorder]:
        return [add(instance, input_ids=[9 + row] * 200, operation="embed")[1] for row in range(3)]

    def num_embedded() -> int:
        return sum(recorder.is_ended for recorder in recorders)

    recorders = embed()
    instance.step()
    assert num_embedded() == 3
    _, generated = add(instance, text_input=PROMPT)
    recorders = embed()
    for expected in (1, 2, 3):
        instance.step()
        assert num_embedded() == expected
    assert not generated.is_ended
    finish(instance)


def test_embeddings_are_made_between_steps(instance: LlmInstance) -> None:
    _, generated = add(instance, text_input=PROMPT)
    recorders = [add(instance, text_input=PROMPT, operation="embed")[1] for _ in range(3)]
    gone, dropped = add(instance, text_input=PROMPT, operation="embed")
    instance.abort(gone)
    finish(instance)
    vectors = [recorder.column("embedding") for recorder in recorders]
    assert len(vectors[0]) == 48
    np.testing.assert_allclose(vectors[0], vectors[1])
    assert not dropped.responses
    assert generated.is_ended


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": [5000]}, "5000"),
        ({"input_ids": [1] * 600}, "600"),
        ({"input_ids": [5000], "operation": "embed"}, "token 5000 is outside the model's vocabulary"),
        ({"input_ids": [1] * 600, "operation": "embed"}, "has 600 tokens, and this model takes 1 to 512"),
        ({"text_input": "a", "operation": "embed", "dimensions": 0}, "expected 1 or more, got 0"),
        ({"text_input": "a", "operation": "embed", "truncate_prompt_tokens": 513}, "1 to 512, got 513"),
        ({"text_input": "a", "truncate_prompt_tokens": 5}, "does not go with 'generate'"),
        ({"input_ids": [5000], "operation": "detokenize"}, "token 5000 is outside the model's vocabulary"),
        ({"text_input": "a", "sampling_parameters": {"logprobs": 99}, "return_logprobs": True}, "logprobs"),
        ({"messages": {"messages": [{"role": "user"}, {}]}}, ""),
    ],
)
def test_what_does_not_fit_the_model_is_refused(instance: LlmInstance, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        add(instance, **inputs)
    assert message in caught.value.message
    assert not instance.has_work


def test_embedded_texts_are_cut_where_that_is_asked_for(instance: LlmInstance) -> None:
    recorders = [
        add(instance, operation="embed", truncate_prompt_tokens=truncation, **given)[1]
        for truncation, given in [(-1, {"text_input": "a" * 2000}), (3, {"input_ids": [5, 6, 7, 8]})]
    ]
    finish(instance)
    assert [recorder.column("num_input_tokens") for recorder in recorders] == [[512], [3]]


def test_too_many_dimensions_are_an_answer(instance: LlmInstance) -> None:
    _, recorder = add(instance, text_input=PROMPT, operation="embed", dimensions=99)
    finish(instance)
    assert recorder.error is not None
    assert "expected at most 48, got 99" in recorder.error.message


def test_measurements_follow_the_engine(instance: LlmInstance) -> None:
    before = {(each.name, *each.labels.values()): each for each in instance.measure()}
    assert before["vllm:generation_tokens",].value == 0
    add(instance, text_input=PROMPT)
    finish(instance)
    after = {(each.name, *each.labels.values()): each for each in instance.measure()}
    assert after.keys() == before.keys()
    assert after["vllm:generation_tokens",].value == 8
    assert after["vllm:request_success", "length"].value == 1
    histogram = after["vllm:time_to_first_token_seconds",]
    assert (histogram.kind, sum(histogram.counts), len(histogram.counts)) == ("histogram", 1, len(histogram.bounds) + 1)


async def test_of_two_engines_one_answers_what_begins_alike(backend: LlmBackend) -> None:
    """The prefix is computed once, whatever the other engine does meanwhile."""
    group = ModelInstanceGroup("g", InstanceGroupKind.KIND_CPU, 2)
    context = replace(backend.context, config=replace(backend.context.config, instance_group=(group,)))
    context = replace(context, config=LlmBackend.complete_config(context))
    model = await asyncio.to_thread(Model.load, LlmBackend, context, loop=asyncio.get_running_loop())
    begins = np.arange(5, 305, dtype=np.int32)

    async def num_cached(token_ids: np.ndarray[Any, Any]) -> int:
        inputs = {"input_ids": token_ids, "return_num_cached_tokens": True, "sampling_parameters": GREEDY}
        counts = [
            int(tensor.data.item())
            async for response in model.infer(request_of(**arrays(**inputs)))
            for tensor in response.outputs
            if tensor.name == "num_cached_tokens"
        ]
        return counts[-1]

    try:
        for index in range(4):
            calls = [num_cached(np.append(begins, np.int32(index))), num_cached(begins[40::-1] + index)]
            found = await asyncio.gather(*(calls if index % 2 else calls[::-1]))
            assert sorted(found) == [0, 296 if index else 0]
    finally:
        model.stop()
        await asyncio.to_thread(model.close, 5)
