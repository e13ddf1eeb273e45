"""Tiny random layers for multi-token prediction and EAGLE heads, and what they guess by transformers' own modules."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.tiny_checkpoints import reference_model, write_checkpoint

# transformers' names of the modules, in which checkpoints of DeepSeek have them, and MiMo's.
_USUAL = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}
_MIMO = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "post_norm": "final_layernorm",
}
# Those of hybrids of Qwen, of a layer that is the network's second one.
_HYBRID = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
NUM_LAYERS = 2


def write_predicting(place: Path, family: str, values: dict[str, Any] | None = None) -> Path:
    """A checkpoint of a family of `support.tiny_checkpoints`, or MiMo's, whose last layer is for prediction."""
    is_mimo = family == "mimo"
    write_checkpoint(place, "qwen2" if is_mimo else family, values={**(values or {}), "num_hidden_layers": 3})
    names, prefix = (_MIMO, "model.mtp_layers.0.") if is_mimo else (_USUAL, f"model.layers.{NUM_LAYERS}.")
    path = place / "model.safetensors"
    tensors = {name.replace(f"model.layers.{NUM_LAYERS}.", prefix): each for name, each in load_file(path).items()}
    entries = json.loads((place / "config.json").read_text())
    size, draw = entries["hidden_size"], torch.Generator().manual_seed(4)
    for name in ("enorm", "hnorm", "post_norm"):
        tensors[f"{prefix}{names[name]}.weight"] = 1 + 0.2 * torch.randn(size, generator=draw)
    tensors[f"{prefix}{names['eh_proj']}.weight"] = torch.randn(size, 2 * size, generator=draw) * size**-0.5
    save_file(tensors, path, metadata={"format": "pt"})
    entries |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
    if is_mimo:
        entries["model_type"] = "mimo"
    if "layer_types" in entries:
        entries["layer_types"] = entries["layer_types"][:NUM_LAYERS]
    if "mlp_layer_types" in entries:
        entries["mlp_layer_types"] = entries["mlp_layer_types"][:NUM_LAYERS]
    (place / "config.json").write_text(json.dumps(entries))
    return place


def write_hybrid(place: Path, family: str) -> Path:
    """A checkpoint of Qwen3-Next or Qwen3.5 with a layer for prediction."""
    write_checkpoint(place, family)
    path, draw = place / "model.safetensors", torch.Generator().manual_seed(4)
    tensors = load_file(path)
    size = tensors["model.norm.weight"].shape[0]
    second = {name.partition(".layers.1.")[2]: tensor for name, tensor in tensors.items() if ".layers.1." in name}
    tensors |= {f"mtp.layers.0.{stem}": tensor.clone() for stem, tensor in second.items()}
    for name in ("enorm", "hnorm", "post_norm"):
        tensors[f"mtp.{_HYBRID[name]}.weight"] = 0.2 * torch.randn(size, generator=draw)
    tensors[f"mtp.{_HYBRID['eh_proj']}.weight"] = torch.randn(size, 2 * size, generator=draw) * size**-0.5
    save_file(tensors, path, metadata={"format": "pt"})
    return place


def _hybrid_layer(model: Any, place: Path) -> Any:
    from transformers.modeling_layers import MtpModel

    found, tensors = MtpModel(model, 1).eval(), load_file(place / "model.safetensors")
    (layer,) = found.layers
    for ours, theirs in _HYBRID.items():
        if ours != "eh_proj":  # transformers takes the norm of the recurrence for them
            setattr(layer, ours, copy.deepcopy(model.model.norm))
        getattr(layer, ours).weight.data = tensors[f"mtp.{theirs}.weight"]
    layer.mtp_block.load_state_dict(model.model.layers[1].state_dict())
    return found


