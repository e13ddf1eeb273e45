"""Runs by IOBinding, on the one device that is there: staging, and buffers that stay while answers do not change."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from modelserver_backends.onnxruntime import pinned
from modelserver_backends.onnxruntime.device_run import MAX_GRAPHS, BoundRun, GraphRun, host_inputs
from modelserver_backends.onnxruntime.instance import OnnxInstance
from modelserver_backends.onnxruntime.pinned import Staging, allocate_pinned
from onnx import TensorProto, helper
from onnxruntime.capi import onnxruntime_pybind11_state as native
from support.contexts import context_of
from support.fake_onnxruntime_cuda import Session, Value
from support.fake_torch_cuda import array_over
from support.onnx_models import identity_model, onnx_model, value

from modelserver.backend import Array, DeviceArray, InternalError, UnavailableError
from modelserver.backend.discovery import find_backend


@pytest.fixture
def session(tmp_path: Path) -> onnxruntime.InferenceSession:
    path = identity_model(tmp_path / "m", ["n", "k"]) / "1" / "model.onnx"
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def rows(count: int, start: float = 0.0) -> dict[str, Array]:
    return {"x": np.arange(start, start + count * 2, dtype=np.float32).reshape(count, 2)}


@pytest.mark.parametrize("is_staged", [False, True])
def test_bound_runs_answer_in_arrays_of_their_own(session: onnxruntime.InferenceSession, is_staged: bool) -> None:
    staging = Staging(lambda size: np.empty(size, np.uint8)) if is_staged else None
    bound = BoundRun(session, ["y"], staging)
    answers = [bound.run(rows(count, count), onnxruntime.RunOptions())[0] for count in (1, 3, 2, 3)]
    for count, answer in zip((1, 3, 2, 3), answers, strict=True):
        assert np.array_equal(answer, rows(count, count)["x"])
    strided = {"x": np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]}
    assert np.array_equal(bound.run(strided, onnxruntime.RunOptions())[0], strided["x"])


def test_fixed_buffers_do_not_change_what_was_answered(session: onnxruntime.InferenceSession) -> None:
    graphs = GraphRun(session, ["y"], ("cpu", 0), has_ids=False)
    answers = [graphs.run(rows(2, start))[0] for start in (1, 2, 3)]
    assert [answer[0, 0] for answer in answers] == [1, 2, 3]
    for count in range(1, MAX_GRAPHS + 4):
        for start in (0.0, 5.0):
            assert np.array_equal(graphs.run(rows(count, start))[0], rows(count, start)["x"])
    assert len(graphs._fixed) == MAX_GRAPHS


def test_buffers_grow_and_are_used_again() -> None:
    sizes: list[int] = []

    def allocate(size: int) -> Array:
        sizes.append(size)
        return np.empty(size, np.uint8)

    staging = Staging(allocate)
    for count in (1, 100_000, 7, 120_000):
        staged = staging.stage("x", np.full(count, count, np.int32))
        assert staged.tolist()[:2] == [count, count][:count]
    assert sizes == [1 << 16, 1 << 19]
    text = np.array([b"a"], dtype=object)
    assert staging.stage("t", text) is text
    plain = np.ones(3)
    assert Staging(lambda _: None).stage("x", plain) is plain


def test_without_cuda_there_is_no_pinned_memory() -> None:
    assert allocate_pinned(100, 0) is None


def test_pinned_memory_belongs_to_the_instances_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's first call of CUDA makes a context on its device, which is the first one unless it says otherwise."""
    calls: list[tuple[str, int]] = []
    memory = np.empty(256, np.uint8)

    class Runtime:
        def cudaSetDevice(self, number: int) -> int:  # noqa: N802 - the name is the library's
            calls.append(("cudaSetDevice", number))
            return 0

        def cudaHostAlloc(self, address: object, size: ctypes.c_size_t, _flags: int) -> int:  # noqa: N802
            calls.append(("cudaHostAlloc", size.value))
            address._obj.value = memory.ctypes.data  # type: ignore[attr-defined]
            return 0

        def cudaFreeHost(self, address: ctypes.c_void_p) -> None:  # noqa: N802
            calls.append(("cudaFreeHost", address.value or 0))

    monkeypatch.setattr(pinned, "_runtime", Runtime)
    found = allocate_pinned(100, 1)
    assert found is not None
    found[:] = 7
    assert memory[:100].tolist() == [7] * 100
    assert calls == [("cudaSetDevice", 1), ("cudaHostAlloc", 100)]
    del found
    assert calls[2:] == [("cudaFreeHost", memory.ctypes.data)]


