"""A server in a Python program: functions and classes as models, asked with and without sockets."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, TypedDict

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from support.processes import ServerProcess
from support.waiting import until_true

import modelserver as ms
from modelserver.errors import ConfigError, InternalError, NotFoundError, UnsupportedError

ROWS = ms.Tensor["FP32", 3]
# Outputs by name, as an annotation that tools for types leave alone.
DOUBLED = {"y": ROWS}
SUM = {"sum": int, "who": str}
TEXT = {"text_output": str}
left = threading.Event()
calls: list[int] = []


def double(x: ROWS) -> DOUBLED:
    calls.append(len(x))
    return {"y": x * 2}


class Answer(TypedDict):
    total: float
    words: list[str]


def everything(
    text: str,
    raw: bytes,
    number: int,
    numbers: list[float],
    document: dict[str, Any],
    grid: Annotated[np.ndarray, ms.Tensor["INT32", -1, 2]],
    flag: bool = False,
    note: str | None = None,
) -> Answer:
    words = [text, raw.decode(), str(flag), str(note), str(document["a"])]
    return {"total": number + sum(numbers) + float(grid.sum()), "words": words}


def words(text: str) -> Iterator[str]:
    yield from text.split()


async def slow_words(text: str) -> AsyncIterator[str]:
    try:
        for word in text.split():
            await asyncio.sleep(0)
            yield word
        await asyncio.sleep(3600)
    finally:
        left.set()


async def later(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return 2 * seconds


def refuse(kind: str) -> str:
    if kind == "client":
        raise ms.InvalidArgumentError("this is not for us")
    raise ValueError("broken inside")


def who(request: ms.Request, number: int) -> str:
    return f"{request.id or 'no id'} {request.parameters.get('lang', '')} {number}"


def chat(text_input: str = "", messages: dict[str, Any] | None = None) -> Iterator[TEXT]:
    text = messages["messages"][-1]["content"] if messages else text_input
    for word in text.split():
        yield {"text_output": word.upper() + " "}


def process_id(number: int) -> int:
    return os.getpid() + 0 * number


class Counter(ms.Model):
    ended = 0

    def load(self, placement: Any) -> None:
        self.name = placement.name

    def predict(self, numbers: list[int]) -> SUM:
        return {"sum": sum(numbers), "who": self.name}

    def unload(self) -> None:
        Counter.ended += 1


@pytest.fixture(scope="module")
def server() -> Iterator[ms.Server]:
    server = ms.Server(http_port=0, grpc_port=0, allow_metrics=False)
    server.add("double", double, max_batch_size=8, max_delay_ms=200)
    for function in (everything, words, slow_words, later, refuse, who, chat):
        server.add(function.__name__, function)
    with server:
        yield server


def test_a_function_is_asked_with_batches(server: ms.Server) -> None:
    calls.clear()
    answers: list[np.ndarray] = []

    def ask(number: int) -> None:
        answers.append(server.infer("double", x=np.full((1, 3), number, "f4"))["y"])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(float(answer[0, 0]) for answer in answers) == [2.0 * number for number in range(8)]
    assert sum(calls) == 8
    assert len(calls) < 8


def test_values_have_the_types_of_the_annotations(server: ms.Server) -> None:
    asked = {"text": "ä", "raw": b"\x41", "number": 3, "numbers": [0.5, 1], "document": {"a": [1]}}
    answer = server.infer("everything", **asked, grid=np.ones((4, 2), "i4"))
    assert answer == {"total": 12.5, "words": ["ä", "A", "False", "None", "[1]"]}
    answer = server.infer("everything", **asked, grid=[[1, 1]], flag=True, note="n")
    assert answer["words"] == ["ä", "A", "True", "n", "[1]"]


def test_foreign_clients_reach_a_function(server: ms.Server) -> None:
    document = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a b"]}]}
    body = {"inputs": [{"name": "kind", "shape": [1], "datatype": "BYTES", "data": ["client"]}]}
    with httpx.Client(base_url=f"http://{server.http_url}") as http:
        assert http.get("/v2/models/words").json()["inputs"] == [{"name": "text", "datatype": "BYTES", "shape": [1]}]
        refused = http.post("/v2/models/refuse/infer", json=body)
        assert (refused.status_code, refused.json()) == (400, {"error": "this is not for us"})
        assert http.post("/v2/models/words/infer", json=document).status_code == 501  # it answers twice
        chatted = http.post(
            "/v1/chat/completions", json={"model": "chat", "messages": [{"role": "user", "content": "hello there"}]}
        )
        assert "HELLO THERE" in chatted.json()["choices"][0]["message"]["content"]
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        tensor = grpcclient.InferInput("x", [2, 3], "FP32")
        tensor.set_data_from_numpy(np.ones((2, 3), np.float32))
        assert client.infer("double", [tensor]).as_numpy("y").tolist() == [[2, 2, 2], [2, 2, 2]]


def test_generators_stream(server: ms.Server) -> None:
    assert [answer["output"] for answer in server.stream("words", text="a b c")] == ["a", "b", "c"]
    assert list(server.stream("words", text="")) == []
    with pytest.raises(UnsupportedError, match="answers more than once: use stream"):
        server.infer("words", text="a b")


def test_a_stream_that_is_left_ends_the_coroutine(server: ms.Server) -> None:
    left.clear()
    for answer in server.stream("slow_words", text="a b"):
        assert answer == {"output": "a"}
        break
    assert left.wait(30)


def test_coroutines_run_at_the_same_time(server: ms.Server) -> None:
    async def ask() -> list[dict[str, Any]]:
        # One after another they would take half a minute.
        return await asyncio.gather(*(server.infer_async("later", seconds=0.25) for _ in range(100)))

    assert asyncio.run(asyncio.wait_for(ask(), 20)) == [{"output": 0.5}] * 100


def test_a_wait_has_an_end(server: ms.Server) -> None:
    with pytest.raises(TimeoutError):
        server.infer("later", seconds=3600, timeout_s=0.05)


def test_a_function_may_see_the_request(server: ms.Server) -> None:
    assert server.infer("who", number=3, parameters={"lang": "de"})["output"] == "no id de 3"


@pytest.mark.parametrize(
    ("model", "inputs", "error", "message"),
    [
        ("refuse", {"kind": "client"}, ms.InvalidArgumentError, "this is not for us"),
        ("refuse", {"kind": "other"}, InternalError, "ValueError: broken inside"),
        ("nothing", {}, NotFoundError, "nothing"),
        ("words", {}, ms.InvalidArgumentError, "required input"),
        ("words", {"text": b"\xff"}, ms.InvalidArgumentError, "input 'text' of model 'words': the text is not UTF-8"),
        ("later", {"seconds": "soon"}, ms.InvalidArgumentError, "input 'seconds': no FP64 can be made of it"),
        ("double", {"x": np.ones((1, 2), "f4")}, ms.InvalidArgumentError, "unexpected shape for input 'x'"),
        ("double", {"x": np.ones((1, 3), "c8")}, ms.InvalidArgumentError, "input 'x': no FP32 can be made of it"),
    ],
)
def test_a_bad_request_says_what_is_wrong(
    server: ms.Server, model: str, inputs: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        server.infer(model, **inputs)


def test_models_that_are_not_asked_hold_no_threads() -> None:
    server = ms.Server(ports=False)
    for number in range(20):
        server.add(f"idle_{number}", double, instances=2)

    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("idle_")]

    with server:
        until_true(lambda: not threads(), "the workers' threads end")
        for number in range(20):
            assert server.infer(f"idle_{number}", x=[1, 2, 3])["y"].tolist() == [2, 4, 6]
        assert threads(), "a thread stays for the next request"


def test_classes_processes_and_late_models() -> None:
    Counter.ended = 0
    server = ms.Server(ports=False)
    server.add("counter", Counter, instances=2)
    server.add("process_id", process_id, place="process")
    with server:
        answer = server.infer("counter", numbers=[1, 2])
        assert answer["sum"] == 3
        assert answer["who"].startswith("counter_0")
        assert server.infer("process_id", number=1)["output"] != os.getpid()
        with pytest.raises(RuntimeError, match="HTTP is not served"):
            _ = server.http_url
        for step in (1, 2):

            @server.model("late")
            def late(number: int, step: int = step) -> int:
                return number + step

            assert server.infer("late", number=1)["output"] == 1 + step
        assert late(1) == 3  # still a function

        def twice(number: int, step: int = 0) -> int:
            return 2 * number + step

        server.add("late", twice, version=2)
        assert [server.infer("late", version=one, number=4)["output"] for one in (1, 2, None)] == [6, 8, 8]
    assert Counter.ended == 2
    with pytest.raises(RuntimeError, match="the server is not running"):
        server.infer("late", number=1)
    with server:  # again
        assert server.infer("late", version=1, number=1)["output"] == 3


def no_result(x: int):
    return x


def no_input(x) -> int:
    return int(x)


def odd_input(x: complex) -> int:
    return int(x.real)


def odd_output(x: int) -> complex:
    return complex(x)


@pytest.mark.parametrize(
    ("target", "settings", "error", "message"),
    [
        (no_result, {}, ConfigError, "no_result does not say what it returns"),
        (no_input, {}, ConfigError, "parameter 'x': it has no annotation; expected Tensor"),
        (odd_input, {}, ConfigError, "parameter 'x': <class 'complex'> is not understood"),
        (odd_output, {}, ConfigError, "the returned value: <class 'complex'> is not understood"),
        (words, {"max_batch_size": 4}, ms.InvalidArgumentError, "max_batch_size is for functions that are called with"),
        (process_id, {"max_batch_size": 4}, ms.InvalidArgumentError, "'number' must be a Tensor"),
        (process_id, {"place": "moon"}, ms.InvalidArgumentError, "place 'moon' is none of thread"),
        (lambda x: x, {"place": "process", "inputs": {"x": int}, "outputs": {"y": int}}, ms.InvalidArgumentError, "at"),
        (process_id, {"inputs": {"y": int}}, ConfigError, "has no parameter 'y'"),
        (process_id, {"config": {"max_batch": 1}}, ConfigError, "max_batch"),
        (3, {}, ms.InvalidArgumentError, "expected a function or a class, got int"),
        (ms.Model, {}, ms.InvalidArgumentError, "class Model has no method predict"),
    ],
)
def test_what_cannot_be_served_is_refused_when_it_is_added(
    target: Any, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        ms.Server(ports=False).add("model", target, **settings)


@pytest.mark.parametrize("item", [("FP32", 0), ("FP33", 1), (complex, 1), ("FP32", "x")])
def test_a_tensor_says_which_datatypes_and_dims_there_are(item: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected (a datatype|dims)"):
        ms.Tensor(*item)


def test_wrong_options_and_failed_loads_say_what_is_wrong() -> None:
    with pytest.raises(ms.InvalidArgumentError, match="Server has no option 'http_prot'"):
        ms.Server(http_prot=1)

    class Broken:
        def load(self, placement: Any) -> None:
            raise FileNotFoundError("weights.bin")

        def predict(self, x: int) -> int:
            return x

    server = ms.Server(ports=False)
    server.add("broken", Broken)
    with pytest.raises(ms.ServerError, match=r"weights\.bin"):
        server.start()


def test_the_page_and_the_command_line(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "python-api.md").read_text()
    app, notebook, _of_triton = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "app.py").write_text(app)
    (tmp_path / "notebook.py").write_text(
        f"import numpy as np\nimport modelserver as ms\nfrom app import *\n{notebook}"
    )
    done = subprocess.run(
        [sys.executable, "notebook.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.split() == ["[[2.", "2.", "2.]]", "Hello", "Ada"]
    arguments = [f"{tmp_path}/app.py:server", "--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    with closing(ServerProcess(arguments)) as served:
        served.wait_until_started()
        body = re.findall(r"-d '(.*?)'", page)[0]
        answer = httpx.post(f"http://{served.http_url}/v2/models/greet/infer", content=body).json()
        assert answer["outputs"][0]["data"] == ["Hello Ada"]
    done = subprocess.run(
        [sys.executable, "-m", "modelserver", "serve", f"{tmp_path}/app.py:nothing"], capture_output=True, text=True
    )
    assert (done.returncode, "expected nothing = modelserver.Server(...)" in done.stderr) == (2, True)
