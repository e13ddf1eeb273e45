"""Foreign clients through a router: they get the answers that they get without it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc
import tritonclient.http
from support.mock_llm import write_mock_llm
from support.routing import RunningRouter, running_router
from support.serving import running_server

REPOSITORY = Path(__file__).parents[2] / "model_repository" / "identity"


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRouter]:
    """Two servers of two models, and a router."""
    root = tmp_path_factory.mktemp("models")
    (root / "identity").symlink_to(REPOSITORY)
    write_mock_llm(root, "mock", parameters={"max_model_len": "512"})
    with (
        running_server(root, id="one") as one,
        running_server(root, id="two") as two,
        running_router((one.http_url, two.http_url)) as running,
    ):
        yield running


def tensor(library: Any, values: np.ndarray) -> Any:
    made = library.InferInput("INPUT0", list(values.shape), "FP32")
    made.set_data_from_numpy(values)
    return made


@pytest.mark.parametrize("size", [8, 1_000_000])
def test_tritonclient_over_http(router: RunningRouter, size: int) -> None:
    values = np.arange(size, dtype=np.float32).reshape(1, size)
    with tritonclient.http.InferenceServerClient(router.http_url) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("identity")
        assert client.get_server_metadata()["name"] in ("one", "two")
        for _ in range(3):
            answer = client.infer("identity", [tensor(tritonclient.http, values)])
            assert np.array_equal(answer.as_numpy("OUTPUT0"), values)
        with pytest.raises(tritonclient.http.InferenceServerException, match="unknown model: 'none'"):
            client.infer("none", [tensor(tritonclient.http, values)])


@pytest.mark.parametrize("size", [8, 1_000_000])
def test_tritonclient_over_grpc(router: RunningRouter, size: int) -> None:
    values = np.arange(size, dtype=np.float32).reshape(1, size)
    with tritonclient.grpc.InferenceServerClient(router.grpc_url) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.get_server_metadata().name in ("one", "two")
        for _ in range(3):
            answer = client.infer("identity", [tensor(tritonclient.grpc, values)], client_timeout=60)
            assert np.array_equal(answer.as_numpy("OUTPUT0"), values)
        with pytest.raises(tritonclient.grpc.InferenceServerException, match="unknown model: 'none'") as raised:
            client.infer("none", [tensor(tritonclient.grpc, values)])
        assert raised.value.status() == "StatusCode.NOT_FOUND"


def test_a_stream_of_grpc(router: RunningRouter) -> None:
    answers: SimpleQueue[Any] = SimpleQueue()
    with tritonclient.grpc.InferenceServerClient(router.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        for number in range(20):
            client.async_stream_infer("identity", [tensor(tritonclient.grpc, np.full((1, 2), number, np.float32))])
        found = [answers.get(timeout=30).as_numpy("OUTPUT0").tolist() for _ in range(20)]
        client.stop_stream()
    assert found == [[[number, number]] for number in range(20)]


def test_openai(router: RunningRouter) -> None:
    with openai.OpenAI(base_url=f"http://{router.http_url}/v1", api_key="none", max_retries=0) as client:
        assert [each.id for each in client.models.list()] == ["mock"]
        asked: Any = [{"role": "user", "content": "one two three"}]
        whole = client.chat.completions.create(model="mock", messages=asked)
        assert whole.choices[0].message.content == "one two three"
        stream = client.chat.completions.create(model="mock", messages=asked, stream=True)
        assert "".join(each.choices[0].delta.content or "" for each in stream) == "one two three"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="none", messages=asked)


def test_tokens_pass_as_they_are_made(router: RunningRouter) -> None:
    """The model waits after three tokens until it is cancelled, so nothing is kept back."""
    script = 'do: {"text": "a b c d", "hang": 3}'
    with httpx.stream(
        "POST",
        f"http://{router.http_url}/v1/completions",
        json={"model": "mock", "prompt": script, "stream": True},
        timeout=30,
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = (line for line in answer.iter_lines() if line.startswith("data: "))
        assert len([next(events) for _ in range(3)]) == 3


def test_a_body_in_chunks_and_a_client_of_http_1_0(router: RunningRouter) -> None:
    chunked = httpx.post(
        f"http://{router.http_url}/v1/completions",
        content=iter([b'{"model": "mock", ', b'"prompt": "x y"}']),
        headers={"content-type": "application/json"},
    )
    assert chunked.json()["choices"][0]["text"] == "x y"
    host, port = router.http_url.split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"GET /v2/models/identity HTTP/1.0\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.endswith(b"}")


def test_http_2_without_grpc(router: RunningRouter) -> None:
    with httpx.Client(http1=False, http2=True, base_url=f"http://{router.http_url}") as client:
        assert client.get("/v2/models/identity").json()["name"] == "identity"
        document = {"model": "mock", "prompt": "x y", "stream": True}
        assert client.post("/v1/completions", json=document).text.endswith("data: [DONE]\n\n")


def test_sequences_and_sessions_stay_on_one_replica(router: RunningRouter) -> None:
    with httpx.Client(base_url=f"http://{router.http_url}") as client:
        for session in ("a", "b", "c"):
            names = {client.get("/v2", headers={"x-session-id": session}).json()["name"] for _ in range(6)}
            assert len(names) == 1, session
