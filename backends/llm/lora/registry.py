"""The adapters that requests of one engine may name: found by name, read from their files, kept in host memory."""

from __future__ import annotations

import hashlib
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from modelserver.backend import InvalidArgumentError, UnsupportedError

from ..checkpoint import is_gguf
from ..checkpoint.gguf import separated_heads
from ..checkpoint.gguf_architectures import written_architecture
from ..checkpoint.gguf_blocks import unpack_rows
from ..checkpoint.gguf_file import GgufFile
from ..options import EngineOptions
from .adapter import Adapter, LowRank, Target, check_floats, check_modules, combined, scaled
from .peft_files import rank_of, read_peft
from .uses import AdapterUse

logger = logging.getLogger(__name__)


class Adapters:
    """Those of one engine; only the engine's thread calls `find`.

    At most `max_kept` adapters that nothing uses are kept in host memory, and read again when they are asked for.
    `usual` are those of requests that name none.
    """

    def __init__(
        self, target: Target, places: Mapping[str, Path], *, max_kept: int, usual: Sequence[AdapterUse] = ()
    ) -> None:
        self.target = target
        self.places = places
        self.usual = tuple(usual)
        self._max_kept = max_kept
        self._kept: OrderedDict[tuple[AdapterUse, ...], Adapter] = OrderedDict()

    @classmethod
    def of(cls, target: Target | None, options: EngineOptions) -> Adapters | None:
        """None for a network that takes no adapters."""
        if target is None:
            return None
        places = {name: Path(place) for name, place in options.lora_modules}
        usual = [AdapterUse(name) for name in options.usual_adapters]
        return cls(target, places, max_kept=options.num_kept_loras, usual=usual)

    def find(self, uses: Collection[AdapterUse]) -> Adapter | None:
        """What these add together; None where they add nothing.

        Raises ServerErrors, which name the adapter, for one that is unknown or cannot be read.
        """
        uses = tuple(use for use in uses or self.usual if use.scale != 0.0)
        if not uses:
            return None
        found = self._kept.get(uses)
        if found is None:
            parts = [(self._read(use), use.scale) for use in uses]
            found = combined(parts)
            if found.rank > self.target.max_rank:
                raise InvalidArgumentError(
                    f"the adapters {found.name} have rank {found.rank} together, which is more than max_lora_rank "
                    f"{self.target.max_rank}: ask for fewer, or raise that option in model.json"
                )
            self._kept[uses] = found
            if len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)
        self._kept.move_to_end(uses)
        return found

    def _read(self, use: AdapterUse) -> Adapter:
        place = Path(use.place) if use.place else self.places.get(use.name)
        if place is None:
            raise InvalidArgumentError(
                f"LoRA {use.name:.200} is not supported, we currently support {sorted(self.places)}"
            )
        logger.info("reading the adapter '%s' from %s", use.name, place)
        return read_adapter(use.name, place, self.target)


def read_adapter(name: str, place: Path, target: Target) -> Adapter:
    """Of PEFT's directory, or of a GGUF file. Raises ServerErrors that name the adapter and the file."""
    return read_gguf(name, place, target) if is_gguf(place) else read_peft(name, place, target)


def with_lora_rank(options: EngineOptions) -> EngineOptions:
    """`max_lora_rank`, where it is not set, is enough for all adapters that are listed. Raises as `read_adapter`."""
    if not options.serves_adapters or options.max_lora_rank is not None:
        return options
    ranks = [rank_of(Path(place)) for _, place in options.lora_modules if not is_gguf(Path(place))]
    # Adapters of a Modelfile are added up.
    together = sum(ranks) if options.usual_adapters else 0
    return replace(options, max_lora_rank=max([options.lora_rank, together, *ranks]))


# Adapters in GGUF files, as llama.cpp's tools write them.

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
