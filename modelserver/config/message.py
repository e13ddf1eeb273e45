"""Model configs to and from protobuf messages.

Conversion follows the descriptors: a new field of the proto needs a field in `schema` and nothing here.
`document` does the same for JSON.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from modelserver.config import schema
from modelserver.config.problem import Problem, error_of, key_path
from modelserver.core.datatype import Datatype
from modelserver.pb import model_config_pb2 as pb
from modelserver.pb.pool import POOL

# Messages and enums of the proto -> their classes; ModelParameter is flattened into a string.
CLASSES: Mapping[str, type[Any]] = {
    "BatchInput": schema.BatchInput,
    "BatchOutput": schema.BatchOutput,
    "ModelConfig": schema.ModelConfig,
    "ModelDynamicBatching": schema.ModelDynamicBatching,
    "ModelEnsembling": schema.ModelEnsembling,
    "ModelEnsembling.Step": schema.EnsembleStep,
    "ModelInput": schema.ModelInput,
    "ModelInstanceGroup": schema.ModelInstanceGroup,
    "ModelInstanceGroup.SecondaryDevice": schema.SecondaryDevice,
    "ModelMetrics": schema.ModelMetrics,
    "ModelMetrics.MetricControl": schema.MetricControl,
    "ModelMetrics.MetricControl.HistogramOptions": schema.HistogramOptions,
    "ModelMetrics.MetricControl.MetricIdentifier": schema.MetricIdentifier,
    "ModelOperations": schema.ModelOperations,
    "ModelOptimizationPolicy": schema.ModelOptimizationPolicy,
    "ModelOptimizationPolicy.Cuda": schema.OptimizationCuda,
    "ModelOptimizationPolicy.Cuda.GraphSpec": schema.CudaGraphSpec,
    "ModelOptimizationPolicy.Cuda.GraphSpec.LowerBound": schema.CudaGraphLowerBound,
    "ModelOptimizationPolicy.Cuda.GraphSpec.Shape": schema.CudaGraphShape,
    "ModelOptimizationPolicy.ExecutionAccelerators": schema.ExecutionAccelerators,
    "ModelOptimizationPolicy.ExecutionAccelerators.Accelerator": schema.Accelerator,
    "ModelOptimizationPolicy.Graph": schema.OptimizationGraph,
    "ModelOptimizationPolicy.PinnedMemoryBuffer": schema.PinnedMemoryBuffer,
    "ModelOutput": schema.ModelOutput,
    "ModelQueuePolicy": schema.ModelQueuePolicy,
    "ModelRateLimiter": schema.ModelRateLimiter,
    "ModelRateLimiter.Resource": schema.RateLimiterResource,
    "ModelRepositoryAgents": schema.ModelRepositoryAgents,
    "ModelRepositoryAgents.Agent": schema.RepositoryAgent,
    "ModelResponseCache": schema.ModelResponseCache,
    "ModelSequenceBatching": schema.ModelSequenceBatching,
    "ModelSequenceBatching.Control": schema.SequenceControl,
    "ModelSequenceBatching.ControlInput": schema.SequenceControlInput,
    "ModelSequenceBatching.InitialState": schema.SequenceInitialState,
    "ModelSequenceBatching.State": schema.SequenceState,
    "ModelSequenceBatching.StrategyDirect": schema.SequenceStrategyDirect,
    "ModelSequenceBatching.StrategyOldest": schema.SequenceStrategyOldest,
    "ModelTensorReshape": schema.ModelTensorReshape,
    "ModelTransactionPolicy": schema.ModelTransactionPolicy,
    "ModelVersionPolicy": schema.ModelVersionPolicy,
    "ModelVersionPolicy.All": schema.VersionPolicyAll,
    "ModelVersionPolicy.Latest": schema.VersionPolicyLatest,
    "ModelVersionPolicy.Specific": schema.VersionPolicySpecific,
    "ModelWarmup": schema.ModelWarmup,
    "ModelWarmup.Input": schema.WarmupInput,
}
ENUMS: Mapping[str, type[enum.Enum]] = {
    "BatchInput.Kind": schema.BatchInputKind,
    "BatchOutput.Kind": schema.BatchOutputKind,
    "ModelInput.Format": schema.InputFormat,
    "ModelInstanceGroup.Kind": schema.InstanceGroupKind,
    "ModelInstanceGroup.SecondaryDevice.SecondaryDeviceKind": schema.SecondaryDeviceKind,
    "ModelOptimizationPolicy.ModelPriority": schema.OptimizationPriority,
    "ModelQueuePolicy.TimeoutAction": schema.TimeoutAction,
    "ModelSequenceBatching.Control.Kind": schema.SequenceControlKind,
}
_PARAMETER = "ModelParameter"
_PACKAGE = "inference."


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """A field of the proto and its attribute in the dataclass; for a map, `value` is that of its entries."""

    name: str
    attribute: str
    value: FieldDescriptor
    is_map: bool
    is_repeated: bool
    has_presence: bool
    cls: type[Any] | None
    enum_type: type[enum.Enum] | None
    is_datatype: bool
    is_parameter: bool


def _field(field: FieldDescriptor) -> Field:
    entry = field.message_type
    is_map = entry is not None and entry.GetOptions().map_entry
    value = entry.fields_by_name["value"] if entry is not None and is_map else field
    message_name = value.message_type.full_name.removeprefix(_PACKAGE) if value.message_type else None
    enum_name = value.enum_type.full_name.removeprefix(_PACKAGE) if value.enum_type else None
    return Field(
        name=field.name,
        attribute="global_" if field.name == "global" else field.name,  # `global` is a keyword
        value=value,
        is_map=is_map,
        is_repeated=field.is_repeated and not is_map,
        has_presence=field.has_presence,
        cls=CLASSES[message_name] if message_name and message_name != _PARAMETER else None,
        enum_type=ENUMS[enum_name] if enum_name and enum_name != "DataType" else None,
        is_datatype=enum_name == "DataType",
        is_parameter=message_name == _PARAMETER,
    )


_FIELDS: Mapping[type[Any], tuple[Field, ...]] = {
    cls: tuple(_field(field) for field in POOL.FindMessageTypeByName(_PACKAGE + name).fields)
    for name, cls in CLASSES.items()
}


def fields_of(cls: type[Any]) -> tuple[Field, ...]:
    """The fields of a schema class, in the order of the proto."""
    return _FIELDS[cls]


DATATYPES: Mapping[int, Datatype | None] = {
    number: None if name == "TYPE_INVALID" else Datatype.from_config_name(name) for name, number in pb.DataType.items()
}
DATATYPE_NUMBERS: Mapping[Datatype | None, int] = {datatype: number for number, datatype in DATATYPES.items()}


def config_from_message(message: pb.ModelConfig, *, source: str = "message") -> schema.ModelConfig:
    """The config of a message; raises ConfigError if an enum holds a number without a name."""
    problems: list[Problem] = []
    config: schema.ModelConfig = _read(message, schema.ModelConfig, "", source, problems)
    if problems:
        raise error_of(problems, source)
    return config


def _read(message: Any, cls: type[Any], prefix: str, source: str, problems: list[Problem]) -> Any:
    values: dict[str, Any] = {}
    for field in fields_of(cls):
        if field.has_presence and not message.HasField(field.name):
            continue
        path = prefix + field.name
        raw = getattr(message, field.name)
        if field.is_map:
            # Sorted, because protobuf keeps no order in a map.
            value: Any = {
                key: _read_value(field, raw[key], key_path(path, key), source, problems) for key in sorted(raw)
            }
        elif field.is_repeated:
            value = tuple(
                _read_value(field, item, f"{path}[{index}]", source, problems) for index, item in enumerate(raw)
            )
        else:
            value = _read_value(field, raw, path, source, problems)
        values[field.attribute] = value
    return cls(**values)


def _read_value(field: Field, raw: Any, path: str, source: str, problems: list[Problem]) -> Any:
    if field.cls is not None:
        return _read(raw, field.cls, path + ".", source, problems)
    if field.is_parameter:
        return raw.string_value
    numbers = field.value.enum_type
    if numbers is None:
        return raw
    if raw not in numbers.values_by_number:
        problems.append(Problem(source, None, None, path, f"{expected_enum(numbers)}, got {raw}"))
        raw = 0
    return DATATYPES[raw] if field.enum_type is None else field.enum_type(raw)


def expected_enum(descriptor: EnumDescriptor) -> str:
    """`expected one of …` with all names of the enum."""
    names = [value.name for value in descriptor.values if value.name != "TYPE_INVALID"]
    return f"expected {names[0]}" if len(names) == 1 else f"expected one of {', '.join(names)}"


def config_to_message(config: schema.ModelConfig, *, source: str = "model config") -> pb.ModelConfig:
    """The message of a config; raises ConfigError for values that the proto cannot hold."""
    message = pb.ModelConfig()
    problems: list[Problem] = []
    _write(config, message, "", source, problems)
    if problems:
        raise error_of(problems, source)
    return message


def _write(config: Any, message: Any, prefix: str, source: str, problems: list[Problem]) -> None:
    for field in fields_of(type(config)):
        value = getattr(config, field.attribute)
        if value is None and not field.is_datatype:
            continue
        try:
            _write_field(field, value, message, prefix + field.name, source, problems)
        except (TypeError, ValueError) as error:
            problems.append(Problem(source, None, None, prefix + field.name, f"cannot hold {value!r}: {error}"))


def _write_field(field: Field, value: Any, message: Any, path: str, source: str, problems: list[Problem]) -> None:
    if field.is_map:
        entries = getattr(message, field.name)
        for key, item in value.items():
            if field.cls is not None:
                _write(item, _present(entries[key]), f"{key_path(path, key)}.", source, problems)
            elif field.is_parameter:
                entries[key].string_value = item
            else:
                entries[key] = item
    elif field.is_repeated:
        entries = getattr(message, field.name)
        for index, item in enumerate(value):
            if field.cls is not None:
                _write(item, entries.add(), f"{path}[{index}].", source, problems)
            else:
                entries.append(_scalar(field, item))
    elif field.cls is not None:
        _write(value, _present(getattr(message, field.name)), path + ".", source, problems)
    else:
        setattr(message, field.name, _scalar(field, value))


def _present(message: Message) -> Message:
    message.SetInParent()
    return message


def _scalar(field: Field, value: Any) -> Any:
    if field.is_datatype:
        return DATATYPE_NUMBERS[value]
    return value if field.enum_type is None else value.value
