"""Triton's own clients, unmodified, against the whole server: every kind of client, and what they can ask for."""

from __future__ import annotations

import asyncio
import json
import queue
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from support.async_clients import AsyncClient
from support.clients import ClientError, GrpcClient, HttpClient, ProtocolClient
from support.model_files import write_identity
from support.reflecting import write_reflecting
from support.serving import RunningServer, running_server
from tritonclient.utils import InferenceServerException

from modelserver.errors import ErrorCode

COMPRESSION = [None, "gzip", "deflate"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("served")
    write_identity(root, "echo")
    write_identity(root, "text", data_type="TYPE_STRING")
    write_identity(root, "slow", execute_delay_ms=400)
    write_reflecting(root)
    options = {"model_control_mode": "explicit", "load_model": ("*",)}
    with running_server(root, **options) as running:
        yield running


@pytest.fixture
def client(protocol: type[ProtocolClient], served: RunningServer) -> Iterator[ProtocolClient]:
    with protocol(served) as connected:
        yield connected


def _input(library: Any, data: np.ndarray, name: str = "INPUT0", datatype: str = "FP32", **details: Any) -> Any:
    tensor = library.InferInput(name, list(data.shape), datatype)
    tensor.set_data_from_numpy(data, **details)
    return tensor


def _told(client: ProtocolClient, **details: Any) -> dict[str, Any]:
    return json.loads(client.infer("reflect", {"TEXT": np.array([b"x"], dtype=object)}, **details)["TOLD"].item())


def test_an_input_can_be_used_again_with_other_data_and_another_shape(client: ProtocolClient) -> None:
    tensor = client.library.InferInput("INPUT0", [1, 2], "FP32")
    wanted = [client.library.InferRequestedOutput("OUTPUT0")]
    for data in (np.ones((1, 2), np.float32), np.full((1, 2), 7, np.float32), np.zeros((3, 4), np.float32)):
        tensor.set_shape(list(data.shape))
        tensor.set_data_from_numpy(data)
        for _ in range(2):
            answer = client.raw.infer("echo", [tensor], outputs=wanted)
            np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), data)


def test_parameters_reach_the_model(client: ProtocolClient) -> None:
    told = _told(client, request_id="r1", parameters={"text": "a", "number": 7, "yes": True}, timeout=5_000_000)
    assert told["id"] == "r1"
    assert told["parameters"] == {"text": "a", "number": 7, "yes": True}
    assert told["timeout"] == 5_000_000


def test_a_fraction_is_a_parameter_over_grpc_and_http_alike(client: ProtocolClient) -> None:
    if client.name == "grpc":
        assert _told(client, parameters={"half": 0.5})["parameters"] == {"half": 0.5}
    else:
        document = {
            "inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1], "data": ["x"]}],
            "parameters": {"half": 0.5},
        }
        answer = client.raw._post("v2/models/reflect/infer", json.dumps(document), None, None)
        assert json.loads(json.loads(answer.read())["outputs"][0]["data"][0])["parameters"] == {"half": 0.5}


def test_reserved_parameters_are_refused(client: ProtocolClient) -> None:
    with pytest.raises((ClientError, InferenceServerException), match=r"triton_|reserved"):
        _told(client, parameters={"triton_secret": 1})


def test_requested_outputs_are_known_to_the_model(client: ProtocolClient) -> None:
    assert _told(client)["outputs"] == ["TEXT", "TOLD"]
    assert json.loads(client.infer("reflect", {"TEXT": np.array([b"x"], dtype=object)}, ["TOLD"])["TOLD"].item())[
        "outputs"
    ] == ["TOLD"]


@pytest.mark.parametrize("texts", [["a", "", "ü€😀"], [], ["x" * 100_000]])
def test_text(client: ProtocolClient, texts: list[str]) -> None:
    data = np.array([[text.encode() for text in texts]], dtype=object).reshape(1, len(texts))
    answer = client.infer("text", {"INPUT0": data})["OUTPUT0"]
    assert [each.decode() for each in answer.ravel()] == texts


