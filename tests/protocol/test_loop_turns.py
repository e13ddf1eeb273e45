"""No request within the limits holds the event loop for long: the CPU time of its longest turn, for each decoder.

The bound is generous, as machines differ. `benchmarks/loop_turns.py` has the figures.
"""

from __future__ import annotations

import gzip
import http.client
import json
import os
import uuid
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import grpc
import httpx
import pytest
from support.llm_models import write_llm
from support.loop_turns import measured_turns
from support.mock_llm import write_mock_llm
from support.model_files import write_identity
from support.python_models import write_model
from support.serving import ADDRESS, RunningServer, running_server
from support.tiny_checkpoints import write_checkpoint

from modelserver.core import accelerator
from modelserver.pb import grpc_service_pb2 as pb
from modelserver.planes.shared_memory import DIRECTORY

MB = 1 << 20
TEXT = "many words of a text " * (MB // 4 // 21)
MOST_S = 0.05
# A copy of 60 MB by the memory's first touch takes 40 ms on a fast machine.
MOST_OF_COPIES_S = {"numbers there and back": 0.02, "numbers for a child process": 0.02}
# That one joins an answer of 60 MB.
MOST_OF_THE_REFERENCE_S = 0.15
REGION = "/v2/systemsharedmemory/region/turns"
INFER = "/inference.GRPCInferenceService/ModelInfer"

# A picture of 8 MB, which is a file already.
PAINTER = """
import numpy as np
import triton_python_backend_utils as pb_utils

FILE = np.array([b"\\x89PNG\\r\\n\\x1a\\n" + bytes(8 << 20)], object)

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("image", FILE)]) for _ in requests]
"""
PAINTER_CONFIG = """
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "image" data_type: TYPE_STRING dims: [ 1 ] } ]
"""

# Answers text with itself, and numbers with the first one.
HOSTED = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        answers = [tensor if tensor.dtype == object else tensor[:, :1] for tensor in tensors]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", answer)]) for answer in answers]
"""
HOSTED_CONFIG = """
max_batch_size: 1
input [ {{ name: "INPUT0" data_type: TYPE_{0} dims: [ -1 ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_{0} dims: [ -1 ] }} ]
"""

Send = Callable[[RunningServer], object]


@pytest.fixture(scope="module")
def server(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("turns")
    write_identity(root, "echo")
    write_identity(root, "text", data_type="TYPE_STRING")
    write_llm(root, "chat", write_checkpoint(root.parent / "checkpoint", seed=0))
    write_mock_llm(root, "mock")
    write_model(root, PAINTER, PAINTER_CONFIG).rename(root / "painter")
    for name, datatype in (("hosted", "FP32"), ("hosted_text", "STRING")):
        write_model(root, HOSTED, HOSTED_CONFIG.format(datatype)).rename(root / name)
    with running_server(root, allow_client_shm=True) as running:
        yield running


def _post(path: str, body: bytes, **headers: str) -> Send:
    def send(running: RunningServer) -> int:
        connection = http.client.HTTPConnection(ADDRESS, running.server.http_port, timeout=60)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request("POST", path, body, named)
            answer = connection.getresponse()
            answer.read()
            return answer.status
        finally:
            connection.close()

    return send


def _infer(data: bytes, count: int, *, datatype: bytes = b"FP32", more: bytes = b"", model: str = "echo") -> Send:
    head = b'{"inputs":[{"name":"INPUT0","datatype":"%b","shape":[1,%d],"data":%b}]%b}'
    return _post(f"/v2/models/{model}/infer", head % (datatype, count, data, more))


def _binary(elements: bytes, count: int, model: str, *, datatype: bytes = b"BYTES") -> Send:
    head = b'{"inputs":[{"name":"INPUT0","datatype":"%b","shape":[1,%d],"parameters":{"binary_data_size":%d}}]}'
    text = head % (datatype, count, len(elements))
    return _post(f"/v2/models/{model}/infer", text + elements, Inference_Header_Content_Length=str(len(text)))


def _grpc(message: bytes) -> Send:
    def send(running: RunningServer) -> object:
        with grpc.insecure_channel(running.grpc_url, [("grpc.max_receive_message_length", -1)]) as channel:
            call = channel.unary_unary(INFER)
            try:
                call(message, timeout=60)
            except grpc.RpcError as error:
                return error.code()  # type: ignore[attr-defined]
            return grpc.StatusCode.OK

    return send


def _raw(elements: bytes, count: int, model: str) -> Send:
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="BYTES", shape=[1, count])
    request = pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[elements])
    return _grpc(request.SerializeToString())


def _typed(num_elements: int, *, raw: bytes | None = None) -> Send:
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="BYTES", shape=[1, num_elements])
    tensor.contents.bytes_contents.extend([b""] * num_elements)
    raws = [] if raw is None else [raw]
    request = pb.ModelInferRequest(model_name="text", inputs=[tensor], raw_input_contents=raws)
    return _grpc(request.SerializeToString())


def _inputs_with_many_fields(num_inputs: int) -> Send:
    tensor = b"\x0a\1x" + b"\x18\1" * 60
    return _grpc(b"\x0a\4echo" + (b"\x2a" + bytes((len(tensor),)) + tensor) * num_inputs)


def _from_region(datatype: str, count: int, *, offset: int = 0) -> Send:
    """An input and an output in shared memory."""
    num_bytes = 4 * count

    def send(running: RunningServer) -> object:
        path = DIRECTORY / f"modelserver-turns-{uuid.uuid4().hex}"
        path.touch()
        os.truncate(path, num_bytes + offset)
        try:
            document = {"key": f"/{path.name}", "offset": 0, "byte_size": num_bytes + offset}
            assert _post(f"{REGION}/register", json.dumps(document).encode())(running) == 200
            place = {"shared_memory_region": "turns", "shared_memory_byte_size": num_bytes}
            place |= {"shared_memory_offset": offset} if offset else {}
            tensor = {"name": "INPUT0", "datatype": datatype, "shape": [1, count], "parameters": place}
            outputs = [{"name": "OUTPUT0", "parameters": place}]
            body = json.dumps({"inputs": [tensor], "outputs": outputs}).encode()
            model = "text" if datatype == "BYTES" else "echo"
            return _post(f"/v2/models/{model}/infer", body)(running)
        finally:
            _post(f"{REGION}/unregister", b"")(running)
            path.unlink()

    return send


def _classes(count: int) -> Send:
    more = b',"outputs":[{"name":"OUTPUT0","parameters":{"classification":%d}}]' % count
    return _infer(_joined(b"1", count), count, more=more)


def _ask(path: str, **fields: object) -> Send:
    """A request to the language model."""
    return _post(path, json.dumps({"model": "chat", **fields}).encode())


def _draw(**fields: object) -> Send:
    return _ask("/v1/images/generations", model="painter", prompt="a", **fields)


def _input(items: list[dict[str, str]]) -> Send:
    return _ask("/v1/responses", model="mock", input=[*items, {"role": "user", "content": "a"}])


def _ask_and_get(**fields: object) -> Send:
    """The status of a response, and of the same read later."""

    def send(running: RunningServer) -> int:
        with httpx.Client(base_url=f"http://{running.http_url}", timeout=60) as client:
            made = client.post("/v1/responses", json={"model": "mock", "input": "a", **fields})
            if made.status_code != 200:
                return made.status_code
            kept = client.get(f"/v1/responses/{made.json()['id']}")
            assert kept.json() == made.json()
            return kept.status_code

    return send


def _many_at_once(send: Send, count: int) -> Send:
    """The status that all of them have."""

    def send_all(running: RunningServer) -> object:
        with ThreadPoolExecutor(count) as pool:
            (status,) = set(pool.map(send, repeat(running, count)))
        return status

    return send_all


def _joined(item: bytes, count: int) -> bytes:
    return b"[" + b",".join(repeat(item, count)) + b"]"


OK, REFUSED = (
    {200, grpc.StatusCode.OK},
    {400, 413, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED},
)
CASES: dict[str, tuple[Send, set[object]]] = {
    "BYTES of empty elements": (_binary(bytes(2 * MB), MB // 2, "text"), OK),
    "BYTES of short elements": (_binary(b"\2\0\0\0ab" * (MB // 6), MB // 6, "text"), OK),
    "BYTES for a model of numbers": (_binary(bytes(2 * MB), MB // 2, "echo"), REFUSED),
    "BYTES for no model": (_binary(bytes(2 * MB), MB // 2, "none"), {404}),
    "raw BYTES over gRPC": (_raw(bytes(2 * MB), MB // 2, "text"), OK),
    "raw BYTES for a model of numbers": (_raw(bytes(2 * MB), MB // 2, "echo"), REFUSED),
    "typed BYTES over gRPC": (_typed(MB // 4), OK),
    "typed BYTES beside raw ones": (_typed(2 * MB, raw=b""), REFUSED),
    "inputs with many fields": (_inputs_with_many_fields(4000), REFUSED),
    "an id": (_grpc(b"\x0a\4echo\x1a\x80\x80\x80\x08" + b"i" * (16 * MB)), REFUSED),
    "BYTES in shared memory": (_from_region("BYTES", 4 * MB), OK),
    "numbers in shared memory": (_from_region("FP32", 16 * MB), OK),
    "numbers off their boundary": (_from_region("FP32", 16 * MB, offset=1), OK),
    "numbers there and back": (_binary(bytes(60 * MB), 15 * MB, "echo", datatype=b"FP32"), OK),
    "numbers for a child process": (_binary(bytes(60 * MB), 15 * MB, "hosted", datatype=b"FP32"), OK),
    "BYTES through a child process": (_binary((b"\x3c\0\0\0" + b"a" * 60) * (MB // 2), MB // 2, "hosted_text"), OK),
    "one element of BYTES": (_binary(b"\0\0\0\3" + b"a" * (48 * MB), 1, "text"), OK),
    "classes": (_classes(200_000), OK),
    "fields of a message": (_grpc(b"\x3a\0" * (MB // 2)), REFUSED),
    "inputs of a message": (_grpc(b"\x2a\0" * (MB // 2)), REFUSED),
    "outputs of a message": (_grpc(b"\x32\0" * (MB // 2)), REFUSED),
    "dimensions": (_grpc(b"\x2a\x80\x80\x40" + b"\x18\1" * (MB // 2)), REFUSED),
    "numbers": (_infer(_joined(b"1.5", MB // 4), MB // 4), OK),
    "NaN": (_infer(_joined(b"NaN", MB // 4), MB // 4), OK),
    "numbers that C leaves to Python": (_infer(_joined(b"-0", MB // 3), MB // 3), OK),
    "strings": (_infer(_joined(b'""', MB // 3), MB // 3, datatype=b"BYTES", model="text"), OK),
    "numbers that are strings": (_infer(_joined(b'""', MB // 3), MB // 3), REFUSED),
    "outputs": (_infer(b"[1]", 1, more=b',"outputs":' + _joined(b'{"name":"OUTPUT0"}', MB // 19)), REFUSED),
    "ignored members": (_infer(b"[1]", 1, more=b',"more":' + _joined(b"{}", MB // 3)), REFUSED),
    "nesting": (_post("/v2/models/echo/infer", b'{"a":' * (MB // 5)), REFUSED),
    "generate": (_post("/v2/models/echo/generate", b'{"more":' + _joined(b"{}", MB // 4) + b"}"), REFUSED),
    "chat": (_post("/v1/chat/completions", b'{"model":"x","a":' + _joined(b"[]", MB // 8) + b"}"), {404}),
    "a list for a word": (_post("/v1/chat/completions", b'{"model":' + _joined(b"[]", MB // 8) + b"}"), REFUSED),
    "a body that unpacks to the limit": (
        _post("/v2/models/echo/infer", zlib.compress(bytes(60 * MB), 9), Content_Encoding="deflate"),
        REFUSED,
    ),
    "a long string": (
        _post("/v1/chat/completions", b'{"model":"x","a":"' + b"a" * (30 * MB) + b'"}'),
        {404},
    ),
    "bodies that come at once": (_many_at_once(_infer(_joined(b"1.5", 2 * MB), 1), 4), REFUSED),
    "a long text to /tokenize": (_ask("/tokenize", prompt=TEXT, return_token_strs=True), OK),
    "a long prompt": (_ask("/v1/completions", prompt=TEXT), REFUSED),
    "many prompts": (_ask("/v1/completions", prompt=["a"] * 128, max_tokens=1), OK),
    "a prompt of many tokens": (_ask("/v1/completions", prompt=[1] * (MB // 2)), REFUSED),
    "a long message": (_ask("/v1/chat/completions", messages=[{"role": "user", "content": TEXT}]), REFUSED),
    "properties": (_post("/props", b'{"a":' + _joined(b"[]", MB // 4) + b"}"), REFUSED),
    "many messages": (_ask("/v1/chat/completions", messages=[{"role": "user", "content": "a"}] * 20_000), REFUSED),
    "a long message over Ollama": (_ask("/api/chat", messages=[{"role": "user", "content": TEXT}]), REFUSED),
    "a long message over Anthropic": (
        _ask("/v1/messages", max_tokens=1, messages=[{"role": "user", "content": TEXT}]),
        REFUSED,
    ),
    "many tokens to /detokenize": (_ask("/detokenize", tokens=[1] * 50_000), OK),
    "many streams": (
        _many_at_once(
            _ask("/v1/completions", prompt="a", max_tokens=32, min_tokens=32, stream=True, logprobs=5, temperature=0),
            16,
        ),
        OK,
    ),
    "pictures": (_draw(n=10), OK),
    "a picture over a stream": (_draw(stream=True), OK),
    "long turns of the assistant": (_input([{"role": "assistant", "content": "a" * 1500}] * 8191), OK),
    "long turns of the system": (_input([{"role": "system", "content": "a" * 1500}] * 8191), OK),
    "a text that the response repeats": (_ask_and_get(user="a" * (60 * MB)), OK),
    "instructions that a stream repeats": (
        _ask("/v1/responses", model="mock", input="a b", instructions="a" * (30 * MB), stream=True),
        OK,
    ),
    "instructions that a stream in the background repeats": (
        _ask("/v1/responses", model="mock", input="a b", instructions="a" * (30 * MB), stream=True, background=True),
        OK,
    ),
    "index": (_post("/v2/repository/index", b'{"a":' + _joined(b"[]", MB // 8) + b"}"), OK),
    "logging": (_post("/v2/logging", b'{"a":' + _joined(b"[]", MB // 4) + b"}"), REFUSED),
    "gzip of empty members": (
        _post("/v2/models/echo/infer", gzip.compress(b"") * 50_000, Content_Encoding="gzip"),
        REFUSED,
    ),
}


@pytest.mark.skipif(accelerator.cut_data is None, reason="the bound holds where the accelerator was built")
@pytest.mark.parametrize("case", CASES)
def test_no_turn_is_long(server: RunningServer, layout: str, case: str) -> None:
    send, expected = CASES[case]
    with measured_turns(server.loop) as turns:
        assert send(server) in expected
    most_s = MOST_OF_THE_REFERENCE_S if layout == "grpcio" else MOST_OF_COPIES_S.get(case, MOST_S)
    assert turns.longest_s < most_s, f"{turns.longest_s:.3f} s in {turns.longest}"
