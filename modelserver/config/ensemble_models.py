"""Rules for the models of an ensemble's steps, so that tensors can pass from one to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from modelserver.config.ensemble_graph import EnsembleGraph, Guards, condition_paths, ensemble_graph, find_scopes
from modelserver.config.ensemble_parameters import check_limits_of_models
from modelserver.config.problem import Locations, Problem, Report, key_path
from modelserver.config.schema import EnsembleStep, ModelConfig, ModelInput, ModelOutput
from modelserver.core.datatype import Datatype
from modelserver.core.spelling import did_you_mean, suggest

_STEP = "ensemble_scheduling.step"

# The config of a step's model; or the reason why it is missing; or None when it is not known yet.
FindConfig = Callable[[EnsembleStep], ModelConfig | str | None]


@dataclass(frozen=True, slots=True)
class _End:
    """A start or end point of an ensemble's tensor, with its type there. `shape` includes the batch dimension.

    `model` is the step's model, or the ensemble; `step` the step's index, -1 for the ensemble.
    """

    path: str
    what: str
    model: str
    step: int
    datatype: Datatype | None
    dims: tuple[int, ...]
    shape: tuple[int, ...]


def check_models(
    config: ModelConfig, find: FindConfig, *, locations: Locations | None = None, source: str = "config.pbtxt"
) -> tuple[Problem, ...]:
    """Every problem of an ensemble with its models. Its own config is valid (see `validate`), but may be incomplete."""
    report = Report(source, locations, config.name)
    if config.ensemble_scheduling is None:
        return ()
    models: dict[int, ModelConfig] = {}
    for index, step in enumerate(config.ensemble_scheduling.step):
        found = find(step) if step.model_name else None
        if isinstance(found, str):
            summary = f"ensemble {config.name} contains models that are not available or ambiguous: {step.model_name}"
            report.add(f"{_STEP}[{index}].model_name", found, summary=summary)
        elif found is not None:
            models[index] = found
            _check_step(config, step, index, found, report)
    _check_tensors(config, models, report)
    check_limits_of_models(config, models, report)
    if len(models) == len(config.ensemble_scheduling.step) and not report.problems:
        _check_runs(config, models, report)
    return tuple(sorted(report.problems, key=lambda problem: (problem.line or 0, problem.column or 0)))


def is_decoupled(config: ModelConfig, models: Sequence[ModelConfig]) -> bool:
    """Whether an ensemble may have zero or more than one response, by its own config or by a step's model."""
    return config.is_decoupled or any(model.is_decoupled for model in models)


def _check_step(config: ModelConfig, step: EnsembleStep, index: int, model: ModelConfig, report: Report) -> None:
    path, name = f"{_STEP}[{index}]", step.model_name
    inputs, outputs = [tensor.name for tensor in model.input], [tensor.name for tensor in model.output]
    _check_keys(f"{path}.input_map", step, inputs, report)
    _check_keys(f"{path}.output_map", step, outputs, report)
    missing = [tensor.name for tensor in model.input if not tensor.optional and tensor.name not in step.input_map]
    if missing and step.input_map:
        message = f"model '{name}' needs its inputs {missing}, which no tensor is mapped to"
        unmapped = f"input {missing[0]} in model {name} is not mapped to any ensemble tensors"
        report.add(f"{path}.input_map", message, summary=f"in ensemble {config.name}, {unmapped}")
    if 0 < model.max_batch_size < config.max_batch_size:
        limit = f"only {model.max_batch_size} rows"
        message = f"the ensemble allows max_batch_size {config.max_batch_size}, but model '{name}' {limit}"
        allows = f"ensemble {config.name} allows maximum batch size {config.max_batch_size}"
        contains = f"it contains model {name} which only allows maximum batch size to be {model.max_batch_size}"
        hint = f"lower max_batch_size of the ensemble to {model.max_batch_size}"
        report.add(f"{path}.model_name", message, hint, summary=f"{allows}, but {contains}")


