"""The fields of the proto beside the classes of `schema`: the table that every conversion follows."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor

from modelserver.config import schema
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
    """A field of the proto and its attribute in the dataclass; for a map, `value` is the field of its entries."""

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


def expected_enum(descriptor: EnumDescriptor) -> str:
    """`expected one of …` with all names of the enum."""
    names = [value.name for value in descriptor.values if value.name != "TYPE_INVALID"]
    return f"expected {names[0]}" if len(names) == 1 else f"expected one of {', '.join(names)}"
