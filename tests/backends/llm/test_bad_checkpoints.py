"""Files of checkpoints that are truncated or lie: each is refused by file and tensor before memory is taken."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz.checkpoints import FORMS, file_of, read_layer, whole_tensors
from modelserver_backends.llm.checkpoint import HfCheckpoint
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.quantization.quantized_linear import DequantizedLinear, QuantizedEmbedding
from modelserver_backends.llm.quantization.quantized_weight import QuantizedWeight
from modelserver_backends.llm.text.tokenizer import Tokenizer
from safetensors.torch import load_file, save_file
from support.checkpoints import network_of
from support.gguf_models import write_gguf
from support.tiny_checkpoints import write_checkpoint

from modelserver.backend import InvalidArgumentError, ServerError

HUGE = 1 << 60


def header(entries: Any, data: bytes = bytes(8), length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HEADERS = [
    (b"\1\2\3", "cannot be read as safetensors: it has 3 bytes"),
    (header({}, length=HUGE), f"announce a header of {HUGE} bytes, in a file of 18 bytes"),
    (header(b'{"a": ', b""), "header of 6 bytes is not JSON"),
    (header(b"[" * 100_000, b""), "is not a JSON object"),
    (header(b'{"a":' * 100_000, b""), "is not JSON: it is nested too deeply"),
    (header(b'{"a": {}, "a": {}}'), "the field 'a' is there twice"),
    (header({"__metadata__": {"a": 1}}), "__metadata__ must be an object of texts"),
    (header({"t": 5}), "tensor 't' has the unknown dtype None"),
    (header({"t": tensor("Q4")}), "tensor 't' has the unknown dtype 'Q4'"),
    (header({"t": tensor(shape=[-2])}), r"tensor 't' has the shape \[-2\]"),
    (header({"t": tensor(shape=[2.0])}), r"tensor 't' has the shape \[2.0\]"),
    (header({"t": tensor(shape=[True, 2])}), r"tensor 't' has the shape \[True, 2\]"),
    (header({"t": tensor(shape=[HUGE, HUGE])}), "tensor 't', at byte .*, has 8 bytes, which are not those of F32"),
    (header({"t": tensor(shape=[HUGE, HUGE, 0], offsets=[0, 0])}), "are not those of F32"),
    (header({"t": tensor(shape=[3])}), r"has 8 bytes, which are not those of F32 \[3\]"),
    (header({"t": tensor(offsets=[0, HUGE])}), rf"tensor 't' ends at byte {HUGE + 87} of a file of 95"),
    (header({"t": tensor(offsets=[8, 0])}), r"tensor 't' has the data_offsets \[8, 0\]"),
    (header({"t": tensor(), "u": tensor(offsets=[0, 8])}), "tensor 'u' begins at byte .*, within tensor 't'"),
    (header({"t": tensor()}, bytes(9)), "between tensor 't' and the end of the file, belong to no tensor"),
    (header({"t": tensor(offsets=[1, 9])}, bytes(9)), "between the header and tensor 't', belong to no tensor"),
    (header(b'{"\\ud800": {}}'), r"tensor '\\ud800' has a name that is not Unicode"),
]


@pytest.mark.parametrize(("content", "message"), HEADERS, ids=[message for _, message in HEADERS])
def test_a_header_that_lies(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with HfCheckpoint(tmp_path) as checkpoint, pytest.raises(InvalidArgumentError, match=message) as caught:
        checkpoint.names()
    assert str(path) in caught.value.message


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"{", "is not a safetensors index"),
        ([], "it has no object 'weight_map'"),
        ({"weight_map": {"t": "../a.safetensors"}}, r"places 't' in '\.\./a.safetensors': expected the name of a file"),
        ({"weight_map": {"t": "/etc/passwd"}}, "places 't' in '/etc/passwd'"),
        ({"weight_map": {"t": 5}}, "places 't' in 5"),
        ({"weight_map": {"t": "a\0"}}, r"places 't' in 'a\\x00'"),
        ({"weight_map": {"t": ""}}, "places 't' in ''"),
        ({"weight_map": {"t": "."}}, r"places 't' in '\.'"),
        ({"weight_map": {"t": "b.safetensors"}}, "there is no file .*b.safetensors"),
        ({"weight_map": {"u": "a.safetensors"}}, "places u in a.safetensors, which lacks it"),
    ],
)
def test_an_index_that_lies(index: Any, message: str, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    for place in (tmp_path, inner):
        (place / "a.safetensors").write_bytes(file_of({"t": ("U8", [1], b"\1")}))
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    (inner / "model.safetensors.index.json").write_bytes(text)
    with HfCheckpoint(inner) as checkpoint, pytest.raises(InvalidArgumentError, match=message):
        checkpoint.names()


@pytest.mark.parametrize("form", FORMS)
def test_each_tensor_of_a_quantized_layer_is_checked_by_name(form: str) -> None:
    """Whatever is wrong with one of them: the datatype, a dimension more, or one that is longer."""
    config, whole = FORMS[form][0], whole_tensors(form)
    entries = {"quantization_config": config} if config else {}
    assert read_layer(entries, whole) is None
    for name, (dtype, shape, content) in whole.items():
        if name in ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4", "q_groups"):
            wrong = [("F32", [len(content) // 4], content), (dtype, [*shape, 1], content)]
        else:
            wrong = [("F64", shape, content * 8), (dtype, [*shape, 5], content * 5), (dtype, [5, *shape], content * 5)]
        for kind, lengths, values in wrong:
            size = {"F64": 8, "F32": 4}.get(kind)
            if size is not None:
                count = 1
                for length in lengths:
                    count *= length
                values = (values * 8)[: size * count]
            if kind == "F64" and (form == "floats" or "scale" in name or name == "SCB"):
                continue  # scales in any floats are read
            error = read_layer(entries, {**whole, name: (kind, lengths, values)})
            assert error is not None, (name, kind, lengths)
            assert f"up_proj.{name}" in error.message


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.layers.1.input_layernorm.weight"])
@pytest.mark.parametrize("is_gguf", [False, True])
def test_the_last_layers_are_checked_before_any_is_made(
    name: str, is_gguf: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = place = write_checkpoint(tmp_path / "llama")
    tensors = load_file(directory / "model.safetensors")
    save_file({**tensors, name: torch.zeros(*tensors[name].shape[:-1], 32)}, directory / "model.safetensors")
    if is_gguf:
        place = write_gguf(directory, tmp_path / "model.gguf")
    made: list[Any] = []
    monkeypatch.setattr("modelserver_backends.llm.quantization.scheme.stored_float_linear", made.append)
    with pytest.raises(InvalidArgumentError, match=r"layers\.1\..*of shape .*32\]"):
        network_of(place, EngineOptions(device="cpu", max_model_len=64))
    assert not made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.json": b'{"model": {"type": "BPE", "vocab": {"a": 4294967295}, "merges": []}}'}, "too many ids"),
        ({"tokenizer.json": b"{"}, "tokenizer.json cannot be read by the library"),
        ({"tokenizer.json": b"\xff"}, "tokenizer.json cannot be read"),
        ({"tokenizer_config.json": b'{"added_tokens_decoder": {"x": {}}}'}, "must be an object of token ids"),
        (
            {"tokenizer_config.json": b'{"added_tokens_decoder": {"1": {}}}'},
            r"added_tokens_decoder\.1 must have a text",
        ),
        ({"tokenizer_config.json": b'{"chat_template": [{"name": "default"}]}'}, "chat_template must be a text"),
        ({"tokenizer_config.json": b"[]"}, "must hold a JSON object"),
        ({"chat_template.jinja": b"\xff"}, "chat_template.jinja cannot be read"),
    ],
)
def test_documents_of_a_tokenizer(
    changes: dict[str, bytes], message: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((checkpoint("llama") / name).read_bytes())
    for name, content in changes.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        Tokenizer.from_checkpoint(HfCheckpoint(tmp_path))
    assert str(tmp_path) in caught.value.message


def test_a_text_that_the_library_refuses(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = Tokenizer.from_checkpoint(HfCheckpoint(tmp_path))
    assert tokenizer.encode("a") == [0]
    with pytest.raises(ServerError, match="the model's tokenizer cannot read the text"):
        tokenizer.encode("b")


def test_layers_without_kernels_say_what_they_take() -> None:
    codes, scales = torch.zeros(32, 64, dtype=torch.uint8), torch.ones(32, 2)
    weight = QuantizedWeight(codes=codes, scales=scales, group=32, bits=4)
    for layer in (DequantizedLinear(weight, None), QuantizedEmbedding(weight, torch.float32)):
        assert (layer.form, layer.num_bytes) == ("4 bits without kernels", 32 * 32 + 4 * 64)
    wide = QuantizedWeight(codes=codes, scales=scales, group=32, bits=8)
    assert DequantizedLinear(wide, None).num_bytes == 32 * 64 + 4 * 64
