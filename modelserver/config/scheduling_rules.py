"""Rules for dynamic and sequence batching."""

from __future__ import annotations

from collections.abc import Sequence

from modelserver.config.defaults import ENSEMBLE
from modelserver.config.problem import Report
from modelserver.config.schema import (
    ModelConfig,
    ModelDynamicBatching,
    ModelSequenceBatching,
    SequenceControl,
    SequenceControlKind,
    SequenceInitialState,
    SequenceState,
    TimeoutAction,
)
from modelserver.config.tensor_rules import check_dims
from modelserver.core.datatype import Datatype

_CORRELATION_ID_TYPES = (Datatype.UINT64, Datatype.INT64, Datatype.UINT32, Datatype.INT32, Datatype.BYTES)
_PAIRS = ("int32_false_true", "fp32_false_true", "bool_false_true")
_PAIR_NAMES = "'int32_false_true', 'fp32_false_true' or 'bool_false_true'"


def check_scheduling(config: ModelConfig, report: Report) -> None:
    """Report problems in the choice of a scheduler and its options."""
    choices = [
        name
        for name in ("dynamic_batching", "sequence_batching", "ensemble_scheduling")
        if getattr(config, name) is not None
    ]
    for name in choices[1:]:
        summary = ""
        if name == "ensemble_scheduling":
            summary = (
                f"ensemble scheduling cannot be set for model '{report.model_name}' whose platform is not {ENSEMBLE}"
            )
        report.add(name, f"cannot be set beside {choices[0]}: a model has one scheduler", summary=summary)
    if config.dynamic_batching is not None:
        _check_dynamic(config, config.dynamic_batching, report)
    if config.sequence_batching is not None:
        _check_sequence(config, config.sequence_batching, report)


def _check_dynamic(config: ModelConfig, batching: ModelDynamicBatching, report: Report) -> None:
    path = "dynamic_batching"
    # Without a batch dimension, preferred sizes are impossible; queue policies still make sense.
    what = "dynamic batching preferred size"
    _check_preferred(config, batching.preferred_batch_size, f"{path}.preferred_batch_size", what, report)
    levels = batching.priority_levels
    # Without levels there is one queue, and these fields have no effect.
    expected = f"a priority level in [1, {levels}]"
    if levels and not _is_level(batching.default_priority_level, levels):
        message = f"expected {expected}, got {batching.default_priority_level}"
        summary = f"default priority level must be in range [1, {levels}] for {report.model_name}"
        report.add(f"{path}.default_priority_level", message, summary=summary)
    for level in batching.priority_queue_policy:
        if levels and not _is_level(level, levels):
            must = "priority queue policy must have priority level in range"
            summary = f"{must} [1, {levels}] for {report.model_name}"
            report.add(f"{path}.priority_queue_policy[{level}]", f"expected {expected}, got {level}", summary=summary)
    if batching.preserve_ordering:
        _check_ordering(batching, report)


def _is_level(level: int, levels: int) -> bool:
    return 1 <= level <= levels


def _check_ordering(batching: ModelDynamicBatching, report: Report) -> None:
    """With responses in the order of arrival, requests must not overtake each other."""
    if batching.priority_levels > 1:
        what = f"at most one priority level, got {batching.priority_levels}"
        allowed = "Only one priority level is allowed when 'preserve_ordering' is true"
        message = f"keeping the order of requests needs {what}"
        summary = f"{allowed} for {report.model_name}"
        report.add("dynamic_batching.preserve_ordering", message, summary=summary)
    policies = {"default_queue_policy": batching.default_queue_policy}
    policies.update({f"priority_queue_policy[{level}]": it for level, it in batching.priority_queue_policy.items()})
    for name, policy in policies.items():
        if policy is not None and policy.timeout_action is TimeoutAction.DELAY:
            where = f"dynamic_batching.{name}.timeout_action"
            cannot = "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true"
            summary = f"{cannot} for {report.model_name}"
            report.add(where, "expected REJECT because of preserve_ordering, got DELAY", summary=summary)


def _check_preferred(config: ModelConfig, sizes: Sequence[int], path: str, what: str, report: Report) -> None:
    largest = config.max_batch_size
    for index, size in enumerate(sizes):
        if not 1 <= size <= largest:
            expected = f"a size in [1, {largest}], max_batch_size" if largest else "none, because max_batch_size is 0"
            bound = "positive" if size < 1 else "<= max batch size"
            summary = f"{what} must be {bound} for {report.model_name}"
            report.add(f"{path}[{index}]", f"expected {expected}, got {size}", summary=summary)


def _check_sequence(config: ModelConfig, batching: ModelSequenceBatching, report: Report) -> None:
    path = "sequence_batching"
    if batching.direct is not None and batching.oldest is not None:
        report.add(f"{path}.oldest", "cannot be set beside direct: only one of direct, oldest may be")
    if batching.direct is not None:
        utilization = batching.direct.minimum_slot_utilization
        if not 0.0 <= utilization <= 1.0:
            where = f"{path}.direct.minimum_slot_utilization"
            must = "sequence batching minimum slot utilization must be in range (0.0, 1.0]"
            summary = f"{must} for {report.model_name}"
            report.add(where, f"expected a fraction in [0, 1], got {utilization:g}", summary=summary)
    if batching.oldest is not None:
        candidates = batching.oldest.max_candidate_sequences
        if candidates < 0:
            report.add(f"{path}.oldest.max_candidate_sequences", f"expected a count >= 0, got {candidates}")
        if config.max_batch_size > 0:
            sizes, where = batching.oldest.preferred_batch_size, f"{path}.oldest.preferred_batch_size"
            _check_preferred(config, sizes, where, "sequence batching preferred batch size", report)
    _check_controls(batching, report)
    _check_states(batching.state, report)


