"""Short inference calls: which they are, that the core decodes them, and that nothing else differs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from support.echo import EchoModel
from support.fronts import Hop, hop, until
from support.grpc_calls import Call, RefusedError
from support.http_calls import LENGTH, Exchange, ask, binary_body, fp32, json_body

from modelserver.auth.access import Access, ApiGroup, Restriction
from modelserver.errors import ServerError
from modelserver.pb import grpc_service_pb2 as pb
from modelserver.protocol.call import Method, UnaryCall
from modelserver.protocol.exchange import HttpExchange, HttpHandler
from modelserver.protocol.grpc_status import Status
from modelserver.protocol.kserve import INFER_PATH
from modelserver.protocol.response import HttpResponse
from modelserver.wire.processes.short_calls import MAX_SHORT_BYTES, MAX_SHORT_TEXT_BYTES, is_open

PATH = "/v2/models/echo/infer"
TEXT = json_body("INPUT", "FP32", [2], [1, 2])


class Asked(HttpHandler):
    """A frontend of either protocol that keeps what it is asked, and answers nothing by itself."""

    def __init__(self) -> None:
        self.exchanges: list[HttpExchange] = []
        self.calls: list[UnaryCall] = []
        self.methods = {INFER_PATH: Method(unary=self.calls.append)}

    def handle(self, exchange: HttpExchange) -> None:
        self.exchanges.append(exchange)

    def drain(self) -> None:
        pass


def message(values: Any, **fields: Any) -> bytes:
    data = np.asarray(values, np.float32)
    request = pb.ModelInferRequest(model_name="echo", raw_input_contents=[data.tobytes()], **fields)
    request.inputs.add(name="INPUT", datatype="FP32", shape=data.shape)
    encoded: bytes = request.SerializeToString()
    return encoded


def call(over: Hop, request: bytes, **details: Any) -> Call:
    made = Call(request, **details)
    handle = over.core.grpc.methods[INFER_PATH].unary
    assert handle is not None
    handle(made)
    return made


# Which calls they are.


def test_a_server_that_looks_at_its_callers_has_none() -> None:
    given = {
        "restrictions": (Restriction((ApiGroup.HEALTH, ApiGroup.INFERENCE), "key", "secret"),),
        "forward_pattern": "x-.*",
        "reads_context": True,
        "keys_file": "keys",
        "is_logged": True,
        "callers_by": "address",
        "objectives": (("batch", 2),),
    }
    assert set(given) == {field.name for field in dataclasses.fields(Access)}
    for name, value in given.items():
        assert not is_open(Access(**{name: value})), name
    assert is_open(Access())
    assert is_open(Access(restrictions=(Restriction((ApiGroup.HEALTH,), "key", "secret"),)))


async def test_the_core_sees_the_bytes_of_a_short_request_and_the_headers_that_it_reads() -> None:
    asked = Asked()
    async with hop(http=asked) as over:
        body, headers = binary_body([fp32("INPUT", np.arange(900))])
        exchange = Exchange("POST", PATH, {**headers, "host": "x", "cookie": "secret", "accept": "*/*"}, body)
        over.core.http.handle(exchange)
        await until(lambda: bool(asked.exchanges))
        (there,) = asked.exchanges
        assert (there.head.method, there.head.path, there.body) == ("POST", PATH, body)
        assert there.head.headers == {**headers, "accept": "*/*"}
        there.respond(HttpResponse(200, (("a", "b"),), (b"an", b"swer")))
        answer = await exchange.answer()
        assert (answer.status, answer.headers, answer.body) == (200, {"a": "b"}, b"answer")


async def test_only_routes_of_inference_have_short_requests() -> None:
    """Another API's path may end as they do; its handlers see all headers, and may answer by a stream."""
    asked = Asked()
    async with hop(http=asked) as over:
        exchange = Exchange("POST", "/score/echo/infer", {"cookie": "secret"}, TEXT)
        over.core.http.handle(exchange)
        await until(lambda: bool(asked.exchanges))
        (there,) = asked.exchanges
        assert there.head.headers == {"cookie": "secret"}
        there.respond(HttpResponse(200, (), (b"answer",)))
        assert (await exchange.answer()).body == b"answer"


