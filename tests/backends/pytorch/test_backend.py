"""PyTorch files: completion of configs, conflicts, threads, files that cannot be loaded."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from support.contexts import context_of, instance_of, tensors
from support.torch_models import (
    Copy,
    Keyworded,
    Shouting,
    SumAndDifference,
    path_in,
    rewritten,
    write_export,
    write_script,
)
from torch.export import Dim

from modelserver.backend import (
    ConfigError,
    Datatype,
    InvalidArgumentError,
    ModelConfig,
    NotFoundError,
    Placement,
    UnsupportedError,
)
from modelserver.backend.discovery import find_backend
from modelserver.config.schema import ModelDynamicBatching, ModelInput, ModelOutput

FP32 = Datatype.FP32
pytorch = pytest.fixture(lambda: find_backend("pytorch"))


def described(specs) -> list[tuple[str, Datatype, tuple[int, ...]]]:
    return [(spec.name, spec.data_type, spec.dims) for spec in specs]


def config_of(inputs: list[str], outputs: list[str], **parameters: str) -> ModelConfig:
    return ModelConfig(
        input=tensors(ModelInput, **dict.fromkeys(inputs, (FP32, (2,)))),
        output=tensors(ModelOutput, **dict.fromkeys(outputs, (FP32, (2,)))),
        parameters=parameters,
    )


def test_an_exported_program_needs_no_config(pytorch, model_repository: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "1").symlink_to(model_repository / "digits_export" / "1")
    config = pytorch.complete_config(context_of(tmp_path / "m"))
    assert described(config.input) == [("image", FP32, (8, 8))]
    assert described(config.output) == [("probabilities", FP32, (10,)), ("digit", Datatype.INT64, (1,))]
    assert (config.max_batch_size, config.dynamic_batching) == (64, ModelDynamicBatching())


def test_a_batch_without_bound_gets_the_default_size(pytorch, tmp_path: Path) -> None:
    batch = Dim("batch")
    directory = write_export(tmp_path, Copy(), torch.ones(2, 3), dynamic_shapes={"x": {0: batch}})
    assert pytorch.complete_config(context_of(directory)).max_batch_size == 4
    options = {"default-max-batch-size": "16"}
    assert pytorch.complete_config(context_of(directory, options=options)).max_batch_size == 16
    with pytest.raises(ConfigError, match="default-max-batch-size: expected a whole number of 0 or more, got '-1'"):
        pytorch.complete_config(context_of(directory, options={"default-max-batch-size": "-1"}))


def test_a_fixed_program_does_not_batch(pytorch, tmp_path: Path) -> None:
    directory = write_export(tmp_path, Keyworded(), torch.ones(2, 3), 4, shift=torch.ones(2, 3))
    config = pytorch.complete_config(context_of(directory))
    assert config.max_batch_size == 0
    assert described(config.input) == [("x", FP32, (2, 3)), ("shift", FP32, (2, 3))]
    assert described(config.output) == [("OUTPUT__0", FP32, (2, 3)), ("OUTPUT__1", Datatype.BF16, (2, 3))]


def test_an_exported_program_may_be_given_tritons_names(tmp_path: Path) -> None:
    directory = write_export(tmp_path, SumAndDifference(), torch.ones(2), torch.ones(2))
    config = config_of(["INPUT__1", "INPUT__0"], ["sum", "difference"])
    instance = instance_of("pytorch", context_of(directory, config=config))
    left, right = torch.tensor([5.0, 6.0]).numpy(), torch.tensor([1.0, 1.0]).numpy()
    assert instance.run({"INPUT__0": left, "INPUT__1": right})["difference"].tolist() == [4, 5]


def test_contradictions_to_an_exported_program_are_all_reported(pytorch, tmp_path: Path) -> None:
    directory = write_export(tmp_path, SumAndDifference(), torch.ones(2), torch.ones(2))
    config = ModelConfig(
        input=tensors(ModelInput, lfet=(FP32, (2,)), right=(Datatype.INT8, (3,))),
        output=tensors(ModelOutput, OUTPUT__0=(FP32, (2,))),
    )
    with pytest.raises(ConfigError) as caught:
        pytorch.complete_config(context_of(directory, config=config))
    fields = [problem.field for problem in caught.value.problems]
    assert fields == ["input[0].name", "input[1].data_type", "input[1].dims"]
    assert "did you mean left?" in str(caught.value)


def test_more_rows_than_the_program_takes_are_refused(pytorch, model_repository: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "1").symlink_to(model_repository / "digits_export" / "1")
    with pytest.raises(ConfigError, match="max_batch_size: expected at most 64, as the file allows, got 128"):
        pytorch.complete_config(context_of(tmp_path / "m", config=ModelConfig(max_batch_size=128)))


def test_a_script_cannot_complete_a_config_but_tells_its_arguments(pytorch, tmp_path: Path) -> None:
    directory = write_script(tmp_path, SumAndDifference())
    with pytest.raises(ConfigError, match=r"tells neither datatypes nor shapes; .* \(forward takes: left, right\)"):
        pytorch.complete_config(context_of(directory))


def test_inputs_that_forward_does_not_take_are_refused(pytorch, tmp_path: Path) -> None:
    backend = pytorch(context_of(write_script(tmp_path / "m", Copy()), config=config_of(["x", "z"], ["y"])))
    backend.load()
    with pytest.raises(ConfigError, match=r"model 'm': expected an input for every argument of forward\(x\), got x, z"):
        backend.create_instance(Placement("m_0"))


def test_an_exported_program_takes_no_strings(pytorch, tmp_path: Path) -> None:
    config = ModelConfig(input=tensors(ModelInput, text=(Datatype.BYTES, (1,))))
    with pytest.raises(ConfigError, match="text: PyTorch has no tensors of TYPE_STRING"):
        pytorch.complete_config(context_of(write_export(tmp_path, Copy(), torch.ones(2)), config=config))


def test_strings_of_a_script_have_one_dimension(pytorch, tmp_path: Path) -> None:
    config = ModelConfig(input=tensors(ModelInput, text=(Datatype.BYTES, (2, -1))))
    with pytest.raises(ConfigError, match=r"^Triton only supports 1 dimensional List of String as input for 'text'"):
        pytorch.complete_config(context_of(write_script(tmp_path, Shouting()), config=config))


@pytest.mark.parametrize(
    ("module", "datatype", "wanted"), [(Copy(), Datatype.BYTES, "numbers"), (Shouting(), FP32, "TYPE_STRING")]
)
def test_strings_go_to_arguments_that_take_them(pytorch, tmp_path: Path, module, datatype, wanted: str) -> None:
    name = "x" if datatype is Datatype.BYTES else "text"
    config = ModelConfig(
        input=tensors(ModelInput, **{name: (datatype, (-1,))}), output=tensors(ModelOutput, y=(datatype, (-1,)))
    )
    backend = pytorch(context_of(write_script(tmp_path / "m", module), config=config))
    backend.load()
    with pytest.raises(ConfigError, match=f"input '{name}' is .* its data_type is to be .*{wanted}"):
        backend.create_instance(Placement("m_0"))


def test_a_missing_file_says_where_it_was_looked_for(pytorch, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"/1 holds neither model.pt nor model.pt2"):
        pytorch.complete_config(context_of(tmp_path))


def test_two_files_need_a_choice(pytorch, tmp_path: Path) -> None:
    write_export(tmp_path, Copy(), torch.ones(2))
    write_script(tmp_path, Copy())
    with pytest.raises(InvalidArgumentError, match="choose one with default_model_filename"):
        pytorch.complete_config(context_of(tmp_path))
    chosen = ModelConfig(default_model_filename="model.pt2")
    assert described(pytorch.complete_config(context_of(tmp_path, config=chosen)).input) == [("x", FP32, (2,))]


@pytest.mark.parametrize("name", ["model.pt", "model.pt2"])
def test_a_truncated_file_is_named(pytorch, tmp_path: Path, name: str) -> None:
    directory = write_script(tmp_path, Copy()) if name == "model.pt" else write_export(tmp_path, Copy(), torch.ones(2))
    path = path_in(directory, name)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InvalidArgumentError, match=rf"{name} is neither TorchScript nor torch.export: a truncated"):
        pytorch.complete_config(context_of(directory))


def test_a_damaged_archive_is_named(pytorch, tmp_path: Path) -> None:
    path = path_in(write_script(tmp_path, Copy()), "model.pt")
    rewritten(path, {"constants.pkl": b"nothing of use"})
    with pytest.raises(InvalidArgumentError, match=r"PyTorch cannot load the TorchScript archive .*model.pt"):
        pytorch.complete_config(context_of(tmp_path))


def test_a_pickle_is_refused_before_anything_is_loaded(pytorch, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    torch.save(torch.nn.Linear(2, 1), path_in(tmp_path, "model.pt"))
    config = config_of(["x"], ["y"])
    with pytest.raises(UnsupportedError, match=r"model\.pt is a pickled checkpoint .*allow-pickle=true"):
        pytorch.complete_config(context_of(tmp_path, config=config))
    assert pytorch.complete_config(context_of(tmp_path, config=config, options={"allow-pickle": "true"})) == config


def test_thread_counts_are_of_the_instance_s_own_thread(tmp_path: Path) -> None:
    directory = write_script(tmp_path, Copy())
    before = torch.get_num_threads()
    counts: list[int] = []

    def run(count: str) -> None:
        instance = instance_of("pytorch", context_of(directory, config=config_of(["x"], ["y"], NUM_THREADS=count)))
        instance.run({"x": np.zeros(2, np.float32)})
        counts.append(torch.get_num_threads())
        instance.close()

    try:
        for count in ("1", "2"):
            with ThreadPoolExecutor(1) as pool:
                pool.submit(run, count).result()
    finally:
        torch.set_num_threads(before)
    assert counts == [1, 2]


def test_inter_op_threads_are_set_once(pytorch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    count = torch.get_num_interop_threads()
    with caplog.at_level(logging.WARNING):
        for more in (1, 2):
            config = config_of(["x"], ["y"], INTER_OP_THREAD_COUNT=str(count + more))
            pytorch(context_of(tmp_path, config=config)).load()
    assert f"INTER_OP_THREAD_COUNT {count + 2} comes too late: PyTorch sets it once per process" in caplog.text


def test_programs_may_be_loaded_at_once(pytorch, model_repository: Path) -> None:
    """torch.export.load by itself fails then: "_CURRENT_DESERIALIZER is already set"."""
    context = context_of(model_repository / "digits_export")
    with ThreadPoolExecutor(4) as pool:
        configs = list(pool.map(pytorch.complete_config, [context] * 8))
    assert configs == [pytorch.complete_config(context)] * 8


def test_a_directory_is_no_model(pytorch, tmp_path: Path) -> None:
    (tmp_path / "m" / "1" / "weights").mkdir(parents=True)
    config = ModelConfig(default_model_filename="weights")
    with pytest.raises(InvalidArgumentError, match=r"/1/weights cannot be read: Is a directory"):
        pytorch.complete_config(context_of(tmp_path / "m", config=config))