def test_an_instance_runs_bound_what_can_be_bound(session: onnxruntime.InferenceSession, tmp_path: Path) -> None:
    context = context_of(tmp_path / "m")
    config = find_backend("onnxruntime").complete_config(context)
    options = (onnxruntime.RunOptions(), None, 1)
    bound = BoundRun(session, ["y"], None)
    instance = OnnxInstance(session, replace(config), run_options=options, bound=bound)
    assert np.array_equal(instance.run(rows(2))["y"], rows(2)["x"])


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("Error when binding input: Failed to allocate memory for requested buffer of size 9"), "503"),
        (native.Fail("CUDA failure 2: out of memory"), "503"),
        (RuntimeError("Error when binding input: CUDA failure 1: invalid argument"), "500"),
    ],
)
def test_a_gpu_without_memory_is_not_the_servers_fault(
    session: onnxruntime.InferenceSession, tmp_path: Path, error: Exception, expected: str
) -> None:
    """Bindings copy inputs, and raise what no run does."""

    class Full(BoundRun):
        def run(self, *_arguments: object) -> Any:
            raise error

    config = find_backend("onnxruntime").complete_config(context_of(tmp_path / "m"))
    bound = Full(session, ["y"], None)
    instance = OnnxInstance(session, config, run_options=(onnxruntime.RunOptions(), None, 1), bound=bound)
    with pytest.raises(UnavailableError if expected == "503" else InternalError, match=str(error)):
        instance.run(rows(2))


def test_registered_memory_is_read_and_written_where_it_lies(session: onnxruntime.InferenceSession) -> None:
    bound = BoundRun(session, ["y"], Staging(lambda size: np.empty(size, np.uint8)), ("cpu", 0))
    given, place = rows(3)["x"], np.zeros(32, np.uint8)
    options = onnxruntime.RunOptions()
    (out,) = bound.run({"x": array_over(given)}, options, {"y": array_over(place)})
    assert isinstance(out, DeviceArray)
    assert (out.address, out.shape, out.dtype) == (place.ctypes.data, (3, 2), np.dtype(np.float32))
    assert np.array_equal(place.view(np.float32)[:6].reshape(3, 2), given)
    place[:] = 7
    larger = rows(5)["x"]
    assert np.array_equal(bound.run({"x": array_over(larger)}, options, {"y": array_over(place)})[0], larger)
    assert (place == 7).all()
    # The bindings of one run do not stay for the next.
    assert np.array_equal(bound.run(rows(2), options)[0], rows(2)["x"])
    assert (place == 7).all()


