"""A subscriber of ZeroMQ follows which blocks are in the cache, as routers do: always the same blocks as the pool."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from modelserver_backends.llm.kv_events import KvEvents, read_kv_events_config
from modelserver_backends.llm.options import EngineOptions
from support.generations import generate, loaded_engine

from modelserver.backend import InvalidArgumentError

Checkpoints = Callable[[str], Path]
SMALL = {"block_size": 8, "num_gpu_blocks_override": 11, "max_num_seqs": 1}


class Index:
    """A router's books, from the messages alone."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.numbers: list[int] = []
        self.kinds: list[str] = []

    def take(self, number: bytes, content: bytes) -> None:
        self.numbers.append(int.from_bytes(number, "big"))
        _, events, rank = msgpack.unpackb(content)
        assert rank == 0
        for event in events:
            kind, *fields = (event["type"], *list(event.values())[1:]) if isinstance(event, dict) else event
            self.kinds.append(kind)
            if kind == "BlockStored":
                hashes, parent, token_ids, block_size, lora_id, medium, lora_name = fields
                assert (lora_id, medium, lora_name, len(token_ids)) == (None, "GPU", None, block_size * len(hashes))
                for place, block_hash in enumerate(hashes):
                    tokens = tuple(token_ids[place * block_size : (place + 1) * block_size])
                    self.blocks[block_hash] = parent, tokens
                    parent = block_hash
            elif kind == "BlockRemoved":
                for block_hash in fields[0]:
                    del self.blocks[block_hash]
            else:
                self.blocks.clear()

    def tokens_to(self, block_hash: int | None) -> list[int]:
        """The whole prefix that ends with a block."""
        if block_hash is None:
            return []
        parent, tokens = self.blocks[block_hash]
        return [*self.tokens_to(parent), *tokens]


@pytest.fixture
def subscriber() -> Any:
    context = zmq.Context()
    try:
        yield context.socket(zmq.SUB)
    finally:
        context.destroy(linger=0)


def _followed(found: zmq.Socket[bytes], index: Index, until: Callable[[], bool]) -> None:
    while not until():
        assert found.poll(5000), "no more events"
        _, number, content = found.recv_multipart()
        index.take(number, content)


@pytest.mark.parametrize("form", ["array", "map"])
def test_a_subscriber_knows_the_blocks_of_the_cache(
    checkpoint: Checkpoints, tmp_path: Path, subscriber: zmq.Socket[bytes], form: str
) -> None:
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = read_kv_events_config(
        "kv_events_config",
        {
            "enable_kv_cache_events": True,
            "endpoint": endpoint,
            "replay_endpoint": replay,
            "topic": "kv",
            "format": form,
        },
    )
    index = Index()
    with loaded_engine(checkpoint("llama"), **SMALL, kv_events_config=config) as engine:
        subscriber.connect(endpoint)
        subscriber.subscribe(b"kv")
        prompts = [list(range(first, first + 64)) for first in (5, 100, 200)]
        generate(engine, [prompts[0]], 2)  # before anyone subscribes: a subscriber asks for it
        asking = subscriber.context.socket(zmq.DEALER)
        asking.connect(replay)
        asking.send_multipart((b"", (0).to_bytes(8, "big")))
        while (answer := asking.recv_multipart())[1] != (-1).to_bytes(8, "big", signed=True):
            index.take(*answer[1:])
        asking.close(linger=0)
        missed = len(index.numbers)
        for prompt in prompts[1:]:
            generate(engine, [prompt], 2)
        pool = engine._kv.pool
        known = {int.from_bytes(each[-8:], "big") for each in pool._cached}

        def live() -> bool:
            return len(index.numbers) > missed and index.blocks.keys() == known

        while not live():
            assert subscriber.poll(5000), (index.kinds, index.numbers)
            _, number, content = subscriber.recv_multipart()
            if int.from_bytes(number, "big") not in index.numbers:
                index.take(number, content)
        assert "BlockRemoved" in index.kinds  # the pool has room for one prompt
        longest = max((index.tokens_to(each) for each in index.blocks), key=len)
        assert longest[:64] == prompts[-1]
        engine.reset()
        _followed(subscriber, index, lambda: not index.blocks)
    assert index.kinds[-1] == "AllBlocksCleared"
    assert index.numbers == sorted(index.numbers)


def test_prompts_with_a_salt_are_not_told(checkpoint: Checkpoints, tmp_path: Path) -> None:
    from modelserver_backends.llm.generation import GenerationRequest
    from modelserver_backends.llm.sampling_params import SamplingParams

    config = read_kv_events_config("kv_events_config", {"endpoint": f"ipc://{tmp_path}/events"})
    with loaded_engine(checkpoint("llama"), **SMALL, kv_events_config=config) as engine:
        told: list[Any] = []
        engine._events.stored = lambda *found: told.append(found)  # type: ignore[union-attr, method-assign]
        for salt in ("secret", ""):
            engine.compute(GenerationRequest(list(range(5, 60)), SamplingParams(max_tokens=1), cache_salt=salt))
            assert bool(told) is (not salt)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"publisher": "kafka"}, "publisher"),
        ({"endpoints": "x"}, "endpoints"),
        ({"buffer_steps": -1}, "buffer_steps"),
        ({"format": "xml"}, "array or map"),
        ("[1]", "an object"),
    ],
)
def test_wrong_configs_are_named(value: Any, told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        EngineOptions.from_parameters({"kv_events_config": value})


def test_an_address_that_is_taken_is_said(checkpoint: Checkpoints) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = read_kv_events_config("x", {"endpoint": f"tcp://127.0.0.1:{taken.getsockname()[1]}"})
        with (
            pytest.raises(InvalidArgumentError, match="kv_events_config: tcp://127"),
            loaded_engine(checkpoint("llama"), kv_events_config=config),
        ):
            pass


def test_events_that_cannot_be_written_end_nothing(
    subscriber: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = read_kv_events_config("x", {"endpoint": f"ipc://{tmp_path}/events", "max_queue_size": 1})
    assert config is not None
    events = KvEvents(config)
    subscriber.subscribe(b"")
    subscriber.connect(config.endpoint)
    events.stored([b"12345678"], None, [object()], 1, None)  # type: ignore[list-item]
    events.send()
    while not subscriber.poll(20):  # until it is subscribed
        events.cleared()
        events.send()
    closing = threading.Thread(target=events.close)
    for _ in range(3):  # the queue is full
        events.cleared()
        events.send()
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    assert "a batch of events, or an answer about earlier ones, was not sent" in caplog.text


def test_they_are_off_unless_asked_for() -> None:
    for value in ({}, {"enable_kv_cache_events": False, "endpoint": "tcp://*:1"}, {"publisher": "null"}):
        assert EngineOptions.from_parameters({"kv_events_config": value}).kv_events_config is None
