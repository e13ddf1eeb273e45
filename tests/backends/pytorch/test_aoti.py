"""AOTInductor packages: names, machines that they do not fit, and one that is compiled and served in a process."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from modelserver_backends.pytorch.aoti import argument_names, result_names, unfit
from support.contexts import context_of, request_of, tensors
from torch.utils import _pytree as pytree

from modelserver.backend import (
    ConfigError,
    Datatype,
    InferResponse,
    InternalError,
    InvalidArgumentError,
    ModelConfig,
    Placement,
)
from modelserver.backend.discovery import find_backend
from modelserver.config.schema import ModelInput, ModelOutput
from modelserver.execution.process.hosted_backend import complete_config, is_hosted, make_backend
from modelserver.execution.process.instance import ProcessInstance

HERE = {"machine": "x86_64", "cpu_flags": {"avx2", "avx512f"}, "capability": "90"}
FP32 = Datatype.FP32


@pytest.mark.parametrize(
    ("metadata", "device", "reason"),
    [
        ({}, "cpu", None),
        ({"AOTI_DEVICE_KEY": "cpu", "AOTI_CPU_ISA": "AVX512"}, "cpu", None),
        (
            {"AOTI_DEVICE_KEY": "cpu", "AOTI_CPU_ISA": "AVX512 AVX512_VNNI"},
            "cpu",
            "for AVX512_VNNI, which this CPU lacks",
        ),
        ({"AOTI_CPU_ISA": "of the future"}, "cpu", None),
        ({"AOTI_DEVICE_KEY": "cuda"}, "cpu", "compiled for cuda, and the instance is on cpu"),
        ({"AOTI_DEVICE_KEY": "cuda", "AOTI_COMPUTE_CAPABILITY": "90"}, "cuda:1", None),
        ({"AOTI_DEVICE_KEY": "cuda", "AOTI_COMPUTE_CAPABILITY": "80"}, "cuda:0", "capability 80, the GPU has 90"),
        ({"AOTI_DEVICE_KEY": "cpu", "AOTI_MACHINE": "aarch64"}, "cpu", "for aarch64, this machine is x86_64"),
    ],
)
def test_a_package_says_where_it_can_run(metadata: dict[str, str], device: str, reason: str | None) -> None:
    found = unfit(metadata, device, **HERE)  # type: ignore[arg-type]
    assert (found is None) if reason is None else reason in (found or "")


def test_tensors_are_named_by_their_places() -> None:
    spec = pytree.tree_structure(((1, (2, {"k": 3})), {"mask": 4}))
    assert argument_names(spec) == ("ARGS[0]", "ARGS[1][0]", "ARGS[1][1][k]", "KWARGS[mask]")
    assert result_names(pytree.tree_structure(1)) == ("RESULT",)
    assert result_names(pytree.tree_structure((1, {"d": (2, 3)}))) == (
        "RESULT[0]",
        "RESULT[1][d][0]",
        "RESULT[1][d][1]",
    )


def write_shell(directory: Path) -> Path:
    """An archive that looks like a package."""
    path = directory / "m" / "1" / "model.pt2"
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/data/aotinductor/model/x.so", b"")
    return directory / "m"


def test_a_config_has_to_list_what_a_package_takes(tmp_path: Path) -> None:
    context = context_of(write_shell(tmp_path), config=ModelConfig(platform="torch_aoti"))
    assert is_hosted(find_backend("pytorch"), context)
    with pytest.raises(
        ConfigError, match=r"list every input and output in config.pbtxt \(its inputs are called INPUT__0"
    ):
        complete_config(find_backend("pytorch"), context)


def test_a_platform_is_not_taken_for_what_the_file_is_not(tmp_path: Path, model_repository: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "1").symlink_to(model_repository / "digits_export" / "1")
    with pytest.raises(
        InvalidArgumentError, match=r"torch_aoti expects an AOTInductor package, and .* is a torch.export"
    ):
        complete_config(find_backend("pytorch"), context_of(tmp_path / "m", config=ModelConfig(platform="torch_aoti")))


COMPILE = """
import sys, torch

class Sums(torch.nn.Module):
    def forward(self, x, y):
        return x + y, {"difference": x - y}

program = torch.export.export(Sums(), (torch.ones(3), torch.ones(3)))
torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1])
"""


@pytest.mark.slow  # compiling takes half a minute
def test_a_package_is_served_in_a_process(tmp_path: Path) -> None:
    path = tmp_path / "m" / "1" / "model.pt2"
    path.parent.mkdir(parents=True)
    # The compiler starts processes, and warns of itself.
    environment = {
        **os.environ,
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    subprocess.run([sys.executable, "-c", COMPILE, str(path)], env=environment, check=True, capture_output=True)
    x, y = np.array([5, 6, 7], np.float32), np.ones(3, np.float32)
    for inputs, outputs in (
        (("INPUT__1", "INPUT__0"), ("OUTPUT__1", "OUTPUT__0")),
        (("ARGS[1]", "ARGS[0]"), ("RESULT[1][difference]", "RESULT[0]")),
    ):
        config = ModelConfig(
            "m",
            platform="torch_aoti",
            input=tensors(ModelInput, **dict.fromkeys(inputs, (FP32, (3,)))),
            output=tensors(ModelOutput, **dict.fromkeys(outputs, (FP32, (3,)))),
        )
        context = context_of(tmp_path / "m", config=config)
        context = replace(context, config=complete_config(find_backend("pytorch"), context))
        backend = make_backend(find_backend("pytorch"), context)
        backend.load()
        instance = backend.create_instance(Placement("m_0"))
        assert isinstance(instance, ProcessInstance)
        try:
            (answer,) = instance.execute([request_of(**{inputs[0]: y, inputs[1]: x})])
            assert isinstance(answer, InferResponse)
            assert {tensor.name: tensor.data.tolist() for tensor in answer.outputs} == {
                outputs[0]: [4, 5, 6],
                outputs[1]: [6, 7, 8],
            }
            # Without this check the library would read past the end of its input.
            with pytest.raises(InternalError, match="unmatched dim value at 0, expected: 3, but got: 2"):
                instance.execute([request_of(**{inputs[0]: y[:2], inputs[1]: x[:2]})])
        finally:
            instance.close()
            backend.unload()
