"""Python models that call other models on the same server; asked over both protocols."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from support.clients import Array, ClientError, GrpcClient, ProtocolClient
from support.model_files import write_model
from support.serving import RunningServer, running_server
from support.waiting import until_true

pytestmark = pytest.mark.one_layout

IO = """
backend: "{backend}"
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }} ]
instance_group [ {{ kind: KIND_CPU count: {count} }} ]
{more}
"""
HEAD = """
import asyncio
import json
import multiprocessing
import threading
import time
import numpy as np
import triton_python_backend_utils as pb_utils


def array(request):
    return pb_utils.get_input_tensor_by_name(request, "X").as_numpy()


def respond(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.asarray(value, np.float32).reshape(-1))])


def ask(name, data, **more):
    return pb_utils.InferenceRequest(
        model_name=name, requested_output_names=["Y"], inputs=[pb_utils.Tensor("X", data)], **more
    )


def only(response):
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return pb_utils.get_output_tensor_by_name(response, "Y").as_numpy()

"""
ADDER = """
class TritonPythonModel:
    def execute(self, requests):
        return [respond(array(request) + 1) for request in requests]
"""
REPEATER = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for value in array(request):
                sender.send(respond(value))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
# Waits until its caller has left, and counts that.
PATIENT = """
class TritonPythonModel:
    def initialize(self, args):
        kind = pb_utils.MetricFamily.COUNTER
        family = pb_utils.MetricFamily("patient_cancelled", "requests that were cancelled", kind)
        self.family = family
        self.cancelled = family.Metric(labels={"model": "patient"})

    def execute(self, requests):
        for request in requests:
            for _ in range(2000):
                if request.is_cancelled():
                    self.cancelled.increment(1)
                    break
                time.sleep(0.005)
        return [respond(0) for _ in requests]
"""
# Sends numbers for as long as somebody wants them; how many, the other one tells.
FLOOD = """
class TritonPythonModel:
    def initialize(self, args):
        family = pb_utils.MetricFamily("flood_sent", "responses", pb_utils.MetricFamily.GAUGE)
        self.family = family
        self.sent = family.Metric(labels={})

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            value = 0
            while not sender.is_cancelled():
                sender.send(respond(value))
                value += 1
                self.sent.set(value)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
