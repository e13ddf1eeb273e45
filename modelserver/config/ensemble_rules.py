"""What an ensemble must be, judged from its own config; `ensemble_models` looks at the models of its steps."""

from __future__ import annotations

from collections.abc import Mapping

from modelserver.config.ensemble_graph import (
    EnsembleGraph,
    are_exclusive,
    check_conditions,
    condition_paths,
    ensemble_graph,
)
from modelserver.config.ensemble_limits import check_limits
from modelserver.config.ensemble_parameters import check_keys
from modelserver.config.platform import ENSEMBLE
from modelserver.config.problem import key_path
from modelserver.config.report import Report
from modelserver.config.schema import EnsembleStep, ModelConfig, ModelEnsembling
from modelserver.config.suggestion import did_you_mean, suggest

_STEP = "ensemble_scheduling.step"


def check_ensemble(config: ModelConfig, report: Report) -> None:
    """Report what is wrong with an ensemble: its own fields, its steps and the graph that they make."""
    if config.platform not in ("", ENSEMBLE):
        report.add("platform", f"expected {ENSEMBLE} because of ensemble_scheduling, got {config.platform}")
    if config.backend:
        report.add("backend", f"expected none because an ensemble has no backend, got {config.backend}")
    for field in ("instance_group", "optimization", "model_warmup"):
        if getattr(config, field):
            report.add(field, "an ensemble has none: give it to the models of its steps")
    ensemble = config.ensemble_scheduling
    if ensemble is None:
        report.add("platform", "an ensemble needs ensemble_scheduling with its steps, got none")
    elif not ensemble.step:
        report.add(_STEP, "expected at least one step, got none")
    else:
        for index, step in enumerate(ensemble.step):
            _check_step(config, step, f"{_STEP}[{index}]", report)
        _check_graph(config, ensemble, report)


def _check_step(config: ModelConfig, step: EnsembleStep, path: str, report: Report) -> None:
    report.check_name(f"{path}.model_name", step.model_name, "the name of a model")
    if step.model_name and step.model_name == config.name:
        report.add(f"{path}.model_name", f"'{config.name}' cannot be a step of itself")
    if step.model_version < -1:
        report.add(f"{path}.model_version", f"expected a version, or -1 for the latest, got {step.model_version}")
    for field, tensors in (("input_map", step.input_map), ("output_map", step.output_map)):
        if not tensors:
            report.add(f"{path}.{field}", "expected at least one tensor, got none")
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
            report.add(f"output[{index}]", f"output '{output.name}' is written by no step", hint)
    for index, tensor in enumerate(config.input):
        if tensor.name and tensor.name not in read:
            report.add(f"input[{index}]", f"input '{tensor.name}' is read by no step")
    for name, writers in graph.writers.items():
        if name not in read and name not in outputs and name not in graph.inputs and name:
            where = _output_path(ensemble, writers[0], name)
            report.add(where, f"tensor '{name}' is read by no step and is no output of the ensemble")
    has_cycles = _check_cycles(graph, report)
    _check_writers(ensemble, graph, report, has_cycles=has_cycles)


def _check_reads(config: ModelConfig, ensemble: ModelEnsembling, graph: EnsembleGraph, report: Report) -> set[str]:
    """Report tensors that are read and not there; the tensors that are read."""
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
            report.add(where, message, did_you_mean(suggest(tensor, known)))
    return {tensor for _, tensor in reads}


def _check_writers(ensemble: ModelEnsembling, graph: EnsembleGraph, report: Report, *, has_cycles: bool) -> None:
    """Every tensor is written once, or by steps of which only one runs."""
    guards = {} if has_cycles else graph.guards(lambda _index, _name: True)
    for index, step in enumerate(ensemble.step):
        own: set[str] = set()
        for name, tensor in step.output_map.items():
            where = key_path(f"{_STEP}[{index}].output_map", name)
            others = [writer for writer in graph.writers[tensor] if writer < index]
            if tensor in graph.inputs:
                report.add(where, f"tensor '{tensor}' is an input of the ensemble and cannot be written")
            elif tensor and tensor in own:
                report.add(where, f"tensor '{tensor}' is written twice by this step")
            elif tensor:
                for writer in others:
                    if has_cycles or not are_exclusive(guards[index], guards[writer]):
                        hint = "give the steps conditions that exclude each other" if guards.get(index) else None
                        report.add(where, f"tensor '{tensor}' is written twice, first by step[{writer}]", hint)
                        break
            own.add(tensor)


def _output_path(ensemble: ModelEnsembling, index: int, tensor: str) -> str:
    name = next(name for name, written in ensemble.step[index].output_map.items() if written == tensor)
    return key_path(f"{_STEP}[{index}].output_map", name)


def _check_cycles(graph: EnsembleGraph, report: Report) -> bool:
    """Report the steps that wait for their own outputs, each cycle once; whether there are any."""
    needs = {index: list(graph.before(index)) for index in range(len(graph.steps))}
    done: set[int] = set()
    has_cycles = False
    for start in needs:
        cycle = _cycle_from(start, needs, done)
        if cycle:
            has_cycles = True
            steps = " <- ".join(f"step[{index}] ({graph.steps[index].model_name})" for index in cycle)
            report.add(f"{_STEP}[{cycle[0]}]", f"steps wait for each other: {steps}")
    return has_cycles


def _cycle_from(start: int, needs: Mapping[int, list[int]], done: set[int]) -> list[int]:
    """The first cycle on the way back from a step, its first step repeated at the end; empty if there is none.

    Steps that were looked at are added to `done` and not looked at again.
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
