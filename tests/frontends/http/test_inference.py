from __future__ import annotations

import asyncio
import gc
import gzip
import weakref
import zlib
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.echo import EchoModel, echo_dataplane
from support.http_calls import LENGTH, Exchange, ask, ask_now, binary_body, fp32, json_body

from modelserver.app.frontends import http_frontend
from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, ResponseStream
from modelserver.core.tensor import Tensor
from modelserver.errors import InternalError, UnavailableError
from modelserver.frontends.http.frontend import HttpFrontend
from modelserver.protocol.limits import HttpLimits

INFER = "/v2/models/echo/infer"


def _frontend(*models: EchoModel, **limits: Any) -> HttpFrontend:
    return http_frontend(echo_dataplane(*models), cast("Any", None), HttpLimits(**limits))


def _instant(model: EchoModel) -> EchoModel:
    """Make the model answer before `submit` returns."""

    def submit(request: InFlightRequest) -> ResponseStream:
        for response in model.respond(request):
            request.stream.deliver(response)
        return request.stream

    cast("Any", model).submit = submit
    return model


async def test_json_in_json_out_byte_for_byte() -> None:
    answer = await ask(_frontend(EchoModel()), "POST", INFER, json_body("INPUT", "FP32", [3], [1, 2.5, -3], id="a"))
    assert answer.status == 200
    assert answer.headers == {"content-type": "application/json"}
    assert answer.body == (
        b'{"model_name":"echo","model_version":"1","id":"a","outputs":['
        b'{"name":"OUTPUT","datatype":"FP32","shape":[3],"data":[1.0,2.5,-3.0]}]}'
    )


@pytest.mark.parametrize("path", [INFER, INFER + "/", "/v2/models/echo/versions/1/infer"])
async def test_binary_in_binary_out(path: str) -> None:
    body, headers = binary_body([fp32("INPUT", [1, 2])], parameters={"binary_data_output": True})
    answer = await ask(_frontend(EchoModel()), "POST", path, body, headers)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/octet-stream")
    assert np.frombuffer(answer.blobs, "<f4").tolist() == [1, 2]


async def test_calls_with_one_head_are_answered_each_for_itself() -> None:
    def called(frontend: HttpFrontend, exchange: Exchange) -> object:
        frontend.handle(exchange)
        answer = exchange.answer_now()
        return answer.status, answer.headers, answer.body

    frontend = http_frontend(echo_dataplane(_instant(EchoModel())), cast("Any", None))
    parameters = {"binary_data_output": True}
    calls = [
        binary_body([fp32("INPUT", values)], id=request_id, parameters=parameters)
        for values, request_id in (([1, 2], "a"), ([1, 2], "a"), ([3, 4], "a"), ([5, 6], "b"), ([7, 8], "a"))
    ]
    wrong = binary_body([fp32("INPXX", [1, 2])], id="a", parameters=parameters)
    shared = Exchange("POST", INFER, calls[0][1]).head
    for body, headers in (*calls, wrong, calls[2], (b"{" * len(wrong[0]), wrong[1]), calls[3], calls[3]):
        assert len(body) == len(calls[0][0]), "so that each has the same head"
        exchange = Exchange("POST", INFER, headers, body)
        alone = called(http_frontend(echo_dataplane(_instant(EchoModel())), cast("Any", None)), exchange)
        for view in (bytes(body), bytearray(body), memoryview(body)):
            exchange = Exchange("POST", INFER, headers, view)
            exchange.head = shared
            assert called(frontend, exchange) == alone
    assert shared.memo is not None, "the head was read once"


@pytest.mark.parametrize("datatype", list(Datatype))
async def test_every_datatype_through_the_data_plane(datatype: Datatype) -> None:
    elements = [b"a\0b", b"", b"\xff"] if datatype is Datatype.BYTES else [0, 1, 1]
    body, headers = binary_body(
        [Tensor("INPUT", datatype, np.array(elements, datatype.numpy))], parameters={"binary_data_output": True}
    )
    answer = await ask(_frontend(EchoModel(datatype=datatype)), "POST", INFER, body, headers)
    assert answer.status == 200, answer.body
    assert answer.json()["outputs"][0]["datatype"] == datatype.value
    assert answer.blobs == body[int(headers[LENGTH]) :]