def test_text_of_fixed_width(client: ProtocolClient) -> None:
    data = np.array([["ab", "cde"]], dtype="S5")
    assert client.infer("text", {"INPUT0": data}, datatypes={"INPUT0": "BYTES"})["OUTPUT0"].tolist() == [
        [b"ab", b"cde"]
    ]


@pytest.mark.parametrize("is_binary_in", [True, False])
@pytest.mark.parametrize("is_binary_out", [True, False])
@pytest.mark.parametrize("model", ["echo", "text"])
def test_json_and_binary(served: RunningServer, is_binary_in: bool, is_binary_out: bool, model: str) -> None:
    data = np.array([["a", "ü"]], object) if model == "text" else np.array([[1.5, -2]], np.float32)
    with HttpClient(served) as client:
        datatype = "BYTES" if model == "text" else "FP32"
        tensor = _input(tritonclient.http, data, datatype=datatype, binary_data=is_binary_in)
        wanted = [tritonclient.http.InferRequestedOutput("OUTPUT0", binary_data=is_binary_out)]
        answer = client.raw.infer(model, [tensor], outputs=wanted)
        assert ("data" in answer.get_output("OUTPUT0")) is not is_binary_out
        expected = [[b"a", "ü".encode()]] if model == "text" and is_binary_out else data.tolist()
        assert answer.as_numpy("OUTPUT0").tolist() == expected


@pytest.mark.parametrize("request_algorithm", COMPRESSION)
@pytest.mark.parametrize("response_algorithm", COMPRESSION)
@pytest.mark.parametrize("size", [1, 100_000])
def test_http_compression(
    served: RunningServer, request_algorithm: str | None, response_algorithm: str | None, size: int
) -> None:
    data = np.arange(size, dtype=np.float32).reshape(1, size)
    with HttpClient(served) as client:
        answer = client.infer(
            "echo",
            {"INPUT0": data},
            request_compression_algorithm=request_algorithm,
            response_compression_algorithm=response_algorithm,
        )
    np.testing.assert_array_equal(answer["OUTPUT0"], data)


@pytest.mark.parametrize("algorithm", COMPRESSION)
@pytest.mark.parametrize("size", [1, 100_000])
def test_grpc_compression(served: RunningServer, algorithm: str | None, size: int) -> None:
    data = np.arange(size, dtype=np.float32).reshape(1, size)
    with GrpcClient(served) as client:
        answer = client.infer("echo", {"INPUT0": data}, compression_algorithm=algorithm)
    np.testing.assert_array_equal(answer["OUTPUT0"], data)


def test_bodies_made_and_parsed_offline(served: RunningServer) -> None:
    """What SageMaker users do: the body comes from the client, the request from elsewhere."""
    library = tritonclient.http.InferenceServerClient
    data = np.array([[1, 2, 3]], np.float32)
    body, json_size = library.generate_request_body([_input(tritonclient.http, data)])
    with HttpClient(served) as client:
        headers = {"Inference-Header-Content-Length": str(json_size)} if json_size else {}
        answer = client.raw._post("v2/models/echo/infer", body, headers, None)
        length = answer.get("Inference-Header-Content-Length")
        result = library.parse_response_body(bytes(answer.read()), header_length=int(length) if length else None)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), data)


def test_http_async_infer(served: RunningServer) -> None:
    with HttpClient(served, concurrency=8) as client:
        handles = []
        for number in range(20):
            data = np.full((1, 3), number, np.float32)
            handles.append(client.raw.async_infer("echo", [_input(tritonclient.http, data)], request_id=f"{number}"))
        for number, handle in enumerate(handles):
            result = handle.get_result(timeout=20)
            assert result.get_response()["id"] == f"{number}"
            assert result.as_numpy("OUTPUT0").tolist() == [[number] * 3]
        bad = client.raw.async_infer("nobody", [_input(tritonclient.http, data)])
        with pytest.raises(InferenceServerException, match="unknown model"):
            bad.get_result(timeout=20)


