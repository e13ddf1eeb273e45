"""Small whole samples of what `checkpoints` reads, for damage."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from fuzz.checkpoints import FORMS, file_of, joined
from modelserver_backends.llm.checkpoint.gguf_types import BY_NAME
from modelserver_backends.llm.checkpoint.gguf_writing import WrittenTensor, write_gguf

_LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 16,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
_KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"pre": "gpt-2", "tokens": ["a", "b", "ab", "<s>"], "merges": ["a b"]},
    "llama": {"tokens": ["<unk>", "a", "aa", "<s>"], "scores": [0.0, -1.0, -2.0, 0.0]},
    "bert": {"tokens": ["[UNK]", "\u2581a", "b", "[SEP]"], "cls_token_id": 3, "seperator_token_id": 3},
    "t5": {
        "tokens": ["<unk>", "a", "\u2581", "</s>"],
        "scores": [0.0, -1.0, -2.0, 0.0],
        "precompiled_charsmap": [4, 0, 0, 0, 0, 0, 0, 0, 97, 0],
    },
}


def _gguf(kind: str) -> bytes:
    entries = {"model": kind, "token_type": [2, 1, 1, 3], "bos_token_id": 3, "eos_token_id": 3, **_KINDS[kind]}
    metadata = _LLAMA | {f"tokenizer.ggml.{key}": value for key, value in entries.items()}
    metadata["tokenizer.chat_template"] = "{{ messages }}"
    tensors = [WrittenTensor("token_embd.weight", BY_NAME["Q8_0"], (4, 32))]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"
        write_gguf(path, metadata, tensors, [torch.zeros(4 * 34, dtype=torch.uint8)])
        return path.read_bytes()


def _documents() -> bytes:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]], "unk_token": "a"}
    added = {"id": 3, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{**added, "special": True}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": model,
    }
    config = {"bos_token": "<s>", "eos_token": {"content": "<s>"}, "added_tokens_decoder": {"3": {"content": "<s>"}}}
    config["chat_template"] = [{"name": "default", "template": "{{ messages }}"}]
    parts = (config, {"pad_token": "b"}, "{{ messages }}", tokenizer)
    return joined(*(part.encode() if isinstance(part, str) else json.dumps(part).encode() for part in parts))


def _layers() -> list[bytes]:
    whole = [joined(bytes([at]), b"", b"") for at in range(len(FORMS))]
    changed = [joined(bytes([at]), b"", bytes([255, 255, 0, 255] * 6)) for at in range(len(FORMS))]
    configs = [
        joined(bytes([at]), json.dumps({"quantization_config": config}).encode(), b"")
        for at, (config, _) in enumerate(FORMS.values())
    ]
    return [*whole, *changed, *configs]


SAMPLES = {
    "safetensors_file": [
        file_of({"t": ("F32", [2, 2], bytes(16)), "u": ("BF16", [3], bytes(6)), "v": ("F4", [4], bytes(2))}),
        file_of({"model.a": ("U8", [0, 5], b""), "b": ("BOOL", [], b"\1")}),
    ],
    "safetensors_index": [
        json.dumps({"metadata": {"total_size": 1}, "weight_map": {"t": name}}).encode()
        for name in ("a.safetensors", "../a.safetensors", "./a.safetensors")
    ],
    "quantized_layer": _layers(),
    "tokenizer_of_gguf": [_gguf(kind) for kind in _KINDS],
    "tokenizer_documents": [_documents()],
}
