"""Constant load of both protocols through a proxy, and what became of it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http

MODEL = "identity"


class Load:
    """Clients that ask until they are stopped: answered requests by kind, and what went wrong."""

    def __init__(self, http_url: str, grpc_url: str, pause_s: float = 0.0) -> None:
        self.num_answered: Counter[str] = Counter()
        self.failures: list[str] = []
        self._http_url, self._grpc_url = http_url, grpc_url
        self._pause_s = pause_s
        self._is_over = threading.Event()

    def ask_over_http(self) -> None:
        with tritonclient.http.InferenceServerClient(self._http_url) as client:
            self._ask("HTTP", lambda tensor: client.infer(MODEL, [tensor]), tritonclient.http)

    def ask_over_grpc(self) -> None:
        with tritonclient.grpc.InferenceServerClient(self._grpc_url) as client:
            self._ask("gRPC", lambda tensor: client.infer(MODEL, [tensor]), tritonclient.grpc)

    def ask_in_streams(self) -> None:
        """A stream per request, as clients of decoupled models have it."""
        with tritonclient.grpc.InferenceServerClient(self._grpc_url) as client:

            def infer(tensor: Any) -> Any:
                answers: SimpleQueue[Any] = SimpleQueue()
                client.start_stream(lambda result, error: answers.put(error or result))
                try:
                    client.async_stream_infer(MODEL, [tensor])
                    answer = answers.get(timeout=30)
                finally:
                    client.stop_stream()
                if isinstance(answer, Exception):
                    raise answer
                return answer

            self._ask("stream", infer, tritonclient.grpc)

    def _ask(self, kind: str, infer: Callable[[Any], Any], library: Any) -> None:
        number = 0
        while not self._is_over.wait(self._pause_s):
            number += 1
            tensor = library.InferInput("INPUT0", [1, 2], "FP32")
            tensor.set_data_from_numpy(np.full((1, 2), number, np.float32))
            try:
                answer = infer(tensor).as_numpy("OUTPUT0")
            except Exception as error:  # whatever it is, a request was lost
                self.failures.append(f"{kind}: {error}")
                continue
            if answer.tolist() != [[number, number]]:
                self.failures.append(f"{kind}: asked for {number}, got {answer.tolist()}")
            self.num_answered[kind] += 1

    def stop(self) -> None:
        self._is_over.set()


@contextmanager
def constant_load(http_url: str, grpc_url: str, *, num_clients: int = 3, pause_s: float = 0.0) -> Iterator[Load]:
    """`num_clients` of each kind ask at the same time until the block ends, each after a pause between its requests."""
    load = Load(http_url, grpc_url, pause_s)
    threads = [
        threading.Thread(target=target, name=f"load-{target.__name__}-{number}")
        for target in (load.ask_over_http, load.ask_over_grpc, load.ask_in_streams)
        for number in range(num_clients)
    ]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.stop()
        for thread in threads:
            thread.join(60)