def test_grpc_async_infer(served: RunningServer) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with GrpcClient(served) as client:
        for number in range(20):
            data = np.full((1, 3), number, np.float32)
            client.raw.async_infer(
                "echo",
                [_input(tritonclient.grpc, data)],
                lambda result, error: answers.put((result, error)),
                request_id=f"{number}",
            )
        seen = {}
        for _ in range(20):
            result, error = answers.get(timeout=20)
            assert error is None
            seen[result.get_response().id] = result.as_numpy("OUTPUT0").tolist()
    assert seen == {f"{number}": [[number] * 3] for number in range(20)}


def test_grpc_async_infer_can_be_cancelled(served: RunningServer) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with GrpcClient(served) as client:
        call = client.raw.async_infer(
            "slow",
            [_input(tritonclient.grpc, np.zeros((1, 1), np.float32))],
            lambda result, error: answers.put(error),
        )
        call.cancel()
        assert "CANCELLED" in str(answers.get(timeout=20).status())


def test_a_client_s_patience_ends_its_call(served: RunningServer) -> None:
    with GrpcClient(served) as client, pytest.raises(ClientError) as late:
        client.infer("slow", {"INPUT0": np.zeros((1, 1), np.float32)}, client_timeout=0.1)
    assert "DEADLINE_EXCEEDED" in late.value.status


def _stream(client: GrpcClient) -> queue.Queue[tuple[Any, Any]]:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.raw.start_stream(lambda result, error: answers.put((result, error)))
    return answers


@pytest.mark.parametrize("wants_empty_final", [False, True])
def test_a_stream_answers_in_order_and_marks_the_final_response(served: RunningServer, wants_empty_final: bool) -> None:
    with GrpcClient(served) as client:
        answers = _stream(client)
        for number in range(30):
            model = "slow" if number == 0 else "echo"
            data = np.full((1, 2), number, np.float32)
            client.raw.async_stream_infer(
                model,
                [_input(tritonclient.grpc, data)],
                request_id=f"{number}",
                enable_empty_final_response=wants_empty_final,
            )
        for number in range(30):
            result, error = answers.get(timeout=20)
            assert error is None
            response = result.get_response()
            assert response.id == f"{number}"
            assert response.parameters["triton_final_response"].bool_param is True
            assert result.as_numpy("OUTPUT0").tolist() == [[number] * 2]
        client.raw.stop_stream()
        assert answers.empty()


def test_an_error_leaves_the_stream_open(served: RunningServer) -> None:
    data = np.ones((1, 2), np.float32)
    with GrpcClient(served) as client:
        answers = _stream(client)
        for model in ("echo", "nobody", "echo"):
            client.raw.async_stream_infer(model, [_input(tritonclient.grpc, data)])
        outcomes = [answers.get(timeout=20) for _ in range(3)]
        client.raw.stop_stream()
    assert [error is None for _, error in outcomes] == [True, False, True]
    assert "unknown model: 'nobody'" in outcomes[1][1].message()


def test_a_stream_can_be_stopped_with_what_it_has_in_flight(served: RunningServer) -> None:
    with GrpcClient(served) as client:
        answers = _stream(client)
        for _ in range(3):
            client.raw.async_stream_infer("slow", [_input(tritonclient.grpc, np.ones((1, 2), np.float32))])
        client.raw.stop_stream(cancel_requests=True)
        while not answers.empty():
            assert "CANCELLED" in str(answers.get()[1].status())
        assert client.infer("echo", {"INPUT0": np.ones((1, 2), np.float32)})["OUTPUT0"].tolist() == [[1, 1]]


async def test_aio_clients_share_a_connection(async_protocol: type[AsyncClient], served: RunningServer) -> None:
    async with async_protocol(served) as client:
        assert await client.raw.is_server_live()
        assert await client.raw.is_server_ready()
        assert await client.raw.is_model_ready("echo")
        assert not await client.raw.is_model_ready("nobody")
        answers = await asyncio.gather(
            *(client.infer("echo", {"INPUT0": np.full((1, 2), n, np.float32)}, request_id=f"{n}") for n in range(50))
        )
        assert [(each.id, each["OUTPUT0"].tolist()) for each in answers] == [(f"{n}", [[n, n]]) for n in range(50)]
        with pytest.raises(ClientError) as refused:
            await client.infer("nobody", {"INPUT0": np.zeros((1, 1), np.float32)})
        assert refused.value.code is ErrorCode.NOT_FOUND


