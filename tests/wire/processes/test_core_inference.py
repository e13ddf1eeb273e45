"""Inference across the hop: what goes in comes out, whatever it is, and what ends early ends on both sides."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.echo import EchoModel
from support.fronts import Hop, hop, until
from support.integrity import check_integrity

from modelserver.core.datatype import Datatype
from modelserver.core.element_arrays import SLICE_ELEMENTS
from modelserver.core.request import InFlightRequest, RequestForm
from modelserver.core.response import InferResponse, ResponseStream
from modelserver.core.tensor import Tensor
from modelserver.errors import ErrorCode, InvalidArgumentError, ServerError, UnavailableError
from modelserver.wire.processes.link import INLINE_BYTES


def request(data: Any, datatype: Datatype | None = None, **fields: Any) -> InFlightRequest:
    array = np.asarray(data)
    tensor = Tensor("INPUT", datatype or Datatype.from_numpy(array.dtype), array)
    return InFlightRequest(model_name="echo", version=None, inputs={"INPUT": tensor}, **fields)


async def infer(over: Hop, asked: InFlightRequest) -> InferResponse:
    return await over.core.dataplane.infer(asked).only()


def filled(datatype: Datatype, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Elements that differ."""
    count = int(np.prod(shape))
    if datatype is Datatype.BYTES:
        elements = np.empty(count, object)
        elements[:] = [b"\x00\xff" * (index % 7) + str(index).encode() for index in range(count)]
        return elements.reshape(shape)
    raw = np.random.default_rng(count).integers(0, 2, count * (datatype.itemsize or 1), np.uint8)
    return raw.view(datatype.numpy).reshape(shape)


SHAPES = ((0,), (1,), (16,), (INLINE_BYTES // 8,), (INLINE_BYTES + 3,))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("datatype", Datatype)
async def test_every_datatype_crosses_both_ways(datatype: Datatype, shape: tuple[int, ...]) -> None:
    data = filled(datatype, shape)
    async with hop(EchoModel(datatype=datatype)) as over:
        response = await infer(over, request(data, datatype))
        (output,) = response.outputs
        assert (output.name, output.datatype, output.shape) == ("OUTPUT", datatype, shape)
        assert (
            output.data.tolist() == data.tolist()
            if datatype is Datatype.BYTES
            else (output.data.tobytes() == data.tobytes())
        )
        assert output.data.flags.aligned


@pytest.mark.parametrize("order", ["C", "F"])
async def test_arrays_that_do_not_lie_in_order_cross_in_order(order: Any) -> None:
    data = np.asarray(np.arange(12, dtype=np.float32).reshape(3, 4), order=order)[:, ::2]
    async with hop(EchoModel(dims=(-1, -1))) as over:
        response = await infer(over, request(data))
        np.testing.assert_array_equal(response.outputs[0].data, data)


async def test_all_that_a_request_says_reaches_the_model() -> None:
    model = EchoModel(holds=True)
    async with hop(model) as over:
        stream = over.core.dataplane.infer(
            request(
                np.float32([1]),
                id="näme\udc80",
                outputs=("OUTPUT",),
                parameters={"a": 1, "b": 2.5, "c": "text", "d": True, "e": -(1 << 63)},
                priority=3,
                timeout_us=5_000_000,
                deadline_ns=1 << 62,
                sequence_id="s",
                sequence_start=True,
                sequence_end=True,
            )
        )
        await until(lambda: bool(model.held))
        (held,) = model.held
        assert (held.id, held.outputs, held.priority, held.timeout_us) == ("näme\udc80", ("OUTPUT",), 3, 5_000_000)
        assert held.parameters == {"a": 1, "b": 2.5, "c": "text", "d": True, "e": -(1 << 63)}
        assert (held.deadline_ns, held.sequence_id, held.sequence_start, held.sequence_end) == (
            1 << 62,
            "s",
            True,
            True,
        )
        model.release(held)
        await stream.only()


async def test_the_answer_names_the_version_that_gave_it() -> None:
    async with hop(EchoModel(version=7)) as over:
        asked = request(np.float32([1]))
        await infer(over, asked)
        assert asked.version == 7


async def test_requests_of_one_form_are_told_apart_by_model() -> None:
    form = RequestForm()
    models = EchoModel("a", version=1), EchoModel("b", version=2)
    async with hop(*models) as over:
        for name, version in (("a", 1), ("b", 2), ("a", 1), ("b", 2)):
            asked = request(np.float32([version]), form=form)
            asked.model_name = name
            response = await infer(over, asked)
            assert (asked.version, response.outputs[0].data[0]) == (version, version)


async def test_requests_of_one_form_are_checked_once_and_carry_their_own_tensors(monkeypatch: Any) -> None:
    form = RequestForm()
    model = EchoModel()
    checked = []
    check = model.signature.check
    monkeypatch.setattr(model, "signature", _Recording(checked, check))
    async with hop(model) as over:
        for value in range(5):
            response = await infer(over, request(np.float32([value]), form=form, id=str(value)))
            assert response.outputs[0].data.tolist() == [value]
    assert len(checked) == 1


class _Recording:
    def __init__(self, checked: list[InFlightRequest], check: Any) -> None:
        self._checked = checked
        self._check = check

    def check(self, asked: InFlightRequest) -> None:
        self._checked.append(asked)
        self._check(asked)


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (InFlightRequest(model_name="none", version=None, inputs={}), ErrorCode.NOT_FOUND),
        (InFlightRequest(model_name="echo", version=9, inputs={}), ErrorCode.NOT_FOUND),
        (InFlightRequest(model_name="echo", version=None, inputs={}), ErrorCode.INVALID_ARGUMENT),
    ],
)
async def test_refusals_come_back_as_they_were(asked: InFlightRequest, code: ErrorCode) -> None:
    async with hop(EchoModel()) as over:
        with pytest.raises(ServerError) as caught:
            await infer(over, asked)
        assert caught.value.code is code