def _check_keys(path: str, step: EnsembleStep, names: Sequence[str], report: Report) -> None:
    is_input = path.endswith(".input_map")
    kind, mapped = (
        ("input", "mapping to non-existing input") if is_input else ("output", "mapped from non-existing output")
    )
    for name, tensor in (step.input_map if is_input else step.output_map).items():
        if name and name not in names:
            hint = did_you_mean(suggest(name, names))
            expected = f"expected an {kind} of '{step.model_name}', one of {', '.join(names)}; got '{name}'"
            where = f"in ensemble {report.model_name}, ensemble tensor {tensor}"
            summary = f"{where} is {mapped} {name} in model {step.model_name}"
            report.add(key_path(path, name), expected, hint, summary=summary)


def _check_tensors(config: ModelConfig, models: Mapping[int, ModelConfig], report: Report) -> None:
    """Check that writers and readers of a tensor agree on its datatype and on compatible shapes."""
    begins = _begins(config, models)
    for tensor, ends in _ends(config, models).items():
        written = begins.get(tensor, [])
        for other in written[1:]:
            _compare(tensor, written[0], other, report)
        for end in ends:
            for begin in written:
                if not _compare(tensor, begin, end, report):
                    break
    paths = condition_paths(config)
    for index, condition in ensemble_graph(config).conditions.items():
        for begin in begins.get(condition.tensor, ())[:1]:
            if begin.datatype is not Datatype.BOOL:
                kind = begin.datatype.value if begin.datatype is not None else "of no type"
                message = f"expected a tensor of BOOL, but '{condition.tensor}' is {kind} as {begin.what}"
                report.add(paths[index], message)


def _begins(config: ModelConfig, models: Mapping[int, ModelConfig]) -> dict[str, list[_End]]:
    begins: dict[str, list[_End]] = {}
    for position, tensor in enumerate(config.input):
        end = _end(f"input[{position}]", f"input '{tensor.name}' of the ensemble", config, tensor, -1)
        begins.setdefault(tensor.name, []).append(end)
    for index, step, model in _steps(config, models):
        outputs = {output.name: output for output in model.output}
        for name, written in step.output_map.items():
            if name in outputs:
                path = key_path(f"{_STEP}[{index}].output_map", name)
                end = _end(path, f"output '{name}' of model '{step.model_name}'", model, outputs[name], index)
                begins.setdefault(written, []).append(end)
    return begins


def _ends(config: ModelConfig, models: Mapping[int, ModelConfig]) -> dict[str, list[_End]]:
    ends: dict[str, list[_End]] = {}
    for index, step, model in _steps(config, models):
        inputs = {tensor.name: tensor for tensor in model.input}
        for name, read in step.input_map.items():
            if name in inputs:
                path = key_path(f"{_STEP}[{index}].input_map", name)
                end = _end(path, f"input '{name}' of model '{step.model_name}'", model, inputs[name], index)
                ends.setdefault(read, []).append(end)
    for position, output in enumerate(config.output):
        end = _end(f"output[{position}]", f"output '{output.name}' of the ensemble", config, output, -1)
        ends.setdefault(output.name, []).append(end)
    return ends


def _steps(config: ModelConfig, models: Mapping[int, ModelConfig]) -> list[tuple[int, EnsembleStep, ModelConfig]]:
    steps = config.ensemble_scheduling.step if config.ensemble_scheduling is not None else ()
    return [(index, step, models[index]) for index, step in enumerate(steps) if index in models]


def _end(path: str, what: str, config: ModelConfig, tensor: ModelInput | ModelOutput, step: int) -> _End:
    """The tensor as a client of that config sees it; for the ensemble, as its steps see it."""
    lead = (-1,) if config.max_batch_size > 0 else ()
    dims = tuple(tensor.reshape.shape if step < 0 and tensor.reshape is not None else tensor.dims)
    return _End(path, what, config.name, step, tensor.data_type, dims, lead + dims)


