"""An engine over a fake runner, requests for it, and running it to its end."""

from __future__ import annotations

from typing import Any

from modelserver_backends.llm.engine import Engine, GenerationRequest, SequenceOutput
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.sampling_params import SamplingParams
from support.fake_runner import Collected, FakeRunner, collect
from support.llm_integrity import check_integrity

PROMPT = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16]


def engine(runner: FakeRunner | None = None, *, clock: Any = None, **options: Any) -> Engine:
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 16, **options}
    given = {} if clock is None else {"clock_ns": clock}
    return Engine(options=EngineOptions(**options), runner=runner or FakeRunner(), tokenizer=None, **given)


def request(
    prompt: list[int] | None = None, *, is_streamed: bool = True, salt: str = "", **params: Any
) -> GenerationRequest:
    params = {"temperature": 0, "ignore_eos": True, "max_tokens": 8, **params}
    return GenerationRequest(
        list(PROMPT if prompt is None else prompt), SamplingParams(**params), cache_salt=salt, is_streamed=is_streamed
    )


def run(engine: Engine, *requests: GenerationRequest) -> dict[tuple[GenerationRequest, int], Collected]:
    """Take them on, step until there is no work, and see that no block is lost."""
    for each in requests:
        engine.add(each)
    outputs: list[SequenceOutput] = []
    while engine.has_work:
        outputs += engine.step()
        check_integrity(engine)
    assert engine.statistics.kv_cache_usage == 0
    return collect(outputs)


def run_one(engine: Engine, one: GenerationRequest, choice: int = 0) -> Collected:
    return run(engine, one)[one, choice]
