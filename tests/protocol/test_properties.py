"""Requests of random shapes and datatypes, sent together, some cancelled, some failing: each has its own answer."""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.async_clients import AsyncClient, AsyncGrpcClient, AsyncHttpClient
from support.clients import ClientError
from support.gate import until
from support.model_files import write_model
from support.serving import RunningServer, running_server

# Further examples for those who have time: MODELSERVER_PROPERTY_EXAMPLES=1000.
NUM_EXAMPLES = int(os.environ.get("MODELSERVER_PROPERTY_EXAMPLES", "12"))

DATATYPES = {"INT32": np.int32, "FP64": np.float64, "BOOL": np.bool_, "BYTES": np.object_}
CONFIG = """
backend: "{backend}"
max_batch_size: 8
dynamic_batching {{ max_queue_delay_microseconds: 500 }}
input [ {{ name: "INPUT0" data_type: TYPE_{datatype} dims: [ -1, -1 ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_{datatype} dims: [ -1, -1 ] }} ]
instance_group [ {{ kind: KIND_CPU count: 2 }} ]
"""
# A Python model that refuses every request whose id says so, and raises for the whole batch when one says that.
SOURCE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        if any(request.request_id().startswith("raise") for request in requests):
            raise ValueError("somebody raises")
        return [self.answer(request) for request in requests]

    def answer(self, request):
        if request.request_id().startswith("refuse"):
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("refused " + request.request_id()))
        data = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", data)])
"""

FATES = st.sampled_from(["answer"] * 5 + ["cancel", "refuse", "raise", "wrong"])
ONE = st.tuples(
    st.sampled_from(["identity", "python"]),
    st.sampled_from(sorted(DATATYPES)),
    st.integers(1, 9),  # rows; nine are too many
    st.integers(0, 3),
    st.integers(0, 4),
    FATES,
)


@pytest.fixture(scope="module")
def served(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("properties")
    for datatype in DATATYPES:
        for backend in ("identity", "python"):
            _write(root, backend, datatype)
    with running_server(root) as running:
        yield running


def _write(root: Path, backend: str, datatype: str) -> None:
    text = CONFIG.format(backend=backend, datatype={"BYTES": "STRING"}.get(datatype, datatype))
    directory = write_model(root, f"{backend}_{datatype.lower()}", text)
    if backend == "python":
        (directory / "1" / "model.py").write_text(SOURCE)


def _data(datatype: str, shape: tuple[int, ...], number: int) -> Any:
    """What no other request has: values that tell the request and the place."""
    seed = zlib.crc32(f"{number}".encode())
    numbers = np.random.default_rng(seed).integers(0, 2**31 - 1, shape)
    if datatype == "BYTES":
        texts = [f"{number}:{each}".encode() * (1 + each % 3) for each in numbers.ravel().tolist()]
        return np.array(texts, dtype=object).reshape(shape)
    return (numbers % 2 if datatype == "BOOL" else numbers).astype(DATATYPES[datatype])


class _Asked:
    """A request, and what may become of it."""

    def __init__(self, client: AsyncClient, number: int, drawn: tuple[str, str, int, int, int, str]) -> None:
        backend, datatype, rows, first, second, self.fate = drawn
        self.is_python = backend == "python"
        self.is_too_large = rows > 8
        self.id = f"{self.fate}-{number}"
        self.data = _data(datatype, (rows, first, second), number)
        name = "OTHER" if self.fate == "wrong" else "INPUT0"
        infer = client.infer(f"{backend}_{datatype.lower()}", {name: self.data}, request_id=self.id)
        self.task = asyncio.get_running_loop().create_task(infer)

    async def check(self, model_may_raise: bool) -> None:
        try:
            answer = await self.task
        except asyncio.CancelledError:
            assert self.fate == "cancel"
        except ClientError as error:
            self._check_failure(error, model_may_raise)
        else:
            assert self.fate in ("answer", "cancel") or not self.is_python, f"{self.id} was answered"
            assert answer.id == self.id
            assert answer["OUTPUT0"].shape == self.data.shape
            assert answer["OUTPUT0"].tolist() == self.data.tolist()

    def _check_failure(self, error: ClientError, model_may_raise: bool) -> None:
        if self.fate == "refuse" and self.is_python and "refused" in error.message:
            assert f"refused {self.id}" in error.message, "somebody else's failure"
            return
        is_own = self.is_too_large or self.fate in ("wrong", "cancel")
        assert is_own or (self.is_python and model_may_raise and "somebody raises" in error.message), (self.id, error)


@settings(max_examples=NUM_EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.lists(ONE, min_size=1, max_size=24), is_grpc=st.booleans(), patience_ms=st.integers(0, 5))
def test_requests_do_not_mix(served: RunningServer, drawn: list[Any], is_grpc: bool, patience_ms: int) -> None:
    async def ask() -> None:
        async with (AsyncGrpcClient if is_grpc else AsyncHttpClient)(served) as client:
            asked = [_Asked(client, number, each) for number, each in enumerate(drawn)]
            await asyncio.sleep(patience_ms / 1000)
            for each in asked:
                if each.fate == "cancel":
                    each.task.cancel()
            model_may_raise = any(each.fate == "raise" for each in asked)
            async with asyncio.timeout(60):
                for each in asked:
                    await each.check(model_may_raise)

    asyncio.run(ask())
    # Those whose clients left end too.
    models = list(served.server.repository.models())
    served.call(lambda: until(lambda: not any(model.inflight for model in models), "no request is in flight"))
