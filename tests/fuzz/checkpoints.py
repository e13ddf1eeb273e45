"""What must hold of the readers of checkpoints for any bytes: see `parsers`."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from modelserver_backends.llm.checkpoint import GgufCheckpoint, HfCheckpoint
from modelserver_backends.llm.checkpoint.safetensors_header import INDEX, read_header
from modelserver_backends.llm.models.linear_tensors import ALONE, LinearTensors, Part, Split
from modelserver_backends.llm.quantization import find_scheme
from modelserver_backends.llm.quantization.checking import CheckingScheme, UnreadCheckpoint
from modelserver_backends.llm.quantization.stored import StoredScheme
from modelserver_backends.llm.text.tokenizer import Tokenizer

from modelserver.errors import ServerError


def pieces_of(data: bytes, count: int) -> list[bytes]:
    """Cut `data` into that many: each but the last follows two bytes with its length."""
    found, at = [], 0
    for _ in range(count - 1):
        length = int.from_bytes(data[at : at + 2], "little")
        found.append(data[at + 2 : at + 2 + length])
        at += 2 + length
    return [*found, data[at:]]


def joined(*pieces: bytes) -> bytes:
    """The inverse of `pieces_of`."""
    return b"".join(struct.pack("<H", len(piece)) + piece for piece in pieces[:-1]) + pieces[-1]


def safetensors_file(data: bytes) -> None:
    """Tensors that the library has too, with the same bytes; or an error that names the file."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.safetensors"
        path.write_bytes(data)
        try:
            tensors = read_header(path)
        except ServerError as error:
            _check_error(error, str(path))
            return
        expected = dict(safetensors.deserialize(data))
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            found = expected[name]
            assert (tensor.dtype, list(tensor.shape)) == (found["dtype"], found["shape"])
            assert data[tensor.start : tensor.start + tensor.num_bytes] == found["data"]
        with HfCheckpoint(Path(directory)) as checkpoint:
            for name in checkpoint.names():
                try:
                    tensor = checkpoint.tensor(name)
                except ServerError as error:
                    _check_error(error, str(path))
                else:
                    assert tensor.dtype is checkpoint.dtype(name)


def safetensors_index(data: bytes) -> None:
    """No file outside of the directory is read, whatever the index names."""
    with tempfile.TemporaryDirectory() as root:
        directory = Path(root, "inner")
        directory.mkdir()
        for place in (Path(root), directory):
            (place / "a.safetensors").write_bytes(file_of({"t": ("U8", [1], bytes([place == directory]))}))
        (directory / INDEX).write_bytes(data)
        try:
            with HfCheckpoint(directory) as checkpoint:
                assert checkpoint.names() in ([], ["t"])
                assert all(checkpoint.tensor(name).tolist() == [1] for name in checkpoint.names())
        except ServerError as error:
            _check_error(error, str(directory))


def file_of(tensors: Mapping[str, tuple[str, list[int], bytes]]) -> bytes:
    """A safetensors file of datatypes, shapes and bytes."""
    header, at = {}, 0
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(content)]}
        at += len(content)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(content for _, _, content in tensors.values())