@pytest.fixture
def on_gpu(session: onnxruntime.InferenceSession, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setattr(onnxruntime, "OrtValue", Value)
    return Session(session, has_graphs=True)


def test_graphs_are_captured_once_and_replay_at_their_addresses(
    on_gpu: Session, capfd: pytest.CaptureFixture[str]
) -> None:
    graphs = GraphRun(on_gpu, ["y"], ("cuda", 0), has_ids=True)
    for start in range(4):
        for count in (2, 3):
            (found,) = graphs.run(rows(count, start))
            assert np.array_equal(found, rows(count, start)["x"])
    # Of each shape one run without a graph, one that captures, two replays.
    assert (on_gpu.num_captures, on_gpu.num_replays) == (2, 4)
    assert len(on_gpu.options) == 3
    assert "already exists" not in capfd.readouterr().err
    # Another thread has graphs of its own.
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            assert np.array_equal(pool.submit(graphs.run, rows(2, 9.0)).result()[0], rows(2, 9.0)["x"])
    assert (on_gpu.num_captures, on_gpu.num_replays) == (3, 5)


def test_a_graph_that_cannot_be_captured_is_done_without(
    session: onnxruntime.InferenceSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(onnxruntime, "OrtValue", Value)
    graphs = GraphRun(Session(session, has_graphs=True, cannot_capture=True), ["y"], ("cuda", 0), has_ids=True)
    for start in range(4):
        assert np.array_equal(graphs.run(rows(2, start))[0], rows(2, start)["x"])
    assert caplog.text.count("without CUDA graphs, as one cannot be captured") == 1


def test_graphs_read_and_write_registered_memory(on_gpu: Session) -> None:
    graphs = GraphRun(on_gpu, ["y"], ("cuda", 0), has_ids=True)
    for start in range(4):
        given, place = rows(3, start)["x"], np.zeros(32, np.uint8)
        (out,) = graphs.run({"x": array_over(given)}, {"y": array_over(place)})
        assert isinstance(out, DeviceArray)
        assert (out.address, out.shape) == (place.ctypes.data, (3, 2))
        assert np.array_equal(place.view(np.float32)[:6].reshape(3, 2), given)
    assert (on_gpu.num_captures, on_gpu.num_replays) == (1, 2)
    # Memory that is too small for the output, and an output that is not asked for, come as arrays.
    assert np.array_equal(graphs.run({"x": array_over(given)}, {"y": array_over(np.zeros(8, np.uint8))})[0], given)
    assert np.array_equal(graphs.run(rows(3, 9.0))[0], rows(3, 9.0)["x"])


def test_what_kernels_read_of_the_host_belongs_to_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay does not read it again: the shape that Reshape takes, for example."""
    model = onnx_model(
        [value("x", ["n"]), value("shape", [2], TensorProto.INT64)],
        [value("y", ["a", "b"])],
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
    )
    real = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert host_inputs(real) == {"x", "shape"}
    monkeypatch.setattr(onnxruntime, "OrtValue", Value)
    session = Session(real, has_graphs=True, on_host={"shape"})
    assert host_inputs(session) == {"shape"}
    graphs = GraphRun(session, ["y"], ("cuda", 0), has_ids=True, on_host={"shape"})
    for start in range(4):
        for wanted in ((2, 3), (3, 2), (6, 1)):
            given, shape = np.arange(start, start + 6, dtype=np.float32), np.array(wanted)
            (found,) = graphs.run({"x": given, "shape": shape})
            assert np.array_equal(found, given.reshape(wanted))
            shape[:] = 7  # the batch's memory is used again
    assert (session.num_captures, session.num_replays) == (3, 6)


def test_a_capture_is_alone_in_the_process(
    session: onnxruntime.InferenceSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "OrtValue", Value)
    options = onnxruntime.RunOptions()
    other = BoundRun(Session(session), ["y"], None, ("cuda", 0))
    answers: list[Array] = []
    asking = threading.Thread(target=lambda: answers.extend(other.run(rows(2, 5.0), options)))

    def begin_another() -> None:
        asking.start()
        time.sleep(0.02)
        assert not answers

    capturing = Session(session, has_graphs=True, in_capture=begin_another)
    graphs = GraphRun(capturing, ["y"], ("cuda", 0), has_ids=True)
    for start in range(3):
        assert np.array_equal(graphs.run(rows(2, start))[0], rows(2, start)["x"])
    asking.join()
    assert np.array_equal(answers[0], rows(2, 5.0)["x"])
    assert capturing.num_captures == 1


def test_runs_with_graphs_are_interrupted(on_gpu: Session) -> None:
    graphs = GraphRun(on_gpu, ["y"], ("cuda", 0), has_ids=True)
    graphs.run(rows(2))
    graphs.interrupt(True)
    graphs.run(rows(2))
    assert [options.terminate for options, _ in on_gpu.options] == [True, True]
    graphs.interrupt(False)
    assert [options.terminate for options, _ in on_gpu.options] == [False, False]


@pytest.mark.parametrize("is_staged", [False, True])
def test_outputs_are_taken_before_their_memory_is_free_and_inputs_are_let_go(
    session: onnxruntime.InferenceSession, monkeypatch: pytest.MonkeyPatch, is_staged: bool
) -> None:
    monkeypatch.setattr(onnxruntime, "OrtValue", Value)
    staging = Staging(lambda size: np.empty(size, np.uint8)) if is_staged else None
    bound = BoundRun(Session(session), ["y"], staging, ("cuda", 0))
    given, place = rows(3)["x"], np.zeros(32, np.uint8)
    options = onnxruntime.RunOptions()
    (out,) = bound.run({"x": given}, options, {"y": array_over(place)})
    assert isinstance(out, DeviceArray)
    assert np.array_equal(place.view(np.float32)[:6].reshape(3, 2), rows(3)["x"])
    alive = weakref.ref(given)
    del given
    assert alive() is None
    (first,), (second,) = bound.run(rows(2, 1.0), options), bound.run(rows(2, 5.0), options)
    assert np.array_equal(first, rows(2, 1.0)["x"])
    assert np.array_equal(second, rows(2, 5.0)["x"])


def test_a_real_binding_lets_its_inputs_go(session: onnxruntime.InferenceSession) -> None:
    bound, given = BoundRun(session, ["y"], None), rows(3)["x"]
    bound.run({"x": given}, onnxruntime.RunOptions())
    alive = weakref.ref(given)
    del given
    assert alive() is None
