"""What one client can do to a server within its limits, each as a loop that runs for a while.

Bodies are made once and sent over raw sockets, and the attacker has the lowest priority: it costs the machine little
beside what it costs the server. Each attack prints what the server answered, by status.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gzip
import json
import os
import socket
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import shared_memory
from pathlib import Path

import grpc

from modelserver.pb import grpc_service_pb2 as pb

MIB = 1 << 20
# Just below the default limit of an HTTP body.
BODY = 60 * MIB
NUM_CONNECTIONS = 4


@dataclass(frozen=True, slots=True)
class Target:
    """A server under attack; `keys` are what callers send, by name."""

    http: int
    grpc: int
    keys: dict[str, str]
    until_s: float  # of time.time()

    @property
    def is_over(self) -> bool:
        return time.time() > self.until_s


@dataclass(frozen=True, slots=True)
class Attack:
    """One way to abuse a server: who sends it (None: a caller without a key), and what."""

    key: str | None
    run: Callable[[Target, Attack, Counter[str]], None]
    path: str = ""
    body: Callable[[], bytes] = bytes
    headers: tuple[str, ...] = ()
    pause_s: float = 0.0
    niceness: int = 19  # with few processors, what is measured is the server and not a race with the attacker for one


def _head(attack: Attack, target: Target, length: int) -> bytes:
    lines = [f"POST {attack.path} HTTP/1.1", "Host: a", f"Content-Length: {length}", *attack.headers]
    if attack.key is not None:
        lines.append(f"x-api-key: {target.keys[attack.key]}")
    return "\r\n".join([*lines, "", ""]).encode()


def _answer(peer: socket.socket) -> str:
    """The status of the answer, whose body is read and dropped."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = peer.recv(65536)
        if not more:
            return "closed"
        data += more
    head, _, rest = data.partition(b"\r\n\r\n")
    lower = head.lower()
    if b"\r\ncontent-length:" in lower:
        length = int(lower.partition(b"\r\ncontent-length:")[2].split(b"\r\n")[0])
        while len(rest) < length:
            rest += peer.recv(65536) or b"\0" * length
    return head[9:12].decode()


@contextlib.contextmanager
def _connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield peer


def _beside(count: int, run: Callable[[], None]) -> None:
    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _post(target: Target, attack: Attack, seen: Counter[str]) -> None:
    """The same request again and again, over a few connections."""
    body = attack.body()
    whole = _head(attack, target, len(body))

    def one() -> None:
        while not target.is_over:
            try:
                with _connected(target.http) as peer:
                    # An early refusal may close the connection while the body is sent; it can be read all the same.
                    with contextlib.suppress(ConnectionError):
                        peer.sendall(whole)
                        peer.sendall(body)
                    seen[_answer(peer)] += 1
            except OSError as error:
                seen[type(error).__name__] += 1
            time.sleep(attack.pause_s)

    _beside(NUM_CONNECTIONS, one)


def _leave(target: Target, attack: Attack, seen: Counter[str]) -> None:
    """Send a request and leave before it is answered."""
    body = attack.body()
    whole = _head(attack, target, len(body))
    while not target.is_over:
        with contextlib.suppress(OSError), _connected(target.http) as peer:
            peer.sendall(whole)
            peer.sendall(body)
            seen["left"] += 1
        time.sleep(attack.pause_s)


def _trickle(target: Target, attack: Attack, seen: Counter[str]) -> None:
    """Announce large bodies over six connections, send them at the slowest pace that is allowed."""

    def one() -> None:
        while not target.is_over:
            try:
                with _connected(target.http) as peer:
                    peer.sendall(_head(attack, target, BODY))
                    peer.settimeout(0.05)
                    peer.sendall(bytes(2 * MIB))
                    while not target.is_over:
                        peer.sendall(bytes(512))
                        with contextlib.suppress(TimeoutError):
                            seen[_answer(peer)] += 1
                            break
                        time.sleep(0.2)
            except OSError as error:
                seen[type(error).__name__] += 1
                time.sleep(0.05)

    _beside(6, one)


