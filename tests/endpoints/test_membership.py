"""Sources of members: lists, names, files that change, streams of documents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from modelserver.endpoints.endpoint import EndpointState, Member
from modelserver.endpoints.endpoint_set import EndpointSet
from modelserver.endpoints.membership import (
    DnsSource,
    FileSource,
    Membership,
    Source,
    StaticSource,
    StreamSource,
    parse_source,
    read_members,
)
from modelserver.errors import InvalidArgumentError, UnavailableError


async def _no_lines(_: str) -> AsyncIterator[bytes]:
    raise UnavailableError("connection refused")
    yield b""


def _following(source: Source, check: Callable[[EndpointSet, Membership], list[Callable[[], bool]]]) -> None:
    """Follow `source` until each condition in turn holds."""

    async def run() -> None:
        endpoints = EndpointSet()
        membership = Membership(endpoints, source)
        task = asyncio.create_task(membership.run())
        async with asyncio.timeout(10):
            for condition in check(endpoints, membership):
                while not condition():  # noqa: ASYNC110 - tasks of the tested code make it true
                    await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def _addresses(endpoints: EndpointSet) -> list[str]:
    return [each.address for each in endpoints.endpoints]


def test_a_document_lists_endpoints_with_names_ports_labels_and_states() -> None:
    document = {
        "endpoints": [
            {"name": "one", "address": "10.0.0.1", "port": "8000", "labels": {"zone": "a", "rank": 1}},
            {"address": "fd00::1", "port": 8001, "state": "draining"},
            {"address": "grpc://there:1"},
            {"address": "[fd00::2]:9"},
        ]
    }
    assert read_members(json.dumps(document).encode(), scheme="http") == [
        Member("http://10.0.0.1:8000", EndpointState.READY, "one", {"zone": "a", "rank": "1"}),
        Member("http://[fd00::1]:8001", EndpointState.DRAINING),
        Member("grpc://there:1"),
        Member("http://[fd00::2]:9"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object"),
        ("{}", "expected a list 'endpoints'"),
        ('{"endpoints": [{"port": 1}]}', r"endpoints\[0\]: expected an object with an 'address'"),
        ('{"endpoints": [{"address": "a", "labels": []}]}', "expected 'labels' to be an object"),
        ('{"endpoints": [{"address": "a", "state": "tired"}]}', "unknown state 'tired'"),
    ],
)
def test_what_is_wrong_with_a_document_is_told(content: str, message: str) -> None:
    if "labels" in content:
        content = content.replace("[]}", "[1]}")
    with pytest.raises(InvalidArgumentError, match=message):
        read_members(content.encode())


def test_sources_are_written_as_urls() -> None:
    kinds = {
        "dns:///svc:8001": DnsSource,
        "dns:svc:8001": DnsSource,
        "file:members.json": FileSource,
        "file:///etc/members.json": FileSource,
        "http://controller:1/cluster/v1/endpoints": StreamSource,
    }
    assert {text: type(parse_source(text, open_lines=_no_lines)) for text in kinds} == kinds
    for text in ("dns://svc", "dns:svc:x", "file:", "http:///x", "etcd://a"):
        with pytest.raises(InvalidArgumentError, match="expected dns://NAME:PORT"):
            parse_source(text, open_lines=_no_lines)


def test_a_list_stays() -> None:
    _following(StaticSource(["a", "b"]), lambda endpoints, _: [lambda: _addresses(endpoints) == ["a", "b"]])


def test_a_name_is_resolved_to_all_its_addresses() -> None:
    _following(
        DnsSource("localhost", 8001, scheme="grpc"),
        lambda endpoints, _: [lambda: "grpc://127.0.0.1:8001" in _addresses(endpoints)],
    )


def test_a_file_is_followed_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "members.json"
    path.write_text('{"endpoints": [{"address": "a:1"}]}')

    def check(endpoints: EndpointSet, membership: Membership) -> list[Callable[[], bool]]:
        def first() -> bool:
            if _addresses(endpoints) != ["a:1"]:
                return False
            path.write_text('{"endpoints": [')
            return True

        def broken() -> bool:
            if not membership.problem:
                return False
            assert str(path) in membership.problem
            assert _addresses(endpoints) == ["a:1"]
            assert (membership.age_s or 0) > 0
            path.write_text('{"endpoints": [{"address": "b:1"}, {"address": "a:1"}]}')
            return True

        return [first, broken, lambda: _addresses(endpoints) == ["b:1", "a:1"] and not membership.problem]

    _following(FileSource(path, interval_s=0.01), check)


def test_a_stream_of_documents_is_followed_and_opened_again_after_its_end() -> None:
    streams = [
        [(3, ["a"]), (2, ["old"]), (4, ["a", "b"])],
        [(1, ["c"])],
    ]
    seen: list[list[str]] = []

    async def open_lines(url: str) -> AsyncIterator[bytes]:
        assert url == "http://controller:1/endpoints"
        for generation, addresses in streams.pop(0) if streams else []:
            entries = [{"address": address} for address in addresses]
            yield json.dumps({"generation": generation, "endpoints": entries}).encode()
            yield b"\n"
        if not streams:
            await asyncio.Event().wait()

    def check(endpoints: EndpointSet, _: Membership) -> list[Callable[[], bool]]:
        endpoints.observers.append(lambda endpoint: seen.append(_addresses(endpoints)))
        return [lambda: _addresses(endpoints) == ["c"]]

    _following(StreamSource("http://controller:1/endpoints", open_lines), check)
    assert ["old"] not in seen
    assert ["a", "b"] in seen
