"""What rank 0 tells the other ranks, in a format that runs no code: numbers and names in JSON, tensors behind them.

A message begins with a letter for its kind. Steps and graphs, which come often, have numbers alone
(`tensor_parallel.StepBoard`). All other kinds have the length of their JSON in 4 bytes, the JSON, and the bytes of
tensors, one behind the other.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from .lora.adapter import Adapter, LowRank
from .nodes import Nodes
from .options import EngineOptions

# Of a step, of decodes in a graph, and of graphs to be captured: of decodes, and of other steps in pieces.
STEP, GRAPH, CAPTURE, CAPTURE_PIECES = b"S", b"G", b"C", b"D"
_LENGTH = struct.Struct("<I")
# Rank 0 alone has to do with these.
_OF_RANK_0 = frozenset(
    {"kept_prefixes", "kept_prefix_directory", "kv_events_config", "speculative_config", "by_device"}
)
_PARTS = ("down", "up", "gain")


@dataclass(frozen=True, slots=True)
class Membership:
    """The settings of a follower. `place` is the checkpoint's; ranks find each other by the file `store`, or at that
    port of the leader. `host` is the leader's address for the ranks of its own machine."""

    place: Path
    options: EngineOptions
    store: Path | int
    index: int
    host: str = ""

    @property
    def size(self) -> int:
        return self.options.tensor_parallel_size


@dataclass(frozen=True, slots=True)
class Pool:
    """How many KV blocks every rank has."""

    num_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Embedding:
    """Texts that are computed as wholes."""

    token_id_lists: tuple[tuple[int, ...], ...]
    has_adapter: bool = False


@dataclass(frozen=True, slots=True)
class Placing:
    """An adapter, whole, of which each rank keeps its share."""

    slot: int
    adapter: Adapter


@dataclass(frozen=True, slots=True)
class Measure:
    """What rank 0 measures next: the largest "step", "graphs"; at the "end" each rank answers how many bytes of its
    memory it leaves for KV blocks."""

    phase: str


@dataclass(frozen=True, slots=True)
class Beat:
    """The load has ended. From now on each rank says every `interval_s` seconds how far it is."""

    interval_s: float


Message = Membership | Pool | Embedding | Placing | Measure | Beat


def packed(message: Message) -> bytes:
    """As bytes."""
    match message:
        case Membership(place, options, store, index, host):
            is_port = isinstance(store, int)
            where = {"place": str(place), "store": store if is_port else str(store), "index": index, "host": host}
            return _joined(b"M", {**where, "options": _changed(options)})
        case Pool(num_blocks, block_size):
            return _joined(b"P", {"num_blocks": num_blocks, "block_size": block_size})
        case Embedding(token_id_lists, has_adapter):
            return _joined(b"E", {"token_id_lists": token_id_lists, "has_adapter": has_adapter})
        case Measure(phase):
            return _joined(b"N", {"phase": phase})
        case Beat(interval_s):
            return _joined(b"B", {"interval_s": interval_s})
        case Placing(slot, adapter):
            modules, tensors = [], []
            for name, module in adapter.modules.items():
                parts = [(part, getattr(module, part)) for part in _PARTS if getattr(module, part) is not None]
                modules.append((name, [(part, _described(tensor)) for part, tensor in parts]))
                tensors += [tensor for _, tensor in parts]
            values = {"slot": slot, "name": adapter.name, "digest": adapter.digest.hex(), "modules": modules}
            return _joined(b"A", values, tensors)


def unpacked(data: bytes) -> Message:
    """The message of which `packed` made the bytes."""
    kind, (length,) = data[:1], _LENGTH.unpack_from(data, 1)
    end = 1 + _LENGTH.size + length
    values = json.loads(data[1 + _LENGTH.size : end])
    if kind == b"M":
        store, options = values["store"], values["options"]
        if "nodes" in options:
            options["nodes"] = Nodes(**options["nodes"])
        options = {name: _tuples(value) for name, value in options.items()}
        return Membership(
            Path(values["place"]),
            EngineOptions(**options),
            store if isinstance(store, int) else Path(store),
            values["index"],
            values["host"],
        )
    if kind == b"P":
        return Pool(**values)
    if kind == b"N":
        return Measure(**values)
    if kind == b"B":
        return Beat(**values)
    if kind == b"E":
        return Embedding(_tuples(values["token_id_lists"]), values["has_adapter"])
    assert kind == b"A", f"no message begins with {kind!r}"
    memory, modules = torch.frombuffer(bytearray(data[end:]), dtype=torch.uint8), {}
    for name, parts in values["modules"]:
        found = {}
        for part, (dtype, shape) in parts:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            num_bytes = tensor.nbytes
            tensor.view(-1).view(torch.uint8).copy_(memory[:num_bytes])
            memory = memory[num_bytes:]
            found[part] = tensor
        modules[name] = LowRank(**found)
    return Placing(values["slot"], Adapter(values["name"], bytes.fromhex(values["digest"]), modules))


def _joined(kind: bytes, values: Mapping[str, Any], tensors: Sequence[torch.Tensor] = ()) -> bytes:
    header = json.dumps(values).encode()
    contents = [each.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for each in tensors]
    return b"".join((kind, _LENGTH.pack(len(header)), header, *contents))


def _described(tensor: torch.Tensor) -> tuple[str, list[int]]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _changed(options: EngineOptions) -> dict[str, Any]:
    """The options that are not the usual ones, as far as ranks need them."""
    usual = EngineOptions()
    names = [field.name for field in fields(options) if field.name not in _OF_RANK_0]
    changed = {name: value for name in names if (value := getattr(options, name)) != getattr(usual, name)}
    if options.nodes is not None:
        changed["nodes"] = asdict(options.nodes)
    return changed


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def membership_of(data: bytes, host: str = "") -> Membership:
    """The first message that a rank gets. `host`: the leader's address as this rank knows it, if it knows one."""
    membership = unpacked(data)
    assert isinstance(membership, Membership), "a rank gets its settings first"
    return replace(membership, host=host) if host else membership
