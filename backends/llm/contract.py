"""The tensors of a language model: the contract of Triton's vLLM backend, and more outputs and inputs in its manner.

Frontends for other APIs speak to a model by these names only. docs/llm.md has the table.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import replace

from modelserver.backend import (
    ConfigError,
    Datatype,
    InstanceGroupKind,
    ModelConfig,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
    ModelTransactionPolicy,
)

# Triton's name for this backend.
VLLM = "vllm"
# Name of an input that asks for an output -> that output.
RETURNS: Mapping[str, str] = {
    "return_finish_reason": "finish_reason",
    "return_stop_reason": "stop_reason",
    "return_cumulative_logprob": "cumulative_logprob",
    "return_logprobs": "logprobs",
    "return_token_logprobs": "token_logprobs",
    "return_prompt_logprobs": "prompt_logprobs",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
    "return_num_cached_tokens": "num_cached_tokens",
    "return_token_ids": "token_ids",
}
# Of models that see pictures: their files, base64 or data: URLs.
IMAGE = "image"
_INPUTS: Mapping[str, tuple[Datatype, int]] = {
    "text_input": (Datatype.BYTES, 1),
    "messages": (Datatype.BYTES, 1),
    "input_ids": (Datatype.INT32, -1),
    "stream": (Datatype.BOOL, 1),
    "sampling_parameters": (Datatype.BYTES, 1),
    "exclude_input_in_output": (Datatype.BOOL, 1),
    **dict.fromkeys(RETURNS, (Datatype.BOOL, 1)),
    "operation": (Datatype.BYTES, 1),
    "add_special_tokens": (Datatype.BOOL, 1),
    "dimensions": (Datatype.INT32, 1),
    "truncate_prompt_tokens": (Datatype.INT32, 1),
    IMAGE: (Datatype.BYTES, -1),
}
OUTPUTS: Mapping[str, Datatype] = {
    "text_output": Datatype.BYTES,
    "finish_reason": Datatype.BYTES,
    "stop_reason": Datatype.BYTES,
    "cumulative_logprob": Datatype.FP32,
    "logprobs": Datatype.BYTES,
    "token_logprobs": Datatype.BYTES,
    "prompt_logprobs": Datatype.BYTES,
    "num_input_tokens": Datatype.UINT32,
    "num_output_tokens": Datatype.UINT32,
    "num_cached_tokens": Datatype.UINT32,
    "token_ids": Datatype.INT32,
    "choice_token_ids": Datatype.BYTES,
    "index": Datatype.INT32,
    "token_strs": Datatype.BYTES,
    "token_bytes": Datatype.BYTES,
    "max_model_len": Datatype.UINT32,
    "embedding": Datatype.FP32,
}
# Those of an encoder.
_ENCODER_INPUTS = (
    "text_input",
    "input_ids",
    "operation",
    "add_special_tokens",
    "dimensions",
    "truncate_prompt_tokens",
    "return_num_input_tokens",
)
_ENCODER_OUTPUTS = ("embedding", "num_input_tokens", "token_ids", "token_strs", "token_bytes", "max_model_len")
# Outputs that come with another one, and so need no input of their own.
COMPANIONS: Mapping[str, str] = {"token_ids": "choice_token_ids"}


class Operation(enum.Enum):
    """The operation that a request asks for; the values are those of the input `operation`."""

    GENERATE = "generate"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"
    EMBED = "embed"


def complete_config(
    config: ModelConfig, *, max_model_len: int | None = None, is_encoder: bool = False, sees_pictures: bool = False
) -> ModelConfig:
    """The config with the contract's tensors and one instance that finds its own device; decoupled, unless it is an
    encoder's, which answers once.

    A config may list fewer tensors, and then has these only; with `backend: "vllm"` those that it leaves out are added,
    and batching and transaction policy are set, as Triton's vLLM backend does. `max_model_len`, if known, becomes a
    parameter, which frontends read. Raises ConfigError where the config asks for batches, or for tensors that the
    contract does not have.
    """
    what = f"model '{config.name}'"
    is_vllm = config.backend == VLLM
    if is_vllm:
        config = replace(config, max_batch_size=0, model_transaction_policy=None)
    if config.max_batch_size:
        raise ConfigError(
            f"{what}: max_batch_size: expected 0, got {config.max_batch_size}: a language model forms its batches step "
            "by step itself; remove the field, and bound what runs at once with the parameter max_num_seqs"
        )
    policy = config.model_transaction_policy
    if policy is not None and policy.decoupled is is_encoder:
        raise ConfigError(
            f"{what}: model_transaction_policy: expected decoupled: "
            + ("false, for an encoder answers once" if is_encoder else "true, which streams need")
        )
    known_inputs = {name: _INPUTS[name] for name in _ENCODER_INPUTS} if is_encoder else dict(_INPUTS)
    if not sees_pictures:
        known_inputs.pop(IMAGE, None)
    known_outputs = {name: OUTPUTS[name] for name in _ENCODER_OUTPUTS} if is_encoder else OUTPUTS
    inputs, outputs = config.input, config.output
    if not inputs or is_vllm:
        listed_names = {listed.name for listed in inputs}
        inputs = (
            *(replace(listed, optional=True) for listed in inputs),
            *(
                ModelInput(name, datatype, dims=(size,), optional=True)
                for name, (datatype, size) in known_inputs.items()
                if name not in listed_names
            ),
        )
    if not outputs or is_vllm:
        listed_names = {offered.name for offered in outputs}
        outputs += tuple(
            ModelOutput(name, datatype, dims=(-1,))
            for name, datatype in known_outputs.items()
            if name not in listed_names
        )
    input_datatypes = {name: datatype for name, (datatype, _) in known_inputs.items()}
    for listed in inputs:
        _check_datatype(what, "input", listed, input_datatypes)
    for offered in outputs:
        _check_datatype(what, "output", offered, known_outputs)
    parameters = dict(config.parameters)
    if max_model_len is not None:
        parameters.setdefault("max_model_len", str(max_model_len))
    return replace(
        config,
        input=inputs,
        output=outputs,
        parameters=parameters,
        model_transaction_policy=ModelTransactionPolicy(decoupled=not is_encoder),
        instance_group=config.instance_group or (ModelInstanceGroup(kind=InstanceGroupKind.KIND_MODEL, count=1),),
    )


def _check_datatype(what: str, kind: str, spec: ModelInput | ModelOutput, datatypes: Mapping[str, Datatype]) -> None:
    expected = datatypes.get(spec.name)
    if expected is None:
        raise ConfigError(f"{what}: {kind} '{spec.name}': this model has {', '.join(datatypes)}")
    if spec.data_type is not expected:
        got = "nothing" if spec.data_type is None else spec.data_type.config_name
        raise ConfigError(f"{what}: {kind} '{spec.name}': expected data_type {expected.config_name}, got {got}")