async def test_raw_mode() -> None:
    frontend = _frontend(EchoModel(dims=(-1,), max_batch_size=4))
    answer = await ask(frontend, "POST", INFER, np.arange(3, dtype="<f4").tobytes(), {LENGTH: "0"})
    assert answer.json()["outputs"][0]["shape"] == [1, 3]
    assert np.frombuffer(answer.blobs, "<f4").tolist() == [0, 1, 2]


@pytest.mark.parametrize("length", ["-1", "abc", "1.5", "", "99999", "9" * 30, "٣"])
async def test_wrong_header_lengths(length: str) -> None:
    answer = await ask(_frontend(EchoModel()), "POST", INFER, b"{}", {LENGTH: length})
    assert answer.status == 400
    assert "Inference-Header-Content-Length" in answer.error


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
@pytest.mark.parametrize("count", [3, 5000])
async def test_compressed_both_ways(encoding: str, pack: Callable[[bytes], bytes], count: int) -> None:
    body, headers = binary_body([fp32("INPUT", np.arange(count))], parameters={"binary_data_output": True})
    headers |= {"content-encoding": encoding, "accept-encoding": encoding}
    answer = await ask(_frontend(EchoModel()), "POST", INFER, pack(body), headers)
    assert answer.headers["content-encoding"] == encoding
    plain = gzip.decompress(answer.body) if encoding == "gzip" else zlib.decompress(answer.body)
    assert np.frombuffer(plain[int(answer.headers[LENGTH]) :], "<f4").tolist() == list(range(count))


async def test_an_unknown_encoding_is_told_the_known_ones() -> None:
    answer = await ask(_frontend(EchoModel()), "POST", INFER, b"x", {"content-encoding": "br"})
    assert (answer.status, answer.headers["accept-encoding"]) == (501, "gzip, deflate")


async def test_the_body_limit_holds_for_plain_and_decompressed_bodies() -> None:
    body = json_body("INPUT", "FP32", [1], [1]) + b" " * 1000
    frontend = _frontend(EchoModel(), max_body_bytes=len(body))
    assert (await ask(frontend, "POST", INFER, body)).status == 200
    assert (await ask(frontend, "POST", INFER, body + b" ")).status == 413
    headers = {"content-encoding": "gzip"}
    assert (await ask(frontend, "POST", INFER, gzip.compress(body), headers)).status == 200
    answer = await ask(frontend, "POST", INFER, gzip.compress(body + b" "), headers)
    assert answer.status == 413
    assert "--http-max-input-size" in answer.error


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (json_body("INPUT", "FP64", [1], [1]), "data-type"),
        (json_body("INPUT", "FP32", [1, 1], [1]), "unexpected shape"),
        (json_body("WRONG", "FP32", [1], [1]), "'WRONG'"),
        (json_body("INPUT", "FP32", [1], [1], outputs=[{"name": "WRONG"}]), "'WRONG'"),
        (b'{"inputs":[]}', "missing"),
    ],
)
async def test_what_does_not_suit_the_model(body: bytes, message: str) -> None:
    answer = await ask(_frontend(EchoModel()), "POST", INFER, body)
    assert answer.status == 400
    assert message in answer.error


@pytest.mark.parametrize(
    ("error", "status"), [(UnavailableError("full"), 503), (InternalError("full"), 500), (KeyError("x"), 500)]
)
async def test_refusals_and_failures_of_the_model(error: Exception, status: int) -> None:
    model = EchoModel()
    model.refuses = error
    body = json_body("INPUT", "FP32", [1], [1])
    assert (await ask(_frontend(model), "POST", INFER, body)).status == status


