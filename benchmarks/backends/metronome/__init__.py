"""A language model that computes nothing: each of its requests gets a token at every tick of a clock.

Its tensors are those of the bundled language models, written by the same code, so that what the server makes of a token
is measured alone. `max_tokens` says how many there are. The parameter `tokens_per_s` of the config is the rate of each
request.
"""

from __future__ import annotations

import time

import orjson
from modelserver_backends.llm.answer import AnswerWriter
from modelserver_backends.llm.contract import RETURNS, complete_config
from modelserver_backends.llm.generation import GenerationRequest, SequenceOutput
from modelserver_backends.llm.plan import TokenLogprobs
from modelserver_backends.llm.sampling_params import SamplingParams
from modelserver_backends.llm.sequence import FinishReason

from modelserver.backend import Backend, BackendContext, InferRequest, ModelConfig, Placement, StepInstance

WORD = " token"


class _Words:
    """The tokenizer, of one word."""

    def token_bytes(self, _token_id: int) -> bytes:
        return WORD.encode()

    def token_text(self, _token_id: int) -> str:
        return WORD


class _Stream:
    """One request: what is left of it, and the writer of its responses."""

    def __init__(self, request: InferRequest) -> None:
        self.sender = request.sender
        sampling = orjson.loads(request.inputs["sampling_parameters"].data.item())
        self.num_left = int(sampling["max_tokens"])
        self.asked = GenerationRequest([1, 2, 3], SamplingParams())
        wants = {output for name, output in RETURNS.items() if name in request.inputs}
        self.has_logprobs = sampling.get("logprobs") is not None
        self.writer = AnswerWriter(
            wants,
            _Words(),  # type: ignore[arg-type]
            [1, 2, 3],
            prefix="",
            has_index=False,
            has_logprobs=self.has_logprobs,
        )
        self.unsent: SequenceOutput | None = None

    def tick(self) -> bool:
        """Send a token; False with the last one."""
        self.num_left -= 1
        logprobs = [TokenLogprobs(-0.5, 1)] if self.has_logprobs else None
        output = SequenceOutput(self.asked, 0, WORD, [7], 1, 0, logprobs)
        if self.num_left == 0:
            output.finish_reason = FinishReason.LENGTH
        if self.unsent is not None:
            self.unsent.extend(output)
            output, self.unsent = self.unsent, None
        if self.num_left == 0:
            self.sender.finish(self.writer.response([output]))
            return False
        if self.sender.has_room:
            self.sender.send(self.writer.response([output]), wait=False)
        else:
            self.unsent = output
        return True


class Metronome(StepInstance):
    def __init__(self, tokens_per_s: float) -> None:
        self._period_s = 1 / tokens_per_s
        self._next_s = time.monotonic()
        self._streams: dict[InferRequest, _Stream] = {}

    def add(self, request: InferRequest) -> None:
        self._streams[request] = _Stream(request)

    def abort(self, request: InferRequest) -> None:
        self._streams.pop(request, None)

    def step(self) -> None:
        now_s = time.monotonic()
        self._next_s = max(self._next_s + self._period_s, now_s)
        time.sleep(self._next_s - now_s)
        for request, stream in list(self._streams.items()):
            if not stream.tick():
                del self._streams[request]

    @property
    def has_work(self) -> bool:
        return bool(self._streams)


class MetronomeBackend(Backend):
    """Makes one instance, with a thread of its own."""

    @classmethod
    def complete_config(cls, context: BackendContext) -> ModelConfig:
        return complete_config(context.config)

    def create_instance(self, placement: Placement) -> Metronome:
        return Metronome(self.context.float_parameter("tokens_per_s", 20.0))


BACKEND = MetronomeBackend
