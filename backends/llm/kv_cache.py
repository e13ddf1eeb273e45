"""Block tables of sequences: what the prefix cache gives them, what they take, and what they give back.

Knows sequences and the pool, no device: the tensors behind the blocks are the runner's.
"""

from __future__ import annotations

from collections.abc import Iterable

from .block_hash import extend_hashes, root_hash
from .blocks import BlockPool
from .sequence import Sequence


class KvManager:
    """Only the engine's thread calls it. `num_query_tokens` and `num_hit_tokens` count tokens of admitted prompts, each
    prompt once.
    """

    def __init__(self, pool: BlockPool, block_size: int, *, is_prefix_caching: bool = True) -> None:
        assert block_size > 0, "a block holds at least one token"
        self.pool = pool
        self.block_size = block_size
        self.is_prefix_caching = is_prefix_caching
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self._root = root_hash()

    @property
    def capacity(self) -> int:
        """How many tokens the whole pool holds: what one sequence alone can have at most."""
        return self.pool.num_usable * self.block_size

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """The blocks that hold the longest known prefix of a sequence without blocks. Changes nothing in the pool.

        At least one token is left to compute, because its row gives the next one; so of a prompt that is known as a
        whole the last block is computed anew. Prompt log-probabilities need every row, so their prompts find nothing
        before they have been computed once.
        """
        most = (len(sequence.token_ids) - 1) // self.block_size
        known = self._find_cached(sequence, most)
        source = sequence.source
        if source is not None and len(known) < most:
            # Another choice of the request may hold the prompt: shared even when prefixes are not cached.
            same = min(
                sequence.num_prompt_tokens // self.block_size, source.num_computed_tokens // self.block_size, most
            )
            if same > len(known):
                return source.block_ids[:same]
        return known

    def _find_cached(self, sequence: Sequence, most: int) -> list[int]:
        is_fresh = not sequence.num_output_tokens
        if not self.is_prefix_caching or (is_fresh and sequence.params.prompt_logprobs is not None):
            return []
        self._extend_hashes(sequence, len(sequence.token_ids))
        blocks = []
        for block_hash in sequence.block_hashes[:most]:
            block = self.pool.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def admit(self, sequence: Sequence, prefix: list[int], num_reserved: int = 0) -> bool:
        """Give a sequence all blocks that its known tokens need, `prefix` (of `find_prefix`) first.

        False, and nothing has changed, if that would leave fewer than `num_reserved` blocks free.
        """
        pool = self.pool
        num_new = -(-len(sequence.token_ids) // self.block_size) - len(prefix)
        if num_new + pool.num_unused(prefix) + num_reserved > pool.num_free:
            return False
        pool.share(prefix)
        sequence.block_ids = prefix + pool.allocate(num_new)
        sequence.num_computed_tokens = len(prefix) * self.block_size
        sequence.num_registered_blocks = len(prefix)
        if self.is_prefix_caching and not sequence.num_preemptions:
            self.num_query_tokens += len(sequence.token_ids)
            self.num_hit_tokens += sequence.num_computed_tokens
        return True

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Let the table reach `num_tokens` tokens. False, and nothing has changed, if there are too few free blocks."""
        num_new = -(-num_tokens // self.block_size) - len(sequence.block_ids)
        if num_new > self.pool.num_free:
            return False
        if num_new > 0:
            sequence.block_ids += self.pool.allocate(num_new)
        return True

    def register(self, sequence: Sequence, num_tokens: int) -> None:
        """Make the full blocks among the first `num_tokens` findable: their tokens are known and computed.

        Blocks of a step that is being planned count as computed, if nothing can drop it any more: every layer stores
        the keys and values of the whole batch before it attends to any.
        """
        if not self.is_prefix_caching:
            return
        self._extend_hashes(sequence, num_tokens)
        for index in range(sequence.num_registered_blocks, num_tokens // self.block_size):
            self.pool.register(sequence.block_ids[index], sequence.block_hashes[index])
            sequence.num_registered_blocks = index + 1

    def free(self, sequence: Sequence) -> None:
        """Give back all blocks of a sequence; what is computed is forgotten, or in the prefix cache."""
        self.pool.free(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed_tokens = 0
        sequence.num_registered_blocks = 0

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that the pool agrees with the tables of all sequences there are, and each table with its tokens."""
        sequences = list(sequences)
        self.pool.check_integrity([sequence.block_ids for sequence in sequences])
        for sequence in sequences:
            room = len(sequence.block_ids) * self.block_size
            assert sequence.num_computed_tokens <= room, f"sequence {sequence.seq_id} has computed more than it holds"
            assert sequence.num_registered_blocks * self.block_size <= sequence.num_computed_tokens, (
                f"sequence {sequence.seq_id} has made blocks findable that are not computed"
            )

    def _extend_hashes(self, sequence: Sequence, num_tokens: int) -> None:
        root = root_hash(sequence.cache_salt) if sequence.cache_salt else self._root
        extend_hashes(sequence.block_hashes, sequence.token_ids, num_tokens, self.block_size, root)
