"""Random requests, many at once, over front processes and over a lone server: the same answers, byte by byte."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from support.echo import EchoModel
from support.fronted import Client, Fronted, fronted
from support.wires import HOST

from modelserver.core.datatype import Datatype
from modelserver.core.tensor import Tensor, tensor_to_bytes
from modelserver.pb import grpc_service_pb2 as pb

NUM_REQUESTS = 300
NUM_CLIENTS = 8
SIZES = (0, 1, 3, 64, 1000, 4096, 16_384, 40_000)
INFER = "/inference.GRPCInferenceService/ModelInfer"
Answer = tuple[Any, ...]


@pytest.fixture(scope="module")
def served() -> Iterator[Fronted]:
    models = [
        EchoModel(f"{datatype.value}_{rank}".lower(), datatype, dims=(-1,) * rank)
        for datatype in Datatype
        for rank in (1, 2)
    ]
    with fronted(*models, num_fronts=3) as made:
        yield made


class Case:
    """A request that may be wrong in some way."""

    def __init__(self, chosen: random.Random) -> None:
        self.datatype = chosen.choice(list(Datatype))
        self.rank = chosen.choice((1, 2))
        size = chosen.choice(SIZES)
        self.shape = (size,) if chosen.random() < 0.5 else (chosen.choice((1, 2)), size)
        self.model = f"{self.datatype.value}_{len(self.shape)}".lower()
        if chosen.random() < 0.1:
            self.model = chosen.choice(("none", "fp32_1", "bytes_2"))
        self.data = filled(self.datatype, self.shape, chosen)
        self.id = chosen.choice(("", "1", "long " * 20, "\N{SNOWMAN}"))
        self.parameters: dict[str, Any] = chosen.choice(({}, {}, {"a": 1, "b": "two"}, {"priority": -1}))
        self.outputs = chosen.choice((None, ["OUTPUT"], ["OUTPUT"], ["NOTHING"]))
        self.is_short = chosen.random() < 0.05
        self.is_binary = chosen.random() < 0.6
        self.wants_binary = chosen.random() < 0.6

    def raw(self) -> bytes:
        raw = bytes(tensor_to_bytes(Tensor("INPUT", self.datatype, self.data)))
        return raw[:-1] if self.is_short else raw

    def http(self) -> tuple[bytes, list[str]]:
        tensor: dict[str, Any] = {"name": "INPUT", "datatype": self.datatype.value, "shape": self.shape}
        raw = self.raw() if self.is_binary else b""
        if self.is_binary:
            tensor["parameters"] = {"binary_data_size": len(raw)}
        else:
            tensor["data"] = as_json(self.data)
        document: dict[str, Any] = {"inputs": [tensor], "parameters": dict(self.parameters)}
        if self.id:
            document["id"] = self.id
        if self.outputs is not None:
            parameters = {"binary_data": self.wants_binary}
            document["outputs"] = [{"name": name, "parameters": parameters} for name in self.outputs]
        elif self.wants_binary:
            document["parameters"]["binary_data_output"] = True
        head = json.dumps(document).encode()
        return head + raw, [f"Inference-Header-Content-Length: {len(head)}"] if self.is_binary else []

    def grpc(self) -> bytes:
        message = pb.ModelInferRequest(model_name=self.model, id=self.id, raw_input_contents=[self.raw()])
        message.inputs.add(name="INPUT", datatype=self.datatype.value, shape=self.shape)
        for name in self.outputs or ():
            message.outputs.add(name=name)
        for key, value in self.parameters.items():
            if isinstance(value, str):
                message.parameters[key].string_param = value
            else:
                message.parameters[key].int64_param = value
        return message.SerializeToString()


def filled(datatype: Datatype, shape: tuple[int, ...], chosen: random.Random) -> np.ndarray[Any, Any]:
    count = int(np.prod(shape))
    if datatype is Datatype.BYTES:
        elements = np.empty(count, object)
        elements[:] = [b"%d" % number * (number % 3) for number in range(count)]
        return elements.reshape(shape)
    numbers = np.random.default_rng(chosen.getrandbits(32)).integers(0, 2 if datatype is Datatype.BOOL else 100, count)
    return numbers.astype(datatype.numpy).reshape(shape)


def as_json(data: np.ndarray[Any, Any]) -> Any:
    return [element.decode() for element in data.ravel()] if data.dtype == object else data.ravel().tolist()


def cases(seed: int) -> list[Case]:
    chosen = random.Random(seed)
    return [Case(chosen) for _ in range(NUM_REQUESTS)]


async def shared_out(asked: list[Case], ask: Any) -> list[Answer]:
    """The answers in the order of the requests, asked by several clients at once."""
    answers: dict[int, Answer] = {}
    waiting = iter(enumerate(asked))

    async def run(number: int) -> None:
        for index, case in waiting:
            answers[index] = await ask(number, case)

    await asyncio.gather(*(run(number) for number in range(NUM_CLIENTS)))
    return [answers[index] for index in range(len(asked))]


@pytest.mark.parametrize("seed", range(3))
async def test_http(served: Fronted, seed: int) -> None:
    asked = cases(seed)

    async def over(port: int) -> list[Answer]:
        clients = [await Client.connect(port) for _ in range(NUM_CLIENTS)]

        async def ask(number: int, case: Case) -> Answer:
            return await clients[number].ask("POST", f"/v2/models/{case.model}/infer", *case.http())

        answers = await shared_out(asked, ask)
        for client in clients:
            await client.close()
        return answers

    answers = await over(served.port)
    assert answers == await over(served.alone.port)
    statuses = {answer[0] for answer in answers}
    assert {200, 400, 404} <= statuses


@pytest.mark.parametrize("seed", range(3))
async def test_grpc(served: Fronted, seed: int) -> None:
    asked = cases(seed)

    async def over(port: int) -> list[Answer]:
        channels = [
            grpc.aio.insecure_channel(f"{HOST}:{port}", [("grpc.use_local_subchannel_pool", 1)])
            for _ in range(NUM_CLIENTS)
        ]

        async def ask(number: int, case: Case) -> Answer:
            try:
                return (await channels[number].unary_unary(INFER)(case.grpc()),)
            except grpc.aio.AioRpcError as error:
                return error.code(), error.details()

        answers = await shared_out(asked, ask)
        for channel in channels:
            await channel.close()
        return answers

    answers = await over(served.port)
    assert answers == await over(served.alone.port)
    assert sum(len(answer) == 1 for answer in answers) > NUM_REQUESTS / 4
