"""Python models that answer later, many times, from threads or coroutines of their own; over both protocols."""

from __future__ import annotations

import contextlib
import queue
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
from prometheus_client.parser import text_string_to_metric_families
from support.clients import ClientError, ProtocolClient
from support.model_files import write_model
from support.serving import RunningServer, running_server

CONFIG = """
backend: "python"
{policy}
input [ {{ name: "N" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
HEAD = """
import asyncio
import threading
import time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def number(request):
    return int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])


def response(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.int32))])

"""
MODELS = {
    # N responses from a thread; below 0 it goes wrong in one way or another.
    "counting": """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            if number(request) == -1:
                raise ValueError("I do not count down")
            if number(request) == -2:
                return [response(0)]
            if number(request) == -3:
                return None  # nobody keeps the request
            threading.Thread(target=self.count, args=(request.get_response_sender(), number(request))).start()

    def count(self, sender, upto):
        if upto == -4:
            error = pb_utils.TritonError("enough", pb_utils.TritonError.UNAVAILABLE)
            sender.send(pb_utils.InferenceResponse(error=error), FINAL)
            return
        for value in range(upto):
            sender.send(response(value))
        sender.send(flags=FINAL)
        try:
            sender.send(response(0))
        except pb_utils.TritonModelException as error:
            print(error, flush=True)
""",
    # Sends until its client leaves, and says so.
    "endless": """
class TritonPythonModel:
    def initialize(self, args):
        family = pb_utils.MetricFamily("endless_left", "clients that left", pb_utils.MetricFamily.COUNTER)
        self.family = family
        self.left = family.Metric()

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.talk, args=(request.get_response_sender(),)).start()

    def talk(self, sender):
        value = 0
        while not sender.is_cancelled():
            sender.send(response(value))
            value += 1
        self.left.increment(1)
        sender.send(flags=FINAL)
""",
    # Ends its requests without a response, also when it is warmed up.
    "quiet": """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            request.get_response_sender().send(flags=FINAL)
""",
    # Each request waits for all others: only side by side do they end.
    "meeting": """
class TritonPythonModel:
    def initialize(self, args):
        self.present = 0

    async def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            if number(request) < 0:
                raise ValueError("nobody comes")
            self.present += 1
            while self.present % number(request):
                await asyncio.sleep(0.001)
            sender.send(response(number(request)))
            sender.send(flags=FINAL)
""",
    # Not decoupled: one answer, but later.
    "later": """
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            if number(request) % 2:
                threading.Thread(target=self.answer, args=(request.get_response_sender(), number(request))).start()
                answers.append(None)
            else:
                answers.append(response(number(request)))
        if number(requests[0]) > 100:
            return None  # the senders have every request
        return answers

    def answer(self, sender, value):
        time.sleep(0.01)
        sender.send(response(value), FINAL)
""",
    # As `later`, but the senders are taken when `execute` has returned.
    "afterwards": """
class TritonPythonModel:
    async def execute(self, requests):
        for request in requests:
            asyncio.create_task(self.answer(request))
        return None if number(requests[0]) % 2 else [None] * len(requests)

    async def answer(self, request):
        await asyncio.sleep(0.01)
        if number(request) < 0:
            return  # and the request is gone
        request.get_response_sender().send(response(number(request)), FINAL)
""",
}
WARMED = 'parameters { key: "auto_warmup" value { string_value: "true" } }'
POLICY = {"later": "", "afterwards": "", "quiet": f"{DECOUPLED} {WARMED}"}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("decoupled")
    for name, source in MODELS.items():
        directory = write_model(root, name, CONFIG.format(policy=POLICY.get(name, DECOUPLED)))
        (directory / "1" / "model.py").write_text(HEAD + textwrap.dedent(source))
    with running_server(root) as running:
        yield running


class Stream:
    """One ModelStreamInfer call."""

    def __init__(self, running: RunningServer) -> None:
        self._client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{running.server.grpc_port}")
        self._answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client.start_stream(lambda result, error: self._answers.put((result, error)))

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        requests = self._client._stream._request_queue
        self._client.stop_stream(cancel_requests=True)
        requests.put(None)  # which tritonclient forgets: its thread would wait for ever
        self._client.close()

    def send(self, model: str, value: int, request_id: str = "") -> None:
        tensor = tritonclient.grpc.InferInput("N", [1], "INT32")
        tensor.set_data_from_numpy(np.array([value], np.int32))
        self._client.async_stream_infer(model, [tensor], request_id=request_id, enable_empty_final_response=True)

    def next(self) -> tuple[str, int | None, bool] | str:
        """Id, value and whether it is final, or an error's text."""
        result, error = self._answers.get(timeout=20)
        if error is not None:
            return str(error)
        answer = result.get_response()
        array = result.as_numpy("OUT")
        is_final = answer.parameters["triton_final_response"].bool_param
        return answer.id, None if array is None else int(array[0]), is_final


