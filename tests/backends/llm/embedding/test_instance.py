"""An encoder as the server drives it, without a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from modelserver_backends.llm.backend import LlmBackend
from modelserver_backends.llm.embedding.instance import EncoderInstance
from modelserver_backends.llm.sequence import FinishReason
from support.contexts import context_of, loaded, request_of
from support.llm_models import arrays
from support.recorder import Recorder
from support.tiny_encoders import reference_hidden, unit, write_encoder

from modelserver.backend import (
    Backend,
    ConfigError,
    DeviceKind,
    InferRequest,
    ModelConfig,
    ModelTransactionPolicy,
    Placement,
    ResponseSender,
    ServerError,
)

TEXT = "the model of a server"
PARAMETERS = {"num_threads": "1", "max_num_seqs": "4", "max_num_batched_tokens": "64", "dtype": "float32"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("encoder")
    prompts = {"prompts": {"query": "answers "}, "default_prompt_name": None}
    write_encoder(root / "m" / "1", files={"config_sentence_transformers.json": prompts})
    return root / "m"


def backend_of(root: Path, **parameters: str) -> Backend:
    config = ModelConfig(name="m", backend="llm", parameters={**PARAMETERS, **parameters})
    return loaded(LlmBackend, context_of(root, config=config))


def made(backend: Backend) -> EncoderInstance:
    instance = backend.create_instance(Placement("m_0", DeviceKind.MODEL))
    assert isinstance(instance, EncoderInstance)
    return instance


@pytest.fixture(scope="module")
def shared(root: Path) -> Iterator[EncoderInstance]:
    instance = made(backend_of(root))
    yield instance
    instance.close()


@pytest.fixture
def instance(shared: EncoderInstance) -> Iterator[EncoderInstance]:
    yield shared
    while shared.has_work:
        shared.step()


def add(instance: EncoderInstance, **inputs: Any) -> tuple[InferRequest, Recorder]:
    recorder = Recorder()
    request = request_of(**arrays(**inputs))
    request.own_sender = ResponseSender(recorder)
    instance.add(request)
    request.own_sender = None
    return request, recorder


def finish(instance: EncoderInstance) -> int:
    num_steps = 0
    while instance.has_work:
        instance.step()
        num_steps += 1
    return num_steps


def test_each_request_is_answered_once_with_its_own_vector(instance: EncoderInstance, root: Path) -> None:
    texts = [TEXT, "and then it waits", TEXT * 3, "a"]
    recorders = [add(instance, text_input=text)[1] for text in texts]
    lists = [instance.encoder.tokenizer.encode(text) for text in texts]
    recorders.append(add(instance, input_ids=lists[0], operation="embed", return_num_input_tokens=True)[1])
    assert 1 < finish(instance) < 5
    for recorder, token_ids in zip(recorders, [*lists, lists[0]], strict=True):
        expected = unit(reference_hidden(root / "1", token_ids).mean(axis=0))
        np.testing.assert_allclose(recorder.column("embedding"), expected, atol=1e-5)
        assert recorder.column("num_input_tokens") == [len(token_ids)]
        assert recorder.is_ended
    assert (lists[0][0], lists[0][-1]) == (0, 2)  # between [CLS] and [SEP]


def test_long_texts_are_read_beside_the_steps(instance: EncoderInstance) -> None:
    long = TEXT * 400
    asked: list[dict[str, Any]] = [{"text_input": long, "truncate_prompt_tokens": 9}, {"text_input": long}]
    (_, cut), (_, refused), (gone, dropped) = (add(instance, **inputs) for inputs in [*asked, asked[0]])
    num_aborted = instance.statistics.by_finish_reason[FinishReason.ABORT]
    instance.abort(gone)
    assert instance.statistics.by_finish_reason[FinishReason.ABORT] == num_aborted + 1
    _, short = add(instance, text_input=TEXT * 5, truncate_prompt_tokens=9)
    finish(instance)
    np.testing.assert_allclose(cut.column("embedding"), short.column("embedding"), atol=1e-5)
    assert refused.error is not None
    assert "and this model takes 1 to 48" in refused.error.message
    assert not dropped.responses


def test_first_dimensions_have_length_one_again(instance: EncoderInstance) -> None:
    recorders = [add(instance, text_input=TEXT, **given)[1] for given in ({}, {"dimensions": 5}, {"dimensions": 99})]
    finish(instance)
    whole, part, beyond = recorders
    np.testing.assert_allclose(part.column("embedding"), unit(np.array(whole.column("embedding")[:5])), rtol=1e-6)
    assert beyond.error is not None
    assert "expected at most 32, got 99" in beyond.error.message


def test_who_leaves_before_the_step_is_not_computed(instance: EncoderInstance) -> None:
    gone, dropped = add(instance, text_input=TEXT)
    _, stays = add(instance, text_input=TEXT)
    before = instance.statistics.num_prompt_tokens
    instance.abort(gone)
    instance.abort(gone)
    assert finish(instance) == 1
    assert (dropped.is_ended, stays.is_ended) == (False, True)
    assert instance.statistics.num_prompt_tokens - before == len(instance.encoder.tokenizer.encode(TEXT))


def test_there_is_room_for_two_batches(instance: EncoderInstance) -> None:
    num_taken = 0
    while instance.has_room:
        add(instance, text_input=TEXT)
        num_taken += 1
    assert num_taken == instance.statistics.num_waiting == 8
    assert finish(instance) == 2
    assert instance.has_room


@pytest.mark.parametrize(("truncation", "num_tokens"), [(-1, 48), (48, 48), (5, 5), (1, 1)])
def test_a_long_text_is_cut_where_that_is_asked_for(
    instance: EncoderInstance, truncation: int, num_tokens: int
) -> None:
    _, recorder = add(instance, text_input="server " * 99, truncate_prompt_tokens=truncation)
    finish(instance)
    assert recorder.column("num_input_tokens") == [num_tokens]


def test_tokens_are_told(instance: EncoderInstance) -> None:
    _, recorder = add(instance, text_input="the Model", operation="tokenize", add_special_tokens=False)
    assert recorder.column("token_strs") == [b"the", b"model"]
    assert recorder.column("max_model_len") == [48]
    assert recorder.is_ended
    assert not instance.has_work


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": [5, 300]}, "token 300 is outside the model's vocabulary (0 to 299)"),
        ({"input_ids": [-1]}, "token -1 is outside"),
        ({"input_ids": [5] * 49}, "the text to embed has 49 tokens, and this model takes 1 to 48"),
        ({"text_input": "a " * 47}, "the text to embed has 49 tokens"),
        ({"input_ids": []}, "has 0 tokens"),
        ({"text_input": "a", "dimensions": 0}, "expected 1 or more, got 0"),
        (
            {"text_input": "a", "truncate_prompt_tokens": 0},
            "expected -1 (as many as the model takes), or 1 to 48, got 0",
        ),
        ({"text_input": "a", "truncate_prompt_tokens": 4, "operation": "tokenize"}, "does not go with 'tokenize'"),
        ({"text_input": "a", "operation": "generate"}, "does not generate; expected embed, token_embed or tokenize"),
        ({"input_ids": [5], "operation": "detokenize"}, "does not detokenize"),
        ({"text_input": b"\xff"}, "is not UTF-8"),
        ({"text_input": "a", "input_ids": [5]}, "needs one of the inputs"),
        ({}, "got none of them"),
        ({"messages": {"messages": [{"role": "user", "content": "a"}]}}, "no chat template"),
    ],
)
def test_what_does_not_fit_is_refused(instance: EncoderInstance, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ServerError) as caught:
        add(instance, **inputs)
    assert message in caught.value.message
    assert not instance.has_work


def test_a_vector_that_is_not_finite_is_an_error(instance: EncoderInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    _, recorder = add(instance, text_input=TEXT)
    with monkeypatch.context() as patched:
        patched.setattr(instance.encoder, "embed", lambda lists: [np.full(32, np.nan, np.float32) for _ in lists])
        instance.step()
    assert recorder.error is not None
    assert "not finite" in recorder.error.message


def test_a_failed_step_leaves_the_others_to_be_aborted(
    instance: EncoderInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [add(instance, text_input=TEXT)[0] for _ in range(6)]

    def fail(_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(instance.encoder, "embed", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            instance.step()
    for request in requests:
        instance.abort(request)
    assert not instance.has_work
    assert instance.statistics.num_running == 0


def test_prompts_stand_before_texts_and_not_before_tokens(instance: EncoderInstance, root: Path) -> None:
    prompted = made(backend_of(root, default_prompt_name="query", normalize="false"))
    assert prompted._max_rows == 4
    recorders = [add(prompted, **given)[1] for given in ({"text_input": TEXT}, {"input_ids": [9, 8]})]
    finish(prompted)
    token_ids = instance.encoder.tokenizer.encode("answers " + TEXT)
    for recorder, expected in zip(recorders, (token_ids, [9, 8]), strict=True):
        hidden = reference_hidden(root / "1", expected)
        np.testing.assert_allclose(recorder.column("embedding"), hidden.mean(axis=0), atol=1e-5)


def test_measurements_count_what_was_embedded(root: Path) -> None:
    instance = made(backend_of(root))
    for text in (TEXT, TEXT, "a"):
        add(instance, text_input=text)
    num_steps = finish(instance)
    found = {(each.name, *each.labels.values()): each for each in instance.measure()}
    num_tokens = 2 * len(instance.encoder.tokenizer.encode(TEXT)) + 3
    assert found["vllm:prompt_tokens",].value == num_tokens
    assert found["vllm:request_success", "stop"].value == 3
    assert sum(found["vllm:e2e_request_latency_seconds",].counts) == 3
    assert sum(found["vllm:iteration_tokens_total",].counts) == num_steps
    assert found["vllm:generation_tokens",].value == 0
    assert found["vllm:num_requests_running",].value == found["vllm:num_requests_waiting",].value == 0


def test_the_config_is_that_of_one_answer(root: Path) -> None:
    config = LlmBackend.complete_config(context_of(root, config=ModelConfig(name="m", backend="llm")))
    assert [spec.name for spec in config.output][:2] == ["embedding", "num_input_tokens"]
    assert "text_output" not in {spec.name for spec in config.output}
    assert not config.is_decoupled
    assert config.parameters["max_model_len"] == "48"
    policy = ModelTransactionPolicy(decoupled=True)
    with pytest.raises(ConfigError, match="an encoder answers once"):
        LlmBackend.complete_config(
            context_of(root, config=ModelConfig(name="m", backend="llm", model_transaction_policy=policy))
        )
