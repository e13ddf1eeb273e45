"""One inference request, as every room below the frontends sees it, and the records that belong to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import msgspec
import numpy as np

from modelserver.core.datatype import Datatype
from modelserver.core.response import InferResponse, ParameterValue, ResponseStream
from modelserver.core.sender import ResponseSender
from modelserver.core.tensor import Tensor
from modelserver.core.trace import ComputeNotes
from modelserver.errors import InternalError, UnavailableError

# Of requests that wait for all others: the lowest level of a model that has levels, and last in an engine that knows
# priorities.
LOWEST_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RegionSlice:
    """Bytes of a region that a client has registered under the name `region`."""

    region: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RegionInput:
    """An input whose elements lie in a region."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    place: RegionSlice


@dataclass(frozen=True, slots=True)
class Transfer:
    """Inputs that are in regions, and outputs that go there, by name; outputs wanted as classes, and how many.

    It is never changed: equal requests may share one.
    """

    inputs: tuple[RegionInput, ...] = ()
    placed: Mapping[str, RegionSlice] = field(default_factory=dict)
    class_counts: Mapping[str, int] = field(default_factory=dict)

    def without(self, items: Sequence[RegionInput]) -> Transfer | None:
        """The rest after these inputs were read; None if nothing remains."""
        rest = Transfer(tuple(item for item in self.inputs if item not in items), self.placed, self.class_counts)
        return rest if rest.inputs or rest.placed or rest.class_counts else None


class SequenceState:
    """State tensors by the name of the model's input; none before the first request was executed.

    Owned by the current holder of the sequence's one request: the scheduler, or the thread that executes it.
    """

    __slots__ = ("arrays",)

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the state tensors, in the order of the config; empty at the start of a sequence."""
        return tuple(array.shape for array in self.arrays.values())


@dataclass(frozen=True, slots=True)
class CallOrigin:
    """A calling instance, and its model with the number of its instances."""

    instance: str
    model: str = ""
    num_instances: int = 0


def check_has_free_instance(model: str, origins: Sequence[CallOrigin]) -> None:
    """Refuse a call of a model if all of its instances already wait for the answer: the call would never end.

    `origins` are the waiting callers, outermost first. Raises UnavailableError.
    """
    waiting = {caller.instance for caller in origins if caller.model == model}
    limits = [caller.num_instances for caller in origins if caller.model == model]
    if waiting and len(waiting) >= limits[-1] > 0:
        chain = " -> ".join([*(caller.model for caller in origins), model])
        raise UnavailableError(
            f"calling model '{model}' would wait for ever: all its {limits[-1]} instances wait for "
            f"the answer ({chain}); give it more instances (instance_group), or do not call in a circle"
        )


class RequestForm:
    """The properties that a model's signature checks, shared by requests that differ in other things only.

    A frontend that recognises such requests gives them one form. `signature` is the last one that accepted such a
    request, and `rows` is its batch size: the next request skips the check.
    """

    __slots__ = ("rows", "signature")

    def __init__(self) -> None:
        self.signature: object = None
        self.rows = 1


class LoadedAdapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that was loaded while its model serves: where it lies, and the number of the load."""

    name: str
    place: str
    load: int


