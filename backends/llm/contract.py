"""The tensors of a language model: the contract of Triton's vLLM backend, and more outputs and inputs in its manner.

Frontends for other APIs speak to a model by these names only. docs/llm.md has the table.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import replace

import orjson

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
# The answer that a client expects; the outputs say how much of it was right.
PREDICTION = "prediction"
PREDICTED = ("num_accepted_prediction_tokens", "num_rejected_prediction_tokens")
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
    PREDICTION: (Datatype.BYTES, 1),
    "dimensions": (Datatype.INT32, 1),
    "truncate_prompt_tokens": (Datatype.INT32, 1),
    IMAGE: (Datatype.BYTES, -1),
    "text_pair": (Datatype.BYTES, 1),
    "truncate_pair_tokens": (Datatype.INT32, 1),
    "raw_scores": (Datatype.BOOL, 1),
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
    **dict.fromkeys(PREDICTED, Datatype.UINT32),
    "token_ids": Datatype.INT32,
    "choice_token_ids": Datatype.BYTES,
    "index": Datatype.INT32,
    "token_strs": Datatype.BYTES,
    "token_bytes": Datatype.BYTES,
    "max_model_len": Datatype.UINT32,
    "embedding": Datatype.FP32,
    "token_embeddings": Datatype.FP32,
    "scores": Datatype.FP32,
    "token_scores": Datatype.FP32,
    "label": Datatype.BYTES,
}
# Outputs with a row for each token.
_OF_TOKENS = frozenset({"token_embeddings", "token_scores"})
# Of models that answer once: those of all, then those of each purpose.
_TEXT_INPUTS = (
    "text_input",
    "input_ids",
    "operation",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "return_num_input_tokens",
)
_TEXT_OUTPUTS = ("num_input_tokens", "token_ids", "token_strs", "token_bytes", "max_model_len")
# The parameter of a classifier's config that lists its labels, as a JSON array.
LABELS = "labels"


class Purpose(enum.Enum):
    """What a checkpoint was trained for."""

    GENERATE = enum.auto()
    EMBED = enum.auto()
    CLASSIFY = enum.auto()
    CLASSIFY_TOKENS = enum.auto()

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs of a model of this purpose."""
        match self:
            case Purpose.GENERATE:
                return tuple(
                    name for name in _INPUTS if name not in ("text_pair", "truncate_pair_tokens", "raw_scores")
                )
            case Purpose.EMBED:
                return (*_TEXT_INPUTS, "dimensions")
            case Purpose.CLASSIFY:
                return (*_TEXT_INPUTS, "text_pair", "truncate_pair_tokens", "raw_scores")
            case Purpose.CLASSIFY_TOKENS:
                return (*_TEXT_INPUTS, "raw_scores")

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs of a model of this purpose."""
        match self:
            case Purpose.GENERATE:
                others = ("scores", "label", *_OF_TOKENS)
                return tuple(name for name in OUTPUTS if name not in others)
            case Purpose.EMBED:
                return ("embedding", *_TEXT_OUTPUTS, "token_embeddings")
            case Purpose.CLASSIFY:
                return ("scores", "label", *_TEXT_OUTPUTS)
            case Purpose.CLASSIFY_TOKENS:
                return ("token_scores", "label", *_TEXT_OUTPUTS)


# Outputs that come with another one, and so need no input of their own.
COMPANIONS: Mapping[str, str] = {"token_ids": "choice_token_ids"}


class Operation(enum.Enum):
    """The operation that a request asks for; the values are those of the input `operation`."""

    GENERATE = "generate"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"
    EMBED = "embed"
    TOKEN_EMBED = "token_embed"  # noqa: S105  # not a password
    CLASSIFY = "classify"
    LOAD_ADAPTER = "load_adapter"
    SLOTS = "slots"


def complete_config(
    config: ModelConfig,
    *,
    max_model_len: int | None = None,
    purpose: Purpose = Purpose.GENERATE,
    labels: Sequence[str] = (),
    sees_pictures: bool = False,
) -> ModelConfig:
    """The config with the contract's tensors and one instance that finds its own device; decoupled if the model
    generates, for all others answer once.

    A config may list fewer tensors, and then has these only; with `backend: "vllm"` those that it leaves out are added,
    and batching and transaction policy are set, as Triton's vLLM backend does. `max_model_len`, if known, and the
    `labels` of a classifier become parameters, which frontends read. Raises ConfigError where the config asks for
    batches, or for tensors that the contract does not have.
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
    generates = purpose is Purpose.GENERATE
    if policy is not None and policy.decoupled is not generates:
        raise ConfigError(
            f"{what}: model_transaction_policy: expected decoupled: "
            + ("true, which streams need" if generates else "false, for an encoder answers once")
        )
    known_inputs = {name: _INPUTS[name] for name in purpose.inputs if name != IMAGE or sees_pictures}
    known_outputs = {name: OUTPUTS[name] for name in purpose.outputs}
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
            ModelOutput(name, datatype, dims=(-1, -1) if name in _OF_TOKENS else (-1,))
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
    if labels:
        parameters.setdefault(LABELS, orjson.dumps(list(labels)).decode())
    return replace(
        config,
        input=inputs,
        output=outputs,
        parameters=parameters,
        model_transaction_policy=ModelTransactionPolicy(decoupled=generates),
        instance_group=config.instance_group or (ModelInstanceGroup(kind=InstanceGroupKind.KIND_MODEL, count=1),),
    )


def _check_datatype(what: str, kind: str, spec: ModelInput | ModelOutput, datatypes: Mapping[str, Datatype]) -> None:
    expected = datatypes.get(spec.name)
    if expected is None:
        raise ConfigError(f"{what}: {kind} '{spec.name}': this model has {', '.join(datatypes)}")
    if spec.data_type is not expected:
        got = "nothing" if spec.data_type is None else spec.data_type.config_name
        raise ConfigError(f"{what}: {kind} '{spec.name}': expected data_type {expected.config_name}, got {got}")
