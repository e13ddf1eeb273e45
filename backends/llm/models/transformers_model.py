"""Any causal language model of `transformers` whose attention can be exchanged, on our blocks.

Slower than our own decoder, but there is nothing to write for a new family. transformers is imported when this is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from modelserver.backend import UnsupportedError

from .attention_trial import NUM_TRIED, AttentionCall, TrialAttention, check_equal
from .pretrained import load_pretrained

_ATTENTION = "modelserver_paged"
# What an attention function may be given that does not change its result here, or that `AttentionCall` keeps.
_HARMLESS = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "return_dict"}
)
# What code raises that is called in a way which it was not written for.
_UNEXPECTED = (AttributeError, TypeError, LookupError, ValueError, RuntimeError, AssertionError)


class TransformersNetwork:
    """Calls `model`, a `...ForCausalLM`, whose attention functions find this object through their modules."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._inner = _inner_of(model)
        self._inner_forward = self._inner.forward
        self._inner.forward = self._forward_inner
        self._attention: Any = None
        self._inputs: Any = None
        self._hidden: torch.Tensor | None = None
        self._output_type: Any = None
        for module in model.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.paged_network = self

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: Any, inputs: Any) -> torch.Tensor:
        """`input_ids` and `positions` [tokens] -> [tokens, hidden_size], normalised."""
        self._attention, self._inputs = attention, inputs
        output = self._inner(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        self._output_type = type(output)
        return output.last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocab_size]; whatever the model does to them after its head, it does."""
        self._hidden = hidden[None]
        try:
            ids = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
            return self._model(input_ids=ids, use_cache=False).logits[0].float()
        finally:
            self._hidden = None

    def attend(self, layer: int, queries: torch.Tensor, kv: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        inputs = call if isinstance(self._attention, TrialAttention) else self._inputs
        return self._attention(layer, queries, kv, inputs)

    def try_out(self) -> list[AttentionCall]:
        """How each layer attends. UnsupportedError, if that says anything else than the model's own attention."""
        model, trial = self._model, TrialAttention()
        ids = torch.arange(NUM_TRIED, device=model.device)
        found = self.logits(self(ids, ids, trial, None))
        model.set_attn_implementation("eager")
        expected = model(input_ids=ids[None], position_ids=ids[None], use_cache=False).logits[0].float()
        model.set_attn_implementation(_ATTENTION)
        check_equal(found, expected, is_exact=model.dtype == torch.float32)
        return [trial.calls[layer] for layer in sorted(trial.calls)]

    def _forward_inner(self, *args: Any, **kwargs: Any) -> Any:
        """The model without its head; while logits are made, its result is there already."""
        if self._hidden is None:
            return self._inner_forward(*args, **kwargs)
        return self._output_type(last_hidden_state=self._hidden)


def _inner_of(model: Any) -> Any:
    """What a `...ForCausalLM` calls before its head: not always its base_model, but a decoder within that."""
    from transformers import PreTrainedModel

    for inner in (model.get_decoder(), model.base_model):
        if isinstance(inner, PreTrainedModel) and inner is not model:
            return inner
    raise UnsupportedError(f"{type(model).__name__} has no part that gives what its head takes")


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - causality is ours
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001 - none at inference
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: [1, heads, tokens, head_dim] each -> [1, tokens, heads, head_dim]."""
    if getattr(module, "is_causal", None) is False:
        raise UnsupportedError(
            f"{type(module).__name__} looks at tokens that come later, as encoders do: this backend runs causal models"
        )
    if changing := [name for name, given in others.items() if given is not None and name not in _HARMLESS]:
        raise UnsupportedError(
            f"{type(module).__name__} attends in a way that blocks do not support: {', '.join(changing)}"
        )
    _, num_heads, _, key_dim = query.shape
    value_dim = value.shape[-1]
    head_dim = max(key_dim, value_dim)
    scale = key_dim**-0.5 if scaling is None else scaling
    call = AttentionCall(num_heads, key.shape[1], head_dim, scale, softcap, sliding_window, s_aux)
    queries = _widened(query, head_dim)[0].transpose(0, 1)
    kv = torch.stack((_widened(key, head_dim)[0], _widened(value, head_dim)[0])).permute(2, 0, 1, 3)
    output = module.paged_network.attend(module.layer_idx, queries, kv, call)
    return output.view(1, -1, num_heads, head_dim)[..., :value_dim], None


def _widened(heads: torch.Tensor, head_dim: int) -> torch.Tensor:
    """With zeros up to `head_dim`: a block's keys and values are of one size, those of latent attention are not."""
    return F.pad(heads, (0, head_dim - heads.shape[-1])) if heads.shape[-1] < head_dim else heads


@dataclass(frozen=True, slots=True)
class TransformersLoaded:
    """What `load` found; `num_kv_heads` and `head_dim` are those of every layer."""

    network: TransformersNetwork
    calls: tuple[AttentionCall, ...]
    vocab_size: int


def load_transformers(
    directory: Path, config: Mapping[str, Any], *, dtype: torch.dtype, device: torch.device
) -> TransformersLoaded:
    """UnsupportedError, if transformers is not installed or does not know the model, or its layers are not alike;
    InvalidArgumentError, if files are damaged or weights are missing. Code that comes with a checkpoint is not run.
    """
    model_type = config["model_type"]
    try:
        from transformers import AutoModelForCausalLM
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError:
        raise UnsupportedError(
            f"config.json says {model_type}, which this server has no network for; with transformers installed "
            "(pip install transformers) it runs most others"
        ) from None
    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _attend)
    try:
        model = load_pretrained(
            AutoModelForCausalLM,
            directory,
            model_type,
            dtype=dtype,
            attn_implementation=_ATTENTION,
            **_unpacking(config),
        )
    except KeyError as error:
        raise UnsupportedError(
            f"the attention of a {model_type} cannot be exchanged, so that it does not run on blocks: KeyError: {error}"
        ) from None
    network, calls = _tried_out(model_type, model.eval().to(device))
    _check_alike(model_type, calls, int(model.config.get_text_config().num_hidden_layers))
    return TransformersLoaded(network, tuple(calls), int(model.config.get_text_config().vocab_size))


def _unpacking(config: Mapping[str, Any]) -> dict[str, Any]:
    """Experts in MXFP4 (gpt-oss) become what the other weights are: transformers' kernels for them want packages of
    their own, and it would ask for these.
    """
    if (config.get("quantization_config") or {}).get("quant_method") != "mxfp4":
        return {}
    from transformers.utils.quantization_config import Mxfp4Config

    return {"quantization_config": Mxfp4Config(dequantize=True)}


def _tried_out(model_type: str, model: Any) -> tuple[TransformersNetwork, list[AttentionCall]]:
    """Whatever transformers' code for one of its hundreds of models does not expect of our attention shows here."""
    try:
        network = TransformersNetwork(model)
        with torch.inference_mode():
            return network, network.try_out()
    except _UNEXPECTED as error:
        raise UnsupportedError(
            f"the {model_type} of transformers does not run on blocks: {type(error).__name__}: {error}"
        ) from error


def _check_alike(model_type: str, calls: list[AttentionCall], num_layers: int) -> None:
    if len(calls) != num_layers:
        raise UnsupportedError(
            f"{len(calls)} of the {num_layers} layers of this {model_type} have attention that can be exchanged"
        )
    shared = {(call.num_heads, call.num_kv_heads, call.head_dim, call.scale, call.softcap) for call in calls}
    if len(shared) > 1:
        raise UnsupportedError(f"the layers of this {model_type} attend differently: {sorted(shared, key=str)}")
