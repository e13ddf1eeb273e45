"""A copy of a checkpoint as one GGUF file, in floats or in few bits, and the way back to safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from modelserver.backend import InvalidArgumentError, UnsupportedError

from .checkpoint import Checkpoint, text_config
from .checkpoint.gguf_architecture import ROPE_FREQS, ROPE_LONG, ROPE_SHORT, Architecture
from .checkpoint.gguf_architectures import written_architecture
from .checkpoint.gguf_metadata import frequency_factors, is_tied, long_factors, metadata_of, num_layers
from .checkpoint.gguf_types import BY_NAME, TensorType
from .checkpoint.gguf_writing import WrittenTensor, write_gguf
from .checkpoint.safetensors_files import SafetensorsWriter
from .embedding.layout import read_layout
from .embedding.recognition import is_encoder
from .quantization.gguf_encoding import encode_rows

FILE_NAME = "model.gguf"
_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Of older checkpoints: what a network makes of its config.
_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
# Latent attention: what makes keys, values, and both.
_LATENT_KEYS, _LATENT_VALUES, _LATENT_BOTH = ".k_b_proj.weight", ".v_b_proj.weight", ".kv_b_proj.weight"
# What stands in a file for its usual type, as llama.cpp numbers them.
_FILE_TYPES = {"Q8_0": 7, "Q6_K": 18, "Q4_0": 2, "Q4_K": 15, "F32": 0, "F16": 1, "BF16": 32}
# Of rows that are not whole blocks.
_IN_SMALLER_BLOCKS = {"Q4_K": "Q5_0", "Q6_K": "Q8_0", "Q4_0": "F16", "Q5_0": "F16", "Q8_0": "F16"}


@dataclass(frozen=True, slots=True)
class _Mixture:
    """`finer` is the type of what an answer depends on most: the head, and with `mixes_layers` some matrices too."""

    usual: str
    finer: str
    mixes_layers: bool = False


GGUF_METHODS = {
    "q8_0": _Mixture("Q8_0", "Q8_0"),
    "q6_k": _Mixture("Q6_K", "Q6_K"),
    "q4_0": _Mixture("Q4_0", "Q6_K"),
    "q4_k_m": _Mixture("Q4_K", "Q6_K", mixes_layers=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """A tensor of the file, of those of the checkpoint that are stacked in it.

    `heads`: of a matrix that makes both keys and values of latent attention, the outputs of a head that are this one's.
    """

    written: WrittenTensor
    sources: tuple[str, ...]
    num_heads: int = 0
    offset: float = 0.0
    is_transposed: bool = False
    heads: slice | None = None


@dataclass(frozen=True, slots=True)
class GgufCopy:
    num_bytes: int
    num_rounded: int
    notes: list[str] = field(default_factory=list)


def write_gguf_copy(
    checkpoint: Checkpoint,
    target: Path,
    method: str | None = None,
    importance: Mapping[str, torch.Tensor] | None = None,
    report: Callable[[int, int], None] | None = None,
) -> GgufCopy:
    """The checkpoint as `target`/model.gguf, in one of GGUF_METHODS; None: in the floats that it has.

    `importance` by module of the decoder, as `measured_importance` finds it. One tensor is in memory at a time. After
    each, `report` gets the bytes that are written, and those of all tensors; what it raises ends the copy.
    UnsupportedError for weights that are quantized already, and for what a GGUF file has no words for.
    """
    if method is not None and checkpoint.config.get("quantization_config") is not None:
        raise UnsupportedError(f"the weights in {checkpoint.place} are quantized already")
    name, architecture = written_architecture(text_config(checkpoint)["model_type"])
    mixture = None if method is None else GGUF_METHODS[method]
    planned = _planned(checkpoint, architecture, mixture)
    metadata = metadata_of(checkpoint, name)
    usual = mixture.usual if mixture is not None else planned[0].written.kind.name
    metadata |= {"general.file_type": _FILE_TYPES[usual], "general.quantization_version": 2}
    factors = _factors(text_config(checkpoint))
    tensors = [WrittenTensor(name, BY_NAME["F32"], (len(values),)) for name, values in factors.items()]
    tensors += [plan.written for plan in planned]
    path = target / FILE_NAME
    write_gguf(
        path,
        metadata,
        tensors,
        _reported(
            chain(map(torch.tensor, factors.values()), _contents(checkpoint, planned, importance or {})),
            sum(tensor.num_bytes for tensor in tensors),
            report,
        ),
    )
    notes = []
    if metadata.get("tokenizer.ggml.pre") == "default":
        notes.append("llama.cpp has no name for how this tokenizer splits texts, and may split them otherwise")
    if left := _predicting(checkpoint):
        notes.append(f"{len(left)} tensors of layers that predict further tokens are left out")
    if name in ("llama", "phi3") and (window := metadata.get(f"{name}.attention.sliding_window")):
        notes.append(f"llama.cpp attends to the whole text in files of this family, not to {window} tokens")
    num_rounded = sum(tensor.kind.is_quantized for tensor in tensors)
    return GgufCopy(path.stat().st_size, num_rounded, notes)


def _reported(
    contents: Iterable[torch.Tensor], total: int, report: Callable[[int, int], None] | None
) -> Iterator[torch.Tensor]:
    done = 0
    for content in contents:
        yield content
        done += content.nbytes
        if report is not None:
            report(done, total)


def _factors(entries: Mapping[str, Any]) -> dict[str, list[float]]:
    """What frequencies are divided by, by the names of their tensors."""
    if (both := long_factors(entries)) is not None:
        return dict(zip((ROPE_LONG, ROPE_SHORT), both, strict=True))
    factors = frequency_factors(entries)
    return {} if factors is None else {ROPE_FREQS: factors}


def write_safetensors_copy(checkpoint: Checkpoint, target: Path) -> int:
    """The checkpoint in the layout of Hugging Face, with weights in floats; returns the bytes of its tensors.

    Blocks become the datatype that its config names. Raises as the checkpoint does.
    """
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    if not config.get("has_grouped_qkv", True):
        raise UnsupportedError(
            f"safetensors of a {config['model_type']} in GGUF are not written: serve the file as it is"
        )
    dtype = _DTYPES[str(config.get("dtype") or config.get("torch_dtype") or "float32")]
    prefix = "transformer." if config["model_type"] == "gpt2" else "model."
    if is_encoder(config, checkpoint):
        prefix = ""
        _write_modules(checkpoint, target)
    writer = SafetensorsWriter(target)
    for name in checkpoint.names():
        if name.endswith(_LATENT_VALUES):
            continue  # with the keys
        tensor = checkpoint.tensor(name)
        has_blocks = f"{name.rpartition('.')[0]}.blocks" in checkpoint
        if name.endswith(_LATENT_KEYS):
            values = checkpoint.tensor(name.removesuffix(_LATENT_KEYS) + _LATENT_VALUES)
            tensor = _joined_heads(tensor, values, config)
            name = name.removesuffix(_LATENT_KEYS) + _LATENT_BOTH
        tensor = tensor.to(dtype) if has_blocks else tensor
        writer.add(name if name.startswith("lm_head.") else prefix + name, tensor)
    writer.finish()
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", dict(checkpoint.generation_config))
    (target / "tokenizer.json").write_text(checkpoint.tokenizer.document, encoding="utf-8")
    _write_json(target / "tokenizer_config.json", dict(checkpoint.tokenizer.config))
    for name, template in checkpoint.chat_templates.items():
        path = target / "chat_template.jinja"
        if name != "default":
            path = target / "additional_chat_templates" / f"{name}.jinja"
            path.parent.mkdir(exist_ok=True)
        path.write_text(template, encoding="utf-8")
    return writer.total


def _joined_heads(keys: torch.Tensor, values: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    """One matrix [heads * outputs, rank] of the keys [heads * rank, outputs] and values [heads * outputs, rank]."""
    by_head = [each.unflatten(0, (int(config["num_attention_heads"]), -1)) for each in (keys, values)]
    return torch.cat((by_head[0].transpose(1, 2), by_head[1]), dim=1).flatten(0, 1)


def _write_modules(checkpoint: Checkpoint, target: Path) -> None:
    """The documents of sentence-transformers, and the dense layers that they name."""
    for name in checkpoint.find("*.json"):
        path = target / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(checkpoint.document(name), indent=2) + "\n", encoding="utf-8")
    for name in read_layout(checkpoint, default="mean").dense:
        module, writer = checkpoint.nested(name), SafetensorsWriter(target / name)
        for part in ("linear.weight", "linear.bias"):
            if part in module:
                writer.add(part, module.tensor(part))
        writer.finish()


def _write_json(path: Path, entries: object) -> None:
    path.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _planned(checkpoint: Checkpoint, architecture: Architecture, mixture: _Mixture | None) -> list[_Planned]:
    """All tensors by their names in the file. UnsupportedError for one that has no name there."""
    entries = text_config(checkpoint)
    found: list[_Planned] = []
    modules = [(name, inner, -1) for name, inner in architecture.top.items()]
    for index in range(num_layers(entries)):
        prefix = architecture.layer_name.format(index)
        modules += [(f"blk.{index}.{name}", f"{prefix}.{inner}", index) for name, inner in architecture.layer.items()]
    heads = {"attn_q": entries.get("num_attention_heads"), "attn_k": entries.get("num_key_value_heads")}
    for name, inner, layer in modules:
        for part in ("weight", "bias"):
            sources = _sources(checkpoint, inner if inner.endswith(f"_{part}") else f"{inner}.{part}")
            if not sources:
                continue
            if name.endswith("attn_kv_b"):
                found += _by_head(checkpoint, name.removesuffix("kv_b"), sources, layer, mixture)
                continue
            shape = checkpoint.shape(sources[0])
            is_transposed = architecture.is_transposed and layer >= 0 and len(shape) == 2
            shape = shape[::-1] if is_transposed else shape
            stacked = (len(sources), *shape) if "{}" in inner else shape
            kind = _kind(checkpoint, name, sources[0], stacked, layer, mixture)
            turned = (heads.get(name.rpartition(".")[2]) or heads["attn_q"]) if _is_turned(architecture, name) else 0
            found.append(
                _Planned(
                    written=WrittenTensor(f"{name}.{part}", kind, stacked),
                    sources=sources,
                    num_heads=int(turned or 0),
                    offset=architecture.norm_offset if name.endswith("norm") and part == "weight" else 0.0,
                    is_transposed=is_transposed,
                )
            )
    left = set(checkpoint.names()) - {source for plan in found for source in plan.sources}
    left -= {name for name in left if name.endswith(_BUFFERS)} | _predicting(checkpoint)
    if is_tied(entries):
        left.discard("lm_head.weight")
        found = [plan for plan in found if plan.written.name != "output.weight"]
    if left:
        raise UnsupportedError(f"{checkpoint.place} has tensors that no GGUF file has: {', '.join(sorted(left)[:3])}")
    return found


def _by_head(
    checkpoint: Checkpoint, prefix: str, sources: tuple[str, ...], layer: int, mixture: _Mixture | None
) -> Iterator[_Planned]:
    """Keys [heads, rank, outputs] and values [heads, outputs, rank] of the matrix that makes both, as llama.cpp attends
    to the latent itself.
    """
    entries = text_config(checkpoint)
    heads, rank = int(entries["num_attention_heads"]), int(entries["kv_lora_rank"])
    plain, value = int(entries["qk_nope_head_dim"]), int(entries["v_head_dim"])
    for name, shape, part in (
        ("k_b", (heads, rank, plain), slice(0, plain)),
        ("v_b", (heads, value, rank), slice(plain, plain + value)),
    ):
        kind = _kind(checkpoint, prefix + name, sources[0], shape, layer, mixture)
        yield _Planned(written=WrittenTensor(f"{prefix}{name}.weight", kind, shape), sources=sources, heads=part)


def _predicting(checkpoint: Checkpoint) -> set[str]:
    """Tensors of layers beyond the last, which predict further tokens and which our reader has no names for."""
    entries = text_config(checkpoint)
    if not entries.get("num_nextn_predict_layers"):
        return set()
    beyond = tuple(f"layers.{num_layers(entries) + at}." for at in range(int(entries["num_nextn_predict_layers"])))
    return {name for name in checkpoint.names() if name.startswith(beyond)}


def _is_turned(architecture: Architecture, name: str) -> bool:
    return architecture.interleaves_heads and name.rpartition(".")[2] in ("attn_q", "attn_k")


def _sources(checkpoint: Checkpoint, name: str) -> tuple[str, ...]:
    if "{}" not in name:
        return (name,) if name in checkpoint else ()
    found: list[str] = []
    while (one := name.replace("{}", str(len(found)))) in checkpoint:
        found.append(one)
    return tuple(found)


def _kind(
    checkpoint: Checkpoint, name: str, source: str, shape: tuple[int, ...], layer: int, mixture: _Mixture | None
) -> TensorType:
    """Vectors and routers are in F32."""
    module = name.rpartition(".")[2]
    if len(shape) == 1 or module.startswith("ffn_gate_inp"):
        return BY_NAME["F32"]
    if mixture is None:
        return BY_NAME[_FLOATS.get(checkpoint.tensor(source).dtype, "F32")]
    is_head = module == "output" or (module == "token_embd" and "lm_head.weight" not in checkpoint)
    is_fine = mixture.mixes_layers and module.startswith(("attn_v", "ffn_down"))
    is_fine = is_fine and _is_sensitive(layer, num_layers(text_config(checkpoint)))
    kind = BY_NAME[mixture.finer if is_head or is_fine else mixture.usual]
    while shape[-1] % kind.block_len:
        kind = BY_NAME[_IN_SMALLER_BLOCKS[kind.name]]
    return kind


def _is_sensitive(layer: int, num_layers: int) -> bool:
    """The first and the last eighth of layers, and every third of those between."""
    first = num_layers // 8
    return layer < first or layer >= 7 * num_layers // 8 or (layer - first) % 3 == 2


def _contents(
    checkpoint: Checkpoint, planned: list[_Planned], importance: Mapping[str, torch.Tensor]
) -> Iterator[torch.Tensor]:
    for plan in planned:
        encoded = []
        for source in plan.sources:
            tensor = _interleaved(checkpoint.tensor(source), plan.num_heads)
            if plan.offset:
                tensor = tensor.float() + plan.offset
            if plan.is_transposed:
                tensor = tensor.t()
            weights = importance.get(source.rpartition(".")[0])
            if plan.heads is not None:
                tensor = tensor.unflatten(0, (plan.written.shape[0], -1))[:, plan.heads]
                if plan.heads.start == 0:  # a row of keys is multiplied by queries
                    tensor, weights = tensor.transpose(1, 2), None
            rows = tensor.reshape(-1, plan.written.shape[-1])
            encoded.append(encode_rows(plan.written.kind, rows, weights))
        yield encoded[0] if len(encoded) == 1 else torch.cat(encoded)


def _interleaved(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The two halves of each head's rows in turn, as llama.cpp turns them."""
    if not num_heads:
        return rows
    if rows.shape[0] % (2 * num_heads):
        raise InvalidArgumentError(f"{rows.shape[0]} rows are not those of {num_heads} heads")
    return rows.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).reshape(rows.shape)