async def test_errors_of_models_come_back_as_they_were() -> None:
    model = EchoModel()
    model.respond = lambda _: [InferResponse(error=UnavailableError("not \udc80 now"))]
    async with hop(model) as over:
        with pytest.raises(ServerError, match="not \\? now") as caught:
            await infer(over, request(np.float32([1])))
        assert caught.value.code is ErrorCode.UNAVAILABLE


async def test_what_fails_unexpectedly_is_answered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = EchoModel()
    model.refuses = RuntimeError("a bug")
    async with hop(model) as over:
        with pytest.raises(ServerError, match="internal error: RuntimeError"):
            await infer(over, request(np.float32([1])))
    assert "a bug" in caplog.text


async def test_outputs_that_cannot_travel_end_the_request() -> None:
    model = EchoModel(datatype=Datatype.BYTES)
    wrong = np.empty(1, object)
    wrong[0] = 5
    model.respond = lambda _: [
        InferResponse([Tensor("OUTPUT", Datatype.BYTES, wrong)], is_final=False),
        InferResponse([Tensor("OUTPUT", Datatype.BYTES, wrong)]),
    ]
    async with hop(model) as over:
        with pytest.raises(ServerError, match="must be bytes or str"):
            await infer(over, request(np.array([b"x"], object)))


@pytest.mark.parametrize("parameters", [{"a": 1 << 64}, {"a": "\udc80"}])
async def test_requests_that_cannot_travel_are_refused_at_once(parameters: dict[str, Any]) -> None:
    async with hop(EchoModel()) as over:
        with pytest.raises(InvalidArgumentError):
            over.core.dataplane.infer(request(np.float32([1]), parameters=parameters))


