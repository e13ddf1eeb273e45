"""The backend where there is no GPU: each load fails with a reason, and the process goes on."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from modelserver_backends.tensorrt.backend import TensorRTBackend
from modelserver_backends.tensorrt.sidecar import write_sidecar
from support.contexts import context_of
from support.engines import batching_engine, context_with, plan_bytes
from support.onnx_models import identity_model

from modelserver.backend import (
    BackendContext,
    ConfigError,
    FindingLevel,
    InvalidArgumentError,
    Placement,
    ServerError,
    UnavailableError,
    UnsupportedError,
)

without_gpu = pytest.mark.tool("no-gpu")
IO = (
    'input [ { name: "in" data_type: TYPE_FP32 dims: [ 16 ] } ] '
    'output [ { name: "out" data_type: TYPE_FP32 dims: [ 16 ] } ] max_batch_size: 4'
)


def plan_model(tmp_path: Path, text: str = "", content: bytes | None = None) -> BackendContext:
    directory = tmp_path / "m"
    (directory / "1").mkdir(parents=True, exist_ok=True)
    (directory / "1" / "model.plan").write_bytes(plan_bytes() if content is None else content)
    return context_with(text, directory)


def load(context: BackendContext) -> None:
    TensorRTBackend(context).load()


@without_gpu
def test_without_a_gpu_a_load_says_so_in_tritons_words(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError) as raised:
        load(plan_model(tmp_path, IO))
    assert raised.value.message.startswith("unable to load model 'm', TensorRT backend supports only GPU device: ")
    assert "driver" in raised.value.message


@without_gpu
def test_the_example_says_so_too(model_repository: Path) -> None:
    context = context_of(model_repository / "digits_tensorrt")
    # Its config is whole, and what its ONNX file says.
    assert TensorRTBackend.complete_config(context) == context.config
    with pytest.raises(UnavailableError, match="supports only GPU device"):
        load(context)


def test_the_example_is_the_digits_model(model_repository: Path) -> None:
    ours, theirs = (model_repository / name / "1/model.onnx" for name in ("digits_tensorrt", "digits_onnx"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_what_is_wrong_with_a_file_is_told_before_the_machine_is_looked_at(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="the file was cut off"):
        load(plan_model(tmp_path, IO, plan_bytes()[:99]))
    (tmp_path / "m/1/model.plan").unlink()
    (tmp_path / "m/1/model.onnx").write_bytes(b"nothing")
    with pytest.raises(InvalidArgumentError, match="expected an ONNX model"):
        load(context_with(IO, tmp_path / "m"))


@without_gpu
def test_a_config_is_completed_from_the_sidecar(tmp_path: Path) -> None:
    context = plan_model(tmp_path)
    with pytest.raises(UnavailableError, match=r"tells its inputs and outputs on a GPU only .* list them in config"):
        TensorRTBackend.complete_config(context)
    written = context_with(IO, context.model_directory)
    assert TensorRTBackend.complete_config(written) == written.config
    write_sidecar(tmp_path / "m/1/model.plan", batching_engine(32), "0" * 64, {})
    assert TensorRTBackend.complete_config(context).max_batch_size == 32
    with pytest.raises(ConfigError, match="expected at most 32"):
        TensorRTBackend.complete_config(context_with("max_batch_size: 64", context.model_directory))
    (tmp_path / "m/1/model.plan.json").write_text("[")
    with pytest.raises(InvalidArgumentError, match=r"model\.plan\.json: expected the JSON description"):
        TensorRTBackend.complete_config(context)


def test_a_config_is_completed_from_the_onnx_file(tmp_path: Path) -> None:
    context = context_with("max_batch_size: 16", identity_model(tmp_path / "m", ["n", 3]))
    config = TensorRTBackend.complete_config(context)
    assert (config.max_batch_size, config.input[0].dims, config.output[0].dims) == (16, (3,), (3,))


def test_plugins_that_are_not_there_are_named(tmp_path: Path) -> None:
    directory = identity_model(tmp_path / "m", ["n", 3])
    context = context_with("max_batch_size: 16", directory, options={"plugins": f"{__file__};/nowhere/p.so"})
    with pytest.raises(ConfigError, match=r"found none at '/nowhere/p\.so'"):
        load(context)


def test_instances_are_on_gpus(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="supports only GPU device: instance 'm_0' is KIND_CPU"):
        TensorRTBackend(plan_model(tmp_path, IO)).create_instance(Placement("m_0"))


@without_gpu
def test_the_doctor_does_not_worry_about_a_machine_without_a_gpu() -> None:
    (finding,) = TensorRTBackend.diagnose()
    assert finding.level is FindingLevel.OK
    assert "cannot run here" in finding.found


@without_gpu
def test_nothing_heavy_is_imported_without_a_gpu(tmp_path: Path) -> None:
    plan_model(tmp_path, IO)
    script = (
        "import sys; from pathlib import Path; from support.engines import context_with\n"
        "from modelserver_backends.tensorrt.backend import TensorRTBackend\n"
        f"context = context_with({IO!r}, Path({str(tmp_path / 'm')!r}))\n"
        "try: TensorRTBackend(context).load()\n"
        "except Exception as error: print(type(error).__name__)\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'tensorrt', 'tensorrt_rtx')])\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{script}"], capture_output=True, timeout=60
    )
    assert ended.stdout.decode().split("\n")[:2] == ["UnavailableError", "[]"], ended.stderr.decode()


def mutated(generator: random.Random) -> bytes:
    """A plan, or its header, with something wrong; now and then it is whole."""
    size = generator.choice([28, 40, 64, 256, 4096])
    plan = bytearray(plan_bytes(generator.choice(["tensorrt", "tensorrt_rtx"]), size=max(size, 64)))
    for _ in range(generator.randint(0, 6)):
        plan[generator.randrange(min(64, len(plan)))] = generator.randrange(256)
    if generator.random() < 0.3:
        struct.pack_into("<Q", plan, 16, generator.choice([0, 1, len(plan), 2**32, 2**63, 2**64 - 1]))
    if generator.random() < 0.3:
        plan = plan[: generator.randrange(len(plan))]
    return bytes(plan)


@without_gpu
@pytest.mark.parametrize("cases", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_damaged_plans_are_load_errors(tmp_path: Path, cases: int) -> None:
    generator = random.Random(11)
    path = tmp_path / "m/1/model.plan"
    context = replace(plan_model(tmp_path, IO))
    reasons = set()
    for _ in range(cases):
        path.write_bytes(mutated(generator))
        with pytest.raises(ServerError) as raised:
            load(context)
        assert str(path) in raised.value.message or "supports only GPU device" in raised.value.message
        reasons.add(raised.value.code)
    assert len(reasons) == 2  # most are refused for what they are, some are whole
