"""Runs by IOBinding, on the one device that is there: staging, and buffers that stay while answers do not change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from modelserver_backends.onnxruntime.device_run import MAX_GRAPHS, BoundRun, GraphRun
from modelserver_backends.onnxruntime.instance import OnnxInstance
from modelserver_backends.onnxruntime.pinned import Staging, allocate_pinned
from support.contexts import context_of
from support.fake_torch_cuda import array_over
from support.onnx_models import identity_model

from modelserver.backend import Array, DeviceArray
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
    answers = [graphs.run(rows(2, start), onnxruntime.RunOptions())[0] for start in (1, 2, 3)]
    assert [answer[0, 0] for answer in answers] == [1, 2, 3]
    for count in range(1, MAX_GRAPHS + 4):
        for start in (0.0, 5.0):
            assert np.array_equal(graphs.run(rows(count, start), onnxruntime.RunOptions())[0], rows(count, start)["x"])
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
    assert allocate_pinned(100) is None


def test_an_instance_runs_bound_what_can_be_bound(session: onnxruntime.InferenceSession, tmp_path: Path) -> None:
    context = context_of(tmp_path / "m")
    config = find_backend("onnxruntime").complete_config(context)
    options = (onnxruntime.RunOptions(), None, 1)
    bound = BoundRun(session, ["y"], None)
    instance = OnnxInstance(session, replace(config), run_options=options, bound=bound)
    assert np.array_equal(instance.run(rows(2))["y"], rows(2)["x"])


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
