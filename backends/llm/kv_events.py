"""Which blocks the prefix cache holds, told to routers as vLLM tells it (`vllm/distributed/kv_events.py`).

Messages on a PUB socket of ZeroMQ are the topic, a number of 8 bytes that counts up (big-endian), and MessagePack: a
batch `[time, events, rank]`. A subscriber that missed some asks the ROUTER socket `replay_endpoint` for all
from a number on; the answers end with the number -1.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from modelserver.backend import InvalidArgumentError, UnavailableError

from .json_fields import boolean, decoded, integer, string, unknown, wrong

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_END = (-1).to_bytes(8, "big", signed=True)
# vLLM names the device's cache so, whatever the device is.
_MEDIUM = "GPU"
_BOUND = ("*", "::", "ipc://", "inproc://", "127.0.0.1", "localhost")
_MOST_BUFFERED = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig:
    """vLLM's `kv_events_config`. `format`: events are arrays, as until vLLM 0.12 and in SGLang, or maps."""

    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    format: str = "array"


def read_kv_events_config(name: str, value: Any) -> KvEventsConfig | None:
    """From an object, or JSON text of one; None where events are off. Raises InvalidArgumentError, naming the field."""
    if isinstance(value, str):
        value = decoded(name, value) if value.strip() else None
    if value is None or value == {}:
        return None
    if not isinstance(value, Mapping):
        raise wrong(name, 'an object, such as {"enable_kv_cache_events": true}', value)
    given = dict(value)
    is_on = boolean(f"{name}.enable_kv_cache_events", given.pop("enable_kv_cache_events", True))
    publisher = given.pop("publisher", None) or "zmq"
    if publisher not in ("zmq", "null"):
        raise wrong(f"{name}.publisher", "zmq or null", publisher)
    read: dict[str, Any] = {}
    for field, what in given.items():
        if field not in _FIELDS:
            raise unknown(f"{name}.{field}", [f"{name}.{each}" for each in _FIELDS])
        if what is not None:
            read[field] = _FIELDS[field](f"{name}.{field}", what)
    for field in ("buffer_steps", "hwm", "max_queue_size"):
        if not 0 <= read.get(field, 0) <= _MOST_BUFFERED:
            raise wrong(f"{name}.{field}", f"from 0 to {_MOST_BUFFERED}", read[field])
    if read.get("format", "array") not in ("array", "map"):
        raise wrong(f"{name}.format", "array or map", read["format"])
    return KvEventsConfig(**read) if is_on and publisher == "zmq" else None


_FIELDS = {
    "endpoint": string,
    "replay_endpoint": string,
    "buffer_steps": integer,
    "hwm": integer,
    "max_queue_size": integer,
    "topic": string,
    "format": string,
}


class KvEvents:
    """The events of one engine. Only its thread calls `stored`, `removed`, `cleared` and `send`; `rank` is 0."""

    def __init__(self, config: KvEventsConfig) -> None:
        """Raises UnavailableError without pyzmq and msgpack, InvalidArgumentError for an address that is not free."""
        self._is_map = config.format == "map"
        self._events: list[Any] = []
        self._publisher = _Publisher(config)

    def stored(
        self,
        hashes: Sequence[bytes],
        parent: bytes | None,
        token_ids: Sequence[int],
        block_size: int,
        adapter: str | None,
    ) -> None:
        """These blocks, one behind the other, are found from now on."""
        self._add(
            "BlockStored",
            block_hashes=[_number(each) for each in hashes],
            parent_block_hash=None if parent is None else _number(parent),
            token_ids=list(token_ids),
            block_size=block_size,
            lora_id=None,
            medium=_MEDIUM,
            lora_name=adapter,
        )

    def removed(self, block_hash: bytes) -> None:
        self._add("BlockRemoved", block_hashes=[_number(block_hash)], medium=_MEDIUM)

    def cleared(self) -> None:
        self._events.clear()
        self._add("AllBlocksCleared")

    def send(self) -> None:
        """What has happened since, as one batch; nothing is sent where nothing has."""
        if self._events:
            self._publisher.put([time.time(), self._events, 0])
            self._events = []

    def close(self) -> None:
        self.send()
        self._publisher.close()

    def _add(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": kind, **fields} if self._is_map else [kind, *fields.values()])


class _Publisher:
    """A thread with the sockets. A batch that has no room in the queue is dropped: its number is missing then."""

    def __init__(self, config: KvEventsConfig) -> None:
        try:
            import msgpack
            import zmq
        except ModuleNotFoundError as error:
            raise UnavailableError(
                f"kv_events_config needs the Python package '{error.name}': pip install 'modelserver-py[kv-events]'"
            ) from error
        self._pack = msgpack.packb
        self._topic = config.topic.encode()
        self._queue: queue.Queue[tuple[int, Any] | None] = queue.Queue(config.max_queue_size)
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next = 0
        self._context = zmq.Context()
        self._replay: Any = None
        try:
            self._socket: Any = self._context.socket(zmq.PUB)
            self._socket.set_hwm(config.hwm)
            self._socket.linger = 0
            # As in vLLM: a wildcard or a path is bound, and a host connected to; but for that of this machine.
            is_bound = any(each in config.endpoint for each in _BOUND)
            (self._socket.bind if is_bound else self._socket.connect)(config.endpoint)
            if config.replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.linger = 0
                self._replay.bind(config.replay_endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise InvalidArgumentError(f"kv_events_config: {config.endpoint}: {error}") from error
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="kv-events", daemon=True)
        self._thread.start()

    def put(self, batch: Any) -> None:
        try:
            self._queue.put_nowait((self._next, batch))
        except queue.Full:
            if not self._next & (self._next - 1):
                logger.warning("kv_events_config: batches are dropped, as %d wait to be sent", self._queue.qsize())
        self._next += 1

    def close(self) -> None:
        self._is_ending.set()
        with suppress(queue.Full):  # the thread ends when it finds no more
            self._queue.put_nowait(None)
        self._thread.join()
        self._context.destroy(linger=0)

    def _work(self) -> None:
        while True:
            try:
                if self._replay is not None and self._replay.poll(0):
                    self._answer()
                item = self._queue.get(timeout=_POLL_S)
                if item is None:
                    return
                number, batch = item
                content = self._pack(batch)
                self._socket.send_multipart((self._topic, number.to_bytes(8, "big"), content))
                self._sent.append((number, content))
            except queue.Empty:
                if self._is_ending.is_set():
                    return
            except Exception:
                logger.exception("kv_events_config: a batch of events, or an answer about earlier ones, was not sent")

    def _answer(self) -> None:
        """Send what is asked for again, as far as it is remembered."""
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("kv_events_config: a request for a replay has %d frames, expected 3", len(frames))
            return
        client, _, first = frames
        for number, content in self._sent:
            if number >= int.from_bytes(first, "big"):
                self._replay.send_multipart((client, b"", number.to_bytes(8, "big"), content))
        self._replay.send_multipart((client, b"", _END, b""))


def _number(block_hash: bytes) -> int:
    """64 bits of a hash, as vLLM tells it."""
    return int.from_bytes(block_hash[-8:], "big")
