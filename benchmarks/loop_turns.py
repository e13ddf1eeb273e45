"""How long a request may hold everybody else up: `python -m benchmarks.loop_turns [--megabytes 8] [--fronts 0]`.

A server runs with two models that echo. A client of its own sends small requests, one after another, while each of the
requests below is answered, each as large as is asked for. Printed are, for each: the status, the CPU time per megabyte,
and the longest that the well-behaved client has waited, beside its wait with nothing else going on.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path

import grpc

from benchmarks.servers.ours import modelserver
from benchmarks.servers.process import ServerProcess
from modelserver.pb import grpc_service_pb2 as pb

MB = 1_000_000
CONFIG = """
backend: "identity"
max_batch_size: 0
input [ {{ name: "INPUT0" data_type: TYPE_{0} dims: [ -1 ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_{0} dims: [ -1 ] }} ]
"""
SMALL = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1],"data":[1.0]}]}'
CHANNEL = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

# Sends one request of about the given number of bytes; returns their exact number and the status.
Ports = Mapping[str, int]
Send = Callable[[Ports, int], tuple[int, object]]


def _post(path: str, body: bytes, ports: Ports, **headers: str) -> tuple[int, object]:
    connection = http.client.HTTPConnection("127.0.0.1", ports["http"], timeout=600)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("POST", path, body, named)
        answer = connection.getresponse()
        answer.read()
        return len(body), answer.status
    finally:
        connection.close()


def _call(message: bytes, ports: Ports) -> tuple[int, object]:
    with grpc.insecure_channel(f"127.0.0.1:{ports['grpc']}", CHANNEL) as channel:
        try:
            channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(message, timeout=600)
        except grpc.RpcError as error:
            return len(message), error.code().name  # type: ignore[attr-defined]
    return len(message), "OK"


def _array(item: bytes, size: int) -> tuple[bytes, int]:
    """An array of that many bytes, and its elements."""
    count = size // (len(item) + 1)
    return b"[" + b",".join(repeat(item, count)) + b"]", count


def _json(item: bytes, datatype: str = "FP32", model: str = "numbers") -> Send:
    def send(ports: Ports, size: int) -> tuple[int, object]:
        data, count = _array(item, size)
        head = b'{"inputs":[{"name":"INPUT0","datatype":"%b","shape":[%d],"data":' % (datatype.encode(), count)
        return _post(f"/v2/models/{model}/infer", head + data + b"}]}", ports)

    return send


def _member(path: str, item: bytes, before: bytes = b'"more":') -> Send:
    def send(ports: Ports, size: int) -> tuple[int, object]:
        return _post(path, b"{%b%b}" % (before, _array(item, size)[0]), ports)

    return send


def _binary(element: bytes, model: str) -> Send:
    def send(ports: Ports, size: int) -> tuple[int, object]:
        count = size // (4 + len(element))
        raw = (len(element).to_bytes(4, "little") + element) * count
        head = (
            b'{"inputs":[{"name":"INPUT0","datatype":"BYTES","shape":[%d],"parameters":{"binary_data_size":%d}}],'
            b'"parameters":{"binary_data_output":true}}' % (count, len(raw))
        )
        length = str(len(head))
        return _post(f"/v2/models/{model}/infer", head + raw, ports, Inference_Header_Content_Length=length)

    return send


def _raw(element: bytes, model: str) -> Send:
    def send(ports: Ports, size: int) -> tuple[int, object]:
        count = size // (4 + len(element))
        tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="BYTES", shape=[count])
        raw = (len(element).to_bytes(4, "little") + element) * count
        request = pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[raw])
        return _call(request.SerializeToString(), ports)

    return send


def _contents(datatype: str, field: str, value: object) -> Send:
    def send(ports: Ports, size: int) -> tuple[int, object]:
        per_element = {"fp32_contents": 4, "int_contents": 1, "bytes_contents": 2}[field]
        count = size // per_element
        tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype=datatype, shape=[count])
        getattr(tensor.contents, field).extend(repeat(value, count))
        model = "numbers" if datatype == "FP32" else "texts"
        return _call(pb.ModelInferRequest(model_name=model, inputs=[tensor]).SerializeToString(), ports)

    return send


CASES: dict[str, Send] = {
    "JSON: numbers": _json(b"1.5"),
    "JSON: NaN": _json(b"NaN"),
    "JSON: -0, which C leaves to Python": _json(b"-0"),
    "JSON: empty strings": _json(b'""', "BYTES", "texts"),
    "JSON: empty strings for numbers": _json(b'""'),
    "JSON: outputs": _member("/v2/models/numbers/infer", b'{"name":"OUTPUT0"}', SMALL[1:-1] + b',"outputs":'),
    "JSON: ignored objects": _member("/v2/models/numbers/infer", b"{}", SMALL[1:-1] + b',"more":'),
    'JSON: {"a": again and again': lambda ports, size: _post("/v2/models/numbers/infer", b'{"a":' * (size // 5), ports),
    "JSON: one string": lambda ports, size: _post(
        "/v2/models/numbers/infer", SMALL[:-1] + b',"more":"' + b"a" * size + b'"}', ports
    ),
    "generate: ignored objects": _member("/v2/models/numbers/generate", b"{}"),
    "generate: numbers": _member("/v2/models/numbers/generate", b"1", b'"INPUT0":'),
    "chat: messages": _member("/v1/chat/completions", b'{"role":"user","content":""}', b'"model":"x","messages":'),
    "chat: one string": lambda ports, size: _post(
        "/v1/chat/completions", b'{"model":"x","user":"' + b"a" * size + b'"}', ports
    ),
    "embeddings: inputs": _member("/v1/embeddings", b'"a"', b'"model":"x","input":'),
    "load: one config": lambda ports, size: _post(
        "/v2/repository/models/numbers/load", b'{"parameters":{"config":"{' + b" " * size + b'}"}}', ports
    ),
    "logging: ignored objects": _member("/v2/logging", b"{}"),
    "index: ignored objects": _member("/v2/repository/index", b"{}"),
    "binary: BYTES of empty elements": _binary(b"", "texts"),
    "binary: BYTES of two bytes": _binary(b"ab", "texts"),
    "binary: BYTES for numbers": _binary(b"", "numbers"),
    "binary: BYTES for no model": _binary(b"", "none"),
    "gzip of empty members": lambda ports, size: _post(
        "/v2/models/numbers/infer", gzip.compress(b"") * (size // 20), ports, Content_Encoding="gzip"
    ),
    "gRPC: BYTES of empty elements": _raw(b"", "texts"),
    "gRPC: BYTES for numbers": _raw(b"", "numbers"),
    "gRPC: empty inputs": lambda ports, size: _call(b"\x2a\0" * (size // 2), ports),
    "gRPC: empty raw contents": lambda ports, size: _call(b"\x3a\0" * (size // 2), ports),
    "gRPC: fp32_contents": _contents("FP32", "fp32_contents", 1.5),
    "gRPC: bytes_contents": _contents("BYTES", "bytes_contents", b""),
    "gRPC: int_contents for texts": _contents("INT32", "int_contents", 1),
}


def send_case(name: str, ports: Ports, size: int) -> tuple[int, object]:
    """In a process of its own, so that what it computes holds no other client up."""
    return CASES[name](ports, size)


class Neighbour:
    """The well-behaved client."""

    def __init__(self, server: ServerProcess) -> None:
        self._port = server.ports["http"]
        self._is_over = False
        self.longest_s = 0.0

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        while not self._is_over:
            began_s = time.perf_counter()
            connection.request("POST", "/v2/models/numbers/infer", SMALL)
            connection.getresponse().read()
            self.longest_s = max(self.longest_s, time.perf_counter() - began_s)
            time.sleep(0.001)
        connection.close()

    @classmethod
    @contextmanager
    def beside(cls, server: ServerProcess) -> Iterator[Neighbour]:
        neighbour = cls(server)
        thread = threading.Thread(target=neighbour.run)
        thread.start()
        try:
            time.sleep(0.2)
            yield neighbour
        finally:
            neighbour._is_over = True
            thread.join()


def write_models(root: Path) -> None:
    for name, datatype in (("numbers", "FP32"), ("texts", "STRING")):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(CONFIG.format(datatype))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=8.0, help="the size of each request (default: 8)")
    parser.add_argument("--fronts", type=int, default=0, help="front processes (default: none)")
    parser.add_argument("--only", default="", help="cases that have this in their names")
    options = parser.parse_args()
    size = int(options.megabytes * MB)
    flags = ["--model-control-mode=explicit", "--load-model=*"]
    flags += [f"--wire-processes={options.fronts}"] if options.fronts else []
    with tempfile.TemporaryDirectory() as directory:
        write_models(Path(directory))
        with modelserver(Path(directory), *flags) as server, ProcessPoolExecutor(1) as sender:
            with Neighbour.beside(server) as neighbour:
                time.sleep(1.0)
            print(f"alone, the client waited {neighbour.longest_s * 1000:.1f} ms at most\n")
            print(f"{'request':<38} {'status':>18} {'CPU ms/MB':>10} {'longest wait ms':>16}")
            for name in CASES:
                if options.only not in name:
                    continue
                cpu_s = server.cpu_s()
                with Neighbour.beside(server) as neighbour:
                    num_bytes, status = sender.submit(send_case, name, dict(server.ports), size).result()
                cpu_s = server.cpu_s() - cpu_s
                figures = f"{cpu_s * 1e3 * MB / num_bytes:>10.1f} {neighbour.longest_s * 1000:>16.1f}"
                print(f"{name:<38} {status!s:>18} {figures}", flush=True)


if __name__ == "__main__":
    main()