async def test_a_decoupled_model_sends_any_number_of_responses_in_order() -> None:
    model = EchoModel()
    model.respond = lambda _: [
        *(
            InferResponse([Tensor("OUTPUT", Datatype.FP32, np.float32([n]))], parameters={"n": n}, is_final=False)
            for n in range(100)
        ),
        InferResponse(),
    ]
    async with hop(model) as over:
        responses = [response async for response in over.core.dataplane.infer(request(np.float32([1])))]
        assert [response.outputs[0].data[0] for response in responses[:-1]] == list(range(100))
        assert [response.parameters for response in responses[:-1]] == [{"n": n} for n in range(100)]
        assert (responses[-1].outputs, responses[-1].is_final) == ([], True)


def _texts(count: int) -> np.ndarray[Any, Any]:
    return filled(Datatype.BYTES, (count,))


async def test_responses_of_many_elements_are_not_overtaken() -> None:
    """Those are packed, and unpacked, beside the event loop."""
    sizes = [3 * SLICE_ELEMENTS, 1, 2 * SLICE_ELEMENTS, SLICE_ELEMENTS + 1, 2]
    model = EchoModel(datatype=Datatype.BYTES)
    model.respond = lambda _: [
        *(InferResponse([Tensor("OUTPUT", Datatype.BYTES, _texts(size))], is_final=False) for size in sizes),
        InferResponse(error=UnavailableError("no more")),
    ]
    async with hop(model) as over:
        *received, last = [response async for response in over.core.dataplane.infer(request(_texts(1)))]
        assert [response.outputs[0].data.size for response in received] == sizes
        for response in received:
            data = response.outputs[0].data
            assert data.tolist() == _texts(data.size).tolist()
        assert last.error is not None
        assert last.error.code is ErrorCode.UNAVAILABLE


async def test_requests_of_a_sequence_keep_their_order_whatever_their_sizes() -> None:
    sizes = [1 << 20, 1, 3 << 20, 2]
    model = EchoModel(holds=True)
    async with hop(model) as over:
        asked = [request(np.ones(size, np.float32), sequence_id=7) for size in sizes]
        streams = [over.core.dataplane.infer(each) for each in asked]
        await until(lambda: len(model.held) == len(sizes))
        assert [each.inputs["INPUT"].data.size for each in model.held] == sizes
        for each in model.held[:]:
            model.release(each)
        assert [(await stream.only()).outputs[0].data.size for stream in streams] == sizes


async def test_a_client_that_leaves_while_its_request_is_packed_is_answered() -> None:
    async with hop(EchoModel(datatype=Datatype.BYTES)) as over:
        asked = request(_texts(4 * SLICE_ELEMENTS))
        stream = over.core.dataplane.infer(asked)
        asked.cancel()
        with pytest.raises(ServerError) as caught:
            await stream.only()
        assert caught.value.code is ErrorCode.CANCELLED
        assert over.core.dataplane.num_inflight == 0
        assert (await infer(over, request(_texts(1)))).outputs[0].data.tolist() == _texts(1).tolist()


async def test_many_elements_that_cannot_travel_end_the_request() -> None:
    wrong = _texts(2 * SLICE_ELEMENTS)
    wrong[-1] = 5
    async with hop(EchoModel(datatype=Datatype.BYTES)) as over:
        with pytest.raises(ServerError, match="must be bytes or str"):
            await infer(over, request(wrong))
        assert over.core.dataplane.num_inflight == 0


class SlowReader(ResponseStream):
    reads_later = True


async def test_how_far_a_slow_reader_has_come_is_told_to_the_sender() -> None:
    model = EchoModel(holds=True)
    async with hop(model) as over:
        asked = request(np.float32([1]), stream=SlowReader())
        stream = over.core.dataplane.infer(asked)
        await until(lambda: bool(model.held))
        (held,) = model.held
        assert held.stream.reads_later
        num_read = 0

        def on_read() -> None:
            nonlocal num_read
            num_read += 1

        held.stream.on_read = on_read
        for number in range(3):
            output = Tensor("OUTPUT", Datatype.FP32, np.float32([number]))
            held.stream.deliver(InferResponse([output], is_final=False))
        responses = aiter(stream)
        for number in range(3):
            await anext(responses)
            assert num_read == number
            stream.has_read()
            await until(lambda number=number: num_read == number + 1)
        model.release(held)
        await anext(responses)
        stream.has_read()  # of the last nobody wants to know