def _as_qwen(place: Path, twin: Path) -> Path:
    """MiMo's checkpoint with the names that transformers reads."""
    twin.mkdir()
    tensors = {}
    for name, tensor in load_file(place / "model.safetensors").items():
        stem = name.removeprefix("model.mtp_layers.0.")
        known = next((ours for ours, theirs in _MIMO.items() if stem == f"{theirs}.weight"), None)
        if stem != name:
            stem = stem if known is None else f"{_USUAL[known]}.weight"
            name = f"model.layers.{NUM_LAYERS}.{stem}"
        tensors[name] = tensor
    save_file(tensors, twin / "model.safetensors", metadata={"format": "pt"})
    entries = json.loads((place / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps({**entries, "model_type": "qwen2"}))
    return twin


def write_eagle1(base: Path, place: Path) -> Path:
    """An EAGLE head for the model in `base`, of Llama's kind."""
    entries = json.loads((base / "config.json").read_text())
    size, draw = entries["hidden_size"], torch.Generator().manual_seed(6)
    tensors = {"fc.weight": torch.randn(size, 2 * size, generator=draw) * size**-0.5}
    for name, like in load_file(base / "model.safetensors").items():
        if name.startswith("model.layers.0.") and "input_layernorm" not in name:
            drawn = torch.randn(like.shape, generator=draw)
            stem = name.removeprefix("model.")
            tensors[stem] = 1 + 0.2 * drawn if like.dim() == 1 else drawn * like.shape[-1] ** -0.5
    place.mkdir()
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    described = {**entries, "architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}
    (place / "config.json").write_text(json.dumps(described))
    return place


def _eagle_model(model: Any, head: Path) -> Any:
    """As a layer for prediction without the norms."""
    from transformers.modeling_layers import MtpModel

    found = MtpModel(model, 1).eval()
    tensors = load_file(head / "model.safetensors")
    (layer,) = found.layers
    layer.enorm = layer.hnorm = layer.post_norm = layer.mtp_block.input_layernorm = torch.nn.Identity()
    layer.eh_proj.weight.data = tensors.pop("fc.weight")
    block = {name.removeprefix("layers.0."): tensor for name, tensor in tensors.items()}
    layer.mtp_block.load_state_dict(block)
    return found


class LayerReference:
    """What the layer guesses, by transformers' modules, without a cache; or the EAGLE head in `head`."""

    def __init__(self, place: Path, scratch: Path, *, head: Path | None = None) -> None:
        from transformers.modeling_layers import MtpModel

        self._is_mimo = json.loads((place / "config.json").read_text())["model_type"] == "mimo"
        model = reference_model(_as_qwen(place, scratch / "qwen") if self._is_mimo else place)
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{NUM_LAYERS}\."]
        config = model.config
        config.num_mtp_layers = 1
        config.mtp_hidden_states_first = self._is_mimo
        if getattr(config, "layer_types", None) is not None:
            config.mtp_layer_types = ["full_attention"]
        if getattr(config, "mlp_layer_types", None) is not None:
            config.mtp_mlp_layer_types = ["sparse"]
        if hasattr(config, "first_k_dense_replace"):
            config.first_k_dense_replace = 0  # read when the layer is made: its number begins at 0 again
        self._model = model
        if head is not None:
            self._layer = _eagle_model(model, head)
        elif "linear_attention" in (getattr(config, "layer_types", None) or ()):
            self._layer = _hybrid_layer(model, place)
        else:
            self._layer = MtpModel.from_pretrained(model).eval()

    def guesses(self, token_ids: Sequence[int], count: int) -> list[int]:
        with torch.no_grad():
            before_norm: list[torch.Tensor] = []
            with self._model.model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0])):
                normed = self._model.model(torch.tensor([list(token_ids[:-1])])).last_hidden_state
            states = before_norm[0] if self._is_mimo else normed
            tokens, guessed = list(token_ids[1:]), []
            for _ in range(count):
                places = torch.arange(len(tokens))[None]
                made = self._layer.forward_layer(0, states, places, None, input_ids=torch.tensor([tokens]))
                guessed.append(int(self._layer.shared_head(made[0, -1]).argmax()))
                tokens.append(guessed[-1])
                states = torch.cat((states, made[:, -1:]), dim=1)
        return guessed
