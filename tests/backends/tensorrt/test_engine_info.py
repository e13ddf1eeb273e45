from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from modelserver_backends.tensorrt.completion import complete_from_engine
from modelserver_backends.tensorrt.engine_info import EngineInfo, from_engine, from_json, to_json
from modelserver_backends.tensorrt.sidecar import read_sidecar, write_sidecar
from support.engines import batching_engine, context_with, engine, tensor

from modelserver.backend import InvalidArgumentError, ServerError, UnsupportedError


def test_a_description_survives_json() -> None:
    info = engine(
        tensor("in", -1, 16),
        tensor("in_shape", 2, kind="INT32", is_shape=True),
        tensor("out", -1, -1, kind="BF16"),
        profiles=[{"in": ((1, 16), (4, 16), (8, 16)), "in_shape": ((1, 2), (4, 8), (8, 32))}],
    )
    assert from_json(json.loads(json.dumps(to_json(info))), "x") == info


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"tensors": []},
        {"profiles": []},
        {"profiles": [{}]},
        {"tensors": None},
        {"tensors": [{"name": 1}]},
        {"profiles": [{"in": [[1], [1, 2], [1]]}]},
        {"profiles": [{"in": [[1], [1], [1]]}]},
        {"profiles": [{"in": ["a", "b", "c"]}]},
        {"profiles": [{"in": [[1]]}]},
    ],
)
def test_other_documents_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"model\.plan\.json: expected the description of an engine"):
        from_json({**to_json(batching_engine()), **change}, "model.plan.json")
    for document in (None, [], "text", 3):
        with pytest.raises(InvalidArgumentError, match="expected the description of an engine"):
            from_json(document, "x")


def test_damaged_descriptions_are_refused_or_still_make_sense(tmp_path: Path) -> None:
    generator = random.Random(4)
    plan = tmp_path / "model.plan"
    write_sidecar(plan, batching_engine(), "0" * 64, {"onnx": "m.onnx"})
    whole = (tmp_path / "model.plan.json").read_bytes()
    refused = 0
    for _ in range(400):
        changed = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            changed[generator.randrange(len(changed))] = generator.choice(b'0123456789-[]{}",:ax\xff')
        (tmp_path / "model.plan.json").write_bytes(changed)
        try:
            sidecar = read_sidecar(plan)
        except InvalidArgumentError:
            refused += 1
            continue
        assert sidecar is not None
        with contextlib.suppress(ServerError):
            complete_from_engine(context_with(), sidecar.info, (0,))
    assert 200 < refused < 400


@pytest.mark.parametrize(
    ("info", "profiles", "largest"),
    [
        (batching_engine(32), (), 32),
        (engine(tensor("in"), tensor("out")), (), 0),
        # Of several inputs the smallest, of several profiles the largest.
        (
            engine(
                tensor("in", -1),
                tensor("in_2", -1),
                tensor("out", -1),
                profiles=[{"in": ((1,), (2,), (4,)), "in_2": ((1,), (2,), (9,))}] * 1
                + [{"in": ((1,), (2,), (7,)), "in_2": ((1,), (2,), (6,))}],
            ),
            (0, 1),
            6,
        ),
        # Of a shape tensor its first value.
        (
            engine(
                tensor("in", -1),
                tensor("in_shape", 2, kind="INT32", is_shape=True),
                tensor("out", -1),
                profiles=[{"in": ((1,), (2,), (9,)), "in_shape": ((1, 1), (1, 1), (5, 64))}],
            ),
            (),
            5,
        ),
    ],
)
def test_the_largest_batch(info: EngineInfo, profiles: tuple[int, ...], largest: int) -> None:
    assert info.largest_batch(profiles) == largest


class DescribedEngine:
    """What a TensorRT engine answers, with the types that it answers in; the values are those of a described one."""

    def __init__(self, info: EngineInfo, dtypes: dict[str, str], on_host: tuple[str, ...] = ()) -> None:
        self._on_host = on_host
        self._tensors = {one.name: one for one in info.tensors}
        self._info = info
        self._dtypes = dtypes
        self.num_io_tensors = len(info.tensors)
        self.num_optimization_profiles = len(info.profiles)

    def get_tensor_name(self, index: int) -> str:
        return list(self._tensors)[index]

    def get_tensor_mode(self, name: str) -> str:
        return "in" if self._tensors[name].is_input else "out"

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=self._dtypes[name])

    def get_tensor_shape(self, name: str) -> list[int]:
        return list(self._tensors[name].dims)

    def is_shape_inference_io(self, name: str) -> bool:
        return self._tensors[name].is_shape_tensor

    def get_tensor_location(self, name: str) -> Any:
        is_on_host = self._tensors[name].is_shape_tensor or name in self._on_host
        return SimpleNamespace(name="HOST" if is_on_host else "DEVICE")

    def get_tensor_format(self, name: str) -> str:
        return "linear"

    def get_tensor_vectorized_dim(self, name: str) -> int:
        return -1

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[list[int]]:
        bounds = self._info.profiles[profile][name]
        return [list(bounds.min), list(bounds.opt), list(bounds.max)]

    def get_tensor_profile_values(self, profile: int, name: str) -> list[list[int]]:
        assert self.is_shape_inference_io(name), "Binding index does not correspond to an input shape tensor."
        return self.get_tensor_profile_shape(name, profile)


TRT = SimpleNamespace(TensorIOMode=SimpleNamespace(INPUT="in"), TensorFormat=SimpleNamespace(LINEAR="linear"))


def test_an_engine_is_described_by_its_answers() -> None:
    info = engine(
        tensor("in", -1, 16),
        tensor("in_fixed", 3, kind="INT64"),
        tensor("in_shape", 2, kind="INT32", is_shape=True),
        tensor("out", -1),
        profiles=[{"in": ((1, 16), (4, 16), (8, 16)), "in_shape": ((1, 2), (4, 8), (8, 32))}],
    )
    dtypes = {"in": "FLOAT", "in_fixed": "INT64", "in_shape": "INT32", "out": "FLOAT"}
    assert from_engine(TRT, DescribedEngine(info, dtypes), name="m") == info
    lean = SimpleNamespace(TensorIOMode=TRT.TensorIOMode)
    assert from_engine(lean, DescribedEngine(info, dtypes), name="m") == info
    with pytest.raises(UnsupportedError, match="unsupported datatype TYPE_FP8 for output 'out' for model 'm'"):
        from_engine(TRT, DescribedEngine(info, {**dtypes, "out": "FP8"}), name="m")


def test_what_is_read_on_the_host_is_a_shape_tensor_even_where_no_output_depends_on_it() -> None:
    """Such a value decides how something within is reshaped; whether it may be that is known to TensorRT alone."""
    info = engine(tensor("in", 4), tensor("in_sizes", 2, kind="INT64"), tensor("out", 4))
    dtypes = {"in": "FLOAT", "in_sizes": "INT64", "out": "FLOAT"}
    found = from_engine(TRT, DescribedEngine(info, dtypes, on_host=("in_sizes",)), name="m")
    assert [one.name for one in found.tensors if one.is_shape_tensor] == ["in_sizes"]
    assert found.profiles[0]["in_sizes"].contains((2, -1))
    assert complete_from_engine(context_with(), found, (0,)).input[1].is_shape_tensor
    variable = engine(tensor("in", 4), tensor("out", -1, kind="INT64"))
    with pytest.raises(
        UnsupportedError, match=r"'out' of model 'm' is a shape tensor without a fixed number of values"
    ):
        from_engine(TRT, DescribedEngine(variable, {"in": "FLOAT", "out": "INT64"}, on_host=("out",)), name="m")
