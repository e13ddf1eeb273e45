"""The pool of KV blocks: which are free, who shares them, and which still hold a known prefix.

Blocks are numbers. The free ones form a ring of two lists (`_next`, `_previous`) through block 0, which is never given
away, so that each can be taken out of the middle at once:

    0 -> next to be allocated (no contents worth keeping, or the longest unused) -> ... -> freed last -> 0

A free block keeps its hash until it is allocated again: that is the prefix cache, and allocating is evicting.
Everything is O(1) per block. Not thread-safe: only the engine's thread calls it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence

# Never allocated: the ring's end here, and a harmless place for padding on the device.
NULL_BLOCK = 0


class BlockPool:
    """`num_blocks` counts the null block, so `num_usable` is one less."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, f"a pool of {num_blocks} blocks has none to give: block 0 is for padding"
        self.num_blocks = num_blocks
        self.num_usable = num_blocks - 1
        self.num_free = num_blocks - 1
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        # The first block with that content, and the others: equal blocks stay apart, because block tables only grow.
        self._cached: dict[bytes, int] = {}
        self._duplicates: dict[bytes, dict[int, None]] = {}
        # Called with the hash of a content, and the block that was the last to hold it, before it is overwritten.
        self.on_forgotten: Callable[[bytes, int], None] | None = None

    @property
    def usage(self) -> float:
        """The share of blocks that sequences hold, 0 to 1."""
        return 1.0 - self.num_free / self.num_usable

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, those that are least worth keeping; what they held is forgotten."""
        assert count <= self.num_free, f"{count} blocks asked for, {self.num_free} are free"
        blocks = []
        block = self._next[NULL_BLOCK]
        for _ in range(count):
            if self._hashes[block] is not None:
                self._evict(block)
            self._ref_counts[block] = 1
            blocks.append(block)
            block = self._next[block]
        self._next[NULL_BLOCK] = block
        self._previous[block] = NULL_BLOCK
        self.num_free -= count
        return blocks

    def find(self, block_hash: bytes) -> int | None:
        """A block with that content, in use or free."""
        return self._cached.get(block_hash)

    def num_unused(self, block_ids: Iterable[int]) -> int:
        """How many of the blocks are free; sharing them leaves this many fewer free blocks."""
        ref_counts = self._ref_counts
        return sum(1 for block in block_ids if not ref_counts[block])

    def share(self, block_ids: Iterable[int]) -> None:
        """Hold blocks that `find` gave or another sequence holds; each is to be freed once more."""
        for block in block_ids:
            if self._ref_counts[block] == 0:
                before, after = self._previous[block], self._next[block]
                self._next[before] = after
                self._previous[after] = before
                self.num_free -= 1
            self._ref_counts[block] += 1

    def register(self, block: int, block_hash: bytes) -> None:
        """Say what a held block contains from now on (or will, when the step that is being planned has run)."""
        assert self._ref_counts[block] > 0, f"block {block} is registered but not held"
        assert self._hashes[block] is None, f"block {block} is registered twice"
        self._hashes[block] = block_hash
        if self._cached.setdefault(block_hash, block) != block:
            self._duplicates.setdefault(block_hash, {})[block] = None

    def free(self, block_ids: list[int]) -> None:
        """Give back the blocks of one sequence, in the order of its table.

        The end of a prefix is worth less than its beginning, so it is put in line for eviction first. Blocks without
        a known content go to the front of the line: they cost nothing.
        """
        following, previous, ref_counts = self._next, self._previous, self._ref_counts
        for block in reversed(block_ids):
            assert ref_counts[block] > 0, f"block {block} is freed but not held"
            ref_counts[block] -= 1
            if ref_counts[block]:
                continue
            if self._hashes[block] is None:
                before, after = NULL_BLOCK, following[NULL_BLOCK]
            else:
                before, after = previous[NULL_BLOCK], NULL_BLOCK
            following[before] = previous[after] = block
            previous[block], following[block] = before, after
            self.num_free += 1

    def forget(self) -> None:
        """Drop every known content: no block will be found until it is registered anew.

        `on_forgotten` is not called.
        """
        self._hashes = [None] * self.num_blocks
        self._cached.clear()
        self._duplicates.clear()

    def _evict(self, block: int) -> None:
        block_hash = self._hashes[block]
        assert block_hash is not None, f"block {block} has no content to evict"
        self._hashes[block] = None
        duplicates = self._duplicates.get(block_hash)
        if duplicates is None:
            del self._cached[block_hash]
            if self.on_forgotten is not None:
                self.on_forgotten(block_hash, block)
            return
        if self._cached[block_hash] == block:
            self._cached[block_hash] = next(iter(duplicates))
        del duplicates[self._cached[block_hash] if block not in duplicates else block]
        if not duplicates:
            del self._duplicates[block_hash]

    def free_order(self) -> list[int]:
        """The free blocks, the next to be allocated first. Walks the ring: for tests."""
        order = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            order.append(block)
            block = self._next[block]
            assert len(order) <= self.num_blocks, "the ring of free blocks does not close"
        return order


DIGEST_SIZE = 32


def root_hash(cache_salt: str = "", adapter: bytes = b"") -> bytes:
    """The hash before the first block of a chain; `adapter` is a digest. Both count separately: ("a", b"b") is not
    ("ab", b"").
    """
    salt = cache_salt.encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(len(salt).to_bytes(8, "little"), digest_size=DIGEST_SIZE, person=b"llm block root")
    digest.update(salt)
    digest.update(adapter)
    return digest.digest()


def block_hash(parent: bytes, token_ids: Sequence[int], key: bytes = b"") -> bytes:
    """The hash of a full block of `token_ids` that follows the prefix named `parent`.

    `key` tells apart blocks of equal tokens. Blocks of a chain are equally long, so that no key reads as a token.
    """
    return hashlib.blake2b(parent + array("i", token_ids).tobytes() + key, digest_size=DIGEST_SIZE).digest()


def extend_hashes(
    hashes: list[bytes],
    token_ids: list[int],
    num_tokens: int,
    block_size: int,
    root: bytes,
    key: Callable[[int, int], bytes] | None = None,
) -> None:
    """Append to `hashes` those of the full blocks among the first `num_tokens` tokens that are not there yet.

    `key` gives the keys of blocks, by their first token and that behind their last.
    """
    parent = hashes[-1] if hashes else root
    for end in range((len(hashes) + 1) * block_size, num_tokens + 1, block_size):
        start = end - block_size
        parent = block_hash(parent, token_ids[start:end], key(start, end) if key is not None else b"")
        hashes.append(parent)


def held_blocks(num_tokens: int, block_size: int, *, window: int | None, chunk_len: int | None) -> int:
    """The most blocks that a sequence of this many tokens holds in any step.

    `window`: no layer looks further back than this number of tokens, its own included; None if some layer sees all.
    `chunk_len`: a step computes at most this number of its tokens; None: all that are known. With a window a sequence
    holds what the first token of a chunk sees, and the chunk; everything else has been given back, or is yet to come.
    """
    assert num_tokens > 0, "a sequence has a token"
    whole = -(-num_tokens // block_size)
    if window is None or chunk_len is None:
        return whole
    # The tokens that a chunk needs begin anywhere in a block: at worst with its last slot.
    num_needed = window - 1 + chunk_len
    return min(whole, 1 + -(-(num_needed - 1) // block_size))
