"""A checkpoint in one GGUF file, or in several that were split: config, tensors, tokenizer and chat template."""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from modelserver.backend import InvalidArgumentError, UnsupportedError

from .checkpoint import TokenizerFiles
from .gguf_architecture import ROPE_FREQS, ROPE_LONG, ROPE_SHORT, Architecture, Metadata
from .gguf_architectures import find_architecture
from .gguf_encoders import DENSE, purpose, sentence_documents
from .gguf_file import GgufFile, TensorPlace
from .gguf_tokenizer import end_token_ids, named_tokens, tokenizer_files
from .gguf_types import FILE_TYPES

if TYPE_CHECKING:
    from types import TracebackType

    import torch

SUFFIX = ".gguf"
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf\Z")
# A tensor's module and part; in a layer, and outside.
_IN_LAYER = re.compile(
    r"blk\.(?P<layer>\d{1,9})\.(?P<module>(?:nextn\.)?[a-z_]+(?:_2)?)(?:\.(?P<expert>\d{1,9}))?\.(?P<part>[a-z_]+)\Z"
)
_OUTSIDE = re.compile(r"(?P<module>[a-z_]+\d?)\.(?P<part>[a-z_]+)\Z")
_PARTS = frozenset({"weight", "bias", "scale"})
# What is said elsewhere too: rotations in the config, and how activations were once rounded.
_WITHOUT_MEANING = frozenset({ROPE_FREQS, ROPE_LONG, ROPE_SHORT})
_WITHOUT_MEANING_IN_LAYERS = frozenset({"attn_rot_embd"})
_INPUT_SCALE = "input_scale"
# Matrices of each head, which lie one behind the other.
_BY_HEAD = frozenset({"attn_k_b", "attn_v_b"})
BLOCKS = "blocks"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Where a tensor of the network lies: rows of one in a file. `stored_module` is what the file calls its module.

    Of a vector, `first_row` is where its values begin in that of the file.

    `num_heads` is the number of heads within which rows are interleaved; 0 means none. The file's values are larger by
    `offset`.
    """

    file: GgufFile
    place: TensorPlace
    stored_module: str
    shape: tuple[int, ...]
    first_row: int = 0
    num_heads: int = 0
    offset: float = 0.0
    is_transposed: bool = False

    @property
    def num_rows(self) -> int:
        rows = 1
        for length in self.shape[:-1]:
            rows *= length
        return rows

    @property
    def has_blocks(self) -> bool:
        return self.place.kind.is_quantized and len(self.shape) == 2

    def blocks(self) -> torch.Tensor:
        """uint8 [rows, bytes of a row], rows in the order of transformers. A vector is one row, and whole."""
        import torch

        if len(self.shape) == 1:
            return torch.from_numpy(self.file.rows(self.place.name, 0, 1))
        return self.block_rows(0, self.num_rows)

    def block_rows(self, first: int, count: int) -> torch.Tensor:
        """The same of some rows of a matrix: the heads that they belong to are read whole."""
        import torch

        head = self.num_rows // self.num_heads if self.num_heads else 1
        start, stop = first // head * head, -(-(first + count) // head) * head
        rows = torch.from_numpy(self.file.rows(self.place.name, self.first_row + start, stop - start))
        return separated_heads(rows, (stop - start) // head if self.num_heads else 0)[first - start :][:count]

    def values(self) -> torch.Tensor:
        return self._values(self.blocks(), self.shape)

    def value_rows(self, first: int, count: int) -> torch.Tensor:
        """The same of some rows of a matrix."""
        if self.is_transposed:
            return self.values()[first : first + count]
        return self._values(self.block_rows(first, count), (count, self.shape[1]))

    def _values(self, blocks: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        from .gguf_blocks import unpack_rows

        values = unpack_rows(self.place.kind, blocks)
        if len(shape) == 1:
            values = values.flatten()[self.first_row : self.first_row + shape[0]]
            values = separated_heads(values, self.num_heads)
        values = values.view(shape)
        if self.offset:
            values = values.float() - self.offset
        return values.t().contiguous() if self.is_transposed else values


class GgufCheckpoint:
    """See `Checkpoint`. `place` is the file, of split ones the first.

    Of tensors in blocks, `NAME.weight` is what they stand for, in float32, and `NAME.blocks` are the blocks themselves,
    [rows, bytes of a row]; `quantization_config` of the config says of which type those of each module are.
    """

    def __init__(self, place: Path) -> None:
        self._place = place

    @property
    def place(self) -> Path:
        return self._place

    @property
    def transformers_directory(self) -> Path:
        raise UnsupportedError(f"{self._place} is a GGUF file, which networks of transformers are not loaded from")

    @cached_property
    def config(self) -> Mapping[str, Any]:
        metadata = self._metadata
        entries = self._architecture.entries(metadata)
        config = {"model_type": self._architecture.model_type, **entries, **purpose(metadata, entries)}
        types = {source.stored_module: source.place.kind.name for source in self._sources.values() if source.has_blocks}
        if types:
            config["quantization_config"] = {"quant_method": "gguf", "types": types}
        return config

    @property
    def file_type(self) -> str:
        """The mixture of types, such as Q4_K_M, as the file says, or the type of most bytes of its matrices."""
        number = self._first.integer("general.file_type")
        if number in FILE_TYPES:
            return FILE_TYPES[number]
        sizes: Counter[str] = Counter()
        for file in self._files:
            for place in file.tensors.values():
                sizes[place.kind.name] += place.num_bytes * (len(place.shape) > 1)
        return sizes.most_common(1)[0][0]

    @property
    def generation_config(self) -> Mapping[str, Any]:
        return {"eos_token_id": sorted(self.eos_token_ids)}

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        return end_token_ids(self._first)

    @property
    def tokenizer(self) -> TokenizerFiles:
        return tokenizer_files(self._first)

    @property
    def chat_templates(self) -> Mapping[str, str]:
        prefix = "tokenizer.chat_template"
        named: dict[str, str] = {}
        for key in self._first.keys:
            if key == prefix or key.startswith(f"{prefix}."):
                template = self._first.text(key)
                if template:
                    named[key.removeprefix(prefix).removeprefix(".") or "default"] = template
        return named

    @property
    def digest(self) -> bytes:
        """Over all metadata, where each tensor lies, and size and time of change of each file."""
        state = hashlib.blake2b(digest_size=32, person=b"gguf checkpoint")
        for file in self._files:
            state.update(file.header)
            state.update(file.stamp.encode())
        return state.digest()

    @property
    def num_bytes(self) -> int:
        return sum(place.num_bytes for file in self._files for place in file.tensors.values())

    def find(self, pattern: str) -> list[str]:
        return sorted(fnmatch.filter(self._documents, pattern))

    def document(self, name: str) -> Any:
        if name not in self._documents:
            raise InvalidArgumentError(f"{self._place} has no document {name}")
        return self._documents[name]

    def entries(self, name: str) -> dict[str, Any]:
        if name == "config.json":
            return dict(self.config)
        if name == "tokenizer_config.json":
            return named_tokens(self._first)
        return dict(self._documents.get(name, {}))

    def nested(self, name: str) -> GgufModule:
        return GgufModule(self, name)

    def __contains__(self, name: str) -> bool:
        module, _, part = name.rpartition(".")
        if part == BLOCKS:
            source = self._sources.get(f"{module}.weight")
            return source is not None and source.has_blocks
        return name in self._sources

    def names(self) -> list[str]:
        """Of the network, without the dense layers behind it, which are modules of their own."""
        dense = tuple(f"{module}." for module in DENSE.values())
        return sorted(name for name in self._sources if not name.startswith(dense))

    def module(self, name: str) -> str | None:
        return self._modules.get(name)

    def tensor(self, name: str) -> torch.Tensor:
        module, _, part = name.rpartition(".")
        if part == BLOCKS:
            return self._source(f"{module}.weight").blocks()
        values = self._source(name).values()
        if part == "weight" and f"{module}.scale" in self._sources:
            values = values * self.tensor(f"{module}.scale")
        return values

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        module, _, part = name.rpartition(".")
        if part == BLOCKS:
            return self._source(f"{module}.weight").block_rows(first, count)
        values = self._source(name).value_rows(first, count)
        if part == "weight" and f"{module}.scale" in self._sources:
            values = values * self.tensor(f"{module}.scale")
        return values

    def shape(self, name: str) -> tuple[int, ...]:
        module, _, part = name.rpartition(".")
        if part == BLOCKS:
            source = self._source(f"{module}.weight")
            return source.num_rows, source.place.row_bytes
        source = self._source(name)
        return source.shape[::-1] if source.is_transposed else source.shape

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self.__dict__.get("_files", ()):
            file.close()

    @property
    def _first(self) -> GgufFile:
        return self._files[0]

    @property
    def files(self) -> Sequence[GgufFile]:
        """All of which it is split into. InvalidArgumentError unless they belong together."""
        return self._files

    @cached_property
    def _files(self) -> list[GgufFile]:
        first = GgufFile(self._place)
        count = first.integer("split.count") or 1
        if count == 1:
            return [first]
        match = _SPLIT.match(self._place.name)
        if match is None or int(match["count"]) != count or int(match["number"]) != 1:
            raise InvalidArgumentError(
                f"{self._place} is one of {count} files: name the first, which ends in -00001-of-{count:05}{SUFFIX}"
            )
        paths = [self._place.with_name(f"{match['stem']}-{n:05}-of-{count:05}{SUFFIX}") for n in range(1, count + 1)]
        files = [first, *map(GgufFile, paths[1:])]
        for number, file in enumerate(files):
            if (file.integer("split.no"), file.integer("split.count")) != (number, count):
                raise InvalidArgumentError(f"{file.path} says that it is not the file {number + 1} of {count}")
        total = first.integer("split.tensors.count")
        if total is not None and total != sum(len(file.tensors) for file in files):
            raise InvalidArgumentError(
                f"the {count} files of {self._place} do not hold the {total} tensors of the model"
            )
        return files

    @cached_property
    def _metadata(self) -> Metadata:
        return Metadata(self._files)

    @cached_property
    def _architecture(self) -> Architecture:
        return find_architecture(self._metadata)

    @cached_property
    def _documents(self) -> dict[str, Any]:
        return sentence_documents(self._metadata)

    @cached_property
    def _sources(self) -> dict[str, _Source]:
        sources: dict[str, _Source] = {}
        for file in self._files:
            for place in file.tensors.values():
                for name, source in self._named(file, place):
                    if name in sources:
                        raise InvalidArgumentError(f"{file.path}: tensor {place.name} occurs in another file too")
                    sources[name] = source
        return sources

    @cached_property
    def _modules(self) -> dict[str, str]:
        return {name.rpartition(".")[0]: source.stored_module for name, source in self._sources.items()}

    def _named(self, file: GgufFile, place: TensorPlace) -> list[tuple[str, _Source]]:
        """What a tensor of the file is in the decoder: of stacked experts, one for each."""
        match = _IN_LAYER.match(place.name) or _OUTSIDE.match(place.name)
        if match is None:
            raise self._unknown(file, place)
        found, architecture = match.groupdict(), self._architecture
        module, part, layer, expert = found["module"], found["part"], found.get("layer"), found.get("expert")
        if place.name in _WITHOUT_MEANING or module in _WITHOUT_MEANING_IN_LAYERS or part == _INPUT_SCALE:
            return []
        known = architecture.top if layer is None else architecture.layer
        inner = known.get(module if expert is None else f"{module}_exps")
        is_known = layer is None or int(layer) < self._metadata.num_layers
        if inner is None and is_known and layer is not None and part in _PARTS and module in architecture.fused:
            return self._split(file, place, architecture.layer_name.format(int(layer)), module, part)
        if inner is None or part not in _PARTS or not is_known:
            raise self._unknown(file, place)
        prefix = "" if layer is None else architecture.layer_name.format(int(layer)) + "."
        stored = place.name.rpartition(".")[0]
        if expert is not None:
            source = _Source(file=file, place=place, stored_module=stored, shape=place.shape)
            return [(f"{prefix}{inner.format(int(expert))}.{part}", source)]
        if "{}" in inner:
            return [
                (f"{prefix}{inner.format(number)}.{part}", source)
                for number, source in enumerate(self._experts(file, place, stored, part))
            ]
        name = f"{prefix}{inner}" if inner.endswith(f"_{part}") else f"{prefix}{inner}.{part}"
        return [(name, self._whole(file, place, stored, module, part))]

    def _whole(self, file: GgufFile, place: TensorPlace, stored: str, module: str, part: str) -> _Source:
        architecture, shape = self._architecture, place.shape
        num_heads = 0
        if architecture.interleaves_heads and module in ("attn_q", "attn_k") and part != "scale":
            metadata = self._metadata
            heads = metadata.integer("attention.head_count")
            num_heads = heads if module == "attn_q" else metadata.optional_integer("attention.head_count_kv") or heads
            if num_heads < 1 or shape[0] % (2 * num_heads):
                raise InvalidArgumentError(f"{file.path}: tensor {place.name} has no {num_heads} heads of even length")
        if module == "ffn_gate_inp_shexp" and len(shape) == 1:
            shape = (1, *shape)
        if module in _BY_HEAD and len(shape) == 3:
            shape = (shape[0] * shape[1], shape[2])
        is_matrix = len(shape) == 2 and module not in ("token_embd", "position_embd", "output")
        return _Source(
            file=file,
            place=place,
            stored_module=stored,
            shape=shape,
            num_heads=num_heads,
            offset=architecture.norm_offset if module.endswith("norm") and part == "weight" else 0.0,
            is_transposed=architecture.is_transposed and is_matrix,
        )

    def _split(
        self, file: GgufFile, place: TensorPlace, prefix: str, module: str, part: str
    ) -> list[tuple[str, _Source]]:
        """A tensor that the network has as several of equal size."""
        inner, stored = self._architecture.fused[module], place.name.rpartition(".")[0]
        rows, left = divmod(place.shape[0], len(inner))
        if left or part == "scale":
            raise self._unknown(file, place)
        shape = (rows, *place.shape[1:])
        return [
            (
                f"{prefix}.{name}.{part}",
                _Source(file=file, place=place, stored_module=stored, shape=shape, first_row=number * rows),
            )
            for number, name in enumerate(inner)
        ]

    def _experts(self, file: GgufFile, place: TensorPlace, stored: str, part: str) -> list[_Source]:
        if part == "weight" and len(place.shape) == 3:
            rows = place.shape[1]
            return [
                _Source(file=file, place=place, stored_module=stored, shape=place.shape[1:], first_row=number * rows)
                for number in range(place.shape[0])
            ]
        raise self._unknown(file, place)

    def _source(self, name: str) -> _Source:
        try:
            return self._sources[name]
        except KeyError:
            raise InvalidArgumentError(
                f"{self._place} has no tensor {name}: its tensors do not belong to its metadata"
            ) from None

    def _unknown(self, file: GgufFile, place: TensorPlace) -> UnsupportedError:
        return UnsupportedError(
            f"{file.path}: tensor {place.name}, a {place.kind.name} of shape {list(place.shape)}, has no place in a "
            f"{self._metadata.name} as this version knows it"
        )


class GgufModule(GgufCheckpoint):
    """What a file has of another module than the network: the documents and tensors below a name."""

    def __init__(self, whole: GgufCheckpoint, name: str) -> None:
        super().__init__(whole.place)
        self._whole_file, self._name = whole, name

    def entries(self, name: str) -> dict[str, Any]:
        return self._whole_file.entries(f"{self._name}/{name}")

    def __contains__(self, name: str) -> bool:
        return f"{self._name}.{name}" in self._whole_file

    def tensor(self, name: str) -> torch.Tensor:
        return self._whole_file.tensor(f"{self._name}.{name}")

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        return self._whole_file.rows(f"{self._name}.{name}", first, count)


class UnreadGguf(GgufCheckpoint):
    """The same checkpoint, whose tensors have shapes, but no values and no memory."""

    def __init__(self, whole: GgufCheckpoint) -> None:
        super().__init__(whole.place)
        self._files, self._sources = whole._files, whole._sources

    def tensor(self, name: str) -> torch.Tensor:
        import torch

        return torch.empty(self.shape(name), device="meta")


def separated_heads(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The two halves of each head's rows one behind the other, where they alternate."""
    if not num_heads:
        return rows
    return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


def find_gguf(directory: Path) -> Path | None:
    """The model among the GGUF files of a directory; None if there is none.

    Of split files it is the first. What sees pictures beside a language model (mmproj) is passed over.
    InvalidArgumentError for several, unless one is called model.gguf.
    """
    paths = [path for path in sorted(directory.glob(f"*{SUFFIX}")) if "mmproj" not in path.name.lower()]
    firsts = [path for path in paths if (match := _SPLIT.match(path.name)) is None or int(match["number"]) == 1]
    if not firsts and paths:
        raise InvalidArgumentError(f"{directory} holds {paths[0].name}, but not the first of these files")
    usual = directory / f"model{SUFFIX}"
    if usual in firsts:
        return usual
    if len(firsts) > 1:
        names = ", ".join(path.name for path in firsts[:10])
        raise InvalidArgumentError(
            f"{directory} holds several GGUF files ({names}): name one in default_model_filename of config.pbtxt, or "
            "as 'model' of a model.json"
        )
    return firsts[0] if firsts else None
