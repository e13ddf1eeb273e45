"""Sequences as clients meet them, over both protocols."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from onnx import TensorProto, helper
from support.clients import ClientError, ProtocolClient
from support.onnx_models import onnx_model, value, write_model
from support.sequences import CORRELATION_ID, END, READY, START, add, write_sequence_model
from support.serving import RunningServer, running_server

from modelserver.errors import ErrorCode

pytestmark = pytest.mark.one_layout

MODELS = {
    "direct": ("direct { }", {}),
    "direct_pair": ("direct { }", {"top": "instance_group { kind: KIND_CPU count: 2 }", "max_batch_size": 2}),
    "oldest": ("oldest { max_candidate_sequences: 4 }", {}),
    "unbatched": ("direct { }", {"max_batch_size": 0}),
    "impatient": ("direct { }", {"max_batch_size": 1, "idle_us": 200_000}),
    "narrow": ("direct { }", {"max_batch_size": 1}),
}
ADDING = ["direct", "direct_pair", "oldest"]
# What a Python model sees of a sequence: flags, id, and the controls as numbers.
ECHO = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request, len(requests)) for request in requests]

    def answer(self, request, rows):
        seen = [request.flags(), rows]
        seen += [int(request.input_named(name).as_numpy()[0, 0]) for name in ("START", "END", "READY")]
        names = [request.input_named("CORRID").as_numpy()[0, 0], str(request.correlation_id()).encode()]
        return pb_utils.InferenceResponse([
            pb_utils.Tensor("SEEN", np.array([seen], np.int32)),
            pb_utils.Tensor("IDS", np.array([names], object)),
        ])
"""

