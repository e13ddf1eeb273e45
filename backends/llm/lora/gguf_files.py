"""Adapters in GGUF files, as llama.cpp's tools write them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from modelserver.backend import InvalidArgumentError, UnsupportedError

from ..checkpoint.gguf import separated_heads
from ..checkpoint.gguf_architectures import written_architecture
from ..checkpoint.gguf_blocks import unpack_rows
from ..checkpoint.gguf_file import GgufFile
from .adapter import Adapter, LowRank, Target, check_floats, check_modules, scaled

_MODULE = re.compile(r"blk\.(?P<layer>\d{1,9})\.(?P<module>[a-z_]+)\.weight\Z")
_DOWN, _UP = ".lora_a", ".lora_b"


def read_gguf(name: str, path: Path, target: Target) -> Adapter:
    """Raises InvalidArgumentError or UnsupportedError, which name the adapter and the file."""
    what = f"the adapter '{name}' in {path}"
    file = GgufFile(path)
    try:
        kind = file.text("general.type"), file.text("adapter.type")
        if kind != ("adapter", "lora"):
            raise UnsupportedError(f"{what}: general.type and adapter.type are {kind}, expected adapter and lora")
        architecture, _ = written_architecture(target.kind)
        if file.text("general.architecture") != architecture:
            raise InvalidArgumentError(
                f"{what} is for the architecture {file.text('general.architecture')!r:.40}, and the model is a "
                f"{architecture}"
            )
        alpha = file.number("adapter.lora.alpha") or 0.0
        state = hashlib.blake2b(file.header, digest_size=32, person=b"gguf adapter")
        modules: dict[str, LowRank] = {}
        for stored in sorted(file.tensors):
            if not stored.endswith((_DOWN, _UP)):
                raise UnsupportedError(f"{what} has the tensor {stored}: only {_DOWN} and {_UP} of layers are served")
            module = stored.removesuffix(_DOWN).removesuffix(_UP)
            down, up = (_matrix(what, file, module + part, state.update) for part in (_DOWN, _UP))
            # Without an alpha it counts as it is.
            scale = alpha / down.shape[0] if alpha else 1.0
            modules |= dict(_named(what, module, LowRank(down, scaled(up, scale)), target))
    finally:
        file.close()
    check_modules(what, modules, target)
    return Adapter(name, state.digest(), modules)


def _matrix(what: str, file: GgufFile, name: str, update: Callable[[bytes], object]) -> torch.Tensor:
    if name not in file.tensors:
        raise InvalidArgumentError(f"{what} has no matrix {name} beside the other of its module")
    rows = file.rows(name)
    update(rows.tobytes())
    return check_floats(what, name, unpack_rows(file.place(name).kind, torch.from_numpy(rows)))


def _named(what: str, stored: str, module: LowRank, target: Target) -> Iterator[tuple[str, LowRank]]:
    """By its names inside the decoder, with outputs in their order: files have those of some heads interleaved, and
    some modules fused.
    """
    _, architecture = written_architecture(target.kind)
    match = _MODULE.match(stored)
    known = None if match is None else architecture.layer.get(match["module"])
    fused = () if match is None else architecture.fused.get(match["module"], ())
    if match is None or "{}" in (known or "") or not (known or fused):
        raise UnsupportedError(f"{what} changes {stored}, and adapters are applied to linear layers of decoders only")
    prefix = architecture.layer_name.format(int(match["layer"])) + "."
    if known is None:
        for part, up in zip(fused, module.up.chunk(len(fused)), strict=True):
            yield prefix + part, LowRank(module.down, up)
        return
    heads = {"attn_q": target.num_heads, "attn_k": target.num_kv_heads}.get(match["module"], 0)
    up = module.up
    if architecture.interleaves_heads and heads and up.shape[0] % (2 * heads) == 0:
        up = separated_heads(up, heads)
    yield prefix + known, LowRank(module.down, up)
