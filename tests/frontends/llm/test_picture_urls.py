"""Pictures by URLs: which hosts are asked, and what a client cannot make the server reach."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.tiny_pictures import draw_picture

from modelserver.errors import InvalidArgumentError
from modelserver.frontends.llm import pictures
from modelserver.frontends.llm.pictures import PictureUrls, is_public

PNG = draw_picture()
FAILED = "^the picture could not be fetched$"
Answer = Callable[[str, dict[str, str]], bytes]


def ok(body: bytes = PNG, head: str = "") -> bytes:
    return f"HTTP/1.1 200 OK\r\n{head}\r\n".encode() + body


def redirect(place: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {place}\r\n\r\n".encode()


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[int]:
    """A server on this machine; `answer` gets the target and the headers."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = dict(line.lower().split(": ", 1) for line in lines if line)
        writer.write(answer(first.split()[1], headers))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names lead to this machine, whose address counts as public; the names that were resolved."""
    names: list[str] = []

    async def getaddrinfo(_loop: Any, host: str, port: int, **_: Any) -> list[Any]:
        names.append(host)
        return [(2, 1, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(pictures, "is_public", lambda address: address == "127.0.0.1")
    return names


async def test_a_picture_of_a_named_host(resolved: list[str]) -> None:
    seen: list[tuple[str, dict[str, str]]] = []

    def answer(target: str, headers: dict[str, str]) -> bytes:
        seen.append((target, headers))
        return ok()

    async with serving(answer) as port:
        urls = [f"http://pictures.test:{port}/a%20b.png?size=1#part"] * 2
        assert await PictureUrls([f"Pictures.test:{port}"]).fetch(urls) == [PNG, PNG]
    assert seen[0] == (
        "/a%20b.png?size=1",
        {"host": f"pictures.test:{port}", "accept": "image/*", "accept-encoding": "identity"},
    )


async def test_redirects_are_followed_within_the_named_hosts(resolved: list[str]) -> None:
    async with serving(lambda target, _: ok() if target == "/c" else redirect({"/a": "/b", "/b": "c"}[target])) as port:
        assert await PictureUrls([f"a.test:{port}"]).fetch([f"http://a.test:{port}/a"]) == [PNG]
    assert resolved == ["a.test"] * 3


@pytest.mark.parametrize(
    "place",
    [
        "http://other.test:{port}/",
        "http://a.test/",
        "http://a.test:22/",
        "http://127.0.0.1:{port}/",
        "file:///etc/passwd",
        "//other.test/",
        "http://user@a.test:{port}/",
        "http://a.test:{port}/loop",
        "",
    ],
)
async def test_redirects_elsewhere_and_in_circles_are_not_followed(place: str, resolved: list[str]) -> None:
    async with serving(lambda _target, _headers: redirect(place.format(port=port))) as port:
        with pytest.raises(InvalidArgumentError, match=FAILED):
            await PictureUrls([f"a.test:{port}"]).fetch([f"http://a.test:{port}/loop"])
    assert set(resolved) == {"a.test"}
    assert len(resolved) <= 4


@pytest.mark.parametrize(
    "url",
    [
        "http://other.test/a.png",
        "http://a.test.evil.test/a.png",
        "http://a.test@evil.test/a.png",
        "http://evil.test\\@a.test/a.png",
        "http://a.test:8080/a.png",
        "http://a.test:0/a.png",
        "http://a.test:99999/a.png",
        "http://[::1]/a.png",
        "http://[/a.png",
        "http://a.test/a b\r\nX: y",
        "ftp://a.test/a.png",
        "file:///etc/passwd",
        "http:///a.png",
    ],
)
async def test_other_hosts_ports_and_schemes_are_never_asked(url: str, resolved: list[str]) -> None:
    with pytest.raises(InvalidArgumentError, match="not fetched from this server: send a data: URL"):
        await PictureUrls(["a.test"]).fetch([url])
    assert resolved == []


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.1.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fd00:ec2::254",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::7f00:1",
        "2002:7f00:1::1",
        "2001:0:7f00:1::1",
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


def test_public_addresses() -> None:
    assert all(map(is_public, ("1.1.1.1", "2606:4700:4700::1111", "::ffff:1.1.1.1")))


@pytest.mark.parametrize(
    "addresses", [["127.0.0.1"], ["1.1.1.1", "10.0.0.1"], ["::1"], []], ids=["own", "one of two", "own IPv6", "none"]
)
async def test_a_name_with_an_address_that_is_not_public(addresses: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def getaddrinfo(_loop: Any, _host: str, port: int, **_: Any) -> list[Any]:
        return [(2, 1, 6, "", (address, port)) for address in addresses]

    async def connect(*_: Any, **__: Any) -> None:
        pytest.fail("a connection was made")

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(asyncio, "open_connection", connect)
    with pytest.raises(InvalidArgumentError, match=FAILED):
        await PictureUrls(["a.test"]).fetch(["http://a.test/a.png"])


async def test_a_name_is_resolved_once_and_its_address_is_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a second answer of its server could lead elsewhere."""
    answers = iter(["1.1.1.1", "127.0.0.1"])
    asked: list[str] = []

    async def getaddrinfo(_loop: Any, _host: str, port: int, **_: Any) -> list[Any]:
        return [(2, 1, 6, "", (next(answers), port))]

    async def connect(address: str, *_: Any, **options: Any) -> None:
        asked.append(f"{address} {options['server_hostname']}")
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(asyncio, "open_connection", connect)
    with pytest.raises(InvalidArgumentError, match=FAILED):
        await PictureUrls(["a.test"]).fetch(["https://a.test/a.png"])
    assert asked == ["1.1.1.1 a.test"]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\n\r\n",
        b"HTTP/1.1 500 Oops\r\n\r\nsecret",
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"",
        ok(head="Content-Length: 99999999\r\n"),
        ok(head="Content-Length: -\r\n"),
        ok(b"cut", "Content-Length: 4\r\n"),
        ok(head="Transfer-Encoding: chunked\r\n"),
        ok(bytes(21 << 20)),
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 40_000 + b"\r\n\r\n",
    ],
)
async def test_answers_that_are_no_picture_have_one_message(answer: bytes, resolved: list[str]) -> None:
    async with serving(lambda _target, _headers: answer) as port:
        with pytest.raises(InvalidArgumentError, match=FAILED):
            await PictureUrls([f"a.test:{port}"]).fetch([f"http://a.test:{port}/"])


async def test_slow_servers_and_many_urls(resolved: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "TIME_LIMIT_S", 0.05)

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # the request, until the client leaves
        writer.close()
        left.set()

    left = asyncio.Event()
    silent = await asyncio.start_server(wait, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    with pytest.raises(InvalidArgumentError, match=FAILED):
        await PictureUrls([f"a.test:{port}"]).fetch([f"http://a.test:{port}/"])
    await left.wait()
    silent.close()
    with pytest.raises(InvalidArgumentError, match="may name 16 pictures"):
        await PictureUrls(["a.test"]).fetch(["http://a.test/"] * 17)
