"""Everybody at once for a while: clients that behave never notice those that do not, and nothing is left of anybody."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from support.certificates import Authority
from support.floods import FLOODS
from support.raw_http1 import Http1Peer
from support.raw_http2 import Peer
from support.situations import SITUATIONS
from support.wires import RunningWire, running_wire

from modelserver.wire.tls import TlsFiles

MIB = 1 << 20
# For longer soaks: SOAK_S=600 make test ARGS="tests/wire/attacks/test_soak.py".
SOAK_S = float(os.environ.get("SOAK_S", "12"))
# Memory settles while caches and buffers fill.
SETTLING_S = SOAK_S / 3


@dataclass(frozen=True)
class Place:
    """Where it happens, and whom its clients trust where there is TLS."""

    wire: RunningWire
    authority: Authority | None

    def trust(self, protocol: str) -> ssl.SSLContext | None:
        return None if self.authority is None else self.authority.client_context((protocol,))

    def channel(self) -> grpc.Channel:
        options = [("grpc.use_local_subchannel_pool", 1)]
        if self.authority is None:
            return grpc.insecure_channel(self.wire.url, options)
        credentials = grpc.ssl_channel_credentials(self.authority.certificate.read_bytes())
        return grpc.secure_channel(self.wire.url, credentials, options)

    def client(self, *, is_http2: bool) -> httpx.Client:
        trust = self.trust("h2" if is_http2 else "http/1.1")
        scheme = "http" if trust is None else "https"
        return httpx.Client(
            base_url=f"{scheme}://{self.wire.url}", http1=not is_http2, http2=is_http2, timeout=30, verify=trust or True
        )


def behave_over_grpc(place: Place, dice: random.Random, is_over: threading.Event) -> None:
    while not is_over.is_set():
        with place.channel() as channel:
            echo = channel.unary_unary("/test.Wire/Echo")
            chat = channel.stream_stream("/test.Wire/Chat")
            for _ in range(50):
                message = dice.randbytes(dice.choice((0, 10, 1000, 100_000)))
                assert echo(message, timeout=30) == message
                messages = [dice.randbytes(dice.randrange(1000)) for _ in range(dice.randrange(20))]
                assert list(chat(iter(messages), timeout=30)) == messages


def behave_over_http(place: Place, dice: random.Random, is_over: threading.Event) -> None:
    while not is_over.is_set():
        with place.client(is_http2=dice.random() < 0.5) as client:
            for _ in range(20):
                body = dice.randbytes(dice.choice((0, 10, 1000, 100_000)))
                assert client.post("/echo", content=body).content == body
                assert len(client.get("/pieces/10/1000").content) == 10_000


def flood(place: Place, dice: random.Random, is_over: threading.Event) -> None:
    floods = [sent for sent, _, _ in FLOODS.values()]
    trust = place.trust("h2")
    while not is_over.is_set():
        with Peer(place.wire.address, tls=trust) as attacker:
            sent = dice.choice(floods)
            attacker.send_bytes(sent[: dice.randrange(len(sent))] if dice.random() < 0.5 else sent)
            if dice.random() < 0.3:
                attacker.vanish()
        time.sleep(0.01)


def abandon(place: Place, dice: random.Random, is_over: threading.Event) -> None:
    trusts = place.trust("h2"), place.trust("http/1.1")
    while not is_over.is_set():
        peer = Peer(place.wire.address, tls=trusts[0])
        dice.choice(SITUATIONS)(peer)
        dice.choice((peer.close, peer.vanish))()
        old = Http1Peer(place.wire.address, tls=trusts[1])
        old.ask(dice.choice(("/hold", "/pieces/1000/1000", "/size/1000000")))
        dice.choice((old.close, old.vanish))()
        time.sleep(0.01)


def resident_bytes() -> int:
    """What is in use: the allocator keeps up to 256 MiB that is free, once a server has run in this process."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    return psutil.Process().memory_info().rss


ACTORS = [behave_over_grpc, behave_over_grpc, behave_over_http, flood, abandon]


@pytest.mark.slow
@pytest.mark.timeout(120 + 2 * SOAK_S)
@pytest.mark.parametrize("is_secured", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_everybody_at_once(loop: str, is_secured: bool, tmp_path: Path) -> None:
    authority, tls = None, None
    if is_secured:
        authority = Authority(tmp_path)
        pair = authority.pair("server")
        tls = TlsFiles(str(pair.certificate), str(pair.key))
    is_over = threading.Event()
    failures: list[str] = []

    def run(actor: Callable[[Place, random.Random, threading.Event], None], number: int) -> None:
        try:
            actor(Place(wire, authority), random.Random(number), is_over)
        except Exception as error:  # of a thread: it fails the test below
            failures.append(f"{actor.__name__}: {type(error).__name__}: {error}")
            is_over.set()

    with running_wire(loop=loop, tls=tls) as wire:
        threads = [threading.Thread(target=run, args=(actor, number)) for number, actor in enumerate(ACTORS)]
        for thread in threads:
            thread.start()
        is_over.wait(SETTLING_S)
        settled = resident_bytes()
        is_over.wait(SOAK_S - SETTLING_S)
        is_over.set()
        for thread in threads:
            thread.join()
        assert not failures
        wire.expect_idle()
        assert wire.context.assembly.num_bytes == 0
        grown = resident_bytes() - settled
    assert grown < 40 * MIB, f"{grown / MIB:.0f} MiB more after {SOAK_S - SETTLING_S:.0f} s"
