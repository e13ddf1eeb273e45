"""The layer for multi-token prediction of a network of transformers: Qwen3-Next and Qwen3.5.

transformers leaves these tensors (`mtp.*`) unread. The layer is one of the network's own kind with full attention.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from modelserver.backend import InvalidArgumentError, UnsupportedError

from ..attention.kv_blocks import KvLayout
from ..attention.own_memory import TextMemory
from ..checkpoint import Checkpoint
from ..step_context import StepContext
from .attention_trial import NUM_TRIED, AttentionCall
from .draft_head import DraftHead
from .packed_modules import pack_linears

if TYPE_CHECKING:
    from .transformers_model import TransformersNetwork

_PREFIX = "mtp."
_LAYER = "layers.0."
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


class PredictionModule(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """A `HeadLayer` of modules of transformers, which are named as in checkpoints of Qwen3-Next."""

    def __init__(self, model: Any, inner: Any) -> None:
        super().__init__()
        config = model.config.get_text_config()
        index = next(index for index, layer in enumerate(inner.layers) if hasattr(layer, "self_attn"))
        width, norm = config.hidden_size, type(inner.norm)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            norm(width, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.fc = torch.nn.Linear(2 * width, width, bias=False)
        self.layers = torch.nn.ModuleList([type(inner.layers[index])(config, index)])
        for module in self.modules():
            if hasattr(module, "layer_idx"):
                object.__setattr__(module, "paged_network", self)
        self._rotary = [inner.rotary_emb]  # in a list, so that it is no module of this one
        self._step: StepContext | None = None
        self.call: AttentionCall | None = None

    def forward(self, embedded: torch.Tensor, states: torch.Tensor, step: StepContext) -> torch.Tensor:
        self._step = step
        pair = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states))
        rows, positions = self.fc(torch.cat(pair, dim=-1))[None], step.positions[None]
        turned = self._rotary[0](rows, positions)
        made = self.layers[0](rows, position_embeddings=turned, position_ids=positions)
        return (made[0] if isinstance(made, tuple) else made)[0]

    def attend(self, layer: int, queries: torch.Tensor, kv: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """Called by `attention_hook`. Queries and keys are rotated."""
        step, self.call = self._step, call
        assert step is not None, "attention is called by the layer"
        heads = torch.cat((queries, kv[:, 0], kv[:, 1]), dim=1)
        return step.attention.rope_and_attend(layer, heads, None, step.inputs)


def load_prediction(checkpoint: Checkpoint, network: TransformersNetwork, *, max_len: int) -> DraftHead:
    """UnsupportedError if the checkpoint has no such layer, InvalidArgumentError if its tensors do not fit."""
    model, inner = network.modules
    names = [name for name in checkpoint.names() if name.startswith(_PREFIX)]
    if f"{_PREFIX}fc.weight" not in names or not hasattr(inner, "rotary_emb"):
        raise UnsupportedError(
            f"speculative_config.method mtp: the checkpoint in {checkpoint.place} has no layer for multi-token "
            f"prediction ({_PREFIX}fc) that is computed on transformers' network: remove speculative_config, or name "
            "another method"
        )
    embedding = model.get_input_embeddings()
    with torch.device("meta"):
        module = PredictionModule(model, inner)
    dtype, device = embedding.weight.dtype, network.device
    tensors = {name.removeprefix(_PREFIX): checkpoint.tensor(name).to(device, dtype) for name in names}
    known = module.state_dict()
    tensors = {name: tensor for name, tensor in _joined_experts(tensors).items() if name in known}
    try:
        module.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise InvalidArgumentError(
            f"the layer for multi-token prediction in {checkpoint.place} does not fit its network: {error}"
        ) from None
    config = model.config.get_text_config()
    attention = module.layers[0].self_attn
    num_kv_heads = config.num_key_value_heads
    group = KvLayout.uniform(num_layers=1, num_kv_heads=num_kv_heads, head_dim=attention.head_dim, dtype=dtype).group
    head = DraftHead(
        module.eval(),
        group,
        scale=attention.scaling,
        rope=None,
        layers=(config.num_hidden_layers,),
        embed=embedding,
        norm=module.norm,
        logits=network.logits,
        max_len=max_len,
        device=device,
    )
    ids = list(range(NUM_TRIED))
    states = torch.randn(NUM_TRIED, config.hidden_size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    pack_linears(module, lambda: head(ids, states, [(TextMemory(0), NUM_TRIED)]))
    return head


def _joined_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of each expert as the one tensor of all that transformers has."""
    found = {name: tensor for name, tensor in tensors.items() if not _EXPERT.search(name)}
    experts: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if (match := _EXPERT.search(name)) is not None:
            experts.setdefault(int(match[1]), {})[match[2]] = tensor
    if experts:
        ordered = [experts[number] for number in sorted(experts)]
        place = f"{_LAYER}mlp.experts."
        try:
            found[f"{place}gate_up_proj"] = torch.stack([torch.cat((each["gate"], each["up"])) for each in ordered])
            found[f"{place}down_proj"] = torch.stack([each["down"] for each in ordered])
        except (KeyError, RuntimeError):
            pass  # the layer names what is missing
    return found
