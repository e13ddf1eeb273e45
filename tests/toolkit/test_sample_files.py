"""Samples from every kind of file, and from recorded requests."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.serving import running_server

from modelserver.client.server_client import ServerClient
from modelserver.config.schema import ModelConfig, ModelInput
from modelserver.core.datatype import Datatype
from modelserver.errors import InvalidArgumentError
from modelserver.toolkit.sample_files import read_requests, read_samples

CONFIG = ModelConfig(
    max_batch_size=4,
    input=(
        ModelInput(name="x", data_type=Datatype.FP32, dims=(2,)),
        ModelInput(name="n", data_type=Datatype.INT32, dims=(1,)),
    ),
)
X = np.arange(6, dtype=np.float32).reshape(3, 2)
N = np.arange(3, dtype=np.int64).reshape(3, 1)


def test_npz_directories_and_npy(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", x=X, n=N, labels=N[:, 0])
    single = tmp_path / "single"
    single.mkdir()
    np.save(single / "x.npy", X)
    np.save(single / "n.npy", N)
    several = tmp_path / "several"
    several.mkdir()
    for number in range(3):
        np.savez(several / f"{number}.npz", x=X[number : number + 1], n=N[number : number + 1])
    for path in (tmp_path / "all.npz", single, several):
        samples = read_samples(path, CONFIG)
        np.testing.assert_array_equal(samples.arrays["x"], X)
        assert samples.arrays["n"].dtype == np.int32
    one = ModelConfig(max_batch_size=4, input=CONFIG.input[:1])
    assert read_samples(single / "x.npy", one).count == 3


def test_wrong_files_are_explained(tmp_path: Path) -> None:
    text = tmp_path / "text.npz"
    text.write_text("not an archive")
    objects = tmp_path / "objects.npz"
    np.savez(objects, x=np.array([{}], dtype=object))
    empty = tmp_path / "empty"
    empty.mkdir()
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    np.savez(mixed / "a.npz", x=X, n=N)
    np.savez(mixed / "b.npz", x=X, n=N, labels=N[:, 0])
    for path, reason in (
        (tmp_path / "absent.npz", "No such file"),
        (text, "not a .npz file"),
        (objects, "not a .npz file of plain arrays"),
        (empty, "expected x.npy and n.npy"),
        (mixed, "same arrays"),
    ):
        with pytest.raises(InvalidArgumentError, match=reason):
            read_samples(path, CONFIG)


def test_bench_data_is_read(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps({"data": [{"x": [1, 2], "n": [3]}, {"x": {"content": [4, 5], "shape": [2]}, "n": [6]}]}))
    assert read_requests(path, CONFIG).arrays["x"].tolist() == [[1, 2], [4, 5]]
    for text, reason in (
        ("{", "is not JSON"),
        ("{}", "neither a trace file nor bench data"),
        ("[]", "holds no inputs.*TENSORS"),
        ('{"data": [{"y": [1]}]}', "no input 'y'"),
        ('{"data": [{"x": [1, 2, 3], "n": [1]}]}', "'x' does not fit"),
        ('{"data": [[1]]}', "object of inputs"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidArgumentError, match=reason):
            read_requests(path, CONFIG)


def test_what_a_server_traced_is_read(tmp_path: Path, model_repository: Path) -> None:
    trace = tmp_path / "trace.json"
    sent = np.random.default_rng(0).random((3, 8, 8)).astype(np.float32)
    flags = ("level=TENSORS", "rate=1", f"triton,file={trace}")
    with running_server(
        model_repository, model_control_mode="explicit", load_model=("digits_onnx",), trace_config=flags
    ) as running:
        client = ServerClient(f"http://{running.http_url}")
        for rows in (sent[:2], sent[2:]):
            head = json.dumps(
                {
                    "inputs": [
                        {
                            "name": "image",
                            "datatype": "FP32",
                            "shape": list(rows.shape),
                            "parameters": {"binary_data_size": rows.nbytes},
                        }
                    ]
                }
            ).encode()
            client.infer("digits_onnx", "", head + rows.tobytes(), len(head))
    config = ModelConfig(max_batch_size=64, input=(ModelInput(name="image", data_type=Datatype.FP32, dims=(8, 8)),))
    np.testing.assert_allclose(read_requests(trace, config).arrays["image"], sent, rtol=1e-5)
