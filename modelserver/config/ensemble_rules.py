"""Rules for an ensemble's own config; `ensemble_models` checks the models of its steps."""

from __future__ import annotations

from collections.abc import Mapping

from modelserver.config.defaults import ENSEMBLE
from modelserver.config.ensemble_graph import (
    EnsembleGraph,
    are_exclusive,
    check_conditions,
    condition_paths,
    ensemble_graph,
)
from modelserver.config.ensemble_parameters import check_keys, check_limits
from modelserver.config.problem import Report, key_path
from modelserver.config.schema import EnsembleStep, ModelConfig, ModelEnsembling
from modelserver.core.spelling import did_you_mean, suggest

_STEP = "ensemble_scheduling.step"
_NOT_OF_ENSEMBLES = {
    "instance_group": "instance group should not",
    "optimization": "optimization should not",
    "model_warmup": "model_warmup can not",
}


def check_ensemble(config: ModelConfig, report: Report) -> None:
    """Report problems of an ensemble: in its own fields, its steps and their graph."""
    if config.platform not in ("", ENSEMBLE):
        message = f"expected {ENSEMBLE} because of ensemble_scheduling, got {config.platform}"
        summary = f"ensemble scheduling cannot be set for model '{report.model_name}' whose platform is not {ENSEMBLE}"
        report.add("platform", message, summary=summary)
    if config.backend:
        message = f"expected none because an ensemble has no backend, got {config.backend}"
        must = f"must have platform type '{config.platform or ENSEMBLE}' and empty backend type"
        report.add("backend", message, summary=f"Ensemble model '{report.model_name}' {must}")
    for field, must_not in _NOT_OF_ENSEMBLES.items():
        if getattr(config, field):
            summary = f"{must_not} be specified for ensemble '{report.model_name}'"
            report.add(field, "an ensemble must not have it: set it in the models of its steps", summary=summary)
    ensemble = config.ensemble_scheduling
    if ensemble is None:
        message = "an ensemble needs ensemble_scheduling with its steps, got none"
        must = f"ensemble scheduling must be set for ensemble {report.model_name} whose platform is {ENSEMBLE}"
        report.add("platform", message, summary=must)
    elif not ensemble.step:
        summary = f"must specify 'step' for ensemble '{report.model_name}'"
        report.add(_STEP, "expected at least one step, got none", summary=summary)
    else:
        for index, step in enumerate(ensemble.step):
            _check_step(config, step, index, report)
        _check_graph(config, ensemble, report)


def _check_step(config: ModelConfig, step: EnsembleStep, index: int, report: Report) -> None:
    path = f"{_STEP}[{index}]"
    missing = f"in step {index} of ensemble '{report.model_name}'"
    summary = f"must specify 'model_name' {missing}"
    report.check_name(f"{path}.model_name", step.model_name, "the name of a model", summary=summary)
    if step.model_name and step.model_name == config.name:
        summary = f"circular dependency between ensembles: {config.name} -> ... -> {config.name} -> {config.name}"
        report.add(f"{path}.model_name", f"'{config.name}' cannot be a step of itself", summary=summary)
    if step.model_version < -1:
        report.add(f"{path}.model_version", f"expected a version, or -1 for the latest, got {step.model_version}")
    for field, tensors in (("input_map", step.input_map), ("output_map", step.output_map)):
        if not tensors:
            summary = f"must specify '{field}' {missing}"
            report.add(f"{path}.{field}", "expected at least one tensor, got none", summary=summary)
        for name, tensor in tensors.items():
            where = key_path(f"{path}.{field}", name)
            report.check_name(where, name, "the name of a tensor of the model as key")
            report.check_name(where, tensor, "the name of a tensor of the ensemble as value")


def _check_graph(config: ModelConfig, ensemble: ModelEnsembling, report: Report) -> None:
    check_keys(config, report)
    check_conditions(config, report)
    check_limits(config, report)
    graph = ensemble_graph(config)
    read = _check_reads(config, ensemble, graph, report)
    outputs = {tensor.name for tensor in config.output}
    for index, output in enumerate(config.output):
        if output.name and output.name not in graph.writers:
            hint = did_you_mean(suggest(output.name, graph.writers))
            state = "is not written" if output.name in read else "is not used"
            quoted = f"'{report.model_name}'" if output.name in read else f"{report.model_name}'"  # as Triton does
            summary = (
                f"{'' if output.name in read else 'ensemble '}output '{output.name}' for ensemble {quoted} {state}"
            )
            report.add(f"output[{index}]", f"output '{output.name}' is written by no step", hint, summary=summary)
    for index, tensor in enumerate(config.input):
        if tensor.name and tensor.name not in read:
            summary = f"ensemble input '{tensor.name}' for ensemble {report.model_name}' is not used"
            report.add(f"input[{index}]", f"input '{tensor.name}' is not read by any step", summary=summary)
    for name, writers in graph.writers.items():
        if name not in read and name not in outputs and name not in graph.inputs and name:
            where = _output_path(ensemble, writers[0], name)
            message = f"tensor '{name}' is not read by any step and is not an output of the ensemble"
            report.add(where, message, summary=f"ensemble tensor '{name}' is unused in ensemble '{report.model_name}'")
    has_cycles = _check_cycles(config, graph, report)
    _check_writers(ensemble, graph, report, has_cycles=has_cycles)