async def test_aio_stream(served: RunningServer) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(5):
            data = np.full((1, 2), number, np.float32)
            yield {
                "model_name": "echo" if number != 2 else "nobody",
                "inputs": [_input(tritonclient.grpc.aio, data)],
                "request_id": f"{number}",
                "enable_empty_final_response": True,
            }

    async with tritonclient.grpc.aio.InferenceServerClient(served.grpc_url) as client:
        outcomes = [(result, error) async for result, error in client.stream_infer(requests())]
    assert [error is None for _, error in outcomes] == [True, True, False, True, True]
    assert [result.get_response().id for result, error in outcomes if error is None] == ["0", "1", "3", "4"]


def test_model_control(client: ProtocolClient) -> None:
    client.unload("text")
    assert not client.is_model_ready("text")
    client.load("text")
    assert client.is_model_ready("text")
    with pytest.raises(ClientError):
        client.load("nobody")


def test_statistics_of_a_model_and_of_all(client: ProtocolClient) -> None:
    client.infer("echo", {"INPUT0": np.ones((3, 2), np.float32)})
    (row,) = client.statistics("echo")
    assert row["inference_stats"]["success"]["count"] > 0
    assert row["inference_stats"]["success"]["ns"] > 0
    assert row["inference_stats"]["queue"]["count"] == row["inference_stats"]["success"]["count"]
    assert row["inference_stats"]["compute_infer"]["count"] == row["inference_stats"]["success"]["count"]
    assert row["last_inference"] > 1_700_000_000_000
    assert {each["name"] for each in client.statistics()} == {"echo", "text", "slow", "reflect"}


def test_regions_cannot_be_registered_without_the_flag(client: ProtocolClient) -> None:
    with pytest.raises(InferenceServerException, match="--allow-client-shm") as refused:
        client.raw.register_system_shared_memory("region", "/key", 100)
    assert str(refused.value.status()) in ("501", "StatusCode.UNIMPLEMENTED")


def test_there_are_no_shared_memory_regions(client: ProtocolClient) -> None:
    details = {"as_json": True} if client.name == "grpc" else {}
    for status in (client.raw.get_system_shared_memory_status, client.raw.get_cuda_shared_memory_status):
        assert not status(**details)


def test_unregistering_all_regions_of_none_is_no_error(client: ProtocolClient) -> None:
    """Triton's examples and perf_analyzer do it before they begin."""
    client.raw.unregister_system_shared_memory()
    client.raw.unregister_cuda_shared_memory()


def test_a_plugin_s_headers_are_taken(client: ProtocolClient) -> None:
    from tritonclient.grpc.auth import BasicAuth as GrpcBasicAuth
    from tritonclient.http.auth import BasicAuth as HttpBasicAuth

    plugin = GrpcBasicAuth if client.name == "grpc" else HttpBasicAuth
    client.raw.register_plugin(plugin("user", "secret"))
    assert client.is_live()
    client.infer("echo", {"INPUT0": np.ones((1, 1), np.float32)}, headers={"x-trace": "1"})


def test_keepalive_options(served: RunningServer) -> None:
    options = tritonclient.grpc.KeepAliveOptions(keepalive_time_ms=10_000, keepalive_permit_without_calls=True)
    with GrpcClient(served, keepalive_options=options) as client:
        assert client.is_ready()


def test_health_service(served: RunningServer) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(served.grpc_url) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        for service in ("", "inference.GRPCInferenceService", "echo"):
            assert stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10).status == serving
        with pytest.raises(grpc.RpcError) as unknown:
            stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=10)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=10)
        assert next(watch).status == serving
        watch.cancel()


def test_reflection_describes_a_service_that_can_be_called(served: RunningServer) -> None:
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    with grpc.insecure_channel(served.grpc_url) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "inference.GRPCInferenceService" in database.get_services()
        pool = DescriptorPool(database)
        method = pool.FindServiceByName("inference.GRPCInferenceService").FindMethodByName("ModelReady")
        request = GetMessageClass(method.input_type)(name="echo")
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelReady",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        assert call(request, timeout=10).ready is True
