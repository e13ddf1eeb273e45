"""What an ensemble must be, judged from its own config; its models are looked at when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping

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
    inputs = {tensor.name: f"input[{index}]" for index, tensor in enumerate(config.input)}
    writers = _writers(ensemble, inputs, report)
    read = {tensor for step in ensemble.step for tensor in step.input_map.values()}
    known = [*inputs, *writers]
    for index, step in enumerate(ensemble.step):
        for name, tensor in step.input_map.items():
            if tensor and tensor not in writers and tensor not in inputs:
                where = key_path(f"{_STEP}[{index}].input_map", name)
                message = f"tensor '{tensor}' is neither an input of the ensemble nor written by a step"
                report.add(where, message, did_you_mean(suggest(tensor, known)))
    for index, output in enumerate(config.output):
        if output.name and output.name not in writers:
            hint = did_you_mean(suggest(output.name, writers))
            report.add(f"output[{index}]", f"output '{output.name}' is written by no step", hint)
    outputs = {tensor.name for tensor in config.output}
    for name, where in inputs.items():
        if name and name not in read:
            report.add(where, f"input '{name}' is read by no step")
    for tensor, (_, where) in writers.items():
        if tensor not in read and tensor not in outputs:
            report.add(where, f"tensor '{tensor}' is read by no step and is no output of the ensemble")
    _check_cycles(ensemble, {tensor: index for tensor, (index, _) in writers.items()}, report)


def _writers(ensemble: ModelEnsembling, inputs: Mapping[str, str], report: Report) -> dict[str, tuple[int, str]]:
    """Tensor -> the step that writes it and where it says so; every tensor is written once."""
    writers: dict[str, tuple[int, str]] = {}
    for index, step in enumerate(ensemble.step):
        for name, tensor in step.output_map.items():
            where = key_path(f"{_STEP}[{index}].output_map", name)
            if tensor in inputs:
                report.add(where, f"tensor '{tensor}' is an input of the ensemble and cannot be written")
            elif tensor in writers:
                report.add(where, f"tensor '{tensor}' is written twice, first by step[{writers[tensor][0]}]")
            elif tensor:
                writers[tensor] = (index, where)
    return writers


def _check_cycles(ensemble: ModelEnsembling, writers: Mapping[str, int], report: Report) -> None:
    """Report the steps that wait for their own outputs, each cycle once."""
    needs = {
        index: sorted({writers[tensor] for tensor in step.input_map.values() if tensor in writers})
        for index, step in enumerate(ensemble.step)
    }
    done: set[int] = set()
    for start in needs:
        cycle = _cycle_from(start, needs, done)
        if cycle:
            steps = " <- ".join(f"step[{index}] ({ensemble.step[index].model_name})" for index in cycle)
            report.add(f"{_STEP}[{cycle[0]}]", f"steps wait for each other: {steps}")


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
