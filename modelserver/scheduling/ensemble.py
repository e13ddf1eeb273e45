"""The scheduler of an ensemble: takes requests through the models of its steps, which have their own queues."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from modelserver.config.schema import ModelConfig
from modelserver.core.clock import Clock, SystemClock
from modelserver.core.request import InFlightRequest
from modelserver.core.response import ResponseStream
from modelserver.errors import ServerError, UnavailableError
from modelserver.scheduling.admission import refuse
from modelserver.scheduling.ensemble_iteration import StepCounts
from modelserver.scheduling.ensemble_plan import EnsemblePlan, StepModel, plan_ensemble
from modelserver.scheduling.ensemble_run import EnsembleRun, RunOwner
from modelserver.scheduling.scheduler import Scheduler
from modelserver.telemetry.statistics import ModelStatistics, ResponseKind
from modelserver.telemetry.statistics_snapshot import FailureReason

# The model that holds a sequence, if that is not the one that serves now.
FindHolder = Callable[[StepModel, int | str], StepModel | None]

# At most this many plans for different choices of outputs are kept.
_MAX_PLANS = 64


class Binding:
    """The models that an ensemble's steps call. They are held until the last request that uses them has ended."""

    def __init__(self, config: ModelConfig, models: Sequence[StepModel], find_holder: FindHolder | None = None) -> None:
        self.models = tuple(models)
        self.find_holder = find_holder
        self.is_decoupled = config.is_decoupled or any(model.is_decoupled for model in models)
        self._config = config
        self._num_users = 1  # the scheduler, as long as it uses this binding
        self._whole = plan_ensemble(config, models)
        self._plans: dict[tuple[str, ...], EnsemblePlan] = {}
        for model in self.models:
            model.hold()

    def plan(self, outputs: tuple[str, ...] | None) -> EnsemblePlan:
        """The plan for a request that asks for these outputs (None or empty: all)."""
        if not outputs:
            return self._whole
        plan = self._plans.get(outputs)
        if plan is None:
            plan = plan_ensemble(self._config, self.models, outputs)
            if len(self._plans) < _MAX_PLANS:
                self._plans[outputs] = plan
        return plan

    def hold(self) -> None:
        self._num_users += 1

    def release(self) -> None:
        self._num_users -= 1
        if not self._num_users:
            for model in self.models:
                model.release()


class EnsembleScheduler(Scheduler, RunOwner):
    """Its steps' models hold the sequences and the queues."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        loop: asyncio.AbstractEventLoop,
        statistics: ModelStatistics,
        clock: Clock | None = None,
    ) -> None:
        self.now_ns = (clock or SystemClock()).now_ns
        self._name = config.name
        self._config = config
        self._loop = loop
        self._statistics = statistics
        self._is_stopped = False
        self._fault = "its models are not bound yet"
        self._binding: Binding | None = None
        self._runs: set[EnsembleRun] = set()
        self.step_counts = StepCounts()

    @property
    def inflight(self) -> int:
        return len(self._runs)

    def bind(self, binding: Binding | None, fault: str = "") -> None:
        """Use these models from now on; requests under way keep theirs. None: refuse requests because of `fault`."""
        former, self._binding, self._fault = self._binding, binding, fault
        if binding is not None:
            self._statistics.is_decoupled = binding.is_decoupled
        if former is not None:
            former.release()

    def submit(self, request: InFlightRequest) -> ResponseStream:
        """Start with the first steps; the answer comes on the request's stream, perhaps before this returns.

        Raises UnavailableError (stopped, or a model is missing) or CancelledError: then the caller answers.
        """
        now_ns = self.now_ns()
        if request.arrival_ns == 0:
            request.arrival_ns = now_ns
        if self._is_stopped or request.is_cancelled or request.deadline_ns is not None:
            refusal = refuse(request, self._name, self._statistics, now_ns, is_stopped=self._is_stopped)
            if refusal is not None:
                raise refusal
        binding = self._binding
        if binding is None:
            self._statistics.record_failures(FailureReason.OTHER, (now_ns - request.arrival_ns,))
            raise UnavailableError(f"ensemble '{self._name}' cannot take requests: {self._fault}")
        run = EnsembleRun(self, self._name, request, binding.plan(request.outputs), is_decoupled=binding.is_decoupled)
        run.binding = binding
        binding.hold()
        self._runs.add(run)
        run.start()
        return request.stream

    def stop(self) -> None:
        """Refuse new requests; those under way continue with the models that they began with."""
        self._is_stopped = True
        self.bind(None, "it is being unloaded")

    def abort(self, error: ServerError) -> None:
        """Refuse new requests, and soon end the others with the error. From any thread."""
        self._is_stopped = True
        if self._runs:
            with suppress(RuntimeError):  # the loop is closed: no client waits any more
                self._loop.call_soon_threadsafe(self._abort, error)

    def _abort(self, error: ServerError) -> None:
        for run in tuple(self._runs):
            run.abort(error)

    # Called by runs.

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        return self._loop.call_later(delay_s, callback, *args)

    def holder_of(self, run: EnsembleRun, model: StepModel) -> StepModel:
        assert isinstance(run.binding, Binding), "set by submit"
        find_holder, sequence_id = run.binding.find_holder, run.request.sequence_id
        return (find_holder(model, sequence_id) if find_holder is not None else None) or model

    def responded(self, _run: EnsembleRun, position: int, kind: ResponseKind, infer_ns: int) -> None:
        self._statistics.record_response(position, kind, infer_ns, 0)
        if not position and kind is ResponseKind.SUCCESS:
            self._statistics.record_first_response(infer_ns)  # the first one began when the request came

    def ended(self, run: EnsembleRun, now_ns: int, reason: FailureReason | None) -> None:
        self._runs.discard(run)
        request = run.request
        request_ns = now_ns - request.arrival_ns
        if reason is None:
            # As in Triton the phases are sums over the steps, which may be more or less than the request took.
            input_ns, infer_ns, output_ns = run.input_ns, run.infer_ns, run.output_ns
            self._statistics.record_lone(request.rows, input_ns, infer_ns, output_ns, 0, request_ns)
            if request.trace is not None:
                request.trace.note_durations(input_ns, infer_ns, output_ns)
        else:
            self._statistics.record_failures(reason, (request_ns,))
        assert isinstance(run.binding, Binding), "set by submit"
        run.binding.release()
        if not self._runs and self.on_idle is not None:
            self.on_idle()
