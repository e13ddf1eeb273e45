"""The model config as frozen dataclasses, one per message of protos/model_config.proto.

Fields have their names and defaults in the proto; a repeated field is a tuple, a map a Mapping, an
absent message None. Every member of a oneof is an optional field, of which at most one is set.
Nothing here checks or completes: see `validate` and `defaults`. Variants by `dataclasses.replace`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from modelserver.core.datatype import Datatype


class InstanceGroupKind(enum.Enum):
    """Device kind of an instance group; AUTO is resolved by `defaults.normalise`."""

    KIND_AUTO = 0
    KIND_GPU = 1
    KIND_CPU = 2
    KIND_MODEL = 3


class SecondaryDeviceKind(enum.Enum):
    """Devices that an instance may use beside its GPU."""

    KIND_NVDLA = 0


class InputFormat(enum.Enum):
    """Layout of an image input's dimensions."""

    FORMAT_NONE = 0
    FORMAT_NHWC = 1
    FORMAT_NCHW = 2


class BatchInputKind(enum.Enum):
    """The information in a batch input about the shapes of a batch."""

    BATCH_ELEMENT_COUNT = 0
    BATCH_ACCUMULATED_ELEMENT_COUNT = 1
    BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO = 2
    BATCH_MAX_ELEMENT_COUNT_AS_SHAPE = 3
    BATCH_ITEM_SHAPE = 4
    BATCH_ITEM_SHAPE_FLATTEN = 5


class BatchOutputKind(enum.Enum):
    """How a batched output is split among the requests."""

    BATCH_SCATTER_WITH_INPUT_SHAPE = 0


class OptimizationPriority(enum.Enum):
    """Priority of a model's device work against that of other models."""

    PRIORITY_DEFAULT = 0
    PRIORITY_MAX = 1
    PRIORITY_MIN = 2


class TimeoutAction(enum.Enum):
    """The action on a request whose queue timeout expires: fail, or wait behind all others."""

    REJECT = 0
    DELAY = 1


class SequenceControlKind(enum.Enum):
    """Signals that the sequence batcher gives to a model."""

    CONTROL_SEQUENCE_START = 0
    CONTROL_SEQUENCE_READY = 1
    CONTROL_SEQUENCE_END = 2
    CONTROL_SEQUENCE_CORRID = 3


@dataclass(frozen=True, slots=True)
class RateLimiterResource:
    """`count` units of a resource; `global_` (proto: `global`) means one pool for all devices."""

    name: str = ""
    global_: bool = False
    count: int = 0


@dataclass(frozen=True, slots=True)
class ModelRateLimiter:
    """Resources that an instance needs to execute; priority 2 runs half as often as 1, 0 means 1."""

    resources: tuple[RateLimiterResource, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True)
class SecondaryDevice:
    """A device used beside the GPU."""

    kind: SecondaryDeviceKind = SecondaryDeviceKind.KIND_NVDLA
    device_id: int = 0


@dataclass(frozen=True, slots=True)
class ModelInstanceGroup:
    """`count` instances on every device of `gpus`, or in all for kinds without devices."""

    name: str = ""
    kind: InstanceGroupKind = InstanceGroupKind.KIND_AUTO
    count: int = 0
    rate_limiter: ModelRateLimiter | None = None
    gpus: tuple[int, ...] = ()
    secondary_devices: tuple[SecondaryDevice, ...] = ()
    profile: tuple[str, ...] = ()
    passive: bool = False
    host_policy: str = ""


@dataclass(frozen=True, slots=True)
class ModelTensorReshape:
    """The shape that the model sees, without the batch dimension; empty is a scalar per row."""

    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelInput:
    """An input tensor; `dims` is without the batch dimension, -1 is any size."""

    name: str = ""
    data_type: Datatype | None = None
    format: InputFormat = InputFormat.FORMAT_NONE
    dims: tuple[int, ...] = ()
    reshape: ModelTensorReshape | None = None
    is_shape_tensor: bool = False
    allow_ragged_batch: bool = False
    optional: bool = False
    is_non_linear_format_io: bool = False


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """An output tensor; `label_filename` is relative to the model directory."""

    name: str = ""
    data_type: Datatype | None = None
    dims: tuple[int, ...] = ()
    reshape: ModelTensorReshape | None = None
    label_filename: str = ""
    is_shape_tensor: bool = False
    is_non_linear_format_io: bool = False


@dataclass(frozen=True, slots=True)
class BatchInput:
    """Input tensors that the server makes from the shapes of `source_input` in a batch."""

    kind: BatchInputKind = BatchInputKind.BATCH_ELEMENT_COUNT
    target_name: tuple[str, ...] = ()
    data_type: Datatype | None = None
    source_input: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """Output tensors that are split by the shapes of `source_input`."""

    target_name: tuple[str, ...] = ()
    kind: BatchOutputKind = BatchOutputKind.BATCH_SCATTER_WITH_INPUT_SHAPE
    source_input: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VersionPolicyLatest:
    """Serve the `num_versions` highest versions."""

    num_versions: int = 0


