"""The engine: requests in, outputs out, one step at a time. It owns no thread and no clock of its own.

A step is one plan of the scheduler, computed by the runner, and taken in: tokens, stops, text. Where the runner is
asynchronous, a step launches the next plan first and then takes in the one before, so that the device never waits for
the host; a sequence's end is then noticed one step late, and what the device has computed beyond it is dropped.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from modelserver.backend import ServerError, UnsupportedError

from .admission import check_request, is_host_bound, max_num_tokens
from .blocks import BlockPool, root_hash
from .delivery import Delivery
from .engine_statistics import EngineStatistics
from .generation import GenerationRequest, SequenceOutput
from .grammar_queue import GrammarQueue
from .kv_cache import KvManager
from .kv_events import KvEvents
from .lora.slots import AdapterSlots
from .lora.uses import AdapterUse, refuse_adapters
from .options import EngineOptions
from .plan import SampledToken, StepPlan, StepResult
from .sampling_params import MAX_SEED, SamplingParams
from .scheduler import Scheduler
from .sequence import FinishReason, Sequence
from .speculation.prediction import Prediction
from .speculation.speculator import make_predicting, make_speculator

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .grammar import Grammar
    from .kept_blocks import HostBlocks
    from .lora.adapter import Adapter
    from .lora.registry import Adapters
    from .pictures.reader import PictureReader
    from .runner import Launched, Runner
    from .sampler import Sampler
    from .text.text_stream import TextStream
    from .text.tokenizer import Tokenizer

__all__ = ["Engine", "GenerationRequest", "SequenceOutput"]


@dataclass(slots=True)
class _Choices:
    """Of one request: those that have not ended, and the most tokens that one has generated."""

    running: list[Sequence]
    longest: int = 0


# How long a tokenizer that cannot be read takes to say so, of the usual causes.
_TOKENIZER_S = 0.01


class Engine:
    """Called from one thread at a time; `statistics` may be read from any."""

    def __init__(
        self,
        *,
        options: EngineOptions,
        runner: Runner,
        tokenizer: Tokenizer | None,
        pictures: PictureReader | None = None,
        drafter: Runner | None = None,
        adapters: Adapters | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.options = options
        self.runner = runner
        self.tokenizer = tokenizer
        self.pictures = pictures
        self._clock_ns = clock_ns
        self._kv = KvManager(
            BlockPool(runner.num_blocks),
            runner.block_size,
            is_prefix_caching=options.enable_prefix_caching,
            window=runner.window,
            chunk_len=options.chunk_len,
            has_states=runner.has_states,
        )
        self._host_blocks: HostBlocks | None = None
        if options.kv_offloading_size:
            self._check_can_keep("kv_offloading_size")
            from .kept_blocks import HostBlocks

            self._host_blocks = HostBlocks(runner.blocks, int(options.kv_offloading_size * (1 << 30)))
            self._kv.kept = [self._host_blocks]
        self._events = None if options.kv_events_config is None else KvEvents(options.kv_events_config)
        self._kv.events = self._events
        if self._host_blocks is not None or self._events is not None:
            self._kv.pool.on_forgotten = self._on_forgotten
        self.adapters = adapters
        self.adapter_slots = None if adapters is None else AdapterSlots(options.num_lora_slots)
        self._scheduler = Scheduler(
            self._kv,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            is_by_priority=options.scheduling_policy == "priority",
            is_chunked=options.enable_chunked_prefill,
            adapters=self.adapter_slots,
        )
        # A sequence has to fit into the pool alone, so that it can be finished whatever the others do.
        self.max_model_len = self._kv.most_tokens(runner.max_model_len)
        options.check_unchunked(self.max_model_len)
        self._eos_token_ids = runner.eos_token_ids
        self._deliveries: dict[int, Delivery] = {}
        self._by_request: dict[GenerationRequest, _Choices] = {}
        self._grammars = (
            GrammarQueue(
                tokenizer, is_compact=options.disable_any_whitespace, engine=options.structured_outputs_backend
            )
            if tokenizer is not None
            else None
        )
        self._inflight: tuple[StepPlan, Launched] | None = None
        self._num_sequences = 0
        self._seeds = random.Random(options.seed)  # noqa: S311 - noise of sampling, no secret
        self._speculator = make_speculator(runner, options, drafter, clock_ns)
        self.statistics = EngineStatistics(max_model_len=self.max_model_len)
        self._note_speculator()

    def _note_speculator(self) -> None:
        if self._speculator is not None:
            self.statistics.speculation = self._speculator.statistics

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, options: EngineOptions) -> Engine:
        """Load config, weights and tokenizer; the checkpoint is not read afterwards.

        Raises ServerErrors that name the file.
        """
        from .kv_memory import sized_for
        from .lora.registry import Adapters
        from .models.load import choose_device
        from .sampler import Sampler
        from .text.tokenizer import Tokenizer

        options = sized_for(options, choose_device(options.device))
        with ThreadPoolExecutor(1, "tokenizer") as beside_weights:
            reading = beside_weights.submit(Tokenizer.from_checkpoint, checkpoint)
            if wait((reading,), _TOKENIZER_S).done:  # one that is missing or wrong is found before the weights are read
                reading.result()

            def make_sampler() -> Sampler:
                return Sampler(eos_token_ids=reading.result().eos_token_ids, tokenizer=reading.result())

            runner, drafter = _load_networks(checkpoint, options, make_sampler, reading.result)
            tokenizer = reading.result()
        pictures = None
        if runner.tower is not None:
            from .pictures.reader import PictureReader

            pictures = PictureReader(runner.tower, tokenizer, options)
        try:
            engine = cls(
                options=options,
                runner=runner,
                tokenizer=tokenizer,
                pictures=pictures,
                drafter=drafter,
                adapters=Adapters.of(runner.target, options),
            )
        except BaseException:
            for each in (runner, drafter):
                if each is not None:
                    each.close()
            raise
        if options.kept_prefixes:
            try:
                engine.open_prefixes(checkpoint.digest)
            except BaseException:
                engine.close()
                raise
        return engine

    def open_prefixes(self, digest: bytes) -> None:
        """Look for blocks in the files of `kept_prefixes` too, which are written if need be; before any request.

        `digest` is the checkpoint's. Raises ServerErrors.
        """
        from .kept_blocks import open_prefixes

        def held(token_ids: list[int], hashes: list[bytes]) -> list[int]:
            self.compute(GenerationRequest(token_ids, SamplingParams(max_tokens=1, temperature=0)))
            found = [self._kv.pool.find(block_hash) for block_hash in hashes]
            known = [block for block in found if block is not None]
            assert len(known) == len(found), "the pool has forgotten what was computed last"
            return known

        self._check_can_keep("kept_prefixes")
        adapter = self.find_adapter(())
        root = root_hash("", b"" if adapter is None else adapter.digest)
        files = open_prefixes(self.options, self.runner.blocks, self.tokenizer, digest, root, held)
        self._kv.kept = [*self._kv.kept, files]
        # What was computed for it counts for no request.
        self.statistics = EngineStatistics(max_model_len=self.max_model_len)
        self._note_speculator()
        self._kv.num_query_tokens = self._kv.num_hit_tokens = 0

    def compute(self, request: GenerationRequest) -> None:
        """Generate it here and now, while nothing else runs. Raises ServerErrors."""
        request.is_streamed = False
        self.add(request)
        while self.has_work:
            for output in self.step():
                if output.error is not None:
                    raise output.error

    def _on_forgotten(self, block_hash: bytes, block: int) -> None:
        if self._host_blocks is not None:
            self._host_blocks.keep(block_hash, block)
        if self._events is not None:
            self._events.removed(block_hash)

    def _check_can_keep(self, option: str) -> None:
        kv = self._kv
        if self.options.tensor_parallel_size > 1:
            raise UnsupportedError(f"{option} is not supported with tensor_parallel_size: remove one of them")
        if not kv.is_prefix_caching or kv.window is not None:
            why = "all layers have a sliding window" if kv.window is not None else "prefixes are not cached"
            raise UnsupportedError(f"{option} has no effect on this model, because {why}: remove it")

    @property
    def cache_config(self) -> dict[str, object]:
        """How large the KV cache is and how it is used, in the words of vLLM's `cache_config_info`.

        `num_gpu_blocks` are those that sequences may hold, on whatever device.
        """
        options = self.options
        return {
            "block_size": self._kv.block_size,
            "num_gpu_blocks": self._kv.pool.num_usable,
            "num_cpu_blocks": None,
            "num_gpu_blocks_override": options.num_gpu_blocks_override,
            "cache_dtype": options.kv_cache_dtype,
            "enable_prefix_caching": self._kv.is_prefix_caching,
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "kv_cache_memory_bytes": options.kv_cache_memory_bytes,
            "sliding_window": self._kv.window,
        }

    def slots(self) -> dict[str, object]:
        """What runs, for people and APIs that ask: the number of slots, and of each that is taken its sequence.

        The prompt and what is generated are not told, nor anything else that a client wrote.
        """
        return {
            "num_slots": self.options.max_num_seqs,
            "max_model_len": self.max_model_len,
            "is_speculative": self._speculator is not None,
            "running": [self._deliveries[sequence.seq_id].described() for sequence in self._scheduler.running],
        }

    @property
    def vocab_size(self) -> int:
        return self.runner.vocab_size

    @property
    def has_work(self) -> bool:
        """Also when no step can succeed any more: the next one says why, and the engine's process ends."""
        return bool(self._deliveries) or self._inflight is not None or bool(self._grammars) or self.runner.is_lost

    def is_running(self, request: GenerationRequest) -> bool:
        """Whether outputs of the request are still to come."""
        return request in self._by_request or (self._grammars is not None and request in self._grammars)

    def add(self, request: GenerationRequest) -> None:
        """Take a request on: from now on its outputs come from `step`, until each choice has its last or `abort`.

        Raises InvalidArgumentError, and the request is not taken: a parameter that this model or these options do not
        have, a prompt that is empty or too long, or an output that could never have room. A grammar that takes its time
        is compiled beside the steps; if it is refused in the end, the request's only output has an `error`.
        """
        check_request(
            request,
            vocab_size=self.runner.vocab_size,
            max_model_len=self.max_model_len,
            max_logprobs=self.options.max_logprobs,
            has_text=self.tokenizer is not None,
        )
        request.adapter = self.find_adapter(request.adapters)
        request.arrival_ns = request.arrival_ns or self._clock_ns()
        grammar = None
        if request.params.structured_outputs is not None:
            assert self._grammars is not None, "without a tokenizer such a request was refused"
            grammar = self._grammars.compile(request)
            if grammar is None:
                return
        self._begin(request, grammar)

    def find_adapter(self, uses: Collection[AdapterUse]) -> Adapter | None:
        """What the adapters that a request asks for add together; read from their files if need be.

        Raises ServerErrors that name the adapter.
        """
        if self.adapters is None:
            refuse_adapters(uses)
            return None
        return self.adapters.find(uses)

    def _begin(self, request: GenerationRequest, grammar: Grammar | None) -> None:
        """Let the sequences of a request wait for their turn."""
        params = request.params
        if request.prediction and self._speculator is None:
            self._speculator = make_predicting(self.runner, self._clock_ns)
            self._note_speculator()
        self.statistics.request_params_n.observe(params.n)
        sequences: list[Sequence] = []
        for choice in range(params.n):
            sequence = Sequence(
                seq_id=self._num_sequences,
                token_ids=list(request.prompt_token_ids),
                num_prompt_tokens=len(request.prompt_token_ids),
                # The prompt's own log-probabilities come once, of the choice that computes it.
                params=replace(params, prompt_logprobs=None)
                if choice and params.prompt_logprobs is not None
                else params,
                choice=choice,
                arrival=self._num_sequences,
                priority=request.priority,
                cache_salt=request.cache_salt,
                seed=self._seeds.getrandbits(63) if params.seed is None else (params.seed + choice) & MAX_SEED,
                max_num_tokens=max_num_tokens(request, self.max_model_len),
                is_host_bound=is_host_bound(params),
                source=sequences[0] if sequences else None,
                matcher=grammar.matcher() if grammar is not None else None,
                adapter=request.adapter,
                pictures=request.pictures,
                prediction=Prediction(request.prediction) if request.prediction else None,
            )
            self._num_sequences += 1
            sequences.append(sequence)
            self._deliveries[sequence.seq_id] = Delivery(
                request,
                sequence,
                self._text_stream(request),
                is_lazy=not request.is_streamed and not params.stop,
                queued_ns=request.arrival_ns,
                prompt_logprobs=[None] if sequence.params.prompt_logprobs is not None else [],
            )
            self._scheduler.add(sequence)
        self._by_request[request] = _Choices(sequences)
        self.statistics.num_waiting = self._scheduler.num_waiting

    def abort(self, request: GenerationRequest) -> None:
        """Drop what is left of a request: its blocks are free at once, and no output of it comes any more.

        A request that has ended, or was never taken, is left alone.
        """
        if self._grammars is not None and self._grammars.discard(request):
            return
        choices = self._by_request.get(request)
        if choices is None:
            return
        now_ns = self._clock_ns()
        for sequence in list(choices.running):
            self._end(sequence, FinishReason.ABORT, now_ns)
        self._observe_gauges()

    def reset(self) -> None:
        """Drop all requests and the cache. Needed after `step` has raised."""
        self._inflight = None
        for request in list(self._by_request):
            self.abort(request)
        if self._grammars is not None:
            self._grammars.clear()
        self._kv.pool.forget()
        if self._events is not None:
            self._events.cleared()
            self._events.send()

    def close(self) -> None:
        """Drop all requests and give back the device's memory; nothing may be called after it."""
        self.reset()
        if self._grammars is not None:
            self._grammars.close()
        if self._speculator is not None:
            self._speculator.close()
        for kept in self._kv.kept:
            kept.close()
        if self._events is not None:
            self._events.close()
        self.runner.close()

    def step(self) -> list[SequenceOutput]:
        """Compute the next plan, or launch it and take in the one before; what came of it. [] when there is nothing to
        do.

        Errors of the runner pass through, after which `reset` must be called.
        """
        if self.runner.is_lost:
            self.runner.check()
        refused = self._take_grammars() if self._grammars else []
        if self._speculator is not None:
            self._speculator.draft(self._scheduler.running)
        plan = self._scheduler.plan()
        if plan.admitted:
            self._observe_admitted(plan.admitted)
        launched = self.runner.launch(plan) if plan.chunks else None
        if self.runner.is_asynchronous:
            taken, self._inflight = self._inflight, (plan, launched) if launched is not None else None
        else:
            taken = (plan, launched) if launched is not None else None
        assert taken or launched or not self._deliveries, "sequences wait and nothing can be done for them"
        outputs = self._take_in(taken[0], taken[1].result()) if taken is not None else []
        self._observe_gauges()
        if self._events is not None:
            self._events.send()
        return refused + outputs if refused else outputs

    def _take_in(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        """Tokens to sequences, stops, text. One loop: it runs for every token of every sequence."""
        now_ns = self._clock_ns()
        statistics = self.statistics
        deliveries, eos_token_ids = self._deliveries, self._eos_token_ids
        if result.prompt_logprobs:
            self._take_prompt_logprobs(plan, result)
        if self._speculator is not None:
            self._speculator.observe(plan, result.sampled)
        outputs: list[SequenceOutput] = []
        since_ns: dict[int, int] = {}
        num_tokens = 0
        for sequence, sampled in zip(self._scheduler.update(plan, result.sampled), result.sampled, strict=True):
            if sequence is None:
                continue
            delivery = deliveries[sequence.seq_id]
            last_ns = delivery.last_token_ns
            if last_ns:
                since_ns[last_ns] = since_ns.get(last_ns, 0) + 1
                delivery.last_token_ns = now_ns
            else:
                delivery.observe_first_token(statistics, now_ns)
            if len(sampled) == 1:
                token_id, logprobs = sampled[0]
                if logprobs is not None:
                    delivery.take_logprobs(logprobs)
                reason = delivery.take_token(token_id, eos_token_ids)
                num_tokens += 1
            else:
                reason, num_taken = self._take_tokens(delivery, sequence, sampled)
                num_tokens += num_taken
            if reason is not None:
                self._end(sequence, reason, now_ns)
            elif not delivery.request.is_streamed:
                continue
            outputs.append(delivery.output())
        statistics.num_steps += 1
        statistics.num_step_sequences += len(plan.chunks)
        statistics.num_generation_tokens += num_tokens
        statistics.iteration_tokens.observe(plan.num_tokens)
        statistics.observe_tokens(since_ns, now_ns)
        return outputs

    def _take_tokens(
        self, delivery: Delivery, sequence: Sequence, sampled: tuple[SampledToken, ...]
    ) -> tuple[FinishReason | None, int]:
        """Of several: why the sequence ends, None if it goes on; and how many it took: what follows its end is
        dropped."""
        del sequence.token_ids[1 - len(sampled) :]
        for index, token in enumerate(sampled):
            if index:
                sequence.token_ids.append(token.token_id)
            if token.logprobs is not None:
                delivery.take_logprobs(token.logprobs)
            reason = delivery.take_token(token.token_id, self._eos_token_ids)
            if reason is not None:
                return reason, index + 1
        return None, len(sampled)

    def _take_prompt_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        for chunk in plan.chunks:
            logprobs = result.prompt_logprobs.get(chunk.sequence.seq_id)
            delivery = self._deliveries.get(chunk.sequence.seq_id)
            if logprobs and delivery is not None:
                delivery.take_prompt_logprobs(chunk.start, logprobs)

    def _end(self, sequence: Sequence, reason: FinishReason, now_ns: int) -> None:
        self._scheduler.finish(sequence)
        if self._speculator is not None:
            self._speculator.end(sequence)
        sequence.finish_reason = reason
        delivery = self._deliveries.pop(sequence.seq_id)
        delivery.observe_end(self.statistics, now_ns, reason)
        self.statistics.longest_sequence = max(self.statistics.longest_sequence, sequence.num_tokens)
        if sequence.adapter is not None:
            self.statistics.observe_adapter(sequence.adapter.name, sequence.num_output_tokens)
        choices = self._by_request[delivery.request]
        choices.running.remove(sequence)
        choices.longest = max(choices.longest, sequence.num_output_tokens)
        if not choices.running:
            self.statistics.request_longest_generation.observe(choices.longest)
            del self._by_request[delivery.request]

    def _observe_admitted(self, admitted: Iterable[Sequence]) -> None:
        now_ns = self._clock_ns()
        for sequence in admitted:
            delivery = self._deliveries[sequence.seq_id]
            if not delivery.scheduled_ns:
                delivery.scheduled_ns = now_ns

    def _observe_gauges(self) -> None:
        statistics = self.statistics
        statistics.num_running = self._scheduler.num_running
        statistics.num_waiting = self._scheduler.num_waiting
        statistics.num_preemptions = self._scheduler.num_preemptions
        statistics.kv_cache_usage = self._kv.pool.usage
        statistics.num_prefix_query_tokens = self._kv.num_query_tokens
        statistics.num_prefix_hit_tokens = self._kv.num_hit_tokens

    def _text_stream(self, request: GenerationRequest) -> TextStream | None:
        if self.tokenizer is None:
            return None
        from .text.text_stream import TextStream

        return TextStream(self.tokenizer, request.prompt_token_ids, request.params)

    def _take_grammars(self) -> list[SequenceOutput]:
        """Begin the requests whose grammars are there; the outputs of those whose grammars never will be."""
        assert self._grammars is not None, "asked only when grammars are being compiled"
        refused = []
        is_idle = not self._deliveries and self._inflight is None
        for request, compiled in self._grammars.take(is_idle=is_idle):
            if isinstance(compiled, ServerError):
                refused.append(SequenceOutput(request, 0, "", [], 0, 0, error=compiled))
            else:
                self._begin(request, compiled)
        return refused


def _load_networks(
    checkpoint: Checkpoint,
    options: EngineOptions,
    make_sampler: Callable[[], Sampler],
    tokenizer: Callable[[], Tokenizer],
) -> tuple[Runner, Runner | None]:
    """The model, and the draft model if there is one. This is first on a GPU, where the model's KV cache takes all that
    is left."""
    from .models.load import choose_device
    from .runner import load_runner
    from .speculation.draft_model import load_drafter

    is_gpu = choose_device(options.device).type == "cuda"
    with ExitStack() as failed:
        drafter = load_drafter(checkpoint, options, tokenizer, is_gpu=True) if is_gpu else None
        if drafter is not None:
            failed.callback(drafter.close)
        runner = load_runner(checkpoint, options, make_sampler)
        failed.callback(runner.close)
        if not is_gpu:
            drafter = load_drafter(checkpoint, options, tokenizer, is_gpu=False)
        failed.pop_all()
    return runner, drafter
