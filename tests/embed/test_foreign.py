"""Programs that were written for LitServe and PyTriton, served unmodified by `modelserver serve FILE`."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.http as httpclient
from support.processes import ServerProcess

PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")

LITSERVE = """
    import numpy as np
    import litserve as ls

    class TooSmall(Exception):
        status_code = 422
        detail = "the number is negative"

    class Squares(ls.LitAPI):
        def setup(self, device):
            self.power = 2

        def decode_request(self, request, context):
            context["name"] = request.get("name", "nameless")
            if request["input"] < 0:
                raise TooSmall
            return request["input"]

        def predict(self, x):
            return x ** self.power

        def encode_response(self, output, context):
            return {"output": output, "name": context["name"]}

    class Batched(ls.LitAPI):
        def decode_request(self, request):
            if "row" not in request:
                raise TooSmall
            return np.asarray(request["row"], "f4")

        def predict(self, x):
            return [{"sum": row.sum(), "of": len(x)} for row in x]

    class Words(ls.LitAPI):
        def decode_request(self, request):
            return request["text"]

        def predict(self, x):
            for word in x.split():
                yield word

        def encode_response(self, outputs):
            for word in outputs:
                yield {"word": word}

    class Later(ls.LitAPI):
        async def decode_request(self, request):
            return request["input"]

        async def predict(self, x):
            return x + 1

        async def encode_response(self, output):
            return {"output": output}

    class Parrot(ls.LitAPI):
        def predict(self, messages):
            for word in messages[-1]["content"].split():
                yield word + " "

    if __name__ == "__main__":
        apis = [
            Squares(),
            Batched(max_batch_size=4, batch_timeout=0.01, api_path="/batched"),
            Words(stream=True, api_path="/v1/words"),
            Later(enable_async=True, api_path="/later"),
            Parrot(spec=ls.OpenAISpec()),
        ]
        ls.LitServer(apis, accelerator="cpu", workers_per_device=2).run(port=8000, generate_client_file=False)
"""

PYTRITON = """
    import numpy as np
    from pytriton.decorators import batch, fill_optionals, first_value, group_by_keys, group_by_values, sample
    from pytriton.decorators import ConstantPadder, pad_batch, triton_context
    from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
    from pytriton.triton import Triton, TritonConfig

    @batch
    def scale(x, factor):
        return {"y": x * factor}

    @fill_optionals(factor=np.array([10], np.float32))
    @group_by_values("factor")
    @batch
    @first_value("factor")
    def scale_by_first(x, factor):
        assert np.isscalar(factor)
        return [x * factor]

    @sample
    def shout(text):
        return {"loud": np.char.upper(text.astype("U"))}

    class Model:
        def __init__(self, number):
            self.number = number

        @triton_context
        @batch
        @pad_batch
        def infer(self, x, triton_context):
            assert len(x) == triton_context.model_config.max_batch_size
            return [x + self.number]

    def raw(requests):
        return [{"y": request["x"][::-1] + request.parameters.get("more", 0)} for request in requests]

    def count(requests):
        for number in range(int(requests[0]["n"].item())):
            yield [{"i": np.array([[number]])}]

    ROW = Tensor(name="x", dtype=np.float32, shape=(2,))
    with Triton(config=TritonConfig(http_port=8000, exit_timeout_secs=20)) as triton:
        y = Tensor(name="y", dtype=np.float32, shape=(2,))
        one = Tensor(name="factor", dtype=np.float32, shape=(1,))
        optional = Tensor(name="factor", dtype=np.float32, shape=(1,), optional=True)
        triton.bind("scale", scale, [ROW, one], [y], config=ModelConfig(max_batch_size=16,
                    batcher=DynamicBatcher(max_queue_delay_microseconds=100)))
        triton.bind("first", scale_by_first, inputs=[ROW, optional], outputs=[y])
        triton.bind("shout", shout, inputs=[Tensor(name="text", dtype=bytes, shape=(-1,))],
                    outputs=[Tensor(name="loud", dtype=bytes, shape=(-1,))], config=ModelConfig(batching=False))
        triton.bind(model_name="two", infer_func=[Model(1).infer, Model(1).infer], inputs=[ROW],
                    outputs=[Tensor(dtype=np.float32, shape=(2,))], strict=True)
        triton.bind("raw", raw, inputs=[ROW], outputs=[y])
        triton.bind("count", count, inputs=[Tensor(name="n", dtype=np.int64, shape=(1,))],
                    outputs=[Tensor(name="i", dtype=np.int64, shape=(1,))], config=ModelConfig(decoupled=True))
        triton.serve()