@dataclass(frozen=True, slots=True)
class VersionPolicyAll:
    """Serve every version."""


@dataclass(frozen=True, slots=True)
class VersionPolicySpecific:
    """Serve the named versions."""

    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelVersionPolicy:
    """Which versions on disk are served; one of the three is set, none means the latest one."""

    latest: VersionPolicyLatest | None = None
    all: VersionPolicyAll | None = None
    specific: VersionPolicySpecific | None = None


@dataclass(frozen=True, slots=True)
class OptimizationGraph:
    """Graph optimization level; what it means is the backend's."""

    level: int = 0


@dataclass(frozen=True, slots=True)
class CudaGraphShape:
    """Dimensions of one input of a captured CUDA graph."""

    dim: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CudaGraphLowerBound:
    """The smallest batch and shapes that a captured CUDA graph may serve."""

    batch_size: int = 0
    input: Mapping[str, CudaGraphShape] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CudaGraphSpec:
    """Batch size and input shapes of one CUDA graph to capture."""

    batch_size: int = 0
    input: Mapping[str, CudaGraphShape] = field(default_factory=dict)
    graph_lower_bound: CudaGraphLowerBound | None = None


@dataclass(frozen=True, slots=True)
class OptimizationCuda:
    """CUDA options of a backend that has them."""

    graphs: bool = False
    busy_wait_events: bool = False
    graph_spec: tuple[CudaGraphSpec, ...] = ()
    output_copy_stream: bool = False


@dataclass(frozen=True, slots=True)
class Accelerator:
    """An execution accelerator (`tensorrt`, `openvino`, …) and its parameters."""

    name: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExecutionAccelerators:
    """Accelerators by device kind, the preferred one first."""

    gpu_execution_accelerator: tuple[Accelerator, ...] = ()
    cpu_execution_accelerator: tuple[Accelerator, ...] = ()


@dataclass(frozen=True, slots=True)
class PinnedMemoryBuffer:
    """Whether copies between host and device go through pinned memory."""

    enable: bool = False


@dataclass(frozen=True, slots=True)
class ModelOptimizationPolicy:
    """Hints to the backend."""

    graph: OptimizationGraph | None = None
    priority: OptimizationPriority = OptimizationPriority.PRIORITY_DEFAULT
    cuda: OptimizationCuda | None = None
    execution_accelerators: ExecutionAccelerators | None = None
    input_pinned_memory: PinnedMemoryBuffer | None = None
    output_pinned_memory: PinnedMemoryBuffer | None = None
    gather_kernel_buffer_threshold: int = 0
    eager_batching: bool = False


@dataclass(frozen=True, slots=True)
class ModelQueuePolicy:
    """Limits of one queue; a timeout of 0 is none, a size of 0 unlimited."""

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_microseconds: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


@dataclass(frozen=True, slots=True)
class ModelDynamicBatching:
    """The dynamic batcher; priority level 1 is the most urgent, `priority_levels` 0 means no levels."""

    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: ModelQueuePolicy | None = None
    priority_queue_policy: Mapping[int, ModelQueuePolicy] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SequenceControl:
    """One signal: exactly one false/true pair, or the data_type of the correlation id."""

    kind: SequenceControlKind = SequenceControlKind.CONTROL_SEQUENCE_START
    int32_false_true: tuple[int, ...] = ()
    fp32_false_true: tuple[float, ...] = ()
    bool_false_true: tuple[bool, ...] = ()
    data_type: Datatype | None = None