def _grpc(target: Target, attack: Attack, seen: Counter[str]) -> None:
    """One ModelInfer message again and again."""
    message = attack.body()
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{target.grpc}", options=options) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        metadata = [("x-api-key", target.keys[attack.key])] if attack.key else []
        while not target.is_over:
            try:
                call(message, metadata=metadata, timeout=60)
                seen["OK"] += 1
            except grpc.RpcError as error:
                seen[error.code().name] += 1
            time.sleep(attack.pause_s)


def _shrink(target: Target, attack: Attack, seen: Counter[str]) -> None:
    """Register a region of shared memory, and cut and stretch its file while requests use it."""
    region = shared_memory.SharedMemory(create=True, size=MIB)
    document = json.dumps({"key": f"/{region.name}", "offset": 0, "byte_size": MIB}).encode()
    shared = {"shared_memory_region": "cut", "shared_memory_byte_size": MIB}
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, MIB // 4], "parameters": shared}
    output = {"name": "OUTPUT0", "parameters": shared}
    infer = json.dumps({"inputs": [tensor], "outputs": [output]}).encode()

    def cut() -> None:
        while not target.is_over:
            for size in (0, MIB):
                os.truncate(f"/dev/shm/{region.name}", size)
                time.sleep(0.001)

    def ask(path: str, body: bytes) -> None:
        with contextlib.suppress(OSError), _connected(target.http) as peer:
            peer.sendall(_head(Attack(attack.key, _shrink, path), target, len(body)) + body)
            seen[f"{path.rsplit('/', 1)[1]} {_answer(peer)}"] += 1

    try:
        ask("/v2/systemsharedmemory/region/cut/register", document)
        cutter = threading.Thread(target=cut)
        cutter.start()
        while not target.is_over:
            ask(NUMBERS, infer)
            time.sleep(attack.pause_s)
        cutter.join()
        ask("/v2/systemsharedmemory/region/cut/unregister", b"")
    finally:
        region.close()
        region.unlink()


def _compute(target: Target, attack: Attack, seen: Counter[str]) -> None:
    """Keep a processor busy and send nothing, to show what any other work costs the clients on this machine."""
    del attack
    number = 1
    while not target.is_over:
        for _ in range(100_000):
            number = number * 1_103_515_245 + 12_345 & 0xFFFFFFFF
    seen["nothing sent"] += 1


def _control(target: Target, attack: Attack, seen: Counter[str]) -> None:
    """Load and unload a model; `body` is the load's."""
    load = attack.body()
    while not target.is_over:
        for verb, body in (("load", load), ("infer", b""), ("unload", b"")):
            path = f"{attack.path}/{verb}" if verb != "infer" else attack.path.replace("/repository", "") + "/infer"
            step = Attack("infer" if verb == "infer" else attack.key, _control, path)
            if verb == "infer":
                tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}
                body = json.dumps({"inputs": [tensor]}).encode()
            with contextlib.suppress(OSError), _connected(target.http) as peer:
                peer.settimeout(2.0)
                peer.sendall(_head(step, target, len(body)) + body)
                try:
                    seen[f"{verb} {_answer(peer)}"] += 1
                except TimeoutError:
                    seen[f"{verb} left"] += 1
        time.sleep(attack.pause_s)


