from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from support.integrity import check_integrity

from modelserver.cache.local import LocalStore
from modelserver.cache.store import CachedAnswer, RequestKey
from modelserver.core.datatype import Datatype
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Tensor

MANY = 1 << 20


class HandClock:
    def __init__(self) -> None:
        self.ns = 0

    def now_ns(self) -> int:
        return self.ns


def key(name: str, generation: bytes = b"g") -> RequestKey:
    return RequestKey(generation, name.encode(), [])


def response(size: int = 100) -> InferResponse:
    return InferResponse([Tensor("OUT", Datatype.UINT8, np.arange(size, dtype=np.uint32).astype(np.uint8))])


def put(store: LocalStore, name: str, size: int = 100, generation: bytes = b"g") -> None:
    found = key(name, generation)
    packed = store.pack(found, response(size))
    if packed is not None:
        store.insert(found, packed)
    check_integrity(store)


def has(store: LocalStore, name: str, generation: bytes = b"g") -> bool:
    answers: list[CachedAnswer | None] = []
    store.look_up(key(name, generation), answers.append)
    check_integrity(store)
    return answers != [None]


def entry_bytes(size: int = 100) -> int:
    store = LocalStore(MANY)
    put(store, "a", size)
    return store.counts.num_bytes


def test_what_is_kept_is_found() -> None:
    store = LocalStore(MANY)
    assert not has(store, "a")
    put(store, "a")
    assert has(store, "a")
    assert not has(store, "b")
    counts = store.counts
    assert (counts.lookups, counts.hits, counts.misses, counts.num_entries) == (3, 1, 2, 1)


def test_the_least_recently_used_go_first() -> None:
    store = LocalStore(3 * entry_bytes())
    for name in "abc":
        put(store, name)
    assert has(store, "a")
    put(store, "d")
    assert [name for name in "abcd" if has(store, name)] == ["a", "c", "d"]
    assert store.counts.evictions == 1


def test_a_large_answer_takes_the_place_of_several_small_ones() -> None:
    store = LocalStore(4 * entry_bytes())
    for name in "abcd":
        put(store, name)
    put(store, "e", 100 + 2 * entry_bytes())
    assert has(store, "e")
    assert store.counts.num_entries == 2


def test_what_is_larger_than_the_cache_pushes_nothing_out() -> None:
    store = LocalStore(2 * entry_bytes())
    put(store, "a")
    put(store, "b", 2 * entry_bytes())  # its tensor fits, with what belongs to it it does not
    put(store, "c", 3 * entry_bytes())
    assert has(store, "a")
    assert store.counts.num_entries == 1


def test_a_second_answer_replaces_the_first() -> None:
    store = LocalStore(MANY)
    put(store, "a", 100)
    put(store, "a", 200)
    assert store.counts.num_entries == 1
    assert store.counts.num_bytes == entry_bytes(200)


def test_answers_end_with_their_time() -> None:
    clock = HandClock()
    store = LocalStore(MANY, ttl_s=2.0, clock=clock)
    put(store, "a")
    clock.ns = 1_999_999_999
    assert has(store, "a")
    clock.ns = 2_000_000_000
    assert not has(store, "a")
    assert store.counts.num_bytes == 0


def test_a_model_that_serves_no_more_is_forgotten() -> None:
    store = LocalStore(MANY)
    put(store, "a", generation=b"1")
    put(store, "b", generation=b"1")
    put(store, "a", generation=b"2")
    store.forget(b"1")
    store.forget(b"never seen")
    check_integrity(store)
    assert not has(store, "a", b"1")
    assert has(store, "a", b"2")


def test_a_digest_alone_proves_nothing() -> None:
    store = LocalStore(MANY)
    put(store, "a")
    forged = key("b")
    forged.digest = key("a").digest
    assert store.find(forged) is None


def test_answers_are_copies_that_nobody_changes() -> None:
    store = LocalStore(MANY)
    batch = np.zeros((100, 4), np.float32)
    row = InferResponse([Tensor("OUT", Datatype.FP32, batch[3:4])], parameters={"p": 1})
    packed = store.pack(key("a"), row)
    assert packed is not None
    store.insert(key("a"), packed)
    batch[:] = 1
    answer = store.find(key("a"))
    assert answer is not None
    data = answer.response().outputs[0].data
    assert data.tolist() == [[0, 0, 0, 0]]
    assert data.base is None
    with pytest.raises(ValueError, match="read-only"):
        data[:] = 2
    assert answer.response().outputs[0].data is data
    assert answer.response().parameters == {"p": 1}


def test_elements_of_bytes_are_counted() -> None:
    def size(element: bytes) -> int:
        store = LocalStore(MANY)
        outputs = [Tensor("OUT", Datatype.BYTES, np.array([element], object))]
        packed = store.pack(key("a"), InferResponse(outputs))
        assert packed is not None
        return packed.num_bytes

    assert size(bytes(1000)) - size(b"") == 1000


def test_the_accounts_are_right_whatever_happens() -> None:
    store: Any = LocalStore(20 * entry_bytes())
    chance = random.Random(0)
    for _ in range(2000):
        name, generation = str(chance.randrange(40)), bytes([chance.randrange(3)])
        match chance.randrange(10):
            case 0:
                store.forget(generation)
                check_integrity(store)
            case 1 | 2 | 3 | 4:
                has(store, name, generation)
            case _:
                put(store, name, chance.randrange(5000), generation)
    assert store.counts.evictions > 0
