"""Blocks of keys and values that are kept beyond the device's pool, by their hashes: in host memory, and in files.

A block that the prefix cache does not find in the pool is looked for here, and copied into a block of the pool when the
sequence that needs it is admitted. Copies are queued on the device's own stream: what was launched before has read or
written a block when it is copied, and what is launched later waits for the copy.
"""

from __future__ import annotations

import abc
import hashlib
import json
import logging
import os
import tempfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from modelserver.backend import InternalError, InvalidArgumentError, Reservation

from .attention.kv_blocks import KvBlocks
from .blocks import extend_hashes
from .kv_memory import device_memory
from .options import EngineOptions
from .text.tokenizer import Tokenizer

# Prefixes that a model's options name: computed once, kept in files, and found there by every engine of the model.

logger = logging.getLogger(__name__)

# Of a file: this, the length of a JSON document in 8 bytes, that document, and the blocks.
_MAGIC = b"llm kv blocks 1\n"
_MOST_DOCUMENT = 1 << 28


class KeptBlocks(abc.ABC):
    """One place that keeps blocks. Only the engine's thread calls it."""

    @abc.abstractmethod
    def __contains__(self, block_hash: bytes) -> bool: ...

    @abc.abstractmethod
    def restore(self, block_hash: bytes, block: int) -> None:
        """Copy a block that is kept into one of the pool. Raises InternalError, and the block is kept no more."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what it holds; files stay."""


