"""How an ensemble executes a request, worked out once for its steps' models and the requested outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from modelserver.config.ensemble_graph import Condition, EnsembleGraph, Scopes, ensemble_graph, find_scopes
from modelserver.config.ensemble_parameters import StepLimits, step_limits
from modelserver.config.schema import ModelConfig
from modelserver.config.signature import Array, ModelSignature, Reshape, Shape, TensorSpec, reshaper
from modelserver.core.request import InFlightRequest
from modelserver.core.tensor import Tensor
from modelserver.telemetry.statistics import ModelStatistics


def is_mixed(config: ModelConfig, signatures: Sequence[ModelSignature]) -> bool:
    """Whether some have a batch dimension and others have none."""
    return len({config.max_batch_size > 0, *(signature.max_batch_size > 0 for signature in signatures)}) > 1


def step_adapters(signature: ModelSignature, names: Sequence[str]) -> dict[str, Reshape]:
    """For the inputs of a step of a mixed ensemble, by the model's names of them."""
    specs = (signature.inputs[name] for name in names)
    return {
        spec.name: _leading(spec.dims, is_batched=signature.max_batch_size > 0) for spec in specs if not spec.is_shape
    }


def input_adapters(config: ModelConfig) -> dict[str, Reshape]:
    """For the inputs of the ensemble that have a `reshape`."""
    specs = ModelSignature(config).inputs.values()
    is_batched = config.max_batch_size > 0
    return {
        spec.name: reshaper(spec.dims, spec.reshape, is_batched=is_batched)
        for spec in specs
        if spec.reshape is not None
    }


def output_adapters(config: ModelConfig, *, is_mixed: bool) -> dict[str, Reshape]:
    """For the outputs of the ensemble that may change on their way out."""
    is_batched = config.max_batch_size > 0
    found: dict[str, Reshape] = {}
    for spec in ModelSignature(config).outputs.values():
        adapters = [_leading(_inner(spec), is_batched=is_batched)] if is_mixed else []
        if spec.reshape is not None:
            adapters.append(reshaper(spec.reshape, spec.dims, is_batched=is_batched))
        if adapters:
            found[spec.name] = _in_turn(adapters)
    return found


def adapt(tensors: dict[str, Tensor], adapters: Mapping[str, Reshape]) -> None:
    """Give the tensors the shapes that their reader expects, as far as possible."""
    for name, adapter in adapters.items():
        tensor = tensors.get(name)
        if tensor is not None:
            tensors[name] = Tensor(tensor.name, tensor.datatype, adapter(tensor.data))


def _inner(spec: TensorSpec) -> Shape:
    return spec.dims if spec.reshape is None else spec.reshape


def _leading(dims: Shape, *, is_batched: bool) -> Reshape:
    """Adds or removes a batch dimension of one. A shape that fits neither way stays, and its reader reports it."""

    def change(array: Array) -> Array:
        shape = array.shape
        if _matches(shape, dims) is is_batched:
            if is_batched:
                return array[np.newaxis]
            if shape[:1] == (1,) and _matches(shape[1:], dims):
                return array.reshape(shape[1:])
        return array

    return change


def _matches(shape: Shape, dims: Shape) -> bool:
    return len(shape) == len(dims) and all(dim in (-1, size) for size, dim in zip(shape, dims, strict=True))


def _in_turn(adapters: Sequence[Reshape]) -> Reshape:
    def change(array: Array) -> Array:
        for adapter in adapters:
            array = adapter(array)
        return array

    return change


class StepModel(Protocol):
    """A loaded model as a step calls it. Event loop thread."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def is_decoupled(self) -> bool: ...

    @property
    def signature(self) -> ModelSignature: ...

    @property
    def statistics(self) -> ModelStatistics: ...

    def infer(self, request: InFlightRequest) -> object:
        """Check and submit a request, which is answered on its stream. Raises ServerError: then it is not."""

    def hold(self) -> None:
        """Keep the model accepting requests, even if it is unloaded or replaced meanwhile."""

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step. `inputs` are (the model's name of it, tensor of the ensemble, whether the model needs it), `outputs`
    (the model's name of it, tensor of the ensemble). The model is asked for `requested`: None means for all of them.

    `opens` is the scope of each of its responses if it is decoupled. `position` is its place in its scope. `adapters`
    are of inputs, by the model's names, whose shapes may have to change on their way to it.
    """

    index: int
    label: str
    model: StepModel
    model_name: str
    inputs: tuple[tuple[str, str, bool], ...]
    outputs: tuple[tuple[str, str], ...]
    requested: tuple[str, ...] | None
    condition: Condition | None
    limits: StepLimits | None
    scope: int
    position: int
    opens: int | None
    adapters: Mapping[str, Reshape]


@dataclass(frozen=True, slots=True, eq=False)
class ScopePlan:
    """The steps of one scope. `missing` is how many tensors of the scope each step waits for; the answer counts as
    one more step at the end of it, in the scope that answers. `outer` are tensors of scopes around it, by position.

    `opening` are the tensors that come with what opens the scope. `readers` are the positions of the steps that wait
    for a tensor, `inner` those in scopes within (scope, position). `writers` says of tensors with several
    possible writers how many. `first` are the positions without inputs to wait for, in scope 0 only.
    """

    steps: tuple[StepPlan, ...]
    missing: tuple[int, ...]
    outer: tuple[tuple[int, str], ...]
    opening: tuple[str, ...]
    readers: dict[str, tuple[int, ...]]
    inner: dict[str, tuple[tuple[int, int], ...]]
    writers: dict[str, int]
    first: tuple[int, ...]
    answers: bool

    @property
    def num_parts(self) -> int:
        """Steps, and the answer."""
        return len(self.steps) + self.answers


