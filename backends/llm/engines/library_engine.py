"""An engine of another library, as `LlmInstance` drives ours: requests in, outputs out, in steps.

The library computes on an event loop in a thread, and forms its own batches. A step takes what has arrived from it:
tokens become text here, and stop strings, lengths and log-probabilities are ours.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import queue
import random
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelserver.backend import (
    InternalError,
    InvalidArgumentError,
    ServerError,
    UnavailableError,
    UnsupportedError,
    parse_json,
)
from modelserver.backend.child import LoopThread

from ..admission import check_request, max_num_tokens
from ..delivery import Delivery
from ..engine_statistics import EngineStatistics
from ..generation import GenerationRequest, SequenceOutput
from ..lora.uses import AdapterUse, refuse_adapters
from ..options import EngineOptions
from ..sampling_params import MAX_SEED
from ..sequence import FinishReason, Sequence
from ..structured_outputs import with_default
from ..text.text_stream import TextStream
from ..text.tokenizer import Tokenizer
from . import ENGINES, OtherEngine
from .library import Asked, Library, News, OtherAdapter

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

logger = logging.getLogger(__name__)

# How long a step waits for news. New requests and cancels wait as long.
_WAIT_S = 0.002
_STOP_TIMEOUT_S = 30.0


class LibraryEngine:
    """Called from one thread at a time; `statistics` may be read from any. Steps are short, whatever the library does.

    `max_num_seqs` requests run in the library, and as many more wait there.
    """

    # What our own engine has, and these do not: a network that embeds, pictures, a cache of which we know.
    runner = None
    pictures = None
    cache_config = None
    adapter_slots = None

    def __init__(
        self,
        library: Library,
        tokenizer: Tokenizer,
        *,
        options: EngineOptions,
        max_model_len: int,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.options = options
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = tokenizer.vocab_size
        self.statistics = EngineStatistics(max_model_len=max_model_len)
        self._library = library
        self._clock_ns = clock_ns
        self._seeds = random.Random(options.seed)  # noqa: S311 - noise of sampling, no secret
        self._arrived: queue.SimpleQueue[tuple[int, News | Exception]] = queue.SimpleQueue()
        self._deliveries: dict[int, Delivery] = {}
        self._tasks: dict[int, Future[None]] = {}
        self._by_request: dict[GenerationRequest, list[Sequence]] = {}
        self._adapters: dict[tuple[str, str, int], OtherAdapter] = {}
        self._num_sequences = 0
        self._failure: Exception | None = None
        self._thread = LoopThread(f"engine-{library.engine.name}")
        try:
            self._call(library.start())
        except BaseException:
            self._thread.stop()
            raise

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, engine: OtherEngine, options: EngineOptions) -> LibraryEngine:
        """Our tokenizer of the checkpoint, and the library's engine. `options` have a `max_model_len`.

        Raises UnavailableError where the library is not installed, InternalError with its own words where it fails.
        """
        assert options.max_model_len is not None, "it was completed from the checkpoint"
        library = _library_class(engine)(engine, options)
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
        try:
            return cls(library, tokenizer, options=options, max_model_len=options.max_model_len)
        except ServerError:
            raise
        except Exception as error:
            raise InternalError(
                f"the engine {engine.name} does not load {engine.model}: {type(error).__name__}: {error}"
            ) from error

    def slots(self) -> dict[str, object]:
        """As of our engine. What the library computes of a sequence is not known: its tokens so far are.

        Those that began first have slots, as the library runs no more than these.
        """
        running = list(self._deliveries.values())[: self.options.max_num_seqs]
        return {
            "num_slots": self.options.max_num_seqs,
            "max_model_len": self.max_model_len,
            "is_speculative": False,
            "running": [{**delivery.described(), "slot": slot} for slot, delivery in enumerate(running)],
        }

    @property
    def has_work(self) -> bool:
        # An engine that is dead has work until its process ends, which is what its driver does then.
        return bool(self._deliveries) or self._failure is not None

    def is_running(self, request: GenerationRequest) -> bool:
        return request in self._by_request

    def find_adapter(self, uses: Collection[AdapterUse]) -> OtherAdapter | None:
        """The adapter that a request asks for. Raises ServerErrors that name it."""
        uses = [use for use in uses if use.scale]
        if not self.options.serves_adapters:
            refuse_adapters(uses)
        if not uses:
            return None
        if len(uses) > 1 or uses[0].scale != 1.0:
            raise UnsupportedError(f"the engine {self._library.engine.name} takes one adapter a request, unscaled")
        (use,) = uses
        places = dict(self.options.lora_modules)
        place = use.place or places.get(use.name)
        if place is None:
            raise InvalidArgumentError(f"LoRA {use.name:.200} is not supported, we currently support {sorted(places)}")
        key = use.name, place, use.load
        found = self._adapters.get(key)
        if found is None:
            found = OtherAdapter(use.name, len(self._adapters) + 1, place, _rank_of(Path(place)))
            self._adapters[key] = found
        return found

    def add(self, request: GenerationRequest) -> None:
        """Raises ServerErrors, and the request is not taken."""
        if self._failure is not None:
            raise UnavailableError(f"the engine {self._library.engine.name} has died: {self._failure}")
        params = request.params
        check_request(
            request,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            max_logprobs=self.options.max_logprobs,
            has_text=True,
        )
        self._library.check(params)
        adapter = self.find_adapter(request.adapters)
        request.arrival_ns = request.arrival_ns or self._clock_ns()
        if params.structured_outputs is not None:
            asked = with_default(params.structured_outputs, is_compact=self.options.disable_any_whitespace)
            params = replace(params, structured_outputs=asked)
        self.statistics.request_params_n.observe(params.n)
        self._by_request[request] = [
            self._begin(request, replace(params, n=1), choice, adapter) for choice in range(params.n)
        ]
        self._observe_gauges()

    def abort(self, request: GenerationRequest) -> None:
        """Drop what is left of a request. One that has ended, or was never taken, is left alone."""
        now_ns = self._clock_ns()
        for sequence in self._by_request.get(request, ())[:]:
            self._end(sequence, FinishReason.ABORT, now_ns)
        self._observe_gauges()

    def reset(self) -> None:
        """Drop all requests."""
        for request in list(self._by_request):
            self.abort(request)

    def close(self) -> None:
        self.reset()
        try:
            asyncio.run_coroutine_threadsafe(self._library.stop(), self._thread.loop).result(_STOP_TIMEOUT_S)
        except Exception:
            logger.exception("the engine %s did not stop", self._library.engine.name)
        self._thread.stop()

    def step(self) -> list[SequenceOutput]:
        """What has come of all requests; waits a moment for the first. Raises InternalError of an engine that died."""
        outputs: list[SequenceOutput] = []
        since_ns: dict[int, int] = {}
        timeout_s: float | None = _WAIT_S
        while True:
            try:
                seq_id, news = self._arrived.get(timeout_s is not None, timeout_s)
            except queue.Empty:
                break
            timeout_s = None
            delivery = self._deliveries.get(seq_id)
            if delivery is None:
                continue
            if isinstance(news, Exception):
                outputs.append(self._fail(delivery, news))
            elif (output := self._take(delivery, news, since_ns)) is not None:
                outputs.append(output)
        if self._failure is not None:
            raise InternalError(f"the engine {self._library.engine.name} has died: {self._failure}")
        self.statistics.observe_tokens(since_ns, self._clock_ns())
        self._observe_gauges()
        return outputs

    def _begin(self, request: GenerationRequest, params: Any, choice: int, adapter: OtherAdapter | None) -> Sequence:
        """Let the library generate one choice."""
        seq_id = self._num_sequences
        self._num_sequences += 1
        # The prompt's own log-probabilities come once.
        if choice and params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)
        if params.seed is not None:
            params = replace(params, seed=(params.seed + choice) & MAX_SEED)
        sequence = Sequence(
            seq_id=seq_id,
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
            params=params,
            choice=choice,
            max_num_tokens=max_num_tokens(request, self.max_model_len),
        )
        delivery = Delivery(
            request,
            sequence,
            TextStream(self.tokenizer, request.prompt_token_ids, params),
            is_lazy=not request.is_streamed and not params.stop,
            queued_ns=request.arrival_ns,
        )
        delivery.scheduled_ns = self._clock_ns()
        eos_token_ids = sorted(self.tokenizer.eos_token_ids)
        ends = set(params.stop_token_ids).union(() if params.ignore_eos else eos_token_ids)
        asked = Asked(
            f"{seq_id}-{self._seeds.getrandbits(32):08x}",
            request.prompt_token_ids,
            params,
            sequence.max_num_tokens - sequence.num_prompt_tokens,
            eos_token_ids,
            sorted(ends),
            adapter,
            request.priority,
            request.cache_salt,
        )
        self._deliveries[seq_id] = delivery
        self._tasks[seq_id] = asyncio.run_coroutine_threadsafe(self._generate(seq_id, asked), self._thread.loop)
        return sequence

    async def _generate(self, seq_id: int, asked: Asked) -> None:
        """On the library's loop. Being cancelled aborts it there."""
        try:
            async with aclosing(self._library.generate(asked)) as stream:
                async for news in stream:
                    self._arrived.put((seq_id, news))
        except Exception as error:
            self._arrived.put((seq_id, error))
        else:
            early = InternalError(f"the engine {self._library.engine.name} ended a text without a reason")
            self._arrived.put((seq_id, early))

    def _take(self, delivery: Delivery, news: News, since_ns: dict[int, int]) -> SequenceOutput | None:
        """Tokens to text; the output of a sequence that is streamed, or has ended."""
        now_ns = self._clock_ns()
        sequence, statistics = delivery.sequence, self.statistics
        sequence.num_cached_tokens = news.num_cached_tokens or sequence.num_cached_tokens
        if news.prompt_logprobs and sequence.params.prompt_logprobs is not None:
            delivery.prompt_logprobs = list(news.prompt_logprobs)
        reason: FinishReason | None = None
        for index, token_id in enumerate(news.token_ids):
            if delivery.last_token_ns:
                since_ns[delivery.last_token_ns] = since_ns.get(delivery.last_token_ns, 0) + 1
                delivery.last_token_ns = now_ns
            else:
                delivery.observe_first_token(statistics, now_ns)
            statistics.num_generation_tokens += 1
            sequence.token_ids.append(token_id)
            if index < len(news.logprobs):
                delivery.take_logprobs(news.logprobs[index])
            reason = delivery.take_token(token_id, self.tokenizer.eos_token_ids)
            if reason is not None:
                break
        if reason is None and news.finish_reason is not None:
            reason = news.finish_reason
            if news.stop_reason not in self.tokenizer.eos_token_ids or sequence.params.ignore_eos:
                sequence.stop_reason = news.stop_reason
        if reason is not None:
            self._end(sequence, reason, now_ns)
        if reason is not None or delivery.request.is_streamed:
            return delivery.output()
        return None

    def _fail(self, delivery: Delivery, error: Exception) -> SequenceOutput:
        """The last output of a request that the library refuses, or has failed at."""
        if self._library.is_dead(error):
            self._failure = error
        if not isinstance(error, ServerError):
            message = f"the engine {self._library.engine.name} failed: {type(error).__name__}: {error}"
            # Libraries raise ValueError for a request that they cannot serve.
            error = InvalidArgumentError(message) if isinstance(error, ValueError) else InternalError(message)
        request = delivery.request
        self.abort(request)
        return SequenceOutput(request, delivery.sequence.choice, "", [], 0, 0, error=error)

    def _end(self, sequence: Sequence, reason: FinishReason, now_ns: int) -> None:
        delivery = self._deliveries.pop(sequence.seq_id)
        self._tasks.pop(sequence.seq_id).cancel()
        sequence.finish_reason = reason
        delivery.observe_end(self.statistics, now_ns, reason)
        choices = self._by_request[delivery.request]
        choices.remove(sequence)
        if not choices:
            del self._by_request[delivery.request]

    def _observe_gauges(self) -> None:
        num_unfinished = len(self._deliveries)
        self.statistics.num_running = min(num_unfinished, self.options.max_num_seqs)
        self.statistics.num_waiting = num_unfinished - self.statistics.num_running

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._thread.loop).result()


def _library_class(engine: OtherEngine) -> type[Library]:
    package = ENGINES[engine.name]
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UnavailableError(
            f"engine: {engine.name}: the Python package '{error.name}' is not installed in the model's environment: "
            "list it in a requirements.txt beside config.pbtxt, or name an environment by EXECUTION_ENV_PATH"
        ) from error
    match engine.name:
        case "vllm":
            from .vllm import VllmLibrary

            return VllmLibrary
        case "sglang":
            from .sglang import SglangLibrary

            return SglangLibrary
        case _:
            from .tensorrt_llm import TensorRtLibrary

            return TensorRtLibrary


def _rank_of(directory: Path) -> int:
    """That of PEFT's config; 0 for an adapter in another form, which the library knows."""
    try:
        config = parse_json((directory / "adapter_config.json").read_bytes(), str(directory))
    except (OSError, ValueError):
        return 0
    return int(config.get("r", 8)) if isinstance(config, dict) else 0
