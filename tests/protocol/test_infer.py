"""Inference over both protocols with Triton's clients: every datatype, outputs, ids, parameters, errors."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.clients import ClientError, ProtocolClient
from support.serving import RunningServer, running_server

from modelserver.core.datatype import Datatype
from modelserver.errors import ErrorCode

NUMERIC = [d for d in Datatype if d not in (Datatype.BYTES, Datatype.BF16)]


@pytest.fixture(scope="module")
def datatypes(layout: str, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    """A server with one identity model per datatype, a model of two inputs, and one without batching."""
    root = tmp_path_factory.mktemp("datatypes")
    for datatype in Datatype:
        _write(root, f"echo_{datatype.value}", 8, [("INPUT0", datatype.config_name, "-1")])
    _write(root, "pair", 4, [("INPUT0", "TYPE_FP32", "3"), ("INPUT1", "TYPE_INT32", "-1")])
    _write(root, "unbatched", 0, [("INPUT0", "TYPE_FP32", "2, -1")])
    with running_server(root) as running:
        yield running


def _write(root: Path, name: str, rows: int, tensors: list[tuple[str, str, str]]) -> None:
    lines = ['backend: "identity"', f"max_batch_size: {rows}"]
    for tensor, kind, dims in tensors:
        lines.append(f'input {{ name: "{tensor}" data_type: {kind} dims: [ {dims} ] }}')
        output = tensor.replace("INPUT", "OUTPUT")
        lines.append(f'output {{ name: "{output}" data_type: {kind} dims: [ {dims} ] }}')
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text("\n".join(lines))


@pytest.fixture
def echo(protocol: type[ProtocolClient], datatypes: RunningServer) -> ProtocolClient:
    with protocol(datatypes) as connected:
        yield connected


@pytest.mark.parametrize("datatype", NUMERIC)
def test_numbers_come_back_as_they_went(echo: ProtocolClient, datatype: Datatype) -> None:
    data = np.arange(-4, 8).reshape(2, 6).astype(datatype.numpy)
    answer = echo.infer(f"echo_{datatype.value}", {"INPUT0": data})["OUTPUT0"]
    assert answer.dtype == data.dtype
    np.testing.assert_array_equal(answer, data)


def test_bytes_keep_nul_emptiness_and_any_octet(echo: ProtocolClient) -> None:
    data = np.array([[b"", b"\x00\x01", "grüße".encode(), b"\xff" * 1000]], dtype=object)
    answer = echo.infer("echo_BYTES", {"INPUT0": data})["OUTPUT0"]
    assert answer.tolist() == data.tolist()


def test_bf16_travels_as_raw_bits(echo: ProtocolClient) -> None:
    data = np.array([[0.5, -2.0, 3.0]], dtype=ml_dtypes.bfloat16)
    answer = echo.infer("echo_BF16", {"INPUT0": data}, datatypes={"INPUT0": "BF16"})["OUTPUT0"]
    np.testing.assert_array_equal(answer, data)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_special_floats_survive(echo: ProtocolClient, value: float) -> None:
    data = np.array([[value, 1.0]], dtype=np.float32)
    np.testing.assert_array_equal(echo.infer("echo_FP32", {"INPUT0": data})["OUTPUT0"], data)


def test_an_empty_item_is_a_tensor_too(echo: ProtocolClient) -> None:
    data = np.empty((3, 0), dtype=np.float32)
    assert echo.infer("echo_FP32", {"INPUT0": data})["OUTPUT0"].shape == (3, 0)


def test_the_id_comes_back_and_the_version_is_named(echo: ProtocolClient) -> None:
    answer = echo.infer("echo_FP32", {"INPUT0": np.zeros((1, 1), np.float32)}, request_id="my-7")
    assert (answer.id, answer.model_name, answer.model_version) == ("my-7", "echo_FP32", "1")


def test_requested_outputs_come_in_their_order(echo: ProtocolClient) -> None:
    inputs = {"INPUT0": np.zeros((1, 3), np.float32), "INPUT1": np.ones((1, 2), np.int32)}
    assert list(echo.infer("pair", inputs).outputs) == ["OUTPUT0", "OUTPUT1"]
    assert list(echo.infer("pair", inputs, ["OUTPUT1"]).outputs) == ["OUTPUT1"]
    assert list(echo.infer("pair", inputs, ["OUTPUT1", "OUTPUT0"]).outputs) == ["OUTPUT1", "OUTPUT0"]


def test_a_model_without_batching_takes_its_dims_as_they_are(echo: ProtocolClient) -> None:
    data = np.ones((2, 5), np.float32)
    np.testing.assert_array_equal(echo.infer("unbatched", {"INPUT0": data})["OUTPUT0"], data)


@pytest.mark.parametrize(
    ("model", "inputs", "outputs", "code", "told"),
    [
        ("nobody", {"INPUT0": np.zeros((1, 1), np.float32)}, None, ErrorCode.NOT_FOUND, "unknown model: 'nobody'"),
        ("echo_FP32", {"INPUT0": np.zeros((1, 1), np.int32)}, None, ErrorCode.INVALID_ARGUMENT, "expects 'FP32'"),
        ("echo_FP32", {"INPUT1": np.zeros((1, 1), np.float32)}, None, ErrorCode.INVALID_ARGUMENT, "INPUT1"),
        ("echo_FP32", {"INPUT0": np.zeros((9, 1), np.float32)}, None, ErrorCode.INVALID_ARGUMENT, "must be <= 8"),
        ("echo_FP32", {"INPUT0": np.zeros((1, 1), np.float32)}, ["X"], ErrorCode.INVALID_ARGUMENT, "output 'X'"),
        ("pair", {"INPUT0": np.zeros((1, 3), np.float32)}, None, ErrorCode.INVALID_ARGUMENT, "missing required"),
        (
            "pair",
            {"INPUT0": np.zeros((1, 4), np.float32), "INPUT1": np.zeros((1, 1), np.int32)},
            None,
            ErrorCode.INVALID_ARGUMENT,
            r"Expected \[-1,3\], got \[1,4\]",
        ),
        (
            "pair",
            {"INPUT0": np.zeros((1, 3), np.float32), "INPUT1": np.zeros((2, 1), np.int32)},
            None,
            ErrorCode.INVALID_ARGUMENT,
            "batch size does not match other inputs for ",
        ),
        ("unbatched", {"INPUT0": np.zeros((3, 2), np.float32)}, None, ErrorCode.INVALID_ARGUMENT, "unexpected shape"),
    ],
)
def test_what_does_not_fit_is_refused_alike(
    echo: ProtocolClient,
    model: str,
    inputs: dict[str, np.ndarray],
    outputs: list[str] | None,
    code: ErrorCode,
    told: str,
) -> None:
    with pytest.raises(ClientError, match=told) as refused:
        echo.infer(model, inputs, outputs)
    assert refused.value.code is code


@pytest.mark.parametrize(("version", "code"), [("9", ErrorCode.NOT_FOUND)])
def test_an_unknown_version_is_not_found(echo: ProtocolClient, version: str, code: ErrorCode) -> None:
    with pytest.raises(ClientError) as refused:
        echo.infer("echo_FP32", {"INPUT0": np.zeros((1, 1), np.float32)}, version=version)
    assert refused.value.code is code


def test_a_refused_request_costs_the_next_nothing(echo: ProtocolClient) -> None:
    for _ in range(20):
        with pytest.raises(ClientError):
            echo.infer("echo_FP32", {"INPUT0": np.zeros((1, 1), np.int8)})
        echo.infer("echo_FP32", {"INPUT0": np.zeros((1, 1), np.float32)})


def test_a_large_tensor_goes_both_ways(echo: ProtocolClient) -> None:
    data = np.random.default_rng(0).random((1, 5_000_000), dtype=np.float32)
    np.testing.assert_array_equal(echo.infer("echo_FP32", {"INPUT0": data})["OUTPUT0"], data)