class InferRequest(msgspec.Struct, eq=False):
    """One inference request, as an instance sees it. Make it with keywords.

    `version` is None for "whichever the version policy serves". `outputs` is None for all of them.
    `timeout_us` is the request's queue timeout (0: none given). `deadline_ns` is the monotonic time after which the
    answer is useless to the caller (None: never).
    `sequence_id` 0 or "" means the request belongs to no sequence.
    `rows` is its size along the batch dimension, 1 without batching. `is_decoupled`: it may have many responses.
    `is_cancelled`: the caller no longer wants the answer. `arrival_ns` is the monotonic time at which it came.
    `trace_parent` is the context (W3C `traceparent`) of which the model may make requests a part, if there is one.
    `adapters` are those of a language model that the server has loaded; no client says them.
    """

    model_name: str
    version: int | None
    inputs: dict[str, Tensor]
    id: str = ""
    outputs: tuple[str, ...] | None = None
    parameters: Mapping[str, ParameterValue] = msgspec.field(default_factory=dict)
    priority: int = 0
    timeout_us: int = 0
    deadline_ns: int | None = None
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    rows: int = 1
    is_decoupled: bool = False
    is_cancelled: bool = False
    arrival_ns: int = 0
    trace_parent: str = ""
    adapters: tuple[LoadedAdapter, ...] = ()

    @property
    def sender(self) -> ResponseSender:
        """How to answer later, or more than once. Take it within `execute`, and keep it until the end.

        Raises InternalError outside of it, and where the instance did not declare `answers_later`.
        """
        raise InternalError(
            "a request has a sender only while execute() runs, of an instance with answers_later = True"
        )

    @property
    def has_taken_sender(self) -> bool:
        """Whether the instance has taken `sender`. Known in a child process only; False elsewhere."""
        return False


class InFlightRequest(InferRequest, eq=False):
    """A request with what the server needs to know of it. Instances get it too, and see an `InferRequest`.

    Frontends make it, the data plane checks it, a scheduler owns it from `submit` on.
    """

    # Where the responses go: a frontend may have put a stream of its own here.
    stream: ResponseStream = msgspec.field(default_factory=ResponseStream)
    # The form that it shares with other requests, if a frontend has recognized one. Whatever makes the request differ
    # from them forgets the form: `forward` and `join_trace` do.
    form: RequestForm | None = None
    # Set by the scheduler that owns the request, so that a queued one leaves its queue at once.
    on_cancel: Callable[[InFlightRequest], None] | None = None
    # Set only while an instance that answers later executes the request, because it refers to the request.
    own_sender: ResponseSender | None = None
    # The implicit state of its sequence; set by the scheduler of a model with implicit state.
    state: SequenceState | None = None
    # Tensors that do not travel in its message; the data plane handles them.
    transfer: Transfer | None = None
    # The client of a stream wants an empty last response too. Only the frontend reads this: models never see it.
    wants_empty_final: bool = False
    # Set for the few requests that are traced, and for steps of ensembles.
    trace: ComputeNotes | None = None
    # Fills the row of an idle slot in a batch of sequences: no client sent it, and its answer is not read.
    is_padding: bool = False
    # The caller, if callers share models and have quotas, and the caller's weight among those waiting.
    caller: str = ""
    share: float = 1.0
    # Outputs that the instance writes to their places on its GPU (`platform.cuda.DeviceArray`, of bytes), by name.
    targets: Mapping[str, Any] | None = None
    # The instances that wait for the answer, outermost first: for requests of models, and their steps in ensembles.
    call_origins: tuple[CallOrigin, ...] = ()

    @property
    def sender(self) -> ResponseSender:
        return self.own_sender or super().sender

    def cancel(self) -> None:
        """The caller no longer wants the answer. Called from the event loop thread; safe to repeat.

        A queued request is dropped and answered CANCELLED; one that executes is answered as usual.
        """
        if self.is_cancelled:
            return
        self.is_cancelled = True
        if self.on_cancel is not None:
            self.on_cancel(self)

    def join_trace(self, trace_parent: str) -> None:
        """Have the request traced as part of the client's own trace (W3C `traceparent`)."""
        self.trace_parent = trace_parent
        self.form = None

    def forward(self, headers: Mapping[str, str]) -> None:
        """Add forwarded headers to the parameters; they win over what the body says, as proxies set them."""
        self.parameters = {**self.parameters, **headers}
        self.form = None


def is_in_flight(requests: Sequence[InferRequest]) -> TypeGuard[Sequence[InFlightRequest]]:
    """Whether the requests come from the server, as those do that an instance is given by it."""
    return not requests or isinstance(requests[0], InFlightRequest)


# A worker's results cross the thread boundary as this: one entry per response, one call per batch.
Delivery = tuple[InFlightRequest, InferResponse]


class CalledRequest(InFlightRequest, eq=False):
    """A request that a model made."""