_SIZES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "I16": 2, "I64": 8, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E8M0": 1}
_OUTPUTS, _INPUTS = 32, 64
_LAYER = "layers.0.mlp.up_proj"
_STATE = json.dumps({"blocksize": 64, "shape": [_OUTPUTS, _INPUTS]}).encode()
_NESTED_STATE = json.dumps(
    {"blocksize": 64, "shape": [_OUTPUTS, _INPUTS], "nested_blocksize": 256, "nested_offset": 0.5}
).encode()
_GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}
_BYTES = {"targets": ["re:.*up"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}}
_NVFP4 = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 16}}
# What a layer of 64 inputs and 32 outputs is stored as: its config, and datatype and shape of each tensor.
FORMS: dict[str, tuple[dict[str, Any], dict[str, tuple[str, list[int]]]]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        {"qweight": ("I32", [8, 32]), "scales": ("F16", [2, 32]), "qzeros": ("I32", [2, 4]), "g_idx": ("I32", [64])},
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32},
        {"qweight": ("I32", [64, 4]), "scales": ("F16", [2, 32]), "qzeros": ("I32", [2, 4])},
    ),
    "awq gemv": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"},
        {"qweight": ("I32", [32, 8]), "scales": ("F16", [32, 16]), "qzeros": ("I32", [32, 2])},
    ),
    "compressed-tensors packed": (
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": _GROUP}},
        {
            "weight_packed": ("I32", [32, 8]),
            "weight_scale": ("F16", [32, 2]),
            "weight_shape": ("I64", [2]),
            "weight_g_idx": ("I32", [64]),
        },
    ),
    "compressed-tensors int8": (
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": _BYTES}, "ignore": ["lm_head"]},
        {"weight": ("I8", [32, 64]), "weight_scale": ("F16", [32, 1]), "weight_zero_point": ("I8", [32, 1])},
    ),
    "compressed-tensors nvfp4": (
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": _NVFP4}},
        {"weight_packed": ("U8", [32, 32]), "weight_scale": ("F8_E4M3", [32, 4]), "weight_global_scale": ("F32", [1])},
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        {"weight": ("F8_E4M3", [32, 64]), "weight_scale_inv": ("F32", [1, 2])},
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"weight": ("F8_E4M3", [32, 64]), "weight_scale": ("F32", [])},
    ),
    "bitsandbytes int8": (
        {"quant_method": "bitsandbytes"},
        {"weight": ("I8", [32, 64]), "SCB": ("F32", [32])},
    ),
    "bitsandbytes nf4": (
        {"quant_method": "bitsandbytes"},
        {
            "weight": ("U8", [1024, 1]),
            "weight.absmax": ("F32", [32]),
            "weight.quant_map": ("F32", [16]),
            "weight.quant_state.bitsandbytes__nf4": ("U8", [len(_STATE)]),
        },
    ),
    "bitsandbytes nested": (
        {"quant_method": "bitsandbytes"},
        {
            "weight": ("U8", [1024, 1]),
            "weight.absmax": ("U8", [32]),
            "weight.quant_map": ("F32", [16]),
            "weight.nested_absmax": ("F32", [1]),
            "weight.nested_quant_map": ("F32", [256]),
            "weight.quant_state.bitsandbytes__fp4": ("U8", [len(_NESTED_STATE)]),
        },
    ),
    "torchao": (
        {"quant_method": "torchao"},
        {
            "_weight_qdata": ("I8", [32, 64]),
            "_weight_scale": ("F32", [32, 2]),
            "_weight_zero_point": ("I8", [32, 2]),
        },
    ),
    "exl2": (
        {"quant_method": "exl2"},
        {
            "q_weight": ("I32", [8, 32]),
            "q_groups": ("I16", [4]),
            "q_scale": ("I32", [2, 4]),
            "q_scale_max": ("F16", [2]),
            "q_invperm": ("I32", [64]),
        },
    ),
    "exl3": (
        {"quant_method": "exl3"},
        {"trellis": ("I16", [8, 8, 32]), "suh": ("F16", [128]), "sv": ("I16", [8]), "mcg": ("I32", [])},
    ),
    "floats": ({}, {"weight": ("BF16", [32, 64]), "bias": ("F32", [32])}),
}
# Values that are not zeros where a layer is whole.
_VALUES = {
    "weight_shape": struct.pack("<2q", _OUTPUTS, _INPUTS),
    "weight_g_idx": struct.pack("<64i", *[0] * 32, *[1] * 32),
    "g_idx": struct.pack("<64i", *[1] * 32, *[0] * 32),
    "q_groups": struct.pack("<4h", 4, 0, 4, 4),
    "q_invperm": struct.pack("<64i", *range(64)),
    "weight.quant_state.bitsandbytes__nf4": _STATE,
    "weight.quant_state.bitsandbytes__fp4": _NESTED_STATE,
}


def whole_tensors(form: str) -> dict[str, tuple[str, list[int], bytes]]:
    """Of a layer as its format has it, by suffix."""
    _, described = FORMS[form]
    return {name: (dtype, shape, _content(name, dtype, shape)) for name, (dtype, shape) in described.items()}


def _content(name: str, dtype: str, shape: list[int]) -> bytes:
    size = _SIZES[dtype]
    for length in shape:
        size *= length
    return (_VALUES.get(name, b"") + bytes(size))[:size]