def _check_reads(config: ModelConfig, ensemble: ModelEnsembling, graph: EnsembleGraph, report: Report) -> set[str]:
    """Report tensors that are read but never written; returns the tensors that are read."""
    reads = [
        (key_path(f"{_STEP}[{index}].input_map", name), tensor)
        for index, step in enumerate(ensemble.step)
        for name, tensor in step.input_map.items()
    ]
    paths = condition_paths(config)
    reads += [(paths[index], condition.tensor) for index, condition in graph.conditions.items()]
    known = [*(tensor.name for tensor in config.input), *graph.writers]
    for where, tensor in reads:
        if tensor and tensor not in known:
            message = f"tensor '{tensor}' is neither an input of the ensemble nor written by a step"
            summary = _unwritten(config, tensor, report)
            report.add(where, message, did_you_mean(suggest(tensor, known)), summary=summary)
    return {tensor for _, tensor in reads}


def _unwritten(config: ModelConfig, tensor: str, report: Report) -> str:
    """Triton's sentence about a tensor that never gets a value; it names an output that depends on it, if any."""
    steps = config.ensemble_scheduling.step if config.ensemble_scheduling is not None else ()
    waiting = {tensor}
    while (
        following := {
            written for step in steps if waiting & set(step.input_map.values()) for written in step.output_map.values()
        }
        - waiting
    ):
        waiting |= following
    output = next((output.name for output in config.output if output.name in waiting), None)
    if output is None:
        return f"ensemble tensor '{tensor}' is unused in ensemble '{report.model_name}'"
    source = "" if output == tensor else f": at least one of its depending tensors, '{tensor}', is not connected"
    return f"output '{output}' for ensemble '{report.model_name}' is not written{source}"


def _check_writers(ensemble: ModelEnsembling, graph: EnsembleGraph, report: Report, *, has_cycles: bool) -> None:
    """Check that every tensor is written once, or by steps of which only one runs."""
    guards = {} if has_cycles else graph.guards(lambda _index, _name: True)
    for index, step in enumerate(ensemble.step):
        own: set[str] = set()
        for name, tensor in step.output_map.items():
            where = key_path(f"{_STEP}[{index}].output_map", name)
            others = [writer for writer in graph.writers[tensor] if writer < index]
            if tensor in graph.inputs:
                report.add(where, f"tensor '{tensor}' is an input of the ensemble and cannot be written")
            elif tensor and tensor in own:
                summary = _written_twice(tensor, index, report)
                report.add(where, f"tensor '{tensor}' is written twice by this step", summary=summary)
            elif tensor:
                for writer in others:
                    if has_cycles or not are_exclusive(guards[index], guards[writer]):
                        hint = "give the steps conditions that exclude each other" if guards.get(index) else None
                        message = f"tensor '{tensor}' is written twice, first by step[{writer}]"
                        report.add(where, message, hint, summary=_written_twice(tensor, index, report))
                        break
            own.add(tensor)


def _written_twice(tensor: str, index: int, report: Report) -> str:
    once = f"ensemble tensor '{tensor}' can appear in an output map only once"
    return f"{once} for ensemble '{report.model_name}' step {index}"


def _output_path(ensemble: ModelEnsembling, index: int, tensor: str) -> str:
    name = next(name for name, written in ensemble.step[index].output_map.items() if written == tensor)
    return key_path(f"{_STEP}[{index}].output_map", name)


def _check_cycles(config: ModelConfig, graph: EnsembleGraph, report: Report) -> bool:
    """Report steps that wait for their own outputs, each cycle once; returns whether a cycle was found."""
    needs = {index: list(graph.before(index)) for index in range(len(graph.steps))}
    done: set[int] = set()
    has_cycles = False
    for start in needs:
        cycle = _cycle_from(start, needs, done)
        if cycle:
            has_cycles = True
            steps = " <- ".join(f"step[{index}] ({graph.steps[index].model_name})" for index in cycle)
            step = graph.steps[cycle[0]]
            waits_for = next((tensor for tensor in step.output_map.values() if tensor), "")
            summary = _unwritten(config, waits_for, report)
            report.add(f"{_STEP}[{cycle[0]}]", f"steps wait for each other: {steps}", summary=summary)
    return has_cycles


def _cycle_from(start: int, needs: Mapping[int, list[int]], done: set[int]) -> list[int]:
    """The first cycle on the way back from a step, its first step repeated at the end; empty without a cycle.

    Visited steps are added to `done` and not visited again.
    """
    path: dict[int, None] = {}  # an ordered set
    stack = [] if start in done else [(start, iter(needs[start]))]
    while stack:
        index, rest = stack[-1]
        path[index] = None
        following = next((step for step in rest if step not in done), None)
        if following is None:
            done.add(index)
            del path[index]
            stack.pop()
        elif following in path:
            done.update(path)
            steps = list(path)
            return [*steps[steps.index(following) :], following]
        else:
            stack.append((following, iter(needs[following])))
    return []