EMPTY_HEAD = json.dumps(
    {
        "inputs": [
            {
                "name": "INPUT0",
                "datatype": "BYTES",
                "shape": [1, BODY // 4],
                "parameters": {"binary_data_size": BODY},
            }
        ]
    }
).encode()
BINARY = (f"Inference-Header-Content-Length: {len(EMPTY_HEAD)}",)


def _empty_elements() -> bytes:
    return EMPTY_HEAD + bytes(BODY)


def _empty_elements_message() -> bytes:
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="BYTES", shape=[1, BODY // 4])
    request = pb.ModelInferRequest(model_name="numbers", inputs=[tensor], raw_input_contents=[bytes(BODY)])
    return bytes(request.SerializeToString())


def _typed_message() -> bytes:
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="BYTES", shape=[1, BODY // 4])
    tensor.contents.bytes_contents.extend([b""] * (BODY // 4))
    return bytes(pb.ModelInferRequest(model_name="numbers", inputs=[tensor]).SerializeToString())


def _nan() -> bytes:
    numbers = b"1.5," * (BODY // 4 - 100)
    return b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,1],"data":[' + numbers + b"NaN]}]}"


def _outputs() -> bytes:
    tensor = b'{"name":"INPUT0","datatype":"FP32","shape":[1,1],"data":[1]}'
    return b'{"inputs":[' + tensor + b'],"outputs":[' + b'{"name":"A"},' * (BODY // 13 - 20) + b'{"name":"A"}]}'


def _nested() -> bytes:
    return b'{"a":' * (BODY // 5)


def _gzip_members() -> bytes:
    member = gzip.compress(b"")
    return member * (BODY // len(member))


def _deflate_bomb() -> bytes:
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(MIB)) for _ in range(60)) + packer.flush()


def _prompt() -> bytes:
    return json.dumps({"model": "tiny_chat", "prompt": "many words of a text " * (4 * MIB // 21)}).encode()


def _texts() -> bytes:
    return json.dumps({"model": "tiny_chat", "prompt": "many words of a text " * (30 * MIB // 21)}).encode()


def _count() -> bytes:
    config = {"backend": "identity", "max_batch_size": 8, "instance_group": [{"kind": "KIND_CPU", "count": 10**9}]}
    for kind in ("input", "output"):
        config[kind] = [{"name": f"{kind.upper()}0", "data_type": "TYPE_FP32", "dims": [-1]}]
    return json.dumps({"parameters": {"config": json.dumps(config)}}).encode()


NUMBERS = "/v2/models/numbers/infer"
REPOSITORY = "/v2/repository/models"
ATTACKS: dict[str, Attack] = {
    "BYTES of empty elements": Attack("other", _post, NUMBERS, _empty_elements, BINARY),
    "the same to a model that takes BYTES": Attack("infer", _post, "/v2/models/texts/infer", _empty_elements, BINARY),
    "the same over gRPC": Attack("infer", _grpc, body=_empty_elements_message),
    "typed BYTES over gRPC": Attack("infer", _grpc, body=_typed_message),
    "JSON with a NaN": Attack("infer", _post, NUMBERS, _nan),
    "many outputs": Attack("infer", _post, NUMBERS, _outputs),
    "nested JSON": Attack("infer", _post, NUMBERS, _nested),
    "gzip of empty members": Attack("infer", _post, NUMBERS, _gzip_members, ("Content-Encoding: gzip",)),
    "a body that unpacks to the limit": Attack("infer", _post, NUMBERS, _deflate_bomb, ("Content-Encoding: deflate",)),
    "prompts of 4 MB": Attack("infer", _post, "/v1/completions", _prompt),
    "prompts whose client leaves": Attack("infer", _leave, "/v1/completions", _prompt, pause_s=0.5),
    "30 MB to /tokenize": Attack("infer", _post, "/tokenize", _texts),
    "six slow bodies without a key": Attack(None, _trickle, NUMBERS),
    "a count of 1e9": Attack("admin", _control, f"{REPOSITORY}/counted", _count, pause_s=0.1),
    "a model that hangs": Attack("admin", _control, f"{REPOSITORY}/hangs", pause_s=0.1),
    "a model that prints": Attack("admin", _control, f"{REPOSITORY}/prints", pause_s=0.1),
    "shared memory that shrinks": Attack("admin", _shrink, pause_s=0.005),
    # No attacks: what a busy processor alone does to the clients, at the priority at which the server reads long texts.
    "a busy processor": Attack(None, _compute, niceness=5),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attack", choices=ATTACKS)
    parser.add_argument("target", type=Path, help="a file with the ports and keys, as JSON")
    parser.add_argument("seconds", type=float)
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(1, 15)  # ends with the process that started it (PR_SET_PDEATHSIG)
    document = json.loads(options.target.read_text())
    attack, seen = ATTACKS[options.attack], Counter[str]()
    os.nice(attack.niceness)
    attack.run(Target(**document, until_s=time.time() + options.seconds), attack, seen)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