def _check_controls(batching: ModelSequenceBatching, report: Report) -> None:
    tensors: dict[str, int] = {}
    kinds: dict[SequenceControlKind, str] = {}
    for index, tensor in enumerate(batching.control_input):
        path = f"sequence_batching.control_input[{index}]"
        unnamed = f"sequence batching control tensor must have a name for {report.model_name}"
        report.check_name(f"{path}.name", tensor.name, "the name of an input tensor", summary=unnamed)
        if tensor.name and tensors.setdefault(tensor.name, index) != index:
            first = f"control_input[{tensors[tensor.name]}]"
            message = f"expected a tensor of its own, got '{tensor.name}' as in {first}"
            twice = f"sequence batching control tensor '{tensor.name}' is specified for multiple control kinds"
            report.add(f"{path}.name", message, summary=f"{twice} for {report.model_name}")
        for position, control in enumerate(tensor.control):
            where = f"{path}.control[{position}]"
            if control.kind in kinds:
                message = f"{control.kind.name} is given twice, first in {kinds[control.kind]}"
                twice = f"sequence batching specifies multiple {control.kind.name} tensors"
                report.add(f"{where}.kind", message, summary=f"{twice} for {report.model_name}")
            kinds.setdefault(control.kind, where.removeprefix("sequence_batching."))
            _check_control(control, where, report)


def _check_control(control: SequenceControl, path: str, report: Report) -> None:
    pairs = [name for name in _PAIRS if getattr(control, name)]
    kind = control.kind.name
    if control.kind is SequenceControlKind.CONTROL_SEQUENCE_CORRID:
        if control.data_type not in _CORRELATION_ID_TYPES:
            names = ", ".join(datatype.config_name for datatype in _CORRELATION_ID_TYPES)
            got = "none" if control.data_type is None else control.data_type.config_name
            summary = f"unexpected data type for control {kind} for {report.model_name}"
            report.add(f"{path}.data_type", f"expected one of {names} for {kind}, got {got}", summary=summary)
        for name in pairs:
            must_not = f"sequence batching must not specify either {_PAIR_NAMES} for {kind}"
            message = f"{kind} takes a data_type and no values"
            report.add(f"{path}.{name}", message, summary=f"{must_not} for {report.model_name}")
        return
    if control.data_type is not None:
        report.add(f"{path}.data_type", f"{kind} takes values and no data_type")
    if len(pairs) != 1:
        got = " and ".join(pairs) or "none"
        must = f"must specify either {_PAIR_NAMES}"
        if pairs:
            must = "specifies more than one from 'int32_false_true', 'fp32_false_true' and 'bool_false_true'"
        summary = f"sequence batching {must} for {kind} for {report.model_name}"
        message = f"expected exactly one of {', '.join(_PAIRS)} for {kind}, got {got}"
        report.add(path, message, summary=summary)
    for name in pairs:
        count = len(getattr(control, name))
        if count != 2:
            must = f"sequence batching control '{name}' must have exactly 2 entries for {kind}"
            message = f"expected two values, for false and for true, got {count}"
            report.add(f"{path}.{name}", message, summary=f"{must} for {report.model_name}")


def _check_states(states: Sequence[SequenceState], report: Report) -> None:
    seen: dict[tuple[str, str], int] = {}
    for index, state in enumerate(states):
        path = f"sequence_batching.state[{index}]"
        for field in ("input_name", "output_name"):
            name = getattr(state, field)
            report.check_name(f"{path}.{field}", name, "the name of a tensor")
            first = seen.setdefault((field, name), index)
            if name and first != index:
                report.add(f"{path}.{field}", f"expected a name of its own, got '{name}' as in state[{first}]")
        if state.data_type is None:
            report.add(f"{path}.data_type", "expected a data type, got none")
        if not state.dims:
            report.add(f"{path}.dims", "expected at least one dimension, got none")
        check_dims(state.dims, f"{path}.dims", report)
        if len(state.initial_state) > 1:
            count = len(state.initial_state)
            must = f"initial_state field for state input '{state.input_name}' must contain exactly one or zero element"
            summary = f"{must}. Found '{count}' elements."
            report.add(f"{path}.initial_state[1]", f"expected at most one, got {count}", summary=summary)
        for position, initial in enumerate(state.initial_state):
            _check_initial_state(state, initial, f"{path}.initial_state[{position}]", report)


def _check_initial_state(state: SequenceState, initial: SequenceInitialState, path: str, report: Report) -> None:
    state_input = f"state input '{state.input_name}'"
    unnamed = f"Field 'name' must be set when using initial_state for {state_input}."
    report.check_name(f"{path}.name", initial.name, "a name", summary=unnamed)
    summary = f"'initial_state' field for state input name '{state.input_name}' contains variable dimensions."
    check_dims(initial.dims, f"{path}.dims", report, allow_variable=False, summary=summary)
    if initial.data_type is None or (state.data_type is not None and initial.data_type is not state.data_type):
        got = "none" if initial.data_type is None else initial.data_type.config_name
        expected = "a data type" if state.data_type is None else f"{state.data_type.config_name}, the state's,"
        used = f"The data type used for 'initial_state' field of state '{state.input_name}'"
        summary = f"{used} does not match the state data type."
        report.add(f"{path}.data_type", f"expected {expected} got {got}", summary=summary)
    if (initial.zero_data is None) == (initial.data_file is None):
        summary = f"initial_state setting expects state'{state.input_name}' to have state_data set"
        report.add(path, "expected exactly one of zero_data, data_file", summary=summary)
    if initial.data_file is not None:
        report.check_name(f"{path}.data_file", initial.data_file, "a file under initial_state/")
        report.check_file(f"{path}.data_file", initial.data_file)