@dataclass(frozen=True, slots=True, eq=False)
class EnsemblePlan:
    """Scope 0 is the request. `outputs` are what an answer is made of. The adapters are by the ensemble's own names."""

    scopes: tuple[ScopePlan, ...]
    outputs: tuple[str, ...]
    num_steps: int
    is_decoupled: bool
    max_inflight_requests: int
    input_adapters: Mapping[str, Reshape]
    output_adapters: Mapping[str, Reshape]


def plan_ensemble(
    config: ModelConfig, models: Sequence[StepModel], outputs: Sequence[str] | None = None
) -> EnsemblePlan:
    """The plan for answers of `outputs` (None: all). Steps that these do not need are left out.

    The config must have passed `check_models`.
    """
    graph = ensemble_graph(config)
    asked = tuple(tensor.name for tensor in config.output if outputs is None or tensor.name in outputs)
    decoupled = [model.is_decoupled for model in models]
    scopes, _ = find_scopes(graph, decoupled, asked)
    used = _used_steps(graph, asked)
    mixed = is_mixed(config, [model.signature for model in models])
    planner = _Planner(graph, scopes, models, used, asked, step_limits(config), is_mixed=mixed)
    outward = output_adapters(config, is_mixed=mixed)
    ensemble = config.ensemble_scheduling
    return EnsemblePlan(
        scopes=tuple(planner.scope(number) for number in range(len(scopes.parents))),
        outputs=asked,
        num_steps=len(graph.steps),
        is_decoupled=any(decoupled),
        max_inflight_requests=ensemble.max_inflight_requests if ensemble is not None else 0,
        input_adapters=input_adapters(config),
        output_adapters={name: adapter for name, adapter in outward.items() if name in asked},
    )


def _used_steps(graph: EnsembleGraph, outputs: Sequence[str]) -> set[int]:
    used: set[int] = set()
    left = [writer for tensor in outputs for writer in graph.writers.get(tensor, ())]
    while left:
        index = left.pop()
        if index not in used:
            used.add(index)
            left += graph.before(index)
    return used


class _Planner:
    def __init__(
        self,
        graph: EnsembleGraph,
        scopes: Scopes,
        models: Sequence[StepModel],
        used: set[int],
        outputs: Sequence[str],
        limits: Mapping[int, StepLimits],
        *,
        is_mixed: bool,
    ) -> None:
        self._is_mixed = is_mixed
        self._graph = graph
        self._limits = limits
        self._scopes = scopes
        self._outputs = outputs
        self._steps: list[list[StepPlan]] = [[] for _ in scopes.parents]
        # The tensors that are read, with the scope and the position of each reader.
        self._readers: dict[str, list[tuple[int, int]]] = {}
        read = {tensor for index in used for tensor in graph.needs(index)} | {*outputs}
        for index in graph.order():
            if index in used:
                self._add(index, models[index], read)
        for tensor in outputs:
            place = (scopes.of_outputs, len(self._steps[scopes.of_outputs]))
            self._readers.setdefault(tensor, []).append(place)

    def _add(self, index: int, model: StepModel, read: set[str]) -> None:
        scope = self._scopes.of_step[index]
        step = self._graph.steps[index]
        specs = model.signature.inputs
        outputs = tuple(item for item in step.output_map.items() if item[1] in read)
        plan = StepPlan(
            index=index,
            label=f"step[{index}] (model '{step.model_name}')",
            model=model,
            model_name=model.name,
            inputs=tuple((name, tensor, not specs[name].is_optional) for name, tensor in step.input_map.items()),
            outputs=outputs,
            requested=None if len(outputs) == len(model.signature.outputs) else tuple(name for name, _ in outputs),
            condition=self._graph.conditions.get(index),
            limits=self._limits.get(index),
            scope=scope,
            position=len(self._steps[scope]),
            opens=self._scopes.opened.get(index),
            adapters=step_adapters(model.signature, tuple(step.input_map)) if self._is_mixed else {},
        )
        self._steps[scope].append(plan)
        for tensor in self._graph.needs(index):
            self._readers.setdefault(tensor, []).append((scope, plan.position))

    def scope(self, number: int) -> ScopePlan:
        steps = tuple(self._steps[number])
        answers = number == self._scopes.of_outputs
        missing = [0] * (len(steps) + answers)
        outer: list[tuple[int, str]] = []
        readers: dict[str, tuple[int, ...]] = {}
        inner: dict[str, tuple[tuple[int, int], ...]] = {}
        for tensor, places in self._readers.items():
            of_tensor = self._scopes.of_tensor[tensor]
            here = tuple(position for scope, position in places if scope == number)
            if of_tensor == number:
                readers[tensor] = here
                inner[tensor] = tuple(place for place in places if place[0] != number)
                for position in here:
                    missing[position] += number > 0 or tensor not in self._graph.inputs
            else:
                outer += ((position, tensor) for position in here)
        opening = {
            tensor: None
            for index, scope in self._scopes.opened.items()
            if scope == number
            for tensor in self._graph.steps[index].output_map.values()
        }
        if number == 0:
            opening = dict.fromkeys(sorted(self._graph.inputs))
        return ScopePlan(
            steps=steps,
            missing=tuple(missing),
            outer=tuple(outer),
            opening=tuple(opening),
            readers=readers,
            inner={tensor: places for tensor, places in inner.items() if places},
            writers={
                tensor: len(writers)
                for tensor, writers in self._graph.writers.items()
                if len(writers) > 1 and self._scopes.of_tensor[tensor] == number and tensor not in opening
            },
            first=tuple(position for position, count in enumerate(missing) if not count) if number == 0 else (),
            answers=answers,
        )