FLOOD_METER = """
class TritonPythonModel:
    def initialize(self, args):
        family = pb_utils.MetricFamily("flood_sent", "responses", pb_utils.MetricFamily.GAUGE)
        self.family = family
        self.sent = family.Metric(labels={})

    def execute(self, requests):
        return [respond(self.sent.value()) for _ in requests]
"""
# One call for all requests of a batch.
TOGETHER = """
class TritonPythonModel:
    def execute(self, requests):
        answer = only(ask("patient", array(requests[0]).reshape(-1)).exec())
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", answer.reshape(1, -1))]) for _ in requests]
"""
# Does what the parameter `do` says with the input.
CALLER = '''
class TritonPythonModel:
    def execute(self, requests):
        return [getattr(self, json.loads(request.parameters())["do"])(request, array(request)) for request in requests]

    def once(self, request, data):
        return respond(only(ask("adder", data).exec()))

    def many_in_threads(self, request, data):
        results = [None] * 8
        def call(index):
            for _ in range(5):
                results[index] = only(ask("adder", data + index).exec())
        threads = [threading.Thread(target=call, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return respond(np.concatenate(results))

    def many_awaited(self, request, data):
        async def gather():
            return await asyncio.gather(*(ask("adder", data + index).async_exec() for index in range(8)))
        return respond(np.concatenate([only(response) for response in asyncio.run(gather())]))

    def stream(self, request, data):
        responses = ask("repeater", data).exec(decoupled=True)
        return respond([value for response in responses for value in values(response)])

    def stream_awaited(self, request, data):
        async def read():
            responses = await ask("repeater", data).async_exec(decoupled=True)
            return [value async for response in responses for value in values(response)]
        return respond(asyncio.run(read()))

    def streams_read_in_turn(self, request, data):
        """Both calls wait at once, although each coroutine reads its responses without awaiting them."""
        async def read(number):
            responses = await ask("meeting", data).async_exec(decoupled=True)
            return [value for response in responses for value in values(response)]
        async def both():
            return await asyncio.gather(read(1), read(2))
        return respond(np.concatenate(asyncio.run(both())))

    def stop_reading(self, request, data):
        responses = ask("repeater", data).exec(decoupled=True)
        first = only(next(responses))
        responses.cancel()
        return respond(first)

    def cancelled(self, request, data):
        """What is read after `cancel`: what was there, and then an error."""
        responses = ask("flood", data).exec(decoupled=True)
        next(responses)
        responses.cancel()
        left = list(responses)
        codes = [part.error().code() for part in left if part.has_error()]
        assert not any(part.has_error() for part in left[:-1])
        return respond([codes == [pb_utils.TritonError.CANCELLED], list(responses) == []])

    def cancelled_awaited(self, request, data):
        async def read():
            responses = await ask("flood", data).async_exec(decoupled=True)
            await anext(responses)
            responses.cancel()
            return [part async for part in responses]
        last = asyncio.run(read())[-1]
        return respond([last.error().code() == pb_utils.TritonError.CANCELLED])

    def cancelled_elsewhere(self, request, data):
        """A thread that waits for a response is woken, and long before the other model would answer."""
        begin_s = time.monotonic()
        responses = ask("patient", data).exec(decoupled=True)
        threading.Timer(0.1, responses.cancel).start()
        codes = [part.error().code() for part in responses]
        return respond([codes == [pb_utils.TritonError.CANCELLED], time.monotonic() - begin_s < 9])

    def pool(self, request, data):
        """Workers that are forked cannot call, and say so."""
        with multiprocessing.get_context("fork").Pool(2) as pool:
            try:
                pool.map(call_elsewhere, [1, 2])
            except pb_utils.TritonModelException as error:
                assert "forked copy" in str(error), error
                return respond([1])
        return respond([0])

    def read_slowly(self, request, data):
        responses = ask("flood", data).exec(decoupled=True)
        first = [only(next(responses))[0] for _ in range(3)]
        num_sent = 0
        while num_sent != (now := only(ask("flood_meter", data).exec())[0]):
            assert now < 100_000, "it does not wait for who reads"
            num_sent = now
            time.sleep(0.2)
        rest = [only(next(responses))[0] for _ in range(400)]
        responses.cancel()
        assert first + rest == list(range(403)), "in order, without a gap"
        return respond(num_sent)

    def forgotten_decoupled(self, request, data):
        return respond(only(ask("repeater", data).exec()))

    def as_pybind(self, request, data):
        """What Triton takes too: bytes for text, integers and texts of NumPy's."""
        call = pb_utils.InferenceRequest(
            model_name=b"adder", requested_output_names=np.array(["Y"]), inputs=[pb_utils.Tensor(b"X", data)],
            request_id=np.str_("a"), model_version=np.int64(1), flags=np.int32(0), timeout=np.uint64(0),
            parameters={np.str_("key"): np.float64(0.5)},
        )
        assert pb_utils.is_model_ready(b"adder", b"1")
        pb_utils.load_model(b"adder")
        family = pb_utils.MetricFamily(name=b"as_pybind", description=b"of bytes", kind=pb_utils.MetricFamily.COUNTER)
        family.Metric(labels={"a": "b"}).increment(1)
        lonely = pb_utils.MetricFamily("lonely", "soon gone", pb_utils.MetricFamily.GAUGE).Metric()
        for use in (lambda: lonely.increment(1), lambda: lonely.set(1), lonely.value):
            try:
                use()
                raise AssertionError("a metric without its family works")
            except pb_utils.TritonModelException as error:
                assert "Invalid metric operation as the corresponding 'MetricFamily' has been deleted." in str(error)
        pb_utils.Logger.log_verbose(b"of bytes")
        return respond(only(call.exec()))

    def unknown(self, request, data):
        response = ask("nobody", data).exec()
        return pb_utils.InferenceResponse(error=response.error())

    def wrong_input(self, request, data):
        response = ask("adder", data.astype(np.int64)).exec()
        return pb_utils.InferenceResponse(error=response.error())

    def failing(self, request, data):
        response = ask("caller", data, parameters={"do": "boom"}, model_version=1).exec()
        return pb_utils.InferenceResponse(error=response.error())

    def itself(self, request, data):
        response = ask("caller", data, parameters={"do": "once"}).exec()
        return pb_utils.InferenceResponse(error=response.error()) if response.has_error() else response

    def circle(self, request, data):
        return pb_utils.InferenceResponse(error=ask("other", data).exec().error())

    def patient(self, request, data):
        return respond(only(ask("patient", data).exec()))

    def impatient(self, request, data):
        responses = [ask("slow", data.reshape(1, -1), timeout=1000).async_exec() for _ in range(2)]
        async def gather():
            return await asyncio.gather(*responses)
        errors = [r.error().message() for r in asyncio.run(gather()) if r.has_error()]
        return pb_utils.InferenceResponse(error=pb_utils.TritonError("; ".join(errors)))

    def ready(self, request, data):
        asked = [("adder",), ("adder", "1"), ("adder", "7"), ("nobody",)]
        return respond([pb_utils.is_model_ready(*model) for model in asked])

    def control(self, request, data):
        tensor = {"data_type": "TYPE_FP32", "dims": [-1]}
        config = json.dumps(
            {"backend": "python", "input": [{"name": "X", **tensor}], "output": [{"name": "Y", **tensor}]}
        )
        source = b"""
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        outputs = [pb_utils.Tensor("Y", request.inputs()[0].as_numpy() * 3) for request in requests]
        return [pb_utils.InferenceResponse([output]) for output in outputs]
"""
        pb_utils.load_model("made", config, {"file:1/model.py": source})
        result = only(ask("made", data).exec())
        pb_utils.unload_model("made")
        return respond([*result, pb_utils.is_model_ready("made")])


def call_elsewhere(value):
    return only(ask("adder", np.array([value], np.float32)).exec())[0]


def values(response):
    return only(response) if response.output_tensors() or response.has_error() else []
'''
OTHER = """
class TritonPythonModel:
    def execute(self, requests):
        asked = [ask("caller", array(request), parameters={"do": "once"}).exec() for request in requests]
        return [pb_utils.InferenceResponse(error=response.error()) for response in asked]
"""
SLOW = """
class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.05)
        return [respond(0) for _ in requests]
"""
MEETING = """
class TritonPythonModel:
    def initialize(self, args):
        self.senders = []

    def execute(self, requests):
        self.senders += [request.get_response_sender() for request in requests]
        if len(self.senders) == 2:
            for sender in self.senders:
                sender.send(respond([1, 2]))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            self.senders = []
        return None
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
POLICY = "default_queue_policy { allow_timeout_override: true timeout_action: REJECT }"
TIMEOUTS = f"max_batch_size: 1 dynamic_batching {{ {POLICY} }}"
PAIRS = "max_batch_size: 2 dynamic_batching { preferred_batch_size: 2 max_queue_delay_microseconds: 20000000 }"
MODELS = {
    "adder": (ADDER, 1, ""),
    "repeater": (REPEATER, 1, DECOUPLED),
    "patient": (PATIENT, 1, ""),
    "caller": (CALLER, 1, ""),
    "pair": (CALLER.replace('"caller"', '"pair"'), 2, ""),
    "other": (OTHER, 1, ""),
    "slow": (SLOW, 1, TIMEOUTS),
    "flood": (FLOOD, 1, DECOUPLED),
    "meeting": (MEETING, 1, DECOUPLED),
    "flood_meter": (FLOOD_METER, 1, ""),
    "together": (TOGETHER, 1, PAIRS),
}


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("bls")
    for name, (source, count, more) in MODELS.items():
        directory = write_model(root, name, IO.format(backend="python", count=count, more=more))
        (directory / "1" / "model.py").write_text(HEAD + textwrap.dedent(source))
    with running_server(root, model_control_mode="explicit", load_model=("*",)) as running:
        yield running


def call(client: ProtocolClient, do: str, *values: float, model: str = "caller") -> list[float]:
    answer = client.infer(model, {"X": np.array(values, np.float32)}, parameters={"do": do})
    return [float(value) for value in answer["Y"]]


@pytest.mark.parametrize(
    ("do", "expected"),
    [
        ("once", [2.0, 3.0]),
        ("many_in_threads", [value for index in range(8) for value in (2.0 + index, 3.0 + index)]),
        ("many_awaited", [value for index in range(8) for value in (2.0 + index, 3.0 + index)]),
        ("stream", [1.0, 2.0]),
        ("stream_awaited", [1.0, 2.0]),
        ("streams_read_in_turn", [1.0, 2.0, 1.0, 2.0]),
        ("stop_reading", [1.0]),
        ("cancelled", [1.0, 1.0]),
        ("cancelled_awaited", [1.0]),
        ("cancelled_elsewhere", [1.0, 1.0]),
        ("pool", [1.0]),
        ("ready", [1.0, 1.0, 0.0, 0.0]),
        ("control", [3.0, 6.0, 0.0]),
        ("as_pybind", [2.0, 3.0]),
    ],
)
def test_a_model_calls_others(
    protocol: type[ProtocolClient], calling: RunningServer, do: str, expected: list[float]
) -> None:
    with protocol(calling) as client:
        assert call(client, do, 1, 2) == expected


def test_large_tensors_come_and_go(protocol: type[ProtocolClient], calling: RunningServer) -> None:
    with protocol(calling) as client:
        data = np.arange(1 << 18, dtype=np.float32)
        answer = client.infer("caller", {"X": data}, parameters={"do": "once"})
        np.testing.assert_array_equal(answer["Y"], data + 1)


@pytest.mark.parametrize(
    ("do", "message"),
    [
        ("unknown", r"Model nobody - Error when running inference: Request for unknown model: 'nobody' is not found"),
        ("wrong_input", "Model .* - Error when running inference: .*FP32"),
        ("forgotten_decoupled", "Please use 'decoupled=True' argument"),
        ("itself", "would wait for ever: all its 1 instances wait for the answer"),
        ("circle", r"would wait for ever: .*\(caller -> other -> caller\)"),
        ("impatient", "timeout expired|cannot answer in time"),  # as soon as that is known
    ],
)
def test_what_goes_wrong_is_the_error_of_the_response(
    protocol: type[ProtocolClient], calling: RunningServer, do: str, message: str
) -> None:
    with protocol(calling) as client, pytest.raises(ClientError, match=message):
        call(client, do, 1)


def test_a_model_with_a_free_instance_may_call_itself(protocol: type[ProtocolClient], calling: RunningServer) -> None:
    with protocol(calling) as client:
        assert call(client, "itself", 1, model="pair") == [2.0]


def num_cancelled(calling: RunningServer) -> float:
    """How often the patient model saw that its caller has left."""
    families = calling.server._model_metrics.families()
    return sum(s.value for family in families if family.name == "patient_cancelled" for s in family.samples)


def wait_for_cancelled(calling: RunningServer, count: float) -> None:
    until_true(lambda: num_cancelled(calling) >= count, "the model that was called learned of it")


def wait_for_call(calling: RunningServer) -> None:
    """Until a model has called "patient"."""
    until_true(lambda: calling.server.repository.get("patient", None).inflight == 1, "the call has arrived")


def begin(client: GrpcClient, model: str, data: Array, **details: Any) -> Any:
    """A request that can be cancelled."""
    tensor = tritonclient.grpc.InferInput("X", list(data.shape), "FP32").set_data_from_numpy(data)
    return client.raw.async_infer(model, [tensor], lambda result, error: None, **details)


def test_a_caller_that_leaves_takes_the_calls_along(calling: RunningServer) -> None:
    before = num_cancelled(calling)
    with GrpcClient(calling) as client:
        leaving = begin(client, "caller", np.zeros(1, np.float32), parameters={"do": "patient"})
        wait_for_call(calling)
        leaving.cancel()
    wait_for_cancelled(calling, before + 1)


def test_a_call_for_several_requests_goes_with_the_last_of_their_callers(calling: RunningServer) -> None:
    before = num_cancelled(calling)
    with GrpcClient(calling) as client:
        first, second = (begin(client, "together", np.zeros((1, 1), np.float32)) for _ in range(2))
        wait_for_call(calling)
        first.cancel()
        time.sleep(0.1)
        assert num_cancelled(calling) == before
        second.cancel()
        wait_for_cancelled(calling, before + 1)
    assert num_cancelled(calling) == before + 1


def test_a_stream_waits_for_the_model_that_reads_it(protocol: type[ProtocolClient], calling: RunningServer) -> None:
    with protocol(calling) as client:
        (num_sent,) = call(client, "read_slowly", 0)
    # The other model stood still, after some more responses until it was told to wait.
    assert 3 <= num_sent < 100_000
