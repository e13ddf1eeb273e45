"""The instance of an encoder or a classifier: requests with the contract's tensors in, a batch per step, answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from modelserver.backend import InferRequest, InferResponse, InvalidArgumentError, Measurement, StepInstance
from modelserver.backend import ResponseSender as Sender

from ..answer import tokenized
from ..call import Call, ReadRequest, read_call
from ..contract import Operation
from ..engine_statistics import EngineStatistics, measure
from ..long_texts import LongTexts
from ..lora.uses import refuse_adapters
from ..options import EngineOptions
from ..sequence import FinishReason
from ..text.tokenizer import LengthCheck, any_length
from .text_model import Text, TextModel

# Texts up to this length share a batch however they differ: there it is the call that costs, not the padding.
_SHORT_LEN = 32


def plan_batch(lengths: Sequence[int], *, max_tokens: int, max_rows: int, stretch: float = 2.0) -> list[int]:
    """The positions in `lengths`, which is in order of arrival, of the next batch; the first is always among them.

    Rows are padded to the longest, so those of like length are taken: the longest is at most `stretch` times as long as
    any other (unless all are short), and rows times the longest is at most `max_tokens`, unless there is one row only.
    The nearest in length are taken first, and of equal ones those that came first.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    start = order.index(0)
    end = start + 1  # of the part of `order` that is taken
    has_below, has_above = start > 0, end < len(order)
    while (has_below or has_above) and end - start < max_rows:
        below = lengths[0] - lengths[order[start - 1]] if has_below else None
        above = lengths[order[end]] - lengths[0] if has_above else None
        goes_up = below is None or (above is not None and above <= below)
        low, high = (start, end + 1) if goes_up else (start - 1, end)
        shortest, longest = lengths[order[low]], lengths[order[high - 1]]
        if longest > max(stretch * shortest, _SHORT_LEN) or (high - low) * longest > max_tokens:
            # Nor would it fit later, when more are taken.
            has_below, has_above = has_below and goes_up, has_above and not goes_up
            continue
        start, end = low, high
        has_below, has_above = has_below and start > 0, has_above and end < len(order)
    return order[start:end]


@dataclass(slots=True, eq=False)
class _Waiting:
    """A text that waits for the step in which it is computed. `arrival_ns` by the instance's clock."""

    sender: Sender
    text: Text
    arrival_ns: int

    @property
    def num_tokens(self) -> int:
        return len(self.text.token_ids)


class EncoderInstance(StepInstance):
    """One text model. Called from the worker's thread; only `measure` is called from another.

    Requests wait here in order of arrival, at most twice as many as a batch takes, so that each batch finds texts of
    like length; all others wait in the model's queue.
    """

    def __init__(
        self, encoder: TextModel, options: EngineOptions, *, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.encoder = encoder
        self.statistics = EngineStatistics(max_model_len=encoder.max_model_len)
        self._max_rows = options.max_num_seqs
        self._max_tokens = options.max_num_batched_tokens
        self._clock_ns = clock_ns
        self._waiting: dict[InferRequest, _Waiting] = {}
        self._long_texts = LongTexts(options.max_num_seqs)

    def add(self, request: InferRequest) -> None:
        if not self._long_texts.add(request, self._read):
            self._begin(request, request.sender, self._read(request, any_length))

    def _read(self, request: InferRequest, check_left: LengthCheck) -> ReadRequest:
        """The part that takes time in proportion to the text. For a long text it runs beside the worker's thread."""
        operations = self.encoder.operations
        call = read_call(request, usual=operations[0])
        refuse_adapters(call.adapters)
        if call.operation is Operation.TOKENIZE:
            return ReadRequest(call, response=self._tokenized(call, check_left, request.outputs))
        if call.operation not in operations:
            known = ", ".join(each.value for each in operations)
            raise InvalidArgumentError(
                f"input 'operation': this model {self.encoder.what} texts: it does not {call.operation.value}; "
                f"expected {known} or tokenize"
            )
        text = self.encoder.read(call, check_left)
        return ReadRequest(call, text.token_ids, type_ids=text.type_ids)

    def _begin(self, request: InferRequest, sender: Sender, read: ReadRequest) -> None:
        if read.response is not None:
            sender.finish(read.response)
            return
        arrival_ns = request.arrival_ns or self._clock_ns()
        text = Text(read.call, read.token_ids, read.type_ids)
        self._waiting[request] = _Waiting(sender, text, arrival_ns)
        self.statistics.num_waiting = len(self._waiting)

    def abort(self, request: InferRequest) -> None:
        if self._long_texts.discard(request) or self._waiting.pop(request, None) is not None:
            self.statistics.by_finish_reason[FinishReason.ABORT] += 1
            self.statistics.num_waiting = len(self._waiting)

    def step(self) -> None:
        if self._long_texts:
            self._long_texts.take(self._begin, is_idle=not self._waiting)
        if self._waiting:
            self._compute()

    def _compute(self) -> None:
        requests = list(self._waiting)
        lengths = [waiting.num_tokens for waiting in self._waiting.values()]
        chosen = plan_batch(lengths, max_tokens=self._max_tokens, max_rows=self._max_rows, stretch=self.encoder.stretch)
        batch = [self._waiting.pop(requests[position]) for position in chosen]
        statistics = self.statistics
        statistics.num_running, statistics.num_waiting = len(batch), len(self._waiting)
        start_ns = self._clock_ns()
        try:
            responses = self.encoder.answer([waiting.text for waiting in batch])
        finally:
            statistics.num_running = 0
        self._observe(batch, start_ns)
        for waiting, response in zip(batch, responses, strict=True):
            waiting.sender.finish(response)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or bool(self._long_texts)

    @property
    def has_room(self) -> bool:
        return len(self._waiting) < 2 * self._max_rows and self._long_texts.has_room

    def close(self) -> None:
        self._long_texts.close()

    def measure(self) -> list[Measurement]:
        return measure(self.statistics, num_unread=len(self._long_texts))

    def _tokenized(self, call: Call, check: LengthCheck, outputs: Collection[str] | None) -> InferResponse:
        token_ids = self.encoder.encoded(call, None, check)
        return tokenized(token_ids, self.encoder.tokenizer, self.encoder.max_model_len, outputs)

    def _observe(self, batch: list[_Waiting], start_ns: int) -> None:
        statistics, end_ns = self.statistics, self._clock_ns()
        computed_s = (end_ns - start_ns) / 1e9
        num_tokens = sum(waiting.num_tokens for waiting in batch)
        statistics.num_steps += 1
        statistics.num_prompt_tokens += num_tokens
        statistics.iteration_tokens.observe(num_tokens)
        statistics.by_finish_reason[FinishReason.STOP] += len(batch)
        statistics.prefill_time_s.observe(computed_s, len(batch))
        statistics.inference_time_s.observe(computed_s, len(batch))
        for waiting in batch:
            statistics.request_prompt_tokens.observe(waiting.num_tokens)
            statistics.queue_time_s.observe((start_ns - waiting.arrival_ns) / 1e9)
            statistics.e2e_latency_s.observe((end_ns - waiting.arrival_ns) / 1e9)
