"""A runner without a network: the next token is a hash of all tokens before, read from its KV memory.

Every slot of the memory holds the token that was computed there, so a block that is shared wrongly, given away too
early or not computed changes the tokens that come out, as it would change a network's.
"""

from __future__ import annotations

import threading
import zlib
from array import array
from dataclasses import dataclass
from typing import Any

from modelserver_backends.llm.blocks import NULL_BLOCK
from modelserver_backends.llm.generation import GenerationRequest, SequenceOutput
from modelserver_backends.llm.plan import SampledToken, StepPlan, StepResult, TokenLogprobs
from modelserver_backends.llm.sequence import Sequence

EOS = 1


def next_token(history: list[int], vocab_size: int, seed: int = 0) -> int:
    return zlib.crc32(array("i", history).tobytes(), seed & 0xFFFFFFFF) % vocab_size


def logprobs_of(token_id: int, position: int, num_top: int) -> TokenLogprobs:
    """Made up, but of token and position alone."""
    return TokenLogprobs(-1.0 - token_id / 100 - position, 1, tuple((top, -float(top)) for top in range(num_top)))


@dataclass
class FakeLaunched:
    value: StepResult

    def result(self) -> StepResult:
        return self.value


class FakeRunner:
    """`launch` computes at once; an asynchronous one keeps the sampled tokens to itself until they are read.

    With a `window` the hash is of so many tokens. With states each slot has the tokens of its sequence, which must come
    one after the other.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 32,
        block_size: int = 4,
        vocab_size: int = 50,
        max_model_len: int = 256,
        is_asynchronous: bool = False,
        eos_token_ids: frozenset[int] = frozenset({EOS}),
        window: int | None = None,
        has_states: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.is_asynchronous = is_asynchronous
        self.eos_token_ids = eos_token_ids
        self.window = window
        self.has_states = has_states
        self.slots: dict[int, list[int | None]] = {}
        self.memory: list[int | None] = [None] * (num_blocks * block_size)
        self.last_token: dict[int, int] = {}
        self.num_computed = 0
        self.is_closed = False
        self.is_lost = False
        # How many steps may be computed, if that is limited; the next one waits for another permit.
        self.permits: threading.Semaphore | None = None
        self.error: Exception | None = None

    def launch(self, plan: StepPlan) -> FakeLaunched:
        if self.error is not None:
            raise self.error
        if self.permits is not None and not self.permits.acquire(timeout=20):
            raise TimeoutError("no permit for another step came")
        for sequence, start, num_tokens, _ in plan.chunks:
            self.num_computed += num_tokens
            seen = sequence.block_ids[self._first_seen(start) // self.block_size :]
            assert NULL_BLOCK not in seen, f"sequence {sequence.seq_id} has given back what it sees"
            if self.has_states:
                self._go_on(sequence, start, num_tokens)
            for position in range(start, start + num_tokens):
                self.memory[self._slot(sequence, position)] = self._token(sequence, position)
        sampled: list[tuple[SampledToken, ...]] = []
        prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        for sequence, start, num_tokens, num_sampled in plan.chunks:
            end = start + num_tokens
            if sequence.params.prompt_logprobs is not None and start < sequence.num_prompt_tokens:
                prompt_logprobs[sequence.seq_id] = tuple(
                    logprobs_of(sequence.token_ids[position], position, sequence.params.prompt_logprobs)
                    for position in range(start + 1, min(end + 1, sequence.num_prompt_tokens))
                )
            if num_sampled:
                sampled.append(self._verified(sequence, end, num_sampled))
        return FakeLaunched(StepResult(tuple(sampled), prompt_logprobs))

    def _go_on(self, sequence: Sequence, start: int, num_tokens: int) -> None:
        state = self.slots.setdefault(sequence.slot, [])
        if start == 0:
            state.clear()
        known = [self.memory[self._slot(sequence, position)] for position in range(start)]
        assert state == known, f"sequence {sequence.seq_id} goes on from a state that is not its own"
        state += [self._token(sequence, position) for position in range(start, start + num_tokens)]

    def close(self) -> None:
        self.is_closed = True

    def _sample(self, sequence: Sequence, end: int) -> SampledToken:
        history = [self.memory[self._slot(sequence, position)] for position in range(self._first_seen(end - 1), end)]
        assert None not in history, f"sequence {sequence.seq_id} reads a slot that was never computed"
        token = next_token(history, self.vocab_size, 0 if sequence.params.is_greedy else sequence.seed)
        if token in self.eos_token_ids and end - sequence.num_prompt_tokens < sequence.params.min_tokens:
            token += 1
        self.last_token[sequence.seq_id] = token
        wanted = sequence.params.logprobs
        return SampledToken(token, None if wanted is None else logprobs_of(token, end, wanted))

    def _verified(self, sequence: Sequence, end: int, num_sampled: int) -> tuple[SampledToken, ...]:
        """The tokens behind the last one and behind drafts, up to the first that is not the draft there."""
        tokens: list[SampledToken] = []
        for place in range(end + 1 - num_sampled, end + 1):
            tokens.append(self._sample(sequence, place))
            if place < end and tokens[-1].token_id != self._token(sequence, place):
                break
        return tuple(tokens)

    def _first_seen(self, position: int) -> int:
        return 0 if self.window is None else max(0, position - self.window + 1)

    def _slot(self, sequence: Sequence, position: int) -> int:
        return sequence.block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def _token(self, sequence: Sequence, position: int) -> int:
        if position < len(sequence.token_ids):
            return sequence.token_ids[position]
        if sequence.drafts:
            return sequence.drafts[position - len(sequence.token_ids)]
        assert self.is_asynchronous, "a token that is not known yet"
        assert position == len(sequence.token_ids), "more than one token ahead of the host"
        return self.last_token[sequence.seq_id]


def expected_tokens(
    prompt: list[int],
    max_tokens: int,
    *,
    vocab_size: int = 50,
    seed: int = 0,
    ignore_eos: bool = False,
    min_tokens: int = 0,
    window: int | None = None,
) -> list[int]:
    """What a request alone gives, by definition."""
    history = list(prompt)
    while len(history) < len(prompt) + max_tokens:
        token = next_token(history[-(window or 0) :], vocab_size, seed)
        num_output = len(history) - len(prompt)
        if token == EOS and num_output < min_tokens:
            token += 1
        history.append(token)
        if token == EOS and not ignore_eos:
            break
    return history[len(prompt) :]


@dataclass
class Collected:
    """All that came of one choice of one request."""

    token_ids: list[int]
    text: str
    outputs: list[SequenceOutput]

    @property
    def last(self) -> SequenceOutput:
        return self.outputs[-1]


def collect(outputs: list[SequenceOutput]) -> dict[tuple[GenerationRequest, int], Collected]:
    """Outputs by request and choice, deltas joined."""
    collected: dict[tuple[GenerationRequest, int], Collected] = {}
    for output in outputs:
        entry = collected.setdefault((output.request, output.choice), Collected([], "", []))
        assert not entry.outputs or entry.last.finish_reason is None, "an output after the last one"
        entry.token_ids += output.token_ids
        entry.text += output.text
        entry.outputs.append(output)
    return collected


class ScriptedRunner(FakeRunner):
    """Continues every prompt with the tokens of `script`, then with end-of-sequence."""

    def __init__(self, script: list[int], **options: Any) -> None:
        super().__init__(**options)
        self.script = script

    def _sample(self, sequence: Sequence, end: int) -> SampledToken:
        position = end - sequence.num_prompt_tokens
        token = self.script[position] if position < len(self.script) else EOS
        self.last_token[sequence.seq_id] = token
        return SampledToken(token)
