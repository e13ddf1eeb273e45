"""How many blocks of KV cache a sequence holds at once: what it takes to admit it, and to finish it."""

from __future__ import annotations


def held_blocks(num_tokens: int, block_size: int, *, window: int | None, chunk_len: int | None) -> int:
    """The most that a sequence of so many tokens holds in any step.

    `window`: no layer looks further back than so many tokens, its own included; None if some layer sees everything.
    `chunk_len`: a step computes at most so many of its tokens; None: all that are there. A sequence with a window holds
    what the first token of a chunk sees, and the chunk; everything else has been given back, or is yet to come.
    """
    assert num_tokens > 0, "a sequence has a token"
    whole = -(-num_tokens // block_size)
    if window is None or chunk_len is None:
        return whole
    # The tokens that a chunk needs begin anywhere in a block: at worst with its last slot.
    num_needed = window - 1 + chunk_len
    return min(whole, 1 + -(-(num_needed - 1) // block_size))