async def test_an_error_response() -> None:
    model = EchoModel()
    model.respond = lambda request: [InferResponse(error=InternalError("it broke " * 100))]
    headers = {"accept-encoding": "gzip"}  # tritonclient does not decompress errors
    answer = await ask(_frontend(model), "POST", INFER, json_body("INPUT", "FP32", [1], [1]), headers)
    assert (answer.status, answer.error) == (500, "it broke " * 100)


async def test_nothing_of_a_request_stays_in_memory_after_its_answer() -> None:
    model = EchoModel(holds=True)
    frontend = _frontend(model)
    gc.disable()
    try:
        asking = asyncio.ensure_future(ask(frontend, "POST", INFER, json_body("INPUT", "FP32", [1], [1])))
        await asyncio.sleep(0)
        data = weakref.ref(model.held[0].inputs["INPUT"].data)
        model.release(model.held[0])
        assert (await asking).status == 200
        assert data() is None
    finally:
        gc.enable()


async def test_an_output_without_json_form_is_the_caller_s_to_mend() -> None:
    model = EchoModel(datatype=Datatype.FP16)
    body, headers = binary_body([Tensor("INPUT", Datatype.FP16, np.ones(2, np.float16))])
    answer = await ask(_frontend(model), "POST", INFER, body, headers)
    assert answer.status == 400
    assert "binary_data" in answer.error


@pytest.mark.parametrize(
    ("num_responses", "ends_empty", "status"), [(1, True, 200), (0, True, 200), (2, True, 501), (2, False, 501)]
)
async def test_a_decoupled_model_may_answer_once(num_responses: int, ends_empty: bool, status: int) -> None:
    model = EchoModel()
    responses = [InferResponse([fp32("OUTPUT", [index])], is_final=False) for index in range(num_responses)]
    model.respond = lambda request: responses + ([InferResponse()] if ends_empty else [])
    answer = await ask(_frontend(model), "POST", INFER, json_body("INPUT", "FP32", [1], [1]))
    assert answer.status == status
    if status == 200:
        assert [row["data"] for row in answer.json()["outputs"]] == [[0.0]] * num_responses


async def test_a_client_that_leaves_cancels_its_request() -> None:
    model = EchoModel(holds=True)
    exchange = Exchange("POST", INFER, {}, json_body("INPUT", "FP32", [1], [1]))
    _frontend(model).handle(exchange)
    assert exchange.on_disconnect is not None
    exchange.on_disconnect()
    assert len(model.cancelled) == 1
    assert exchange.answer_now().status == 400


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=300)
@given(
    data=st.data(),
    length=st.none() | st.integers(-1, 300).map(str) | st.sampled_from(("0", "x")),
    encoding=st.sampled_from((None, None, None, "gzip", "deflate", "br")),
)
def test_no_body_whatever_makes_a_500(data: st.DataObject, length: str | None, encoding: str | None) -> None:
    binary, headers = binary_body([fp32("INPUT", [1, 2])], outputs=[{"name": "OUTPUT"}], parameters={"priority": 1})
    text = json_body("INPUT", "FP32", [2], [[1, 2]], id="x")
    body = bytearray(data.draw(st.sampled_from((binary, text)) | st.binary(max_size=50)))
    for _ in range(data.draw(st.integers(0, 4))):
        position = data.draw(st.integers(0, len(body)))
        junk = st.sampled_from((b"", b"[", b"NaN", b"-1", b"1e999", b'"', b"{", b"null", b"\xff", b"\\ud800", b"2"))
        body[position : position + data.draw(st.integers(0, 5))] = data.draw(junk)
    if length is not None:
        headers = {LENGTH: length}
    elif data.draw(st.booleans()):
        headers = {}
    if encoding is not None:
        headers["content-encoding"] = encoding
    answer = ask_now(_frontend(_instant(EchoModel())), "POST", INFER, bytes(body), headers)
    assert answer.status in (200, 400, 404, 413, 501), answer.body
    assert answer.status == 200 or answer.error
