"""Block tables of sequences: blocks from the prefix cache, blocks that they take, and blocks that they give back.

Knows sequences and the pool, no device: the tensors behind the blocks are the runner's.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Several
from typing import TYPE_CHECKING

from .blocks import NULL_BLOCK, BlockPool, extend_hashes, held_blocks, root_hash
from .sequence import Sequence

if TYPE_CHECKING:
    from .kept_blocks import KeptBlocks
    from .kv_events import KvEvents


class KvManager:
    """Only the engine's thread calls it. `num_query_tokens` and `num_hit_tokens` count tokens of admitted prompts, each
    prompt once.

    `window`: no layer looks further back than this number of tokens, its own included; None if some layer sees all.
    Blocks that no query will see again are given back, and the null block stands for them in the table. `chunk_len`: a
    step computes at most this number of a sequence's tokens; None: all that are known. `has_states`: layers keep more
    of a sequence than its blocks hold, so that none can go on from another's blocks: nothing is shared or found.
    `kept`: where blocks are looked for that the pool has forgotten, or never had; not with a window.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        is_prefix_caching: bool = True,
        window: int | None = None,
        chunk_len: int | None = None,
        has_states: bool = False,
    ) -> None:
        assert block_size > 0, "a block holds at least one token"
        assert window is None or window > 0, "a token sees itself"
        self.pool = pool
        self.block_size = block_size
        self.is_prefix_caching = is_prefix_caching and not has_states
        self.window = window
        self._chunk_len = chunk_len
        self._has_states = has_states
        self.kept: Several[KeptBlocks] = ()
        # Those who are told which blocks are found.
        self.events: KvEvents | None = None
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self._root = root_hash()

    def most_tokens(self, num_tokens: int) -> int:
        """`num_tokens`, or as many of them as one sequence can have with the whole pool to itself."""
        if self._num_held(num_tokens) <= self.pool.num_usable:
            return num_tokens
        return self.pool.num_usable * self.block_size

    def _num_held(self, num_tokens: int) -> int:
        return held_blocks(num_tokens, self.block_size, window=self.window, chunk_len=self._chunk_len)

    def find_prefix(self, sequence: Sequence) -> Several[int | bytes]:
        """The blocks that hold the longest known prefix of a sequence without blocks. Changes nothing in the pool.

        Those that are kept elsewhere are named by their hashes.

        At least one token is left to compute, because its row gives the next one; so of a prompt that is known as a
        whole the last block is computed anew. Prompt log-probabilities need every row, so their prompts find nothing
        before they have been computed once.
        """
        if self._has_states:
            return []
        most = (len(sequence.token_ids) - 1) // self.block_size
        known = self._find_cached(sequence, most)
        source = sequence.source
        if source is not None and len(known) < most:
            # Another choice of the request may hold the prompt: shared even when prefixes are not cached.
            same = min(
                sequence.num_prompt_tokens // self.block_size, source.num_computed_tokens // self.block_size, most
            )
            if same > len(known) and self._holds_window(source, same):
                first = self._first_seen(same)
                return [NULL_BLOCK] * first + source.block_ids[first:same].tolist()
        return known

    def _find_cached(self, sequence: Sequence, most: int) -> Several[int | bytes]:
        is_fresh = not sequence.num_output_tokens
        if not self.is_prefix_caching or (is_fresh and sequence.params.prompt_logprobs is not None):
            return []
        self._extend_hashes(sequence, len(sequence.token_ids))
        find, hashes = self.pool.find, sequence.block_hashes
        if self.window is None:
            blocks: list[int | bytes] = []
            for block_hash in hashes[:most]:
                block = find(block_hash)
                if block is not None:
                    blocks.append(block)
                elif any(block_hash in kept for kept in self.kept):
                    blocks.append(block_hash)
                else:
                    break
            return blocks
        # The longest prefix whose last blocks are cached, as far back as the next token sees.
        end = min(most, len(hashes))
        while end > 0:
            first = self._first_seen(end)
            window = [find(block_hash) for block_hash in hashes[first:end]]
            known = [block for block in window if block is not None]
            if len(known) == len(window):
                return [NULL_BLOCK] * first + known
            end = first + max(index for index, block in enumerate(window) if block is None)
        return []

    def _first_seen(self, num_blocks: int, num_more: int = 0) -> int:
        """The first block that the token behind `num_blocks` blocks and `num_more` tokens sees."""
        if self.window is None:
            return 0
        return max(0, num_blocks * self.block_size + num_more - self.window + 1) // self.block_size

    def _holds_window(self, source: Sequence, num_blocks: int) -> bool:
        return NULL_BLOCK not in source.block_ids[self._first_seen(num_blocks) : num_blocks]

    def admit(self, sequence: Sequence, prefix: Several[int | bytes], num_reserved: int = 0) -> bool:
        """Give a sequence all blocks that its known tokens need at once, `prefix` (of `find_prefix`) first.

        With a window that is less than all of them: `extend` gets the others, for as many that it gives back.
        False, and nothing has changed, if that would leave fewer than `num_reserved` blocks free.
        """
        pool = self.pool
        shared = [block for block in prefix if isinstance(block, int) and block != NULL_BLOCK]
        restored = [block for block in prefix if isinstance(block, bytes)]
        num_tokens = len(sequence.token_ids)
        num_left = len(prefix) - len(shared) - len(restored)
        table_len = min(num_left + self._num_held(num_tokens), -(-num_tokens // self.block_size))
        num_new = table_len - len(prefix) + len(restored)
        if num_new + pool.num_unused(shared) + num_reserved > pool.num_free:
            return False
        pool.share(shared)
        new = pool.allocate(num_new)
        if restored:
            if self.events is not None:
                first = next(index for index, block in enumerate(prefix) if isinstance(block, bytes))
                self._tell(self.events, sequence, first, len(prefix))
            sequence.block_ids = array("q", self._filled(prefix, new))
        else:
            sequence.block_ids = array("q", [*prefix, *new])  # type: ignore[list-item]  # numbers alone
        sequence.num_computed_tokens = len(prefix) * self.block_size
        sequence.num_registered_blocks = len(prefix)
        if self.is_prefix_caching and not sequence.num_preemptions:
            self.num_query_tokens += num_tokens
            self.num_hit_tokens += sequence.num_computed_tokens
        return True

    def _filled(self, prefix: Several[int | bytes], new: list[int]) -> list[int]:
        """The table of a sequence whose prefix is kept elsewhere in part: copied into the first new blocks."""
        table, following = [], iter(new)
        for block in prefix:
            if isinstance(block, bytes):
                place = next(kept for kept in self.kept if block in kept)
                number = next(following)
                place.restore(block, number)
                self.pool.register(number, block)
                block = number
            table.append(block)
        return [*table, *following]

    def leave(self, sequence: Sequence, position: int) -> None:
        """Give back the blocks that tokens from `position` on do not see: those before are planned, or computed."""
        table = sequence.block_ids
        if self.window is None:
            return
        # Never the last one, which is being written.
        end = min(self._first_seen(0, position), len(table) - 1)
        start = end
        while start > 0 and table[start - 1] != NULL_BLOCK:
            start -= 1
        if start < end:
            self.pool.free(table[start:end].tolist())
            table[start:end] = array("q", [NULL_BLOCK] * (end - start))

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Let the table reach `num_tokens` tokens. False, and nothing is taken, if there are too few free blocks."""
        self.leave(sequence, sequence.num_computed_tokens)
        num_new = -(-num_tokens // self.block_size) - len(sequence.block_ids)
        if num_new > self.pool.num_free:
            return False
        if num_new > 0:
            sequence.block_ids.extend(self.pool.allocate(num_new))
        return True

    def register(self, sequence: Sequence, num_tokens: int) -> None:
        """Make the full blocks among the first `num_tokens` findable: their tokens are known and computed.

        Blocks of a step that is being planned count as computed, if nothing can drop it any more: every layer stores
        the keys and values of the whole batch before it attends to any.
        """
        if not self.is_prefix_caching:
            return
        self._extend_hashes(sequence, num_tokens)
        first, end = sequence.num_registered_blocks, num_tokens // self.block_size
        if self.events is not None and end > first:
            self._tell(self.events, sequence, first, end)
        for index in range(first, end):
            block = sequence.block_ids[index]
            if block != NULL_BLOCK:
                self.pool.register(block, sequence.block_hashes[index])
            sequence.num_registered_blocks = index + 1

    def _tell(self, events: KvEvents, sequence: Sequence, first: int, end: int) -> None:
        """Report blocks [first, end) of a sequence whose contents were not reported yet."""
        hashes, size = sequence.block_hashes, self.block_size
        while first < end and self.pool.find(hashes[first]) is not None:
            first += 1
        if first < end and not sequence.cache_salt:
            adapter = sequence.adapter
            parent = hashes[first - 1] if first else None
            token_ids = sequence.token_ids[first * size : end * size]
            events.stored(hashes[first:end], parent, token_ids, size, None if adapter is None else adapter.name)

    def free(self, sequence: Sequence) -> None:
        """Give back all blocks of a sequence; what is computed is forgotten, or in the prefix cache."""
        self.pool.free([block for block in sequence.block_ids if block != NULL_BLOCK])
        sequence.block_ids = array("q")
        sequence.num_computed_tokens = 0
        sequence.num_registered_blocks = 0

    def _extend_hashes(self, sequence: Sequence, num_tokens: int) -> None:
        root, adapter = self._root, sequence.adapter
        if sequence.cache_salt or adapter is not None:
            root = root_hash(sequence.cache_salt, b"" if adapter is None else adapter.digest)
        key = None if sequence.pictures is None else sequence.pictures.block_key
        extend_hashes(sequence.block_hashes, sequence.token_ids, num_tokens, self.block_size, root, key)
