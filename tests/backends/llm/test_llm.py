"""`LLM` and `AsyncLLM`: many prompts at once, in their order; consumers that leave; errors; closing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import modelserver_backends.llm as package
import pytest
from modelserver_backends.llm import LLM, AsyncLLM, RequestOutput, SamplingParams
from modelserver_backends.llm.engine import Engine, GenerationRequest
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.sequence import FinishReason
from support.fake_runner import FakeRunner, expected_tokens
from support.llm_integrity import check_integrity
from support.waiting import until_true

from modelserver.backend import InternalError, InvalidArgumentError, UnavailableError

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[number, 3, 4, 5] for number in range(10, 18)]


def fake_engine(**options: Any) -> Engine:
    return Engine(options=EngineOptions(max_num_seqs=4), runner=FakeRunner(num_blocks=40, **options), tokenizer=None)


def expected(prompt: list[int], num_tokens: int = 6) -> list[int]:
    return expected_tokens(prompt, num_tokens, ignore_eos=True)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM.over(fake_engine()) as llm:
        yield llm
        check_integrity(llm.engine)
        assert not llm.engine.has_work


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
async def async_llm(request: pytest.FixtureRequest):
    async with AsyncLLM.over(fake_engine(is_asynchronous=request.param)) as llm:
        yield llm


def test_outputs_are_in_the_order_of_prompts(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert [output.outputs[0].token_ids for output in outputs] == [expected(prompt) for prompt in PROMPTS]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    assert [output.request_id for output in outputs] == [str(number) for number in range(len(PROMPTS))]


def test_a_list_of_numbers_is_one_prompt(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], PARAMS)
    assert output.outputs[0].token_ids == expected(PROMPTS[0])


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    each = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=count) for count in (1, 2)]
    assert [len(output.outputs[0].token_ids) for output in llm.generate(PROMPTS[:2], each)] == [1, 2]
    with pytest.raises(InvalidArgumentError, match="there are 3 prompts and 2 sampling_params"):
        llm.generate(PROMPTS[:3], each)


def test_choices_and_logprobs(llm: LLM) -> None:
    params = SamplingParams(n=2, seed=4, max_tokens=3, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], params)
    for index, choice in enumerate(output.outputs):
        assert choice.index == index
        assert choice.token_ids == expected_tokens(PROMPTS[0], 3, seed=4 + index, ignore_eos=True)
        assert choice.cumulative_logprob == sum(entry.logprob for entry in choice.logprobs or [])
    assert len(output.prompt_logprobs or []) == 4


def test_salted_prompts_share_nothing(llm: LLM) -> None:
    prompt = list(range(2, 12))
    prompts = [{"prompt_token_ids": prompt, "cache_salt": salt} for salt in ("a", "a", "b")]
    assert [llm.generate([each], PARAMS)[0].num_cached_tokens for each in prompts] == [0, 8, 0]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ("text", "needs a tokenizer"),
        ({"text": "a"}, "must have 'prompt' or 'prompt_token_ids'"),
        (["a", 5], r'must be text or a list of token ids, got \["a", 5\]'),
        (7, "must be text or a list of token ids, got 7"),
        ([5, 1000], "token id 1000"),
    ],
)
def test_a_bad_prompt_fails_all_and_leaves_nothing(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        llm.generate([PROMPTS[0], prompt], PARAMS)
    assert not llm.engine.has_work


def test_a_conversation_needs_a_tokenizer(llm: LLM) -> None:
    with pytest.raises(InvalidArgumentError, match="a conversation needs a tokenizer"):
        llm.chat([{"role": "user", "content": "hello"}])


def test_text_and_conversations_of_a_checkpoint(checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint("llama")
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(directory, device="cpu", dtype="float32", max_model_len=128) as llm:
        one, other = llm.generate(["the model", "hello world"], params)
        assert one.prompt == "the model"
        tokenizer = llm.engine.tokenizer
        assert tokenizer is not None
        assert one.outputs[0].text == tokenizer.decode(one.outputs[0].token_ids)
        assert llm.generate("hello world", params)[0].outputs[0].text == other.outputs[0].text
        messages = [{"role": "user", "content": "hello"}]
        (alone,) = llm.chat(messages, params)
        both = llm.chat([messages, [{"role": "user", "content": "the model"}]], params)
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        assert alone.prompt == both[0].prompt == prompt
        assert alone.prompt_token_ids == tokenizer.encode(prompt, add_special_tokens=False)
        assert alone.outputs[0].token_ids == both[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (None, None, "prompts must be a prompt or a list of prompts, got null"),
        (PROMPTS, {"max_tokens": 3}, "sampling_params must be SamplingParams, or a list of them"),
        (PROMPTS[:1], [None], "sampling_params must be SamplingParams"),
        (PROMPTS, [PARAMS], "there are 8 prompts and 1 sampling_params"),
    ],
)
def test_what_is_no_prompt_and_no_parameters(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        llm.generate(prompts, params)


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="did you mean 'max_model_len'"):
        LLM(tmp_path, max_modellen=5)
    with pytest.raises(InvalidArgumentError, match=r"tokenizer\.json"):
        LLM(tmp_path)


def test_close_gives_back_what_the_runner_holds() -> None:
    engine = fake_engine()
    LLM.over(engine).close()
    assert engine.runner.is_closed  # type: ignore[attr-defined]


def test_what_is_closed_answers_no_more() -> None:
    llm = LLM.over(fake_engine())
    llm.close()
    llm.close()
    with pytest.raises(UnavailableError, match="the engine is closed"):
        llm.generate(PROMPTS, PARAMS)


async def test_outputs_grow(async_llm: AsyncLLM) -> None:
    outputs = [output async for output in async_llm.generate(PROMPTS[0], PARAMS, "mine")]
    assert [output.outputs[0].token_ids for output in outputs] == [
        expected(PROMPTS[0])[:count] for count in range(1, 7)
    ]
    assert [output.finished for output in outputs] == [False] * 5 + [True]
    assert outputs[0].request_id == "mine"


async def last(async_llm: AsyncLLM, prompt: Any, params: SamplingParams = PARAMS) -> RequestOutput:
    async for output in async_llm.generate(prompt, params):
        found = output
    return found


async def test_many_at_once(async_llm: AsyncLLM) -> None:
    outputs = await asyncio.gather(*(last(async_llm, prompt) for prompt in PROMPTS * 4))
    assert [output.outputs[0].token_ids for output in outputs] == [expected(prompt) for prompt in PROMPTS * 4]


async def test_who_leaves_is_aborted(async_llm: AsyncLLM) -> None:
    runner: Any = async_llm.engine.runner
    runner.permits = threading.Semaphore(50)  # fewer than those need who leave
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, n=2)
    stream = async_llm.generate(PROMPTS[0], long)
    await anext(stream)
    waiting = asyncio.create_task(last(async_llm, PROMPTS[1], long))
    await asyncio.sleep(0)
    await stream.aclose()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    runner.permits.release(50)
    await last(async_llm, PROMPTS[2])
    runner.permits.release(50)
    await asyncio.to_thread(async_llm.close)
    assert async_llm.engine.statistics.kv_cache_usage == 0
    assert async_llm.engine.statistics.by_finish_reason[FinishReason.ABORT] >= 2


async def test_a_refused_request_harms_nobody(async_llm: AsyncLLM) -> None:
    good = asyncio.create_task(last(async_llm, PROMPTS[0]))
    with pytest.raises(InvalidArgumentError, match="token id 1000"):
        await last(async_llm, [1000])
    assert (await good).finished


async def test_a_failed_step_fails_what_runs_and_the_next_request_works(
    async_llm: AsyncLLM, caplog: pytest.LogCaptureFixture
) -> None:
    runner: Any = async_llm.engine.runner
    runner.error = RuntimeError("no memory")
    with pytest.raises(InternalError, match="the engine failed: RuntimeError: no memory"):
        await last(async_llm, PROMPTS[0])
    runner.error = None
    assert (await last(async_llm, PROMPTS[0])).outputs[0].token_ids == expected(PROMPTS[0])
    assert sum("a step of the engine failed" in record.message for record in caplog.records) == 1


async def test_closing_fails_what_runs(async_llm: AsyncLLM) -> None:
    runner: Any = async_llm.engine.runner
    runner.permits = threading.Semaphore(3)
    stream = async_llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    await anext(stream)
    closing = asyncio.create_task(asyncio.to_thread(async_llm.close))
    await asyncio.to_thread(until_true, lambda: async_llm.is_closed, "the engine is told to close")
    runner.permits.release(20)
    await closing
    with pytest.raises(UnavailableError, match="closed before the request was finished"):
        async for _ in stream:
            pass
    with pytest.raises(UnavailableError, match="the engine is closed"):
        await last(async_llm, PROMPTS[0])
    async_llm.close()


async def test_who_asks_while_it_is_closed_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread closes it between the look whether it is closed and the request."""
    llm = AsyncLLM.over(fake_engine())
    put = llm._commands.put

    def close_first(command: Any) -> None:
        monkeypatch.setattr(llm, "_commands", commands)
        llm.close()
        put(command)

    commands, late = llm._commands, SimpleNamespace(put=close_first)
    monkeypatch.setattr(llm, "_commands", late)
    with pytest.raises(UnavailableError, match="the engine is closed"):
        await asyncio.wait_for(last(llm, PROMPTS[0]), 60)


def test_a_loop_that_is_closed_is_left_alone() -> None:
    """The consumer's loop ends without a word; the engine goes on with the others."""
    llm = AsyncLLM.over(fake_engine())
    try:
        loop = asyncio.new_event_loop()
        stream = llm.stream(
            GenerationRequest(PROMPTS[0], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
        )
        loop.run_until_complete(anext(stream))
        loop.close()
        assert asyncio.run(last(llm, PROMPTS[1])).outputs[0].token_ids == expected(PROMPTS[1])
    finally:
        llm.close()
    assert llm.engine.statistics.kv_cache_usage == 0


def test_no_thread_stays() -> None:
    llm = AsyncLLM.over(fake_engine())
    llm.close()
    assert "llm-engine" not in [thread.name for thread in threading.enumerate()]


def test_the_package_exports_what_it_says_and_imports_no_torch() -> None:
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        package.Nothing  # noqa: B018
    code = (
        "import sys, modelserver_backends.llm as m; m.LLM, m.AsyncLLM, m.SamplingParams; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