@dataclass(frozen=True, slots=True)
class SequenceControlInput:
    """An input of the model that carries signals; clients do not see it."""

    name: str = ""
    control: tuple[SequenceControl, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceInitialState:
    """First value of a state: `zero_data`, or `data_file` under initial_state/."""

    data_type: Datatype | None = None
    dims: tuple[int, ...] = ()
    zero_data: bool | None = None
    data_file: str | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class SequenceState:
    """A tensor carried from `output_name` of one request to `input_name` of the next."""

    input_name: str = ""
    output_name: str = ""
    data_type: Datatype | None = None
    dims: tuple[int, ...] = ()
    initial_state: tuple[SequenceInitialState, ...] = ()
    use_same_buffer_for_input_output: bool = False
    use_growable_memory: bool = False


@dataclass(frozen=True, slots=True)
class SequenceStrategyDirect:
    """A sequence keeps one slot of one instance for its life."""

    max_queue_delay_microseconds: int = 0
    minimum_slot_utilization: float = 0.0


@dataclass(frozen=True, slots=True)
class SequenceStrategyOldest:
    """A sequence keeps its instance; the oldest requests are batched."""

    max_candidate_sequences: int = 0
    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False


@dataclass(frozen=True, slots=True)
class ModelSequenceBatching:
    """The sequence batcher; without a strategy it is `direct`."""

    direct: SequenceStrategyDirect | None = None
    oldest: SequenceStrategyOldest | None = None
    max_sequence_idle_microseconds: int = 0
    control_input: tuple[SequenceControlInput, ...] = ()
    state: tuple[SequenceState, ...] = ()
    iterative_sequence: bool = False


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """One model of an ensemble; the maps go from the model's tensors to the ensemble's.

    Version 0 or -1 is the latest.
    """

    model_name: str = ""
    model_version: int = 0
    input_map: Mapping[str, str] = field(default_factory=dict)
    output_map: Mapping[str, str] = field(default_factory=dict)
    model_namespace: str = ""


@dataclass(frozen=True, slots=True)
class ModelEnsembling:
    """The steps of an ensemble; `max_inflight_requests` bounds each step, 0 is unlimited."""

    step: tuple[EnsembleStep, ...] = ()
    max_inflight_requests: int = 0


@dataclass(frozen=True, slots=True)
class WarmupInput:
    """Content of one warmup input: zeros, random values, or `input_data_file` under warmup/."""

    data_type: Datatype | None = None
    dims: tuple[int, ...] = ()
    zero_data: bool | None = None
    random_data: bool | None = None
    input_data_file: str | None = None


@dataclass(frozen=True, slots=True)
class ModelWarmup:
    """A request executed `count` times (0 means 1) on every instance before the version is ready."""

    name: str = ""
    batch_size: int = 0
    inputs: Mapping[str, WarmupInput] = field(default_factory=dict)
    count: int = 0


@dataclass(frozen=True, slots=True)
class ModelOperations:
    """Libraries of custom operations to load before the model."""

    op_library_filename: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelTransactionPolicy:
    """Whether a request may have zero or more than one response."""

    decoupled: bool = False


@dataclass(frozen=True, slots=True)
class RepositoryAgent:
    """An agent called on load and unload, and its parameters."""

    name: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelRepositoryAgents:
    """Agents in the order of their calls."""

    agents: tuple[RepositoryAgent, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelResponseCache:
    """Whether responses of this model are cached."""

    enable: bool = False


@dataclass(frozen=True, slots=True)
class MetricIdentifier:
    """Which metric a control is about."""

    family: str = ""


@dataclass(frozen=True, slots=True)
class HistogramOptions:
    """Upper bounds of the buckets of a histogram, ascending."""

    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class MetricControl:
    """Options of one metric of this model."""

    metric_identifier: MetricIdentifier | None = None
    histogram_options: HistogramOptions | None = None


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """Options of this model's metrics."""

    metric_control: tuple[MetricControl, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The contents of a config.pbtxt; `parameters` is flattened to strings.

    With `max_batch_size` > 0 every tensor has a batch dimension in front of its `dims`; with 0 none has.
    """

    name: str = ""
    platform: str = ""
    backend: str = ""
    runtime: str = ""
    version_policy: ModelVersionPolicy | None = None
    max_batch_size: int = 0
    input: tuple[ModelInput, ...] = ()
    output: tuple[ModelOutput, ...] = ()
    batch_input: tuple[BatchInput, ...] = ()
    batch_output: tuple[BatchOutput, ...] = ()
    optimization: ModelOptimizationPolicy | None = None
    dynamic_batching: ModelDynamicBatching | None = None
    sequence_batching: ModelSequenceBatching | None = None
    ensemble_scheduling: ModelEnsembling | None = None
    instance_group: tuple[ModelInstanceGroup, ...] = ()
    default_model_filename: str = ""
    cc_model_filenames: Mapping[str, str] = field(default_factory=dict)
    metric_tags: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    model_warmup: tuple[ModelWarmup, ...] = ()
    model_operations: ModelOperations | None = None
    model_transaction_policy: ModelTransactionPolicy | None = None
    model_repository_agents: ModelRepositoryAgents | None = None
    response_cache: ModelResponseCache | None = None
    model_metrics: ModelMetrics | None = None

    @property
    def is_decoupled(self) -> bool:
        """Whether a request may have zero or more than one response."""
        return self.model_transaction_policy is not None and self.model_transaction_policy.decoupled

    @property
    def is_ensemble(self) -> bool:
        """Whether this is an ensemble: it has steps instead of a backend."""
        return self.ensemble_scheduling is not None or self.platform == "ensemble"
