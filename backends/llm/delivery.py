"""The outputs that a sequence has sent so far, and when: the part of a sequence that the scheduler does not know."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .engine_statistics import EngineStatistics
from .generation import GenerationRequest, SequenceOutput
from .plan import TokenLogprobs
from .sampling_params import CONVERTERS
from .sequence import FinishReason, Sequence, find_stop

if TYPE_CHECKING:
    from .text.text_stream import TextStream


@dataclass(slots=True, eq=False)
class Delivery:
    """One per sequence, from `Engine.add` until it ends. Times by the engine's clock, 0 before they come.

    `stream` is None for an engine without a tokenizer. A sequence `is_lazy` if its text is not looked at before it ends
    (no stop strings, not streamed): it is made text once, as a whole.
    """

    request: GenerationRequest
    sequence: Sequence
    stream: TextStream | None
    is_lazy: bool
    queued_ns: int
    scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    num_delivered: int = 0
    # Text, log-probabilities that are not delivered.
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    # None for the first token, which follows nothing; empty when they are not wanted, or delivered.
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    cumulative_logprob: float | None = None
    # Whether the last token is what stopped it, and not part of its text.
    is_last_hidden: bool = False

    def take_text(self, token_id: int) -> str | None:
        """Add a token's text; the stop string that is complete with it, or None."""
        if self.stream is None or self.is_lazy:
            return None
        delta, matched = self.stream.push([token_id])
        self.text += delta
        return matched

    def take_token(self, token_id: int, eos_token_ids: AbstractSet[int]) -> FinishReason | None:
        """Add the sequence's last token to its text; why the sequence ends with it, None if it goes on."""
        sequence = self.sequence
        reason = find_stop(sequence, token_id, eos_token_ids)
        if reason is FinishReason.STOP:
            self.is_last_hidden = not sequence.params.include_stop_str_in_output
            if not self.is_last_hidden:
                self.take_text(token_id)
            return reason
        if sequence.matcher is not None:
            is_accepted = sequence.matcher.accept(token_id)
            assert is_accepted, f"token {token_id} was sampled, and the grammar does not allow it"
            if sequence.matcher.is_terminated:
                reason = FinishReason.STOP
        if self.stream is not None and not self.is_lazy:
            delta, matched = self.stream.push((token_id,))
            self.text += delta
            if matched is not None:
                sequence.stop_reason = matched
                reason = FinishReason.STOP
        return reason

    def take_logprobs(self, logprobs: TokenLogprobs) -> None:
        self.logprobs.append(logprobs)
        self.cumulative_logprob = (self.cumulative_logprob or 0.0) + logprobs.logprob

    def take_prompt_logprobs(self, start: int, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Those of the tokens after position `start`; what is known from before a preemption is left out."""
        if not self.num_delivered:
            self.prompt_logprobs += logprobs[len(self.prompt_logprobs) - start - 1 :]

    def output(self) -> SequenceOutput:
        """All that is new since the last one."""
        sequence = self.sequence
        if sequence.finish_reason is not None:
            self._end_text()
        token_ids = sequence.token_ids[sequence.num_prompt_tokens + self.num_delivered :]
        self.num_delivered += len(token_ids)
        text, self.text = self.text, ""
        output = SequenceOutput(
            self.request, sequence.choice, text, token_ids, self.num_delivered, sequence.num_cached_tokens
        )
        if sequence.finish_reason is not None:
            output.finish_reason = sequence.finish_reason
            output.stop_reason = sequence.stop_reason
            if (prediction := sequence.prediction) is not None:
                output.predicted = prediction.num_accepted, prediction.num_rejected
            if self.first_token_ns:
                output.phases = (self.scheduled_ns, self.first_token_ns, self.last_token_ns)
        if self.logprobs:
            output.logprobs, self.logprobs = self.logprobs, []
            output.cumulative_logprob = self.cumulative_logprob
        if self.prompt_logprobs:
            output.prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, []
        return output

    def described(self) -> dict[str, object]:
        """How far it is, and its numbers, for people and APIs that ask; nothing of its text."""
        sequence = self.sequence
        numbers = {name: getattr(sequence.params, name) for name in CONVERTERS}
        return {
            "slot": sequence.slot,
            "sequence": sequence.seq_id,
            "is_streamed": self.request.is_streamed,
            "num_prompt_tokens": sequence.num_prompt_tokens,
            "num_cached_tokens": sequence.num_cached_tokens,
            "num_computed_tokens": sequence.num_computed_tokens,
            "num_output_tokens": sequence.num_output_tokens,
            "num_remaining_tokens": sequence.max_num_tokens - sequence.num_tokens,
            "sampling": {name: value for name, value in numbers.items() if isinstance(value, int | float)}
            | {"seed": sequence.seed},
        }

    def _end_text(self) -> None:
        if self.stream is None or isinstance(self.sequence.stop_reason, str):
            return  # a stop string has ended the text already
        if self.is_lazy:
            token_ids = self.sequence.output_token_ids
            self.text, _ = self.stream.push(token_ids[:-1] if self.is_last_hidden else token_ids)
        self.text += self.stream.flush()

    def observe_first_token(self, statistics: EngineStatistics, now_ns: int) -> None:
        sequence = self.sequence
        self.first_token_ns = self.last_token_ns = now_ns
        statistics.time_to_first_token_s.observe((now_ns - self.queued_ns) / 1e9)
        statistics.num_prompt_tokens += sequence.num_prompt_tokens
        statistics.num_cached_prompt_tokens += sequence.num_cached_tokens

    def observe_end(self, statistics: EngineStatistics, now_ns: int, reason: FinishReason) -> None:
        """`now_ns`: when it ended. Times of phases are observed of those that came so far as to have a token."""
        statistics.by_finish_reason[reason] += 1
        sequence = self.sequence
        num_output_tokens = sequence.num_output_tokens
        statistics.request_prompt_tokens.observe(sequence.num_prompt_tokens)
        statistics.request_generation_tokens.observe(num_output_tokens)
        statistics.request_params_max_tokens.observe(sequence.max_num_tokens - sequence.num_prompt_tokens)
        statistics.e2e_latency_s.observe((now_ns - self.queued_ns) / 1e9)
        if not self.first_token_ns:
            return
        decode_s = (self.last_token_ns - self.first_token_ns) / 1e9
        statistics.queue_time_s.observe((self.scheduled_ns - self.queued_ns) / 1e9)
        statistics.prefill_time_s.observe((self.first_token_ns - self.scheduled_ns) / 1e9)
        statistics.decode_time_s.observe(decode_s)
        statistics.inference_time_s.observe((self.last_token_ns - self.scheduled_ns) / 1e9)
        if num_output_tokens > 1:
            statistics.time_per_output_token_s.observe(decode_s / (num_output_tokens - 1))