def _compare(tensor: str, begin: _End, end: _End, report: Report) -> bool:
    """Whether a tensor can pass from one to the other."""
    if begin.datatype is not None and end.datatype is not None and begin.datatype is not end.datatype:
        problem = f"has datatype {end.datatype.value}, but"
        message = f"{end.what} {problem} tensor '{tensor}' is {begin.datatype.value} as {begin.what}"
        types = {one: f"{one.datatype.config_name}" for one in (begin, end) if one.datatype is not None}
        report.add(end.path, message, summary=_inconsistent("data type", tensor, types, report))
        return False
    # If only one side has batches, a batch of one is equivalent to its only row.
    if _can_be_equal(begin.shape, end.shape) or _can_be_equal(begin.dims, end.dims):
        return True
    problem = f"has shape {list(end.shape)}, but"
    hint = None
    if len(begin.shape) != len(end.shape):
        hint = "with max_batch_size > 0 a model's tensors have one more dimension, the batch"
    message = f"{end.what} {problem} tensor '{tensor}' is {list(begin.shape)} as {begin.what}"
    shapes = {one: f"[{','.join(map(str, one.shape))}]" for one in (begin, end)}
    report.add(end.path, message, hint, summary=_inconsistent("shape", tensor, shapes, report))
    return False


def _inconsistent(what: str, tensor: str, ends: Mapping[_End, str], report: Report) -> str:
    """Triton's sentence about a tensor with different types at its ends: first the ensemble, then its steps."""
    inferred = [f"{ends[end]} is inferred from model {end.model}" for end in sorted(ends, key=lambda end: end.step)]
    where = f"in ensemble {report.model_name}, ensemble tensor {tensor}"
    return f"{where}: inconsistent {what}: {' while '.join(inferred)}"


def _can_be_equal(some: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return len(some) == len(others) and all(
        one in (other, -1) or other == -1 for one, other in zip(some, others, strict=True)
    )


def _check_runs(config: ModelConfig, models: Mapping[int, ModelConfig], report: Report) -> None:
    """Check how often steps run, and that their inputs are available when they run."""
    graph = ensemble_graph(config)
    decoupled = [models[index].is_decoupled for index in range(len(graph.steps))]
    _, conflicts = find_scopes(graph, decoupled, [output.name for output in config.output])
    for conflict in conflicts:
        path = "ensemble_scheduling" if conflict.step is None else f"{_STEP}[{conflict.step}]"
        model = config.name if conflict.step is None else graph.steps[conflict.step].model_name
        receives = f"step of model '{model}' receives inputs originated from different decoupled models"
        summary = f"in ensemble {config.name}, {receives}" if conflict.is_input else ""
        report.add(path, conflict.message, summary=summary)
    cache = config.response_cache
    if cache is not None and cache.enable and any(decoupled):
        index = decoupled.index(True)
        message = f"responses of an ensemble with a decoupled model ({graph.name_of(index)}) cannot be cached"
        report.add("response_cache", message)
    required = {
        (index, tensor.name) for index, model in models.items() for tensor in model.input if not tensor.optional
    }
    guards = graph.guards(lambda index, name: (index, name) in required)
    _check_optional(config, graph, guards, required, report)


def _check_optional(
    config: ModelConfig,
    graph: EnsembleGraph,
    guards: Mapping[int, Guards],
    required: set[tuple[int, str]],
    report: Report,
) -> None:
    optional = {tensor.name for tensor in config.input if tensor.optional}
    for index, step in enumerate(graph.steps):
        for name, tensor in step.input_map.items():
            if tensor in optional and (index, name) in required and not guards[index]:
                needed = f"model '{step.model_name}' needs its input '{name}'"
                message = f"input '{tensor}' of the ensemble is optional, but {needed}"
                hint = "let the model's input be optional, or give the step a condition"
                report.add(key_path(f"{_STEP}[{index}].input_map", name), message, hint)
    for tensor, writers in graph.writers.items():
        if len(writers) > 1:
            _check_exclusive(tensor, writers, graph, guards, report)


def _check_exclusive(
    tensor: str, writers: Sequence[int], graph: EnsembleGraph, guards: Mapping[int, Guards], report: Report
) -> None:
    """As `ensemble_rules`, with the knowledge of which inputs are optional for a step."""
    for position, index in enumerate(writers):
        for other in writers[:position]:
            if not any(one.excludes(two) for one in guards[index] for two in guards[other]):
                name = next(name for name, written in graph.steps[index].output_map.items() if written == tensor)
                path = key_path(f"{_STEP}[{index}].output_map", name)
                message = f"tensor '{tensor}' is also written by {graph.name_of(other)}, and both may run"
                report.add(path, message, "give the steps conditions that exclude each other")
                break
