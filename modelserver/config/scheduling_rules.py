"""What dynamic and sequence batching must be."""

from __future__ import annotations

from collections.abc import Sequence

from modelserver.config.report import Report
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


def check_scheduling(config: ModelConfig, report: Report) -> None:
    """Report what is wrong with the choice of a scheduler and its options."""
    choices = [
        name
        for name in ("dynamic_batching", "sequence_batching", "ensemble_scheduling")
        if getattr(config, name) is not None
    ]
    for name in choices[1:]:
        report.add(name, f"cannot be set beside {choices[0]}: a model has one scheduler")
    if config.dynamic_batching is not None:
        _check_dynamic(config, config.dynamic_batching, report)
    if config.sequence_batching is not None:
        _check_sequence(config, config.sequence_batching, report)


def _check_dynamic(config: ModelConfig, batching: ModelDynamicBatching, report: Report) -> None:
    path = "dynamic_batching"
    # Without a batch dimension, preferred sizes ask for what cannot be; queue policies still make sense.
    _check_preferred(config, batching.preferred_batch_size, f"{path}.preferred_batch_size", report)
    levels = batching.priority_levels
    expected = f"a priority level in [1, {levels}]" if levels else "no priority level without priority_levels"
    if not _is_level(batching.default_priority_level, levels):
        report.add(f"{path}.default_priority_level", f"expected {expected}, got {batching.default_priority_level}")
    for level in batching.priority_queue_policy:
        if level == 0 or not _is_level(level, levels):
            report.add(f"{path}.priority_queue_policy[{level}]", f"expected {expected}, got {level}")
    if batching.preserve_ordering:
        _check_ordering(batching, report)


def _is_level(level: int, levels: int) -> bool:
    return 1 <= level <= levels if levels else level == 0


def _check_ordering(batching: ModelDynamicBatching, report: Report) -> None:
    """Responses in the order of arrival leave no room for requests that overtake each other."""
    if batching.priority_levels > 1:
        what = f"at most one priority level, got {batching.priority_levels}"
        report.add("dynamic_batching.preserve_ordering", f"keeping the order of requests needs {what}")
    policies = {"default_queue_policy": batching.default_queue_policy}
    policies.update({f"priority_queue_policy[{level}]": it for level, it in batching.priority_queue_policy.items()})
    for name, policy in policies.items():
        if policy is not None and policy.timeout_action is TimeoutAction.DELAY:
            where = f"dynamic_batching.{name}.timeout_action"
            report.add(where, "expected REJECT because of preserve_ordering, got DELAY")


def _check_preferred(config: ModelConfig, sizes: Sequence[int], path: str, report: Report) -> None:
    largest = config.max_batch_size
    for index, size in enumerate(sizes):
        if not 1 <= size <= largest:
            expected = f"a size in [1, {largest}], max_batch_size" if largest else "none, because max_batch_size is 0"
            report.add(f"{path}[{index}]", f"expected {expected}, got {size}")


def _check_sequence(config: ModelConfig, batching: ModelSequenceBatching, report: Report) -> None:
    path = "sequence_batching"
    if batching.direct is not None and batching.oldest is not None:
        report.add(f"{path}.oldest", "cannot be set beside direct: only one of direct, oldest may be")
    if batching.direct is not None:
        utilization = batching.direct.minimum_slot_utilization
        if not 0.0 <= utilization <= 1.0:
            where = f"{path}.direct.minimum_slot_utilization"
            report.add(where, f"expected a fraction in [0, 1], got {utilization:g}")
    if batching.oldest is not None:
        candidates = batching.oldest.max_candidate_sequences
        if candidates < 0:
            report.add(f"{path}.oldest.max_candidate_sequences", f"expected a count >= 0, got {candidates}")
        if config.max_batch_size > 0:
            _check_preferred(
                config, batching.oldest.preferred_batch_size, f"{path}.oldest.preferred_batch_size", report
            )
    _check_controls(batching, report)
    _check_states(batching.state, report)


def _check_controls(batching: ModelSequenceBatching, report: Report) -> None:
    tensors: dict[str, int] = {}
    kinds: dict[SequenceControlKind, str] = {}
    for index, tensor in enumerate(batching.control_input):
        path = f"sequence_batching.control_input[{index}]"
        report.check_name(f"{path}.name", tensor.name, "the name of an input tensor")
        if tensor.name and tensors.setdefault(tensor.name, index) != index:
            first = f"control_input[{tensors[tensor.name]}]"
            report.add(f"{path}.name", f"expected a tensor of its own, got '{tensor.name}' as in {first}")
        if len(tensor.control) != 1:
            report.add(f"{path}.control", f"expected exactly one control for a tensor, got {len(tensor.control)}")
        for position, control in enumerate(tensor.control):
            where = f"{path}.control[{position}]"
            if control.kind in kinds:
                report.add(f"{where}.kind", f"{control.kind.name} is given twice, first in {kinds[control.kind]}")
            kinds.setdefault(control.kind, where.removeprefix("sequence_batching."))
            _check_control(control, where, report)


def _check_control(control: SequenceControl, path: str, report: Report) -> None:
    pairs = [name for name in _PAIRS if getattr(control, name)]
    kind = control.kind.name
    if control.kind is SequenceControlKind.CONTROL_SEQUENCE_CORRID:
        if control.data_type not in _CORRELATION_ID_TYPES:
            names = ", ".join(datatype.config_name for datatype in _CORRELATION_ID_TYPES)
            got = "none" if control.data_type is None else control.data_type.config_name
            report.add(f"{path}.data_type", f"expected one of {names} for {kind}, got {got}")
        for name in pairs:
            report.add(f"{path}.{name}", f"{kind} takes a data_type and no values")
        return
    if control.data_type is not None:
        report.add(f"{path}.data_type", f"{kind} takes values and no data_type")
    if len(pairs) != 1:
        got = " and ".join(pairs) or "none"
        report.add(path, f"expected exactly one of {', '.join(_PAIRS)} for {kind}, got {got}")
    for name in pairs:
        count = len(getattr(control, name))
        if count != 2:
            report.add(f"{path}.{name}", f"expected two values, for false and for true, got {count}")


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
            report.add(f"{path}.initial_state[1]", f"expected at most one, got {len(state.initial_state)}")
        for position, initial in enumerate(state.initial_state):
            _check_initial_state(state, initial, f"{path}.initial_state[{position}]", report)


def _check_initial_state(state: SequenceState, initial: SequenceInitialState, path: str, report: Report) -> None:
    report.check_name(f"{path}.name", initial.name, "a name")
    check_dims(initial.dims, f"{path}.dims", report, allow_variable=False)
    if initial.data_type is None or (state.data_type is not None and initial.data_type is not state.data_type):
        got = "none" if initial.data_type is None else initial.data_type.config_name
        expected = "a data type" if state.data_type is None else f"{state.data_type.config_name}, the state's,"
        report.add(f"{path}.data_type", f"expected {expected} got {got}")
    if (initial.zero_data is None) == (initial.data_file is None):
        report.add(path, "expected exactly one of zero_data, data_file")
    if initial.data_file is not None:
        report.check_name(f"{path}.data_file", initial.data_file, "a file under initial_state/")
        report.check_file(f"{path}.data_file", initial.data_file)