@pytest.mark.parametrize("count", [0, 1, 5, 500])
def test_any_number_of_responses_in_order(python: RunningServer, count: int) -> None:
    with Stream(python) as stream:
        stream.send("counting", count, "a")
        answers = [stream.next() for _ in range(count + 1)]
    assert answers == [*(("a", value, False) for value in range(count)), ("a", None, True)]


def test_requests_of_one_stream_are_answered_side_by_side(python: RunningServer) -> None:
    with Stream(python) as stream:
        for index in range(20):
            stream.send("counting", 10, str(index))
        answers = [stream.next() for _ in range(220)]
    for index in range(20):
        assert [answer[1] for answer in answers if answer[0] == str(index)] == [*range(10), None]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, "I do not count down"),
        (-2, r"is using the decoupled mode and the execute function must return None"),
        (-3, "dropped the response sender"),
        (-4, "enough"),
    ],
)
def test_what_goes_wrong_is_told(python: RunningServer, value: int, message: str) -> None:
    with Stream(python) as stream:
        stream.send("counting", value)
        answer = stream.next()
        assert isinstance(answer, str)
        assert message in answer
        stream.send("counting", 1, "b")
        while answer != ("b", 0, False):
            answer = stream.next()


def test_a_model_learns_that_its_client_has_left(python: RunningServer) -> None:
    metrics = python.server._model_metrics

    def num_left() -> float:
        return sum(sample.value for family in metrics.families() for sample in family.samples)

    before = num_left()
    with Stream(python) as stream:
        stream.send("endless", 0)
        assert stream.next() == ("", 0, False)
    _wait(lambda: num_left() == before + 1)


def test_coroutines_of_several_requests_run_at_once(python: RunningServer) -> None:
    with Stream(python) as stream:
        for _ in range(4):
            stream.send("meeting", 4)
        answers = [stream.next() for _ in range(8)]
        assert sorted(str(answer) for answer in answers) == sorted(
            str(answer) for answer in [("", 4, False), ("", None, True)] * 4
        )
        stream.send("meeting", -1)
        answer = stream.next()
        assert isinstance(answer, str)
        assert "ValueError: nobody comes" in answer


def test_a_model_with_one_answer_may_give_it_later(protocol: type[ProtocolClient], python: RunningServer) -> None:
    with protocol(python) as client:
        for value in (*range(6), 101):
            answer = client.infer("later", {"N": np.array([value], np.int32)})
            assert answer["OUT"].tolist() == [value]


def test_a_sender_may_be_taken_when_execute_has_returned(protocol: type[ProtocolClient], python: RunningServer) -> None:
    with protocol(python) as client:
        for value in (1, 2, 1, 2):
            assert client.infer("afterwards", {"N": np.array([value], np.int32)})["OUT"].tolist() == [value]
        with pytest.raises(ClientError):
            client.infer("afterwards", {"N": np.array([-1], np.int32)})
        assert client.infer("afterwards", {"N": np.array([3], np.int32)})["OUT"].tolist() == [3]


def test_a_decoupled_model_that_answers_once_is_served_by_plain_calls(
    protocol: type[ProtocolClient], python: RunningServer
) -> None:
    with protocol(python) as client:
        assert client.infer("counting", {"N": np.array([1], np.int32)})["OUT"].tolist() == [0]
        with pytest.raises(ClientError):
            client.infer("counting", {"N": np.array([2], np.int32)})


def _wait(condition: Any) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come true"
        time.sleep(0.01)


def test_first_responses_and_memory_are_told(protocol: type[ProtocolClient], python: RunningServer) -> None:
    name = "nv_inference_first_response_histogram_ms"

    def first_responses() -> dict[str, float]:
        families = text_string_to_metric_families(httpx.get(f"http://{python.metrics_url}/metrics").text)
        samples = (sample for family in families if family.name == name for sample in family.samples)
        return {
            sample.labels["le"]: sample.value
            for sample in samples
            if sample.labels["model"] == "counting" and "le" in sample.labels
        }

    before = first_responses()
    with protocol(python) as client:
        for value in (1, 1, -1):
            with contextlib.suppress(ClientError):
                client.infer("counting", {"N": np.array([value], np.int32)})
        (row,) = client.statistics("counting")
    after = first_responses()
    assert list(after) == ["100", "500", "2000", "5000", "+Inf"]
    assert after["+Inf"] - before["+Inf"] == 2
    (usage,) = row["memory_usage"]
    assert (usage["type"], int(usage.get("id", 0))) == ("CPU", 0)
    assert int(usage["byte_size"]) > 1 << 20


def test_a_warmup_may_end_without_a_response(python: RunningServer) -> None:
    assert httpx.get(f"http://{python.http_url}/v2/models/quiet/ready").status_code == 200
