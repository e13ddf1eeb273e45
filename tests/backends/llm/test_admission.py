"""Which requests are taken on, and how many tokens they may come to."""

from __future__ import annotations

import pytest
from modelserver_backends.llm.engine import GenerationRequest
from modelserver_backends.llm.sequence import FinishReason
from support.fake_engine import engine, request, run_one
from support.fake_runner import FakeRunner
from support.llm_integrity import check_integrity

from modelserver.backend import InvalidArgumentError


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (request([]), "the prompt is empty"),
        (request([3, 50]), "the prompt has token id 50; this model's are 0 to 49"),
        (request([3, -1]), "the prompt has token id -1; this model's are 0 to 49"),
        (request([3] * 64), "the prompt has 64 tokens; this model has room for 64 tokens, prompt and output together"),
        (request([3] * 60, max_tokens=5), "so max_tokens may be 4 with this prompt"),
        (request(logit_bias={50: 1.0}), "parameter 'logit_bias' has token id 50"),
        (request(allowed_token_ids=(1, 77)), "parameter 'allowed_token_ids' has token id 77"),
        (request(logprobs=21), "parameter 'logprobs' must be at most 20"),
        (request(prompt_logprobs=21), "parameter 'prompt_logprobs' must be at most 20"),
        (request(stop=("x",)), "parameter 'stop' needs text, and this model has no tokenizer"),
        (request(structured_outputs={"regex": "a"}), "parameter 'structured_outputs' needs text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_can_never_work_is_refused(wrong: GenerationRequest, message: str) -> None:
    strict = engine(FakeRunner(num_blocks=17, max_model_len=100))
    with pytest.raises(InvalidArgumentError) as raised:
        strict.add(wrong)
    assert message in raised.value.message
    assert not strict.has_work
    check_integrity(strict)


def test_the_whole_pool_may_be_used() -> None:
    answer = run_one(engine(FakeRunner(num_blocks=17, max_model_len=100)), request([3] * 60, max_tokens=4))
    assert len(answer.token_ids) == 4


def test_as_many_tokens_as_the_model_takes(is_asynchronous: bool) -> None:
    runner = FakeRunner(is_asynchronous=is_asynchronous, max_model_len=24)
    answer = run_one(engine(runner), request(max_tokens=None))
    assert len(answer.token_ids) == 14
    assert answer.last.finish_reason is FinishReason.LENGTH


def test_as_many_tokens_as_the_pool_holds(is_asynchronous: bool) -> None:
    runner = FakeRunner(is_asynchronous=is_asynchronous, num_blocks=5)
    answer = run_one(engine(runner), request(max_tokens=None))
    assert len(answer.token_ids) == 6
