"""Requests that come, leave and are stepped at random."""

from __future__ import annotations

import os

from hypothesis import given, settings
from hypothesis import strategies as st
from modelserver_backends.llm.blocks import held_blocks
from modelserver_backends.llm.engine import GenerationRequest, SequenceOutput
from support.fake_engine import engine, request
from support.fake_runner import FakeRunner, collect, expected_tokens
from support.llm_integrity import check_integrity

EXAMPLES = int(os.environ.get("MODELSERVER_PROPERTY_EXAMPLES", "80"))


class Life:
    """Requests come, leave and are stepped as hypothesis likes."""

    def __init__(self, data: st.DataObject) -> None:
        draw = data.draw
        self.data = data
        block_size = draw(st.sampled_from([1, 2, 4, 8]), "block size")
        budget = draw(st.integers(6, 40), "budget")
        self.window = draw(st.sampled_from([None, None, 1, 5, 20]), "window")
        least = held_blocks(48, block_size, window=self.window, chunk_len=budget)
        self.engine = engine(
            FakeRunner(
                num_blocks=draw(st.integers(least + 1, 120 // block_size + 1), "blocks"),
                block_size=block_size,
                is_asynchronous=draw(st.booleans(), "is asynchronous"),
                max_model_len=48,
                window=self.window,
            ),
            max_num_seqs=draw(st.integers(1, 6), "seqs"),
            max_num_batched_tokens=budget,
            enable_prefix_caching=draw(st.booleans(), "caching"),
            scheduling_policy=draw(st.sampled_from(["fcfs", "priority"]), "policy"),
        )
        self.requests: list[GenerationRequest] = []
        self.outputs: list[SequenceOutput] = []
        self.aborted: set[GenerationRequest] = set()

    def add(self) -> None:
        draw = self.data.draw
        prompt = list(range(2, 2 + draw(st.integers(0, 20)))) + draw(
            st.lists(st.integers(0, 49), min_size=1, max_size=8)
        )
        is_greedy = draw(st.booleans())
        one = request(
            prompt,
            temperature=0 if is_greedy else 1,
            seed=draw(st.integers(0, 9)),
            n=draw(st.sampled_from([1, 1, 2, 3])),
            max_tokens=draw(st.integers(1, 48 - len(prompt))),
            ignore_eos=draw(st.booleans()),
            presence_penalty=draw(st.sampled_from([0, 0, 1])),  # host-bound
            prompt_logprobs=draw(st.sampled_from([None, None, 0])),
            is_streamed=draw(st.booleans()),
        )
        one.priority = draw(st.integers(0, 3))
        self.requests.append(one)
        self.engine.add(one)

    def abort(self) -> None:
        if self.requests:
            gone = self.data.draw(st.sampled_from(self.requests))
            self.aborted.add(gone)
            self.engine.abort(gone)

    def step(self) -> None:
        self.outputs += self.engine.step()

    def check(self) -> None:
        answers = collect(self.outputs)
        for one in self.requests:
            for choice in range(one.params.n):
                answer = answers.get((one, choice))
                if one in self.aborted and (answer is None or answer.last.finish_reason is None):
                    continue
                assert answer is not None, "a request got no answer"
                assert answer.token_ids == expected_tokens(
                    one.prompt_token_ids,
                    one.params.max_tokens or 0,
                    seed=0 if one.params.is_greedy else (one.params.seed or 0) + choice,
                    ignore_eos=one.params.ignore_eos,
                    window=self.window,
                )
                assert answer.last.finish_reason is not None
                if one.params.prompt_logprobs is not None and choice == 0:
                    lengths = [len(output.prompt_logprobs or []) for output in answer.outputs]
                    assert lengths == [len(one.prompt_token_ids)] + [0] * (len(lengths) - 1)


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_random_lives_end_with_every_block_back_and_every_text_as_if_alone(data: st.DataObject) -> None:
    life = Life(data)
    for deed in data.draw(
        st.lists(st.sampled_from(["add", "add", "step", "step", "step", "abort"]), max_size=25), "deeds"
    ):
        getattr(life, deed)()
        check_integrity(life.engine)
    num_left = 2000
    while life.engine.has_work:
        life.step()
        check_integrity(life.engine)
        num_left -= 1
        assert num_left, "it does not come to an end"
    assert life.engine.statistics.kv_cache_usage == 0
    life.check()