class HostBlocks(KeptBlocks):
    """Blocks that the pool has forgotten, in host memory; the longest unused is overwritten first."""

    def __init__(self, blocks: KvBlocks, num_bytes: int) -> None:
        """Takes `num_bytes`, at least one block. Raises UnavailableError if there is too little memory."""
        self._blocks = blocks
        block_bytes = blocks.layout.block_bytes(blocks.block_size)
        self.num_blocks = max(1, num_bytes // block_bytes)
        size = self.num_blocks * block_bytes
        self._reservation: Reservation = device_memory(torch.device("cpu")).reserve(
            size,
            available=None,
            least=size,
            what="the host's part of a KV cache",
            purpose=" for kv_offloading_size",
            advice="lower kv_offloading_size, or unload a model",
        )
        # Pinned, so that a GPU copies while the host goes on. For a CPU the system gives memory when it is written.
        self._memory = torch.empty((self.num_blocks, block_bytes), dtype=torch.uint8)
        if blocks.device.type != "cpu":
            self._memory = self._memory.pin_memory()
        self._reservation.settle()
        self._places: OrderedDict[bytes, int] = OrderedDict()
        self.num_kept = self.num_restored = 0

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._places

    def keep(self, block_hash: bytes, block: int) -> None:
        """Copy a block of the pool that is about to be overwritten."""
        place = self._places.pop(block_hash, None)
        if place is None:
            is_full = len(self._places) == self.num_blocks
            place = self._places.popitem(last=False)[1] if is_full else len(self._places)
            row, start = self._memory[place], 0
            for piece in self._blocks.pieces(block):
                part = piece.view(-1)
                row[start : start + len(part)].copy_(part, non_blocking=True)
                start += len(part)
            self.num_kept += 1
        self._places[block_hash] = place

    def restore(self, block_hash: bytes, block: int) -> None:
        self._places.move_to_end(block_hash)
        _write(self._blocks, block, self._memory[self._places[block_hash]])
        self.num_restored += 1

    def close(self) -> None:
        self._places.clear()
        self._reservation.release()


class PrefixFiles(KeptBlocks):
    """Blocks of named prefixes in files of a directory, one for each prefix. They are read when they are used.

    `digest` stands for everything on which keys and values depend besides tokens: a file with another is not used.
    """

    def __init__(self, blocks: KvBlocks, directory: Path, digest: bytes) -> None:
        self._blocks = blocks
        self._directory = directory
        self._digest = digest.hex()
        self._block_bytes = blocks.layout.block_bytes(blocks.block_size)
        self._files: list[BinaryIO] = []
        # By hash: the file, and where the block begins in it.
        self._found: dict[bytes, tuple[BinaryIO, int]] = {}

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._found

    def restore(self, block_hash: bytes, block: int) -> None:
        file, start = self._found[block_hash]
        content = torch.empty(self._block_bytes, dtype=torch.uint8)
        if os.preadv(file.fileno(), [content.numpy()], start) < self._block_bytes:
            self._found = {each: place for each, place in self._found.items() if place[0] is not file}
            raise InternalError(f"{file.name} has become shorter: its prefix is computed again from now on")
        _write(self._blocks, block, content)

    def open(self, name: str, hashes: Sequence[bytes]) -> bool:
        """Whether the blocks of a prefix are kept, and as they were written; from now on they are found."""
        path = self._path(name)
        try:
            file = path.open("rb")
        except OSError:
            return False
        start = self._checked(file, hashes)
        if start is None:
            file.close()
            logger.info("%s is of another model or prefix, or is damaged: it is made again", path)
            return False
        self._files.append(file)
        for number, block_hash in enumerate(hashes):
            self._found[block_hash] = file, start + number * self._block_bytes
        return True

    def _checked(self, file: BinaryIO, hashes: Sequence[bytes]) -> int | None:
        """Where the blocks begin; None if this is not the file of these hashes, or is not as it was written."""
        if file.read(len(_MAGIC)) != _MAGIC:
            return None
        document_len = int.from_bytes(file.read(8), "little")
        if document_len > _MOST_DOCUMENT:
            return None
        try:
            document = json.loads(file.read(document_len))
            checksums = document["checksums"]
            is_same = document["digest"] == self._digest and document["hashes"] == [each.hex() for each in hashes]
        except (ValueError, KeyError, TypeError):
            return None
        if not is_same or len(checksums) != len(hashes):
            return None
        start = file.tell()
        contents = iter(lambda: file.read(self._block_bytes), b"")
        return start if [zlib.crc32(content) for content in contents] == checksums else None

    def write(self, name: str, hashes: Sequence[bytes], block_ids: Sequence[int]) -> Path:
        """Keep blocks of the pool as a prefix. Raises InvalidArgumentError where the directory cannot be written."""
        path = self._path(name)
        checksums = [zlib.crc32(self._content(block)) for block in block_ids]
        known = {"digest": self._digest, "hashes": [each.hex() for each in hashes], "checksums": checksums}
        document = json.dumps(known).encode()
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Another instance may write the same: each its own file, and the last one stays.
            with tempfile.NamedTemporaryFile(dir=self._directory, prefix=".", delete=False) as file:
                try:
                    file.write(_MAGIC + len(document).to_bytes(8, "little") + document)
                    for block in block_ids:
                        file.write(self._content(block))
                    file.flush()
                    os.fsync(file.fileno())
                    Path(file.name).replace(path)
                except BaseException:
                    Path(file.name).unlink()
                    raise
        except OSError as error:
            raise InvalidArgumentError(f"kept_prefix_directory: {path} cannot be written: {error}") from error
        return path

    def close(self) -> None:
        self._found.clear()
        for file in self._files:
            file.close()

    def _content(self, block: int) -> bytes:
        return b"".join(piece.reshape(-1).cpu().numpy().tobytes() for piece in self._blocks.pieces(block))

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.{self._digest[:24]}.kv"


def _write(blocks: KvBlocks, block: int, content: torch.Tensor) -> None:
    start = 0
    for piece in blocks.pieces(block):
        part = piece.view(-1)
        part.copy_(content[start : start + len(part)], non_blocking=True)
        start += len(part)


# Another one where keys and values of the same tokens come out otherwise, or blocks are laid out otherwise.
_REVISION = "1"


def open_prefixes(
    options: EngineOptions,
    blocks: KvBlocks,
    tokenizer: Tokenizer | None,
    digest: bytes,
    root: bytes,
    compute: Callable[[list[int], list[bytes]], list[int]],
) -> PrefixFiles:
    """The files of all prefixes of the options; those that are missing are computed and written.

    `digest` is the checkpoint's, and `root` the hash before the first block. `compute` is given tokens and the hashes
    of their blocks, and returns the blocks. Raises InvalidArgumentError, which names the prefix.
    """
    state = [_REVISION, repr(blocks.layout), str(blocks.block_size)]
    state += [str(options.quantization), options.attention_backend, str(options.max_model_len)]
    key = hashlib.blake2b(digest + "\n".join(state).encode(), digest_size=32).digest()
    files = PrefixFiles(blocks, _directory(options.kept_prefix_directory), key)
    for name, prefix in options.kept_prefixes.items():
        token_ids = _token_ids(name, prefix, tokenizer)
        hashes: list[bytes] = []
        extend_hashes(hashes, token_ids, len(token_ids), blocks.block_size, root)
        if not hashes:
            raise InvalidArgumentError(
                f"kept_prefixes: {name} has {len(token_ids)} tokens; a prefix is kept in blocks of {blocks.block_size}"
            )
        if files.open(name, hashes):
            logger.info("the prefix %s, %d tokens, is kept", name, len(token_ids))
            continue
        try:
            held = compute(token_ids, hashes)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"kept_prefixes: {name}: {error.message}") from None
        path = files.write(name, hashes, held)
        files.open(name, hashes)
        logger.info("the prefix %s, %d tokens, was computed, and is kept in %s", name, len(token_ids), path)
    return files


def _directory(chosen: str | None) -> Path:
    if chosen is not None:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modelserver" / "prefixes"


def _token_ids(name: str, prefix: Any, tokenizer: Tokenizer | None) -> list[int]:
    if isinstance(prefix, list):
        return prefix
    if tokenizer is None:
        raise InvalidArgumentError(f"kept_prefixes: {name} is text, and this model has no tokenizer: give token ids")
    if isinstance(prefix, str):
        return tokenizer.encode(prefix, True)
    try:
        text = tokenizer.apply_chat_template(prefix["messages"], tools=prefix.get("tools"), add_generation_prompt=False)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"kept_prefixes: {name}: {error.message}") from None
    return tokenizer.encode(text, tokenizer.begins_with_special_tokens(text))
