"""Tensors that the server makes or keeps itself: the model has them, its clients never see them.

Inputs: the controls and states of a sequence, and values computed from a batch. Outputs: states.
"""

from __future__ import annotations

from modelserver.config.schema import (
    BatchInputKind,
    ModelConfig,
    ModelInput,
    ModelOutput,
    SequenceControl,
    SequenceControlInput,
)
from modelserver.core.datatype import Datatype


def model_inputs(config: ModelConfig) -> tuple[ModelInput, ...]:
    """All inputs of the model itself: those of the config, and the hidden ones."""
    return (*config.input, *hidden_inputs(config))


def model_outputs(config: ModelConfig) -> tuple[ModelOutput, ...]:
    """All outputs of the model itself: those of the config, and states that clients do not see."""
    return (*config.output, *hidden_outputs(config))


def hidden_inputs(config: ModelConfig) -> tuple[ModelInput, ...]:
    """Inputs of the model that are not part of requests."""
    hidden: list[ModelInput] = []
    if config.sequence_batching is not None:
        hidden += [
            ModelInput(name=tensor.name, data_type=control_datatype(control), dims=(1,))
            for tensor, control in control_tensors(config)
        ]
        for state in config.sequence_batching.state:
            hidden.append(ModelInput(name=state.input_name, data_type=state.data_type, dims=state.dims))
    return (*hidden, *_batch_inputs(config))


def hidden_outputs(config: ModelConfig) -> tuple[ModelOutput, ...]:
    """Outputs of the model that are not part of responses: states that the config does not also list as outputs."""
    if config.sequence_batching is None:
        return ()
    shown = {output.name for output in config.output}
    return tuple(
        ModelOutput(name=state.output_name, data_type=state.data_type, dims=state.dims)
        for state in config.sequence_batching.state
        if state.output_name not in shown
    )


def control_datatype(control: SequenceControl) -> Datatype | None:
    """The datatype of a control's tensor: that of its pair of values, or of the correlation id."""
    if control.int32_false_true:
        return Datatype.INT32
    if control.fp32_false_true:
        return Datatype.FP32
    if control.bool_false_true:
        return Datatype.BOOL
    return control.data_type


def control_tensors(config: ModelConfig) -> tuple[tuple[SequenceControlInput, SequenceControl], ...]:
    """Each control of a sequence model, with the tensor that carries it; of several for one tensor only the last."""
    if config.sequence_batching is None:
        return ()
    return tuple((tensor, tensor.control[-1]) for tensor in config.sequence_batching.control_input if tensor.control)


def _batch_inputs(config: ModelConfig) -> list[ModelInput]:
    """Targets of `batch_input`; targets that describe the batch as a whole have unknown dims."""
    return [
        ModelInput(
            name=name,
            data_type=batch_input.data_type,
            # With the batch dimension in front, as for any input; the other kinds describe the batch as a whole.
            dims=(-1,) if batch_input.kind is BatchInputKind.BATCH_ITEM_SHAPE else (),
        )
        for batch_input in config.batch_input
        for name in batch_input.target_name
    ]
