"""One loaded version of a model: its backend, its instances with their workers, its scheduler, its labels.

`load` gives a model that answers; `stop` refuses new requests; `drain` waits for the accepted ones;
`close` frees everything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from modelserver.backend import Backend, BackendContext, Instance, ServerCalls, TensorInstance
from modelserver.cache.store import AnswerStore
from modelserver.config.schema import ModelConfig, ModelTransactionPolicy
from modelserver.config.signature import ModelSignature
from modelserver.core.clock import Clock, SystemClock
from modelserver.core.request import InFlightRequest
from modelserver.core.response import ResponseStream
from modelserver.errors import InvalidArgumentError, UnavailableError
from modelserver.execution.engine import Engine, EnsembleEngine
from modelserver.execution.instance_pool import InstancePool
from modelserver.execution.instances import InstanceFactory, guard
from modelserver.execution.placement import plan_instances
from modelserver.execution.pooled_instances import InstanceInfo
from modelserver.execution.process.hosted_backend import make_backend
from modelserver.execution.response_cache import ResponseCache, make_generation
from modelserver.execution.shared_resources import SharedResources
from modelserver.scheduling.ensemble import FindHolder
from modelserver.telemetry.histogram import first_response_bounds_ms
from modelserver.telemetry.host import MemoryUsage, process_memory
from modelserver.telemetry.measurement import Measurement
from modelserver.telemetry.statistics import ModelStatistics

logger = logging.getLogger(__name__)
# How long `close` waits for a batch in progress before it abandons the instance.
CLOSE_TIMEOUT_S = 30.0


class Model:
    """Made by `load`. The event loop thread submits, stops and drains; load-pool threads load, update and close."""

    def __init__(
        self,
        backend: Backend,
        engine: Engine,
        *,
        signature: ModelSignature,
        statistics: ModelStatistics,
    ) -> None:
        context = backend.context
        self.name = context.model_name
        self.namespace = context.namespace
        self.version = context.version
        self.config = context.config
        self.is_decoupled = context.config.is_decoupled
        self.backend_name = context.config.backend
        self.signature = signature
        self.statistics = statistics
        self.load_duration_s = 0.0
        # By output: the names of its classes.
        self.labels: Labels = {}
        self._backend = backend
        self._engine = engine
        self._is_closed = False
        self._idle = asyncio.Event()
        self._num_holders = 0
        self._is_stopping = False
        self._cache: ResponseCache | None = None
        self._generation = b""
        # When it was last requested, or loaded (monotonic).
        self.last_use_ns = time.monotonic_ns()
        # Why a loaded model cannot serve: an ensemble with missing models. Empty for others.
        self.fault = ""
        # The models that an ensemble calls now.
        self.composing: tuple[Model, ...] = ()

    @classmethod
    def load(
        cls,
        backend_class: type[Backend],
        context: BackendContext,
        *,
        loop: asyncio.AbstractEventLoop,
        clock: Clock | None = None,
        default_max_queue_size: int = 0,
        resources: SharedResources | None = None,
        server: ServerCalls | None = None,
    ) -> Model:
        """Load, create and warm up; the model answers from here on. Blocking, called from a load-pool thread.

        Raises ServerError with the reason, after freeing what was made. `default_max_queue_size` bounds
        queues whose config does not (0: unbounded). `server` are the calls that its backend may make.
        """
        context = replace(context, server=server)
        started_s = time.monotonic()
        clock = clock or SystemClock()
        resources = resources or SharedResources()
        config = context.config
        plans = () if config.is_ensemble else plan_instances(config)
        resources.gpu_limits.check(config.name or context.model_name, plans)
        what = f"model '{context.model_name}' version {context.version}"
        labels = read_labels(config, context.model_directory)
        backend = guard(lambda: make_backend(backend_class, context), f"loading {what} failed")
        guard(backend.load, f"loading {what} failed")
        try:
            signature = ModelSignature(config)
            statistics = ModelStatistics(
                first_response_bounds_ms=first_response_bounds_ms(config),
                is_decoupled=config.is_decoupled,
                summary_quantiles=resources.summary_quantiles,
            )
            engine: Engine
            if config.is_ensemble:
                engine = EnsembleEngine(backend, loop=loop, statistics=statistics, clock=clock)
            else:
                engine = InstancePool(
                    backend,
                    InstanceFactory(backend, signature, clock, resources.cores),
                    plans,
                    signature=signature,
                    statistics=statistics,
                    loop=loop,
                    clock=clock,
                    default_max_queue_size=default_max_queue_size,
                    resources=resources,
                )
        except BaseException:
            _unload(backend)
            raise
        model = cls(backend, engine, signature=signature, statistics=statistics)
        model.load_duration_s = time.monotonic() - started_s
        model.labels = labels
        model._open_cache(resources.answers, loop, clock)
        logger.info("%s is loaded, %d instances, %.3f s", what, len(plans), model.load_duration_s)
        return model

    @property
    def directories(self) -> tuple[Path, ...]:
        """Where its files are: of the version, then of the model."""
        return self._backend.context.version_directory, self._backend.context.model_directory

    @property
    def inflight(self) -> int:
        """Requests that are queued or executing. Read on the event loop thread."""
        num_waiting = self._cache.num_waiting if self._cache is not None else 0
        return self._engine.scheduler.inflight + num_waiting

    @property
    def is_idle(self) -> bool:
        """Whether it has no requests, no sequences, and no holders. Event loop thread."""
        return not self.inflight and not self.num_sequences and not self._num_holders

    @property
    def num_sequences(self) -> int:
        """Sequences that have not ended. Read on the event loop thread."""
        return self._engine.scheduler.num_sequences

    def has_sequence(self, sequence_id: int | str) -> bool:
        """Whether a sequence of this id is open here. Read on the event loop thread."""
        return self._engine.scheduler.has_sequence(sequence_id)

    @property
    def queue_depth(self) -> int:
        """Requests that no instance has taken yet."""
        return self._engine.scheduler.queue_depth

    def submit(self, request: InFlightRequest) -> ResponseStream:
        """Accept a checked request, and answer it exactly once on its stream. Event loop thread.

        Raises UnavailableError (stopped, or queue full) or CancelledError: then the caller answers.
        """
        cache = self._cache
        return self._engine.scheduler.submit(request) if cache is None else cache.submit(request)

    def infer(self, request: InFlightRequest) -> ResponseStream:
        """Check and submit a request of an ensemble's step. Raises ServerError."""
        self.signature.check(request)
        request.is_decoupled = self.is_decoupled
        return self.submit(request)

    def is_ready(self) -> bool:
        """Whether every instance can execute now, or if it is an ensemble, those of its models."""
        if self.fault or not all(model.is_ready() for model in self.composing):
            return False
        return all(member.is_ready for member in self._engine.members)

    @property
    def gpu(self) -> int | None:
        """The GPU whose memory all instances take as it is; None too where the server itself looks at tensors."""
        config = self.config
        is_plain = not (
            config.sequence_batching or config.batch_input or config.batch_output or self.signature.is_lenient
        )
        if not is_plain or self._cache is not None or any(spec.allow_ragged_batch for spec in config.input):
            return None
        instances = [member.loaded.instance for member in self._engine.members]
        found = {instance.gpu if isinstance(instance, TensorInstance) else None for instance in instances}
        return found.pop() if len(found) == 1 else None

    @property
    def measures(self) -> bool:
        """Whether `measure` may return anything: it stays so for as long as the version is loaded."""
        instances = (type(member.loaded.instance) for member in self._engine.members)
        return self.is_ensemble or any(kind.measure is not Instance.measure for kind in instances)

    def measure(self) -> list[Sequence[Measurement]]:
        """The instances' own numbers for the metrics page, in the order of the config. Event loop thread."""
        return self._engine.measure()

    def instances(self) -> list[InstanceInfo]:
        """The instances that serve now, in the order of the config."""
        return [member.info() for member in self._engine.members]

    def memory_usage(self) -> tuple[MemoryUsage, ...]:
        """The memory of its own processes. Memory of instances in the server's process is not known."""
        return process_memory(info.pid for info in self.instances() if info.pid is not None)

    @property
    def is_ensemble(self) -> bool:
        """Whether requests go through the steps of an ensemble, and need `bind` first."""
        return self._engine.calls_models

    def bind(self, models: Sequence[Model] | None, fault: str = "", *, find_holder: FindHolder | None = None) -> None:
        """Let the steps of an ensemble call these models from now on; until then it takes no requests.

        Without models it is not ready because of `fault`. `find_holder` finds the model that holds a sequence.
        Event loop thread.
        """
        self.composing = tuple(models or ())
        self.labels = composed_labels(self.config, self.labels, [model.labels for model in self.composing])
        self.fault = fault
        self.is_decoupled = self._engine.bind(models, fault, find_holder)
        written = self._backend.context.config
        policy = ModelTransactionPolicy(decoupled=True) if self.is_decoupled else written.model_transaction_policy
        self.config = replace(written, model_transaction_policy=policy)

    def hold(self) -> None:
        """Keep it accepting requests of an ensemble's steps until `release`. Event loop thread."""
        self._num_holders += 1

    def release(self) -> None:
        """Undo one `hold`."""
        self._num_holders -= 1
        if not self._num_holders:
            if self._is_stopping:
                self._stop()
            self._idle.set()

    def hurry(self) -> None:
        """Stop delaying requests to fill batches. Event loop thread; safe to repeat."""
        self._engine.scheduler.hurry()

    def stop(self) -> None:
        """Reject new requests, except from holders (running ensembles), and finish the accepted ones.

        Event loop thread; safe to repeat.
        """
        self._is_stopping = True
        if not self._num_holders:
            self._stop()

    def _stop(self) -> None:
        if self._cache is None:
            self._engine.stop()
        else:
            self._cache.stop(then=self._engine.stop)

    async def drain(self, timeout_s: float | None) -> bool:
        """Wait until all accepted requests are answered and the model has no holders; False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.inflight or self.num_sequences or self._num_holders:
                    self._idle.clear()
                    self._engine.scheduler.on_idle = self._idle.set
                    if self._cache is not None:
                        self._cache.on_idle = self._idle.set
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _open_cache(self, store: AnswerStore | None, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        """Cache answers, if the config asks for it and the server has a cache. In a load-pool thread."""
        wish = self.config.response_cache
        if store is not None:
            self._generation = make_generation(self._backend.context, is_shared=store.is_shared)
        if wish is None or not wish.enable:
            return
        if store is None:
            logger.warning(
                "model '%s' has response_cache.enable, and the server no cache: nothing is cached. Give it "
                "--cache-config, such as --cache-config=local,size=1073741824",
                self.name,
            )
            return
        self._cache = ResponseCache(
            store,
            lambda: self.generation,
            lambda request: self._engine.scheduler.submit(request),
            model_name=self.name,
            statistics=self.statistics,
            loop=loop,
            clock=clock,
        )

    @property
    def generation(self) -> bytes:
        """The part of cache keys that names this load, and the loads of an ensemble's models."""
        if not self.composing:
            return self._generation
        return b"".join([self._generation, *(model.generation for model in self.composing)])

    @property
    def has_cache(self) -> bool:
        """Whether answers are kept."""
        return self._cache is not None

    def update_instances(self, config: ModelConfig) -> None:
        """Apply a config that differs only in `instance_group`, and in what `update_scheduling` applies.

        Blocking, called from a load-pool thread. New instances are made before old ones are closed, and unchanged ones
        stay, so traffic continues. Sequences end on the instance where they began: an old one that has some is closed
        later, with the last of them. Raises ServerError, with nothing changed, if an instance cannot be made.
        """
        engine = self._engine
        with engine.lock:
            if self._is_closed:
                raise UnavailableError(f"model '{self.name}' version {self.version} is unloaded")
            num_added, removed = engine.update(config)
            # What an ensemble may answer depends on its models too.
            self.config = replace(config, model_transaction_policy=self.config.model_transaction_policy)
            engine.draining.stop(removed, CLOSE_TIMEOUT_S)
        logger.info(
            "model '%s' version %d: %d instances added, %d removed", self.name, self.version, num_added, len(removed)
        )

    def update_scheduling(self, config: ModelConfig) -> None:
        """Apply a config with a changed `dynamic_batching`, which must exist in both and preserve the same order.

        Queued requests stay queued. Event loop thread.
        """
        self._engine.scheduler.reconfigure(config)

    def kill_processes(self, why: str) -> bool:
        """Kill the child processes of its instances and fail their requests, without waiting.

        False, with nothing done, if it has none. `why` continues a sentence that begins with an instance's name. From
        any thread.
        """
        hosted = [member.loaded.process for member in self._engine.members if member.loaded.process is not None]
        if not hosted:
            return False
        what = f"model '{self.name}' version {self.version}"
        self._engine.scheduler.abort(UnavailableError(f"{what} {why}; the request was not executed"))
        for instance in hosted:
            instance.kill(why)
        return True

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Free everything. Blocking, called from a load-pool thread; safe to repeat.

        Requests still queued get UNAVAILABLE. An instance that is still executing after `timeout_s` is
        abandoned, together with the backend, because neither can be freed while it executes.
        """
        engine = self._engine
        with engine.lock:
            if self._is_closed:
                return
            self._is_closed = True
            engine.scheduler.abort(
                UnavailableError(f"model '{self.name}' was unloaded before the request was executed")
            )
            if engine.close(timeout_s):
                _unload(self._backend)


def _unload(backend: Backend) -> None:
    try:
        backend.unload()
    except Exception:
        logger.exception("unloading model '%s' version %d failed", backend.context.model_name, backend.context.version)


Labels = Mapping[str, tuple[str, ...]]


def read_labels(config: ModelConfig, directory: Path) -> Labels:
    """By output, one label per line of its `label_filename`, which is relative to the model's directory.

    Raises InvalidArgumentError for a file that cannot be read.
    """
    return {
        output.name: _read(config.name, output.name, directory / output.label_filename)
        for output in config.output
        if output.label_filename
    }


def composed_labels(config: ModelConfig, labels: Labels, of_steps: Sequence[Labels]) -> Labels:
    """The labels of an ensemble: its own, and for other outputs those of the steps' models that write them."""
    steps = config.ensemble_scheduling.step if config.ensemble_scheduling is not None else ()
    own = {output.name for output in config.output if output.label_filename}
    inherited = {
        written: of_step[name]
        for step, of_step in zip(steps, of_steps, strict=False)
        for name, written in step.output_map.items()
        if name in of_step
    }
    return inherited | {name: lines for name, lines in labels.items() if name in own}


def _read(model: str, output: str, path: Path) -> tuple[str, ...]:
    try:
        return tuple(path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidArgumentError(f"model '{model}', output '{output}': label file '{path}': {reason}") from None