"""


def served(directory: Path, program: str) -> Iterator[str]:
    path = directory / "app.py"
    path.write_text(textwrap.dedent(program))
    with closing(ServerProcess([str(path), *PORTS])) as process:
        process.wait_until_started()
        yield process.http_url


@pytest.fixture(scope="module")
def litserve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from served(tmp_path_factory.mktemp("litserve"), LITSERVE)


@pytest.fixture(scope="module")
def pytriton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from served(tmp_path_factory.mktemp("pytriton"), PYTRITON)


@pytest.mark.parametrize(
    ("path", "body", "status", "answer"),
    [
        ("/predict", {"input": 4.0, "name": "four"}, 200, {"output": 16.0, "name": "four"}),
        ("/predict", {"input": -1}, 422, {"detail": "the number is negative"}),
        ("/predict", {}, 500, None),
        ("/batched", {"row": [1, 2]}, 200, {"sum": 3.0, "of": 1}),
        ("/batched", {}, 422, {"detail": "the number is negative"}),
        ("/later", {"input": 1}, 200, {"output": 2}),
    ],
)
def test_a_lit_api_answers_at_its_path(litserve: str, path: str, body: Any, status: int, answer: Any) -> None:
    response = httpx.post(f"http://{litserve}{path}", json=body)
    assert response.status_code == (400 if status == 422 else status), response.text
    assert response.json() == answer if answer else "KeyError" in response.json()["detail"]


def test_a_lit_api_streams_and_is_a_model_of_every_protocol(litserve: str) -> None:
    response = httpx.post(f"http://{litserve}/v1/words", json={"text": "one two"})
    assert response.text == '{"word":"one"}\n{"word":"two"}\n'
    with closing(httpclient.InferenceServerClient(litserve)) as client:
        request = httpclient.InferInput("request", [3, 1], "BYTES")
        request.set_data_from_numpy(np.array([[b'{"row": [1]}'], [b'{"row": [2]}'], [b'{"row": [3]}']], object))
        rows = client.infer("batched", [request]).as_numpy("response").ravel()
    assert list(rows) == [b'{"sum":%d.0,"of":3}' % number for number in (1, 2, 3)]
    chat = openai.OpenAI(base_url=f"http://{litserve}/v1", api_key="none").chat.completions
    answer = chat.create(model="Parrot", messages=[{"role": "user", "content": "hello there"}])
    assert answer.choices[0].message.content == "hello there "


def ask(url: str, model: str, parameters: dict[str, Any] | None = None, **inputs: np.ndarray[Any, Any]) -> Any:
    with closing(httpclient.InferenceServerClient(url)) as client:
        sent = []
        for name, value in inputs.items():
            datatype = {"f": "FP32", "i": "INT64", "O": "BYTES"}[value.dtype.kind]
            sent.append(httpclient.InferInput(name, list(value.shape), datatype))
            sent[-1].set_data_from_numpy(value)
        answer = client.infer(model, sent, parameters=parameters)
        return answer.as_numpy(answer.get_response()["outputs"][0]["name"])


ROWS = np.array([[1, 2], [3, 4]], "f4")


@pytest.mark.parametrize(
    ("model", "inputs", "expected"),
    [
        ("scale", {"x": ROWS, "factor": np.array([[2], [3]], "f4")}, [[2, 4], [9, 12]]),
        ("first", {"x": ROWS, "factor": np.array([[2], [3]], "f4")}, [[2, 4], [9, 12]]),
        ("first", {"x": ROWS}, [[10, 20], [30, 40]]),
        ("shout", {"text": np.array([b"a", b"b"], object)}, [b"A", b"B"]),
        ("two", {"x": ROWS}, [[2, 3], [4, 5]]),
        ("raw", {"x": ROWS}, [[3, 4], [1, 2]]),
    ],
)
def test_bound_functions_get_what_their_decorators_say(
    pytriton: str, model: str, inputs: dict[str, Any], expected: Any
) -> None:
    assert ask(pytriton, model, **inputs).tolist() == expected


def test_a_bound_function_sees_parameters_and_may_be_a_generator(pytriton: str) -> None:
    assert ask(pytriton, "raw", {"more": 1}, x=ROWS).tolist() == [[4, 5], [2, 3]]
    config = httpx.get(f"http://{pytriton}/v2/models/scale/config").json()
    assert (config["max_batch_size"], config["dynamic_batching"]["max_queue_delay_microseconds"]) == (16, 100)
    stream = httpx.post(f"http://{pytriton}/v2/models/count/generate_stream", json={"n": 2}).text
    assert [line for line in stream.splitlines() if '"i"' in line][-1].count('"i":1') == 1


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import litserve as ls\nls.MCP", "modelserver, which stands in for litserve, has no 'MCP'"),
        ("import litserve as ls\n", "ended without serving: it never started a server of litserve"),
        ("import litserve as ls\nls.LitAPI(api_path='x')", "an api_path that begins with /"),
        (
            "from pytriton.triton import Triton\nfrom pytriton.model_config import Tensor\n"
            "Triton().bind('m', print, [Tensor(shape=(1,), dtype=complex)], [Tensor(shape=(1,), dtype=int)])",
            "expected a datatype",
        ),
        ("from pytriton.triton import TritonConfig\nTritonConfig(http_prot=1)", "modelserver has no flag 'http_prot'"),
    ],
)
def test_a_program_that_cannot_be_served_says_why(tmp_path: Path, program: str, message: str) -> None:
    (tmp_path / "app.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "modelserver", "serve", str(tmp_path / "app.py")], capture_output=True, text=True
    )
    assert done.returncode
    assert message in done.stderr
