"""Parameters of PyTorch models, and what they do."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from modelserver_backends.pytorch.instance import use_threads
from modelserver_backends.pytorch.options import TorchOptions, torch_options
from support.contexts import context_of, instance_of, loaded, tensors
from support.torch_models import Copy, write_export, write_script

from modelserver.backend import ConfigError, Datatype, DeviceKind, ModelConfig, Placement, UnsupportedError
from modelserver.backend.discovery import find_backend
from modelserver.config.schema import (
    ModelInput,
    ModelOptimizationPolicy,
    ModelOutput,
    OptimizationCuda,
    PinnedMemoryBuffer,
)

CONFIG = ModelConfig(
    input=tensors(ModelInput, x=(Datatype.FP32, (2,))), output=tensors(ModelOutput, y=(Datatype.FP32, (2,)))
)


def options(**parameters: str) -> TorchOptions:
    return torch_options(context_of(Path("/models/m"), config=ModelConfig(parameters=parameters)))


def test_the_defaults_are_tritons_but_for_shared_weights() -> None:
    assert options() == TorchOptions()


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"INTRA_OP_THREAD_COUNT": "3", "NUM_THREADS": "5"}, {"num_threads": 3}),
        ({"NUM_THREADS": "5", "NUM_INTEROP_THREADS": "2"}, {"num_threads": 5, "num_interop_threads": 2}),
        (
            {"DISABLE_OPTIMIZED_EXECUTION": "true", "INFERENCE_MODE": "0"},
            {"is_optimized": False, "is_inference_mode": False},
        ),
        ({"DISABLE_CUDNN": "true", "ENABLE_CACHE_CLEANING": "true"}, {"has_cudnn": False, "cleans_cache": True}),
        ({"ENABLE_WEIGHT_SHARING": "false", "CHANNELS_LAST": "1"}, {"shares_weights": False, "is_channels_last": True}),
        ({"TORCH_COMPILE": "true"}, {"compile_arguments": {}}),
        ({"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"dynamic": true}'}, {"compile_arguments": {"dynamic": True}}),
        ({"TORCH_COMPILE": "false", "TORCH_COMPILE_OPTIONAL_PARAMETERS": "{}"}, {}),
    ],
)
def test_parameters_have_tritons_names(parameters: dict[str, str], expected: dict[str, object]) -> None:
    assert options(**parameters) == replace(TorchOptions(), **expected)  # type: ignore[arg-type]


def test_the_optimization_policy_is_read() -> None:
    policy = ModelOptimizationPolicy(cuda=OptimizationCuda(graphs=True), input_pinned_memory=PinnedMemoryBuffer())
    found = torch_options(context_of(Path("/models/m"), config=ModelConfig(optimization=policy)))
    assert (found.has_cuda_graphs, found.is_pinned) == (True, False)


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("NUM_THREADS", "-1", "NUM_THREADS: expected 0 or more, got -1"),
        ("CHANNELS_LAST", "maybe", "CHANNELS_LAST: expected true or false, got 'maybe'"),
        ("TORCH_COMPILE_OPTIONAL_PARAMETERS", "{", "expected JSON, got '{'"),
        ("TORCH_COMPILE_OPTIONAL_PARAMETERS", "[]", "expected a JSON object"),
        ("TORCH_COMPILE_OPTIONAL_PARAMETERS", '{"speed": 1}', "expected one of fullgraph, .*, got 'speed'"),
        ("TORCH_COMPILE_OPTIONAL_PARAMETERS", '{"mode": 1}', "mode: expected a str, got 1"),
    ],
)
def test_a_bad_parameter_is_named(key: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"model 'm': parameter .*{message}"):
        options(**{key: text})


def test_each_thread_keeps_its_own_number() -> None:
    seen: dict[int, int] = {}
    all_set = threading.Barrier(2)

    def compute(count: int) -> None:
        use_threads(count)
        all_set.wait(30)
        torch.ones(4) + 1
        use_threads(count)
        torch.set_num_threads(count)  # what an operator sees, whatever the other thread said last
        seen[count] = torch.get_num_threads()

    before = torch.get_num_threads()
    threads = [threading.Thread(target=compute, args=(count,)) for count in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(before)
    assert seen == {1: 1, 2: 2}


class Images(torch.nn.Module):
    """Tells the stride of its input's channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 2, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.conv(x), torch.tensor([x.stride(1), self.conv.weight.stride(1)])


def test_images_may_be_given_channels_last(tmp_path: Path) -> None:
    config = ModelConfig(
        input=tensors(ModelInput, x=(Datatype.FP32, (1, 3, 4, 4))),
        output=tensors(ModelOutput, y=(Datatype.FP32, (1, 2, 4, 4)), strides=(Datatype.INT64, (2,))),
    )
    directory = write_script(tmp_path / "m", Images())
    image = np.arange(48, dtype=np.float32).reshape(1, 3, 4, 4)
    plain = instance_of("pytorch", context_of(directory, config=config)).run({"x": image})
    config = replace(config, parameters={"CHANNELS_LAST": "true"})
    last = instance_of("pytorch", context_of(directory, config=config)).run({"x": image})
    assert (plain["strides"].tolist(), last["strides"].tolist()) == ([16, 1], [1, 1])
    assert np.allclose(plain["y"], last["y"], atol=1e-5)
    assert last["y"].shape == (1, 2, 4, 4)


def test_an_exported_program_may_be_compiled(tmp_path: Path) -> None:
    """By the compiler that only traces: the others take half a minute."""
    directory = write_export(tmp_path / "m", Copy(), torch.ones(2))
    parameters = {"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"backend": "eager", "fullgraph": true}'}
    context = context_of(directory, config=ModelConfig(parameters=parameters))
    assert instance_of("pytorch", context).run({"x": np.ones(2, np.float32)})["OUTPUT__0"].tolist() == [1, 1]


def test_torchscript_cannot_be_compiled(tmp_path: Path) -> None:
    config = replace(CONFIG, parameters={"TORCH_COMPILE": "true"})
    backend = loaded(find_backend("pytorch"), context_of(write_script(tmp_path / "m", Copy()), config=config))
    with pytest.raises(UnsupportedError, match=r"model 'm': torch.compile takes exported programs"):
        backend.create_instance(Placement("m_0"))


def test_weights_are_shared_unless_the_config_says_no(tmp_path: Path) -> None:
    for shared in (True, False):
        config = replace(CONFIG, parameters={"ENABLE_WEIGHT_SHARING": str(shared).lower()})
        backend = loaded(find_backend("pytorch"), context_of(write_script(tmp_path / "m", Copy()), config=config))
        calls = {id(backend.create_instance(Placement(f"m_{index}"))._call) for index in range(2)}  # type: ignore[union-attr]
        assert (len(calls) == 1) is shared


def test_a_model_may_choose_its_device(tmp_path: Path) -> None:
    backend = loaded(find_backend("pytorch"), context_of(write_script(tmp_path / "m", Copy()), config=CONFIG))
    instance = backend.create_instance(Placement("m_0", DeviceKind.MODEL))
    assert instance.run({"x": np.ones(2, np.float32)})["y"].tolist() == [1, 1]  # type: ignore[union-attr]


def test_here_all_is_well() -> None:
    (finding,) = find_backend("pytorch").diagnose()
    assert finding.found.startswith(f"PyTorch {torch.__version__}")