async def test_who_reads_at_once_tells_nobody() -> None:
    model = EchoModel(holds=True)
    async with hop(model) as over:
        stream = over.core.dataplane.infer(request(np.float32([1])))
        await until(lambda: bool(model.held))
        assert not model.held[0].stream.reads_later
        model.release(model.held[0])
        await stream.only()


async def test_a_client_that_leaves_cancels_its_request_in_the_core() -> None:
    model = EchoModel(holds=True)
    async with hop(model) as over:
        asked = request(np.float32([1]))
        stream = over.core.dataplane.infer(asked)
        await until(lambda: bool(model.held))
        asked.cancel()
        with pytest.raises(ServerError) as caught:
            await stream.only()
        assert caught.value.code is ErrorCode.CANCELLED
        assert len(model.cancelled) == 1


async def test_a_cancel_that_comes_too_late_changes_nothing() -> None:
    async with hop(EchoModel()) as over:
        asked = request(np.float32([1]))
        await infer(over, asked)
        asked.cancel()
        await infer(over, request(np.float32([2])))


async def test_the_end_of_a_front_cancels_what_it_asked() -> None:
    model = EchoModel(holds=True)
    async with hop(model) as over:
        kept = [request(np.zeros(INLINE_BYTES, np.float32)) for _ in range(3)]
        for asked in kept:
            over.core.dataplane.infer(asked)
        await until(lambda: len(model.held) == 3)
        held = list(model.held)
        over.core.link.close()
        await until(lambda: bool(over.lost))
        over.session.close()
        assert len(model.cancelled) == 3
        assert over.session.num_inflight == 0
        # What the model still holds of the front's memory stays readable.
        assert all(each.inputs["INPUT"].data.sum() == 0 for each in held)
        over.core.dataplane._requests.clear()


async def test_the_end_of_the_core_is_told() -> None:
    async with hop(EchoModel()) as over:
        over.session.close()
        await until(lambda: over.graces == [0.0])


async def test_large_tensors_leave_their_memory_when_they_are_dead() -> None:
    async with hop(EchoModel()) as over:
        for _ in range(50):
            large = [request(np.full(1 << 18, n, np.float32)) for n in range(4)]
            responses = await asyncio.gather(*(infer(over, asked) for asked in large))
            for n, response in enumerate(responses):
                assert response.outputs[0].data[[0, -1]].tolist() == [n, n]
            del large, responses, response
        gc.collect()
        arenas = [link._arena for link in (over.core.link, over.session._link)]

        def is_told() -> bool:
            """News of the last ones went there and back."""
            over.core.link.tidy()
            over.session.silence_s(0.0)
            return all(arena.num_leases == 0 and arena.buffer.nbytes <= 16 << 20 for arena in arenas)

        await until(is_told)
        for arena in arenas:
            check_integrity(arena)


@settings(max_examples=60)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 16, 1000, 20_000, 70_000, 300_000]), min_size=1, max_size=60),
    formed=st.booleans(),
)
def test_any_mix_of_requests_comes_back_to_who_asked(sizes: list[int], formed: bool) -> None:
    async def check() -> None:
        forms = {size: RequestForm() for size in sizes}
        async with hop(EchoModel()) as over:
            asked = [
                request(np.full(size, number, np.float32), form=forms[size] if formed else None)
                for number, size in enumerate(sizes)
            ]
            responses = await asyncio.gather(*(infer(over, each) for each in asked))
            for number, (size, response) in enumerate(zip(sizes, responses, strict=True)):
                data = response.outputs[0].data
                assert data.shape == (size,)
                assert (data == number).all()

    asyncio.run(check())
