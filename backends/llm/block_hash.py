"""Names for full blocks by their contents: a chain of hashes, so that equal names mean equal prefixes.

A block's hash covers its tokens, the hash of the block before, and for the first block what keeps prefixes apart
(`cache_salt`, later the adapter). BLAKE2b with 32 bytes: nobody finds two prefixes with the same name, so the cache
compares no tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_SIZE = 32


def root_hash(cache_salt: str = "", adapter: str = "") -> bytes:
    """What the first block of a chain is chained to. Both strings count by themselves: ("a", "b") is not ("ab", "")."""
    salt = cache_salt.encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(len(salt).to_bytes(8, "little"), digest_size=DIGEST_SIZE, person=b"llm block root")
    digest.update(salt)
    digest.update(adapter.encode("utf-8", "surrogatepass"))
    return digest.digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a full block of `token_ids` that follows the prefix named `parent`."""
    return hashlib.blake2b(parent + array("i", token_ids).tobytes(), digest_size=DIGEST_SIZE).digest()


def extend_hashes(hashes: list[bytes], token_ids: list[int], num_tokens: int, block_size: int, root: bytes) -> None:
    """Append to `hashes` those of the full blocks among the first `num_tokens` tokens that are not there yet."""
    parent = hashes[-1] if hashes else root
    for end in range((len(hashes) + 1) * block_size, num_tokens + 1, block_size):
        parent = block_hash(parent, token_ids[end - block_size : end])
        hashes.append(parent)