AGAIN = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.runs = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        runs = self.runs.setdefault(request.correlation_id(), [])
        runs.append(request.flags())
        if len(runs) < request.input_named("INPUT").as_numpy().item():
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return None
        del self.runs[request.correlation_id()]
        seen = np.array([[len(runs), sum(runs)]], np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", seen)])
"""

ENDS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.ends = []

    def execute(self, requests):
        heard = np.array([[",".join(self.ends)]], object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", heard)]) for _ in requests]

    def on_sequence_end(self, correlation_id, reason):
        self.ends.append(f"{correlation_id} {reason}")
"""


@pytest.fixture(scope="module")
def served(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("sequences")
    for name, (strategy, options) in MODELS.items():
        write_sequence_model(root, name, strategy, **options)
    _write_echo(root)
    _write_python(root, "again", AGAIN, "TYPE_INT32 dims: [ 2 ]", more="iterative_sequence: true")
    _write_python(root, "ends", ENDS, "TYPE_STRING dims: [ 1 ]", strategy="oldest { }")
    for strategy in ("direct", "oldest"):
        _write_accumulator(root, f"state_{strategy}", strategy)
    with running_server(root) as running:
        yield running


@pytest.fixture
def client(protocol: type[ProtocolClient], served: RunningServer) -> Iterator[ProtocolClient]:
    with protocol(served) as connected:
        yield connected


@pytest.mark.parametrize("model", ADDING)
@pytest.mark.parametrize("ids", [(1, 2), ("one", "two"), (2**63 - 1, "2")])
def test_interleaved_sequences_do_not_mix(client: ProtocolClient, model: str, ids: tuple[Any, Any]) -> None:
    one, two = ids
    assert add(client, model, one, 1, "+") == 1
    assert add(client, model, two, 10, "+") == 10
    assert add(client, model, one, 2) == 3
    assert add(client, model, two, 20) == 30
    assert add(client, model, two, 30, "-") == 60
    assert add(client, model, one, 3, "-") == 6


def test_a_model_without_batches_takes_one_sequence_at_a_time(client: ProtocolClient) -> None:
    def send(number: int, flags: str) -> int:
        arguments = {"sequence_id": 3, "sequence_start": "+" in flags, "sequence_end": "-" in flags}
        return int(client.infer("unbatched", {"INPUT": np.array([number], np.int32)}, **arguments)["OUTPUT"].item())

    assert [send(5, "+"), send(6, ""), send(7, "-")] == [5, 11, 18]


@pytest.mark.parametrize("model", ADDING)
def test_what_no_sequence_takes_is_refused_in_tritons_words(client: ProtocolClient, model: str) -> None:
    refusals = [
        ((0, 1, ""), f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID"),
        (
            (77, 1, ""),
            f"inference request for sequence 77 to model '{model}' must specify the START flag on the first request of "
            "the sequence",
        ),
    ]
    for (sequence_id, number, flags), message in refusals:
        with pytest.raises(ClientError, match=message) as caught:
            add(client, model, sequence_id, number, flags)
        assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    rows = np.ones((2, 1), np.int32)
    with pytest.raises(ClientError, match=f"to model '{model}' must specify batch-size 1 due to requirements of seq"):
        client.infer(model, {"INPUT": rows}, sequence_id=5, sequence_start=True)


def test_an_ended_sequence_takes_nothing_more(client: ProtocolClient) -> None:
    add(client, "oldest", "over", 1, "+-")
    with pytest.raises(ClientError, match="must specify the START flag"):
        add(client, "oldest", "over", 1)


@pytest.mark.parametrize("model", ADDING)
def test_a_start_begins_a_live_sequence_anew(client: ProtocolClient, model: str) -> None:
    add(client, model, 9, 1, "+")
    assert add(client, model, 9, 100, "+") == 100
    assert add(client, model, 9, 1, "-") == 101


@pytest.mark.parametrize("model", ["direct", "state_direct"])
def test_clients_do_not_see_what_the_server_adds(client: ProtocolClient, model: str) -> None:
    metadata = client.model_metadata(model)
    assert [tensor["name"] for tensor in metadata["inputs"]] == ["INPUT"]
    assert [tensor["name"] for tensor in metadata["outputs"]] == ["OUTPUT"]


def test_a_client_cannot_send_a_control(client: ProtocolClient) -> None:
    inputs = {"INPUT": np.ones((1, 1), np.int32), "START": np.ones((1, 1), np.int32)}
    with pytest.raises(ClientError, match="unexpected inference input 'START'"):
        client.infer("direct", inputs, sequence_id=4, sequence_start=True)


def test_an_idle_sequence_makes_room(client: ProtocolClient) -> None:
    add(client, "impatient", "silent", 1, "+")
    # The only slot is taken: this one waits in the backlog until the other has been idle for long enough.
    assert add(client, "impatient", "waiting", 5, "+-") == 5
    with pytest.raises(ClientError, match="must specify the START flag"):
        add(client, "impatient", "silent", 1)


def test_a_timeout_ends_the_wait_for_a_slot(client: ProtocolClient) -> None:
    add(client, "narrow", "holder", 1, "+")
    with pytest.raises(ClientError, match="timeout of the corresponding sequence has been expired") as caught:
        add(client, "narrow", "waiting", 5, "+", timeout=100_000)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert add(client, "narrow", "holder", 1, "-") == 2


@pytest.mark.parametrize("strategy", ["direct", "oldest"])
def test_the_server_keeps_the_state_of_a_model(client: ProtocolClient, strategy: str) -> None:
    model = f"state_{strategy}"
    assert add(client, model, "a", 1, "+") == 101  # the initial state is 100
    assert add(client, model, "b", 2, "+") == 102
    assert add(client, model, "a", 10) == 111
    assert add(client, model, "b", 20) == 122
    assert add(client, model, "a", 5, "+") == 105
    assert add(client, model, "a", 5, "-") == 110
    assert add(client, model, "b", 0, "-") == 122


def test_a_python_model_sees_flags_and_controls_as_in_triton(client: ProtocolClient) -> None:
    def seen(sequence_id: int | str, flags: str) -> tuple[list[int], list[bytes]]:
        answer = client.infer(
            "echo",
            {"INPUT": np.zeros((1, 1), np.int32)},
            sequence_id=sequence_id,
            sequence_start="+" in flags,
            sequence_end="-" in flags,
        )
        return answer["SEEN"].tolist()[0], answer["IDS"].tolist()[0]

    assert seen(7, "+") == ([1, 1, 1, 0, 1], [b"7", b"7"])
    # Its slot is the second one, so that the row before it is there, without a request.
    assert seen("x", "+") == ([1, 2, 1, 0, 1], [b"x", b"x"])
    assert seen(7, "") == ([0, 2, 0, 0, 1], [b"7", b"7"])
    assert seen(7, "-") == ([2, 2, 0, 1, 1], [b"7", b"7"])
    assert seen("x", "-") == ([2, 2, 0, 1, 1], [b"x", b"x"])


def test_a_python_model_may_want_a_request_again(client: ProtocolClient) -> None:
    def runs(number: int, **details: Any) -> list[int]:
        answer = client.infer("again", {"INPUT": np.array([[number]], np.int32)}, **details)
        return answer["OUTPUT"].tolist()[0]

    before = client.statistics("again")[0]
    # How often it was executed, and in which of these it saw START: the first alone.
    assert runs(3) == [3, 1]
    assert runs(1, sequence_id=8, sequence_start=True) == [1, 1]
    with pytest.raises(ClientError, match="must specify the START flag"):
        runs(1, sequence_id=8)
    after = client.statistics("again")[0]
    assert int(after["execution_count"]) - int(before["execution_count"]) == 4
    assert int(after["inference_stats"]["success"]["count"]) - int(before["inference_stats"]["success"]["count"]) == 2


def test_a_python_model_hears_that_a_sequence_has_ended(client: ProtocolClient) -> None:
    def ends(sequence_id: int | str, flags: str) -> list[bytes]:
        arguments = {"sequence_id": sequence_id, "sequence_start": "+" in flags, "sequence_end": "-" in flags}
        answer = client.infer("ends", {"INPUT": np.zeros((1, 1), np.int32)}, **arguments)
        return [text for text in answer["OUTPUT"].tolist()[0][0].split(b",") if text]

    ends(1, "+-")
    heard = ends("two", "+")
    assert heard[-1] == b"1 end"
    assert ends("two", "+")[-1] == b"two restarted"
    assert ends("two", "-")[-1] == b"two restarted"
    assert ends(3, "+-")[-1] == b"two end"


def test_statistics_count_requests_and_not_padding(client: ProtocolClient) -> None:
    before = client.statistics("echo")[0]
    for sequence_id in ("p", "q", "r"):
        client.infer(
            "echo", {"INPUT": np.zeros((1, 1), np.int32)}, ["SEEN"], sequence_id=sequence_id, sequence_start=True
        )
    after = client.statistics("echo")[0]
    assert int(after["inference_count"]) - int(before["inference_count"]) == 3
    assert int(after["execution_count"]) - int(before["execution_count"]) == 3
    rows = {int(row["batch_size"]) for row in after["batch_stats"]}
    assert {2, 3} <= rows
    for sequence_id in ("p", "q", "r"):
        client.infer(
            "echo", {"INPUT": np.zeros((1, 1), np.int32)}, ["SEEN"], sequence_id=sequence_id, sequence_end=True
        )


@pytest.mark.parametrize("model", ADDING)
def test_many_clients_with_random_sequences(protocol: type[ProtocolClient], served: RunningServer, model: str) -> None:
    failures: list[BaseException] = []

    def live(seed: int) -> None:
        chance = random.Random(seed)
        try:
            with protocol(served) as client:
                for life in range(4):
                    sequence_id: int | str = f"s{seed}-{life}" if seed % 2 else 1000 * seed + life + 1
                    numbers = [chance.randrange(1000) for _ in range(chance.randrange(1, 8))]
                    total = 0
                    for place, number in enumerate(numbers):
                        total += number
                        flags = ("+" if place == 0 else "") + ("-" if place == len(numbers) - 1 else "")
                        assert add(client, model, sequence_id, number, flags) == total
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=live, args=(seed,)) for seed in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


@pytest.mark.parametrize("model", ADDING)
def test_sequences_over_one_stream(served: RunningServer, model: str) -> None:
    """The shape of Triton's sequence stream example: two sequences on one stream, nothing awaited in between."""
    results: Queue[tuple[Any, Any]] = Queue()
    values = [11, 7, 5, 3, 2, 0, 1]
    with grpcclient.InferenceServerClient(served.grpc_url) as client:
        client.start_stream(lambda result, error: results.put((result, error)))
        for place, number in enumerate(values):
            for sequence_id, sign in (("up", 1), (1007, -1)):
                tensor = grpcclient.InferInput("INPUT", [1, 1], "INT32")
                tensor.set_data_from_numpy(np.array([[sign * number]], np.int32))
                client.async_stream_infer(
                    model,
                    [tensor],
                    request_id=f"{sequence_id}_{place}",
                    sequence_id=sequence_id,
                    sequence_start=place == 0,
                    sequence_end=place == len(values) - 1,
                )
        sums: dict[str, list[int]] = {"up": [], "1007": []}
        for _ in range(2 * len(values)):
            result, error = results.get(timeout=10)
            assert error is None
            sums[result.get_response().id.rpartition("_")[0]].append(int(result.as_numpy("OUTPUT").item()))
        client.stop_stream()
    totals = np.cumsum(values).tolist()
    assert sums == {"up": totals, "1007": [-total for total in totals]}


def _write_python(root: Path, name: str, source: str, output: str, *, strategy: str = "", **options: Any) -> None:
    directory = write_sequence_model(root, name, strategy, tensors=(START,), backend="python", **options)
    (directory / "1" / "model.py").write_text(source)
    config = (directory / "config.pbtxt").read_text()
    (directory / "config.pbtxt").write_text(
        config.replace('"OUTPUT" data_type: TYPE_INT32 dims: [ 1 ]', f'"OUTPUT" data_type: {output}')
    )


def _write_echo(root: Path) -> None:
    directory = write_sequence_model(
        root, "echo", "direct { }", tensors=(START, END, READY, CORRELATION_ID), backend="python"
    )
    config = (directory / "config.pbtxt").read_text()
    outputs = 'output { name: "SEEN" data_type: TYPE_INT32 dims: [ 5 ] }'
    outputs += ' output { name: "IDS" data_type: TYPE_STRING dims: [ 2 ] }'
    (directory / "config.pbtxt").write_text(
        config.replace('output { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] }', outputs)
    )
    (directory / "1" / "model.py").write_text(ECHO)


def _write_accumulator(root: Path, name: str, strategy: str) -> None:
    """An ONNX model that adds its input to a state, which begins with 100."""
    state = """
  state {
    input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_INT32 dims: [ 1 ]
    initial_state { name: "hundred" data_type: TYPE_INT32 dims: [ 1 ] data_file: "hundred" }
  }"""
    directory = write_sequence_model(
        root, name, f"{strategy} {{ }}", tensors=(READY,), more=state, backend="onnxruntime"
    )
    (directory / "initial_state").mkdir()
    (directory / "initial_state" / "hundred").write_bytes(np.array([100], np.int32).tobytes())
    rows = [
        value("INPUT", ["n", 1], TensorProto.INT32),
        value("SUM_IN", ["n", 1], TensorProto.INT32),
        value("READY", ["n", 1], TensorProto.BOOL),
    ]
    results = [value("OUTPUT", ["n", 1], TensorProto.INT32), value("SUM_OUT", ["n", 1], TensorProto.INT32)]
    nodes = [
        helper.make_node("Add", ["INPUT", "SUM_IN"], ["ADDED"]),
        helper.make_node("Where", ["READY", "ADDED", "SUM_IN"], ["OUTPUT"]),
        helper.make_node("Identity", ["OUTPUT"], ["SUM_OUT"]),
    ]
    write_model(directory, onnx_model(rows, results, nodes))
