"""What leads requests to one replica, found in their bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelserver.endpoints.endpoint import Endpoint, EndpointState, Member
from modelserver.endpoints.endpoint_set import EndpointSet
from modelserver.endpoints.learned_prefixes import LearnedPrefixes
from modelserver.errors import InvalidArgumentError
from modelserver.options.router_options import resolve_router_options
from modelserver.pb import grpc_service_pb2 as pb
from modelserver.router.affinity import (
    prompt_of,
    sequence_of_json,
    sequence_of_message,
)

LONG = "You are a helpful assistant. " * 300


def chat(*contents: str, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": each} for each in contents]
    return json.dumps({"model": "m", **fields, "messages": messages}).encode()


def test_prompts_that_begin_alike_share_a_key_and_blocks() -> None:
    one, other = prompt_of(chat(LONG, "a")), prompt_of(chat(LONG, "b", temperature=1))
    assert one is not None
    assert other is not None
    assert one.key == other.key
    common = sum(mine == theirs for mine, theirs in zip(one.blocks, other.blocks, strict=False))
    assert common >= len(LONG) // 256


@pytest.mark.parametrize("field", ["model", "cache_salt"])
def test_models_and_salts_have_prompts_of_their_own(field: str) -> None:
    document = {"model": "m", "cache_salt": "s", "prompt": LONG}
    one, other = (prompt_of(json.dumps({**document, field: value}).encode()) for value in ("x", "y"))
    assert one is not None
    assert other is not None
    assert one.key != other.key
    assert not set(one.blocks) & set(other.blocks)


def test_a_line_that_changes_with_each_request_does_not_count() -> None:
    one, other = (
        prompt_of(chat(f"x-anthropic-billing-header: cc_version=2; cch={number};\n{LONG}")) for number in ("1a", "2b")
    )
    assert one is not None
    assert other is not None
    assert one.key == other.key


@pytest.mark.parametrize("document", [{}, {"model": "m"}, [], "text"])
def test_other_documents_have_no_prompt(document: object) -> None:
    assert prompt_of(json.dumps(document).encode()) is None


@pytest.mark.parametrize(("number", "found"), [(0, b""), (7, b"7"), ("", b""), ("seven", b'"seven"')])
def test_sequences_of_json(number: object, found: bytes) -> None:
    head = json.dumps({"parameters": {"sequence_id": number, "sequence_start": True}, "inputs": []}).encode()
    assert sequence_of_json(head, 0) == found
    assert sequence_of_json(head + b"\0" * 100_000, len(head)) == found
    behind = json.dumps({"inputs": [0] * 10_000, "parameters": {"sequence_id": number}}).encode()
    assert sequence_of_json(behind, 0) == found


def test_sequences_of_messages() -> None:
    def of(**value: Any) -> bytes:
        request = pb.ModelInferRequest(model_name="m", raw_input_contents=[b"\1" * 100])
        request.parameters["sequence_id"].CopyFrom(pb.InferParameter(**value))
        return sequence_of_message(b"\0\0\0\0\0" + request.SerializeToString())

    found = [of(int64_param=7), of(int64_param=300), of(string_param="seven"), of(uint64_param=1 << 60)]
    assert len(set(found)) == 4
    assert all(found)
    assert of(int64_param=0) == of(string_param="") == b""
    assert sequence_of_message(pb.ModelInferRequest(model_name="m").SerializeToString()) == b""


def endpoints(*names: str) -> EndpointSet:
    made = EndpointSet()
    made.update([Member(name) for name in names])
    return made


def test_what_was_learned_wins_where_it_is_longer() -> None:
    one, two, three = list(endpoints("a", "b", "c").endpoints)
    learned: LearnedPrefixes[Endpoint] = LearnedPrefixes()
    learned.learn([1, 2, 3, 4, 5, 6], two)
    learned.learn([1, 2], one)
    everyone = [one, two, three]
    assert learned.better([1, 2, 3, 4, 5, 6, 7], three, everyone) is two
    assert learned.better([1, 2, 3, 4, 5, 6, 7], one, everyone) is two
    assert learned.better([1, 2, 3, 4, 5, 6, 7], two, everyone) is None
    assert learned.better([1, 2, 3], three, everyone) is None
    assert learned.better([1, 2, 3, 4, 5], one, everyone) is None
    assert learned.better([1, 2, 3, 4, 5, 6], three, [one, three]) is None


def test_what_is_learned_has_a_bound() -> None:
    (one,) = endpoints("a").endpoints
    learned: LearnedPrefixes[Endpoint] = LearnedPrefixes(max_bytes=256 * 10)
    learned.learn(range(8), one)
    learned.learn(range(100, 108), one)
    assert len(learned) == 10
    assert learned.better(range(100, 108), next(iter(endpoints("b").endpoints)), [one]) is one


def test_routers_agree_on_sessions_and_few_move() -> None:
    names = [f"http://10.0.0.{number}:8000" for number in range(10)]
    ours, theirs = endpoints(*names), endpoints(*reversed(names))
    keys = [b"%d" % number for number in range(300)]

    def places(routed: EndpointSet) -> list[str]:
        return [routed.choose(key=key, is_bounded=False).address for key in keys]

    before = places(ours)
    assert before == places(theirs)
    for endpoint in list(ours.endpoints)[:5]:
        ours.begin(endpoint)
    assert places(ours) == before
    ours.update([Member(name, EndpointState.DRAINING if name == names[3] else EndpointState.READY) for name in names])
    after = places(ours)
    assert names[3] not in after
    assert [one for one, other in zip(before, after, strict=True) if one != other] == [names[3]] * before.count(
        names[3]
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "a router needs its replicas"),
        (["--to=http://a:1", "--discover=dns://b:1"], "not both"),
        (["--to=http://a:1", "--affinity=magic"], "--affinity expects one of prefix, session, none"),
        (["--to=http://a:1", "--model-repository=x"], "unknown flag '--model-repository'"),
        (["--to=http://a:1", "--replica-cert=/none"], "there is no file '/none'"),
        (["--to=http://a:1", "--http-prot=1"], "did you mean '--http-port'"),
        (["--to=http://a:1", "--allow-http=false", "--allow-grpc=false"], "leaves nothing to serve"),
    ],
)
def test_bad_flags(words: list[str], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message.replace("(", r"\(")):
        resolve_router_options(words, {})


def test_replicas_come_from_words_flags_and_variables() -> None:
    assert resolve_router_options(["a:1", "--to=https://b:2, c:3"], {}).routing.addresses == (
        "http://a:1",
        "https://b:2",
        "http://c:3",
    )
    from_environment = resolve_router_options([], {"MODELSERVER_TO": "a:1;b:2", "MODELSERVER_HTTP_PORT": "9"})
    assert from_environment.routing.addresses == ("http://a:1", "http://b:2")
    assert from_environment.server.http_port == 9
