"""Equal names mean equal prefixes."""

from __future__ import annotations

from modelserver_backends.llm.blocks import DIGEST_SIZE, block_hash, extend_hashes, root_hash


def hashes_of(token_ids: list[int], *, block_size: int = 4, root: bytes | None = None) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, len(token_ids), block_size, root or root_hash())
    return hashes


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(hashes_of(list(range(count)))) for count in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert all(len(name) == DIGEST_SIZE for name in hashes_of(list(range(8))))


def test_it_does_not_matter_in_how_many_steps_a_chain_grows() -> None:
    tokens = list(range(100, 123))
    grown: list[bytes] = []
    for count in range(len(tokens) + 1):
        extend_hashes(grown, tokens, count, 4, root_hash())
    assert grown == hashes_of(tokens)


def test_a_hash_covers_all_that_came_before() -> None:
    first, second = hashes_of([1, 2, 3, 4, 5, 6, 7, 8])
    assert hashes_of([1, 2, 3, 4, 5, 6, 7, 9])[0] == first
    assert hashes_of([1, 2, 3, 9, 5, 6, 7, 8])[1] != second
    assert hashes_of([5, 6, 7, 8])[0] != second
    assert block_hash(first, [5, 6, 7, 8]) == second


def test_roots_keep_prefixes_apart() -> None:
    roots = [
        root_hash(),
        root_hash("a"),
        root_hash("ab"),
        root_hash("", b"a"),
        root_hash("a", b"b"),
        root_hash("\ud800"),
    ]
    assert len({hashes_of([1, 2, 3, 4], root=root)[0] for root in roots}) == len(roots)


def test_the_chain_is_the_same_in_every_process() -> None:
    assert hashes_of([1, 2, 3, 4])[0].hex() == "6ac882ba0922c9dab6731b7ef4d7323c990ce227fa29772454146ca03b4ce903"