def quantized_layer(data: bytes) -> None:
    """A layer whose tensors have any datatypes, shapes and values is refused by name, or read.

    The first piece is the format, the second its config. In the last, four bytes for each tensor change it, or drop it.
    """
    name, config, changes = pieces_of(data, 3)
    forms = list(FORMS)
    form = forms[name[0] % len(forms)] if name else forms[0]
    tensors = {}
    for at, (suffix, (dtype, shape, content)) in enumerate(whole_tensors(form).items()):
        tensors[suffix] = _changed(suffix, dtype, shape, content, changes[4 * at : 4 * at + 4])
        if changes[4 * at : 4 * at + 1] == b"\xfe":
            del tensors[suffix]
    try:
        entries = json.loads(config) if config else {"quantization_config": FORMS[form][0]} if FORMS[form][0] else {}
    except (ValueError, RecursionError):
        return
    if isinstance(entries, dict):
        read_layer(entries, tensors)


def _changed(suffix: str, dtype: str, shape: list[int], content: bytes, change: bytes) -> tuple[str, list[int], bytes]:
    """Four bytes choose another datatype, another shape, and a byte and its value; large numbers change nothing."""
    if len(change) < 4:
        return dtype, shape, content
    kind, form, at, value = change
    dtypes, shapes = list(_SIZES), [[*shape, 1], shape[::-1], shape[1:], [0] * len(shape), [], [2**20, 0], [1, 1]]
    shapes.append([*shape[:-1], 3])
    dtype = dtypes[kind] if kind < len(dtypes) else dtype
    shape = shapes[form] if form < len(shapes) else shape
    changed = bytearray(_content(suffix, dtype, shape))
    if changed and value != 0xFF:
        changed[at % len(changed)] = value
    return dtype, shape, bytes(changed)


def read_layer(entries: Mapping[str, Any], tensors: Mapping[str, tuple[str, list[int], bytes]]) -> ServerError | None:
    """What is wrong with it. A layer that is not refused is checked and read, and multiplies."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps({"model_type": "llama"}))
        stored = {f"model.{_LAYER}.{suffix}": tensor for suffix, tensor in tensors.items()}
        Path(directory, "model.safetensors").write_bytes(file_of(stored))
        size = 128 if "trellis" in tensors else None
        part = Part(_LAYER, size or _INPUTS, (size or _OUTPUTS,))
        with UnreadCheckpoint(Path(directory)) as unread, HfCheckpoint(Path(directory)) as checkpoint:
            layer = LinearTensors(
                checkpoint=checkpoint,
                parts=(part,),
                split=Split.OUTPUTS,
                rank=ALONE,
                dtype=torch.float32,
                device=torch.device("cpu"),
            )
            try:
                scheme = find_scheme(None, entries)
                if isinstance(scheme, StoredScheme) or "quantization_config" not in entries:
                    CheckingScheme(scheme if isinstance(scheme, StoredScheme) else None, unread).linear(layer)
                scheme.make_linear(layer)(torch.ones(2, part.num_inputs), None)
            except ServerError as error:
                _check_error(error)
                return error
    return None


def tokenizer_of_gguf(data: bytes) -> None:
    """Metadata are a config and a tokenizer that reads texts, or an error that names the file."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"
        path.write_bytes(data)
        checkpoint = GgufCheckpoint(path)
        for read in (lambda: checkpoint.config, checkpoint.names, lambda: checkpoint.digest):
            try:
                read()
            except ServerError as error:
                _check_error(error, str(path))
        try:
            tokenizer = Tokenizer.from_checkpoint(checkpoint)
        except ServerError as error:
            _check_error(error, str(path))
            return
        _check_tokenizer(tokenizer)


def tokenizer_documents(data: bytes) -> None:
    """The same of tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja."""
    names = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "tokenizer.json")
    with tempfile.TemporaryDirectory() as directory:
        for name, content in zip(names, pieces_of(data, len(names)), strict=True):
            if content:
                Path(directory, name).write_bytes(content)
        Path(directory, "config.json").write_text(json.dumps({"model_type": "llama"}))
        try:
            tokenizer = Tokenizer.from_checkpoint(HfCheckpoint(Path(directory)))
        except ServerError as error:
            _check_error(error, directory)
            return
        _check_tokenizer(tokenizer)


def _check_tokenizer(tokenizer: Tokenizer) -> None:
    try:
        tokens = tokenizer.encode("a text\n\u00e9")
    except ServerError as error:
        _check_error(error)
        return
    assert all(0 <= token < max(tokenizer.vocab_size, 1) for token in tokens)
    tokenizer.decode(tokens)


def _check_error(error: ServerError, place: str = "") -> None:
    """It names the file, in what a log and an answer can hold."""
    assert place in error.message.encode().decode()


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (safetensors_file, safetensors_index, quantized_layer, tokenizer_of_gguf, tokenizer_documents)
}