@pytest.mark.parametrize(
    ("path", "headers", "body"),
    [
        (PATH, {"accept-encoding": "gzip"}, TEXT),
        (PATH, {"content-encoding": "identity"}, TEXT),
        (PATH, {LENGTH: "x"}, TEXT),
        (PATH, {LENGTH: "99999999999"}, TEXT),
        (PATH + "?" + "q" * 600, {}, TEXT),
        (PATH, {}, json_body("INPUT", "FP32", [300], [1.5] * 300)),
        (PATH, {LENGTH: str(2 * MAX_SHORT_TEXT_BYTES)}, b" " * 3 * MAX_SHORT_TEXT_BYTES),
        (PATH, binary_body([fp32("INPUT", np.arange(MAX_SHORT_BYTES // 4))])[1], b" " * (MAX_SHORT_BYTES + 1)),
    ],
)
async def test_other_infer_requests_are_decoded_in_the_front(path: str, headers: dict[str, str], body: bytes) -> None:
    asked = Asked()
    async with hop(EchoModel(), http=asked) as over:
        first, again = (Exchange("POST", path.partition("?")[0], headers, body) for _ in range(2))
        first.head.query = path.partition("?")[2]
        again.head = first.head
        for exchange in (first, again):
            over.core.http.handle(exchange)
            await exchange.answer()
        assert not asked.exchanges


async def test_large_messages_are_decoded_in_the_front() -> None:
    asked = Asked()
    async with hop(EchoModel(), grpc=asked) as over:
        reply = pb.ModelInferResponse.FromString(await call(over, message(np.arange(MAX_SHORT_BYTES // 4))).answer())
        assert len(reply.raw_output_contents[0]) == MAX_SHORT_BYTES
        assert not asked.calls


async def test_who_asks_little_and_is_told_much_is_answered_by_the_front_from_then_on() -> None:
    asked = Asked()
    async with hop(EchoModel(), http=asked) as over:
        exchange = Exchange("POST", PATH, {}, TEXT)
        over.core.http.handle(exchange)
        await until(lambda: bool(asked.exchanges))
        much = b"x" * (1 << 20)
        asked.exchanges.pop().respond(HttpResponse(200, (), (much[1:], memoryview(b"x"))))
        assert (await exchange.answer()).body == much
        again = Exchange("POST", PATH, {}, TEXT)
        again.head = exchange.head
        over.core.http.handle(again)
        assert (await again.answer()).json()["outputs"][0]["data"] == [1, 2]
        assert not asked.exchanges


# What becomes of them.


async def test_more_heads_than_are_remembered() -> None:
    async with hop(EchoModel()) as over:
        for number in range(1100):
            headers = {"x-envoy-expected-rq-timeout-ms": str(100_000 + number)}
            answer = await ask(over.core.http, "POST", PATH, TEXT, headers)
            assert answer.json()["outputs"][0]["data"] == [1, 2]


async def test_answers_with_headers_of_all_kinds() -> None:
    """As many as are remembered and more, of equal and of other statuses."""
    asked = Asked()
    async with hop(http=asked) as over:
        for number in range(2200):
            exchange = Exchange("POST", PATH, {}, TEXT)
            over.core.http.handle(exchange)
            await until(lambda: bool(asked.exchanges))
            status, pairs = 200 + number % 3, [("number", str(number // 2))]
            asked.exchanges.pop().respond(HttpResponse(status, pairs if number % 2 else tuple(pairs), (b"{}",)))
            answer = await exchange.answer()
            assert (answer.status, answer.headers) == (status, dict(pairs))


@pytest.mark.parametrize("size", [0, 1, 1000, 100_000])
async def test_short_requests_with_answers_of_any_size(size: int) -> None:
    model = EchoModel()

    def respond(request: Any) -> Any:
        request.inputs["INPUT"].data = np.resize(np.float32([1, 2]), size)
        return EchoModel._echo(model, request)

    model.respond = respond
    async with hop(model) as over:
        for _ in range(3):
            reply = pb.ModelInferResponse.FromString(await call(over, message([1, 2], id="x")).answer())
            assert (reply.id, len(reply.raw_output_contents[0])) == ("x", 4 * size)
            answer = await ask(over.core.http, "POST", PATH, TEXT)
            assert len(answer.json()["outputs"][0]["data"]) == size


async def test_a_deadline_crosses_and_a_client_that_leaves_is_told_to_the_model() -> None:
    model = EchoModel(holds=True)
    async with hop(model) as over:
        made = call(over, message([1, 2]), deadline_ns=1 << 62)
        exchange = Exchange("POST", PATH, {}, TEXT)
        over.core.http.handle(exchange)
        await until(lambda: len(model.held) == 2)
        first, second = model.held
        assert (first.deadline_ns, second.deadline_ns) == (1 << 62, None)
        assert (over.session.num_inflight, over.core.num_inflight) == (2, 2)
        assert made.on_cancel is not None
        assert exchange.on_disconnect is not None
        made.on_cancel()
        exchange.on_disconnect()
        await until(lambda: model.cancelled == [first, second])
        with pytest.raises(RefusedError, match="cancelled"):
            await made.answer()
        await exchange.answer()
        # In vain: both have been answered.
        made.on_cancel()
        exchange.on_disconnect()


async def test_an_error_that_has_no_utf8_costs_no_other_call_anything() -> None:
    model = EchoModel(holds=True)
    async with hop(model) as over:
        fine = [call(over, message([number, 0])) for number in range(3)]
        await until(lambda: len(model.held) == 3)
        model.refuses = ServerError("no file '\udcff'")
        broken = call(over, message([1, 2]))
        with pytest.raises(RefusedError, match=r"no file '\?'") as caught:
            await broken.answer()
        assert caught.value.status is Status.UNKNOWN
        assert "no file" in (await ask(over.core.http, "POST", PATH, TEXT)).error
        for request in list(model.held):
            model.release(request)
        for made in fine:
            await made.answer()


async def test_the_end_of_a_front_cancels_its_short_calls() -> None:
    model = EchoModel(holds=True)
    async with hop(model) as over:
        call(over, message([1, 2]))
        over.core.http.handle(Exchange("POST", PATH, {}, TEXT))
        await until(lambda: len(model.held) == 2)
        held = list(model.held)
        over.core.link.close()
        await until(lambda: bool(over.lost))
        over.session.close()
        assert model.cancelled == held
        over.core._short._calls.clear()


async def test_calls_of_all_kinds_at_once_get_their_own_answers() -> None:
    async with hop(EchoModel()) as over:

        async def ask_http(number: int) -> None:
            answer = await ask(over.core.http, "POST", PATH, json_body("INPUT", "FP32", [1], [number], id=str(number)))
            document = answer.json()
            assert (document["id"], document["outputs"][0]["data"]) == (str(number), [number])

        async def ask_grpc(number: int) -> None:
            values = np.full(1 + 40 * (number % 60), number)  # short ones and others
            reply = pb.ModelInferResponse.FromString(await call(over, message(values, id=str(number))).answer())
            assert (reply.id, reply.raw_output_contents[0]) == (str(number), values.astype(np.float32).tobytes())

        await asyncio.gather(*(ask_http(number) for number in range(200)), *(ask_grpc(number) for number in range(200)))


async def test_what_is_wrong_with_a_short_request_is_told_as_by_the_core_alone() -> None:
    async with hop(EchoModel()) as over:
        assert over.local.http is not None
        for body in (b"", b"{", json.dumps({"inputs": []}).encode(), json_body("INPUT", "FP32", [2], ["a", 1])):
            there = await ask(over.core.http, "POST", PATH, body)
            assert there == await ask(over.local.http, "POST", PATH, body)
            assert there.status == 400
