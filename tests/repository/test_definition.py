from pathlib import Path

import pytest
from support.onnx_models import identity_model
from support.repositories import IDENTITY_CONFIG, write_model

from modelserver.backend.model_files import backend_for_model_files
from modelserver.errors import ConfigError, UnsupportedError
from modelserver.repository.definition import ModelDefinition, read_definition
from modelserver.repository.layout import scan_model
from modelserver.repository.options import DefinitionOptions
from modelserver.repository.roots import RepositoryRoot, find_model
from modelserver.repository.state import CompletionError, describe_failure


def read(directory: Path, config_json: str | None = None, **options: object) -> ModelDefinition:
    return read_definition(scan_model(directory, directory.name), DefinitionOptions(**options), config_json=config_json)


def problems_of(directory: Path, **options: object) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        read(directory, **options)
    return {problem.field: str(problem) for problem in caught.value.problems}


def test_parses_normalises_and_chooses_versions(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "m", versions=(1, 2))
    definition = read(directory, backend_config={"": {"default-max-batch-size": "8"}, "identity": {"key": "value"}})
    assert definition.name == "m"
    assert definition.backend_class.__name__ == "IdentityBackend"
    assert list(definition.versions) == [2]
    assert definition.config.name == "m"
    assert definition.config.instance_group[0].count == 1
    context = definition.context(2)
    assert context.version_directory == directory / "2"
    assert context.options == {"default-max-batch-size": "8", "key": "value"}


def test_a_version_policy_chooses(tmp_path: Path) -> None:
    policy = "version_policy { specific { versions: [ 1, 3, 9 ] } }"
    definition = read(write_model(tmp_path, "m", versions=(1, 2, 3), extra=policy))
    assert list(definition.versions) == [1, 3]
    assert definition.missing_versions == (9,)


def test_every_problem_is_reported_at_once_with_its_place(tmp_path: Path) -> None:
    config = 'name: "other"\nbackend: "identiti"\nmax_batch_size: -1\nruntime: "r"\n'
    problems = problems_of(write_model(tmp_path, "m", config=config))
    assert {"name", "backend", "max_batch_size", "runtime"} <= problems.keys()
    assert "config.pbtxt:1:" in problems["name"]
    assert "did you mean 'identity'" in problems["backend"]
    assert "config.pbtxt:4:" in problems["runtime"]


def test_a_field_that_is_not_executed_fails_as_unsupported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="runtime: this version does not execute"):
        read(write_model(tmp_path, "m", extra='runtime: "r"'))


def test_a_model_may_complete_its_transaction_policy(tmp_path: Path) -> None:
    model = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "I", "data_type": "TYPE_FP32", "dims": [1]})
        config.add_output({"name": "O", "data_type": "TYPE_FP32", "dims": [1]})
        config.set_model_transaction_policy({"decoupled": True})
        return config
"""
    directory = write_model(tmp_path, "m", config="")
    (directory / "1" / "model.py").write_text(model)
    assert read(directory).config.is_decoupled


def test_an_ensemble_needs_no_backend(tmp_path: Path) -> None:
    step = 'step [ { model_name: "a" input_map { key: "X" value: "I" } output_map { key: "Y" value: "O" } } ]'
    tensors = (
        'input [ { name: "I" data_type: TYPE_FP32 dims: 1 } ] output [ { name: "O" data_type: TYPE_FP32 dims: 1 } ]'
    )
    config = f'platform: "ensemble"\n{tensors}\nensemble_scheduling {{ {step} }}'
    definition = read(write_model(tmp_path, "m", config=config))
    assert definition.config.is_ensemble
    assert definition.config.backend == ""
    assert definition.locations.find("ensemble_scheduling.step[0].model_name") == (3, 32)


def test_without_config_the_backend_is_found_by_its_file_and_completes(model_repository: Path, tmp_path: Path) -> None:
    directory = tmp_path / "digits"
    (directory / "1").mkdir(parents=True)
    source = model_repository / "digits_onnx" / "1" / "model.onnx"
    (directory / "1" / "model.onnx").write_bytes(source.read_bytes())
    definition = read(directory)
    assert definition.config.backend == "onnxruntime"
    assert definition.config.max_batch_size > 0
    assert [spec.name for spec in definition.config.input] == ["image"]


def test_without_auto_completion_inputs_must_be_there(model_repository: Path) -> None:
    problems = problems_of(model_repository / "digits_versions", is_auto_complete_disabled=True)
    assert "backend" in problems


def test_without_auto_completion_a_missing_config_is_named_as_triton_names_it(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / "m", is_auto_complete_disabled=True)
    missing = f"failed to open text file for read {tmp_path}/m/config.pbtxt: No such file or directory"
    assert missing in describe_failure(caught.value)
    assert "auto-completion is disabled" in describe_failure(caught.value)


@pytest.mark.tool("no-gpu")
@pytest.mark.parametrize("is_auto_complete_disabled", [False, True])
def test_a_wish_for_a_gpu_is_read_as_it_was_written(tmp_path: Path, is_auto_complete_disabled: bool) -> None:
    """Once defaults are filled in, groups that were left out say that they are on the CPU."""
    directory = identity_model(tmp_path / "m", ["n", 3])
    tensors = [
        f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: 3 }}' for kind, name in (("input", "x"), ("output", "y"))
    ]
    wish = 'optimization { execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } } }'
    written = "\n".join(['backend: "onnxruntime" max_batch_size: 8', *tensors, wish])
    (directory / "config.pbtxt").write_text(written)
    with pytest.raises(CompletionError, match="GPU accelerator 'tensorrt', and ONNX Runtime here has no GPU"):
        read(directory, is_auto_complete_disabled=is_auto_complete_disabled)
    (directory / "config.pbtxt").write_text(f"{written}\ninstance_group {{ kind: KIND_CPU }}")
    assert read(directory, is_auto_complete_disabled=is_auto_complete_disabled).config.optimization is not None


def test_no_config_and_no_known_file(tmp_path: Path) -> None:
    problems = problems_of(write_model(tmp_path, "m", config=None))
    assert "model.onnx" in problems["backend"]


def test_no_version_directory(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "m", versions=())
    assert "no version directories" in problems_of(directory)[""]
    (directory / "01").mkdir()
    assert "ignore version directory '01' which contains leading zeros" in problems_of(directory)[""]


def test_a_policy_that_leaves_no_version(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "m", extra="version_policy { specific { versions: [ 5 ] } }")
    assert "holds only [1]" in problems_of(directory)["version_policy"]


def test_mistakes_of_the_text_hide_none_of_the_meaning(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "m", versions=())
    (directory / "config.pbtxt").write_text(
        """
name: "wrong"
backend: "identit"
max_batch_sze: -2
input { name: "x" data_type: TYPE_FLOAT dims: [ 0 ] }
output { name: "y" data_type: TYPE_FP32 dims: 1 colour: "red" }
dynamic_batching { preferred_batch_size: [ 99 ] }
instance_group { kind: KIND_CPU gpus: 0 count: many }
"""
    )
    problems = problems_of(directory)
    assert list(problems) == [
        "",
        "name",
        "backend",
        "max_batch_sze",
        "max_batch_size",
        "input[0].data_type",
        "input[0].dims[0]",
        "output[0].colour",
        "dynamic_batching.preferred_batch_size[0]",
        "instance_group[0].gpus",
        "instance_group[0].count",
    ]
    assert "did you mean TYPE_FP32?" in problems["input[0].data_type"]


def test_what_follows_from_a_mistake_of_the_text_is_not_reported(tmp_path: Path) -> None:
    directory = write_model(
        tmp_path,
        "m",
        config="""
backend: identity
max_batch_size: "8"
input { name: "x" data_type: FP32 dims: [ 1, x ] }
output { name: "x" data_type: TYPE_FP32 dims: 1 }
dynamic_batching { }
""",
    )
    assert list(problems_of(directory)) == ["backend", "max_batch_size", "input[0].data_type", "input[0].dims[1]"]


def test_text_that_does_not_parse(tmp_path: Path) -> None:
    problems = problems_of(write_model(tmp_path, "m", config="max_batch_sise: 1"))
    assert any("max_batch_size" in text for text in problems.values())


def test_a_config_that_is_not_text(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "m")
    (directory / "config.pbtxt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        read(directory)


def test_an_override_replaces_the_file(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "m", config="this is not a config")
    document = (
        '{"backend": "identity", "max_batch_size": 2,'
        ' "input": [{"name": "I", "data_type": "TYPE_FP32", "dims": [1]}],'
        ' "output": [{"name": "O", "data_type": "TYPE_FP32", "dims": [1]}]}'
    )
    assert read(directory, document).config.max_batch_size == 2
    with pytest.raises(ConfigError, match="config override of model 'm'"):
        read(directory, "{")


def test_legacy_platforms_name_their_backend(model_repository: Path, tmp_path: Path) -> None:
    directory = tmp_path / "digits"
    (directory / "1").mkdir(parents=True)
    source = model_repository / "digits_onnx" / "1" / "model.onnx"
    (directory / "1" / "model.onnx").write_bytes(source.read_bytes())
    (directory / "config.pbtxt").write_text('platform: "onnxruntime_onnx"')
    assert read(directory).config.backend == "onnxruntime"
    (directory / "config.pbtxt").write_text('platform: "onnxruntime"')
    assert "platform" in problems_of(directory)


def test_a_single_model_takes_the_name_it_was_given(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "exported", config=f'name: "resnet"{IDENTITY_CONFIG}')
    root = RepositoryRoot(directory, "served")
    layout = find_model([root], "served", config_name="", find_backend=backend_for_model_files)
    assert read_definition(layout, DefinitionOptions()).config.name == "served"


def test_warnings_are_kept_with_the_definition_and_their_place(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "m", extra="optimization { graph { level: 1 } }")
    (warning,) = read(directory).warnings
    assert warning.field == "optimization.graph"
    assert f"{directory}/config.pbtxt:6:" in str(warning)


def test_what_is_only_filled_in_is_no_warning(tmp_path: Path) -> None:
    definition = read(write_model(tmp_path, "m"))
    assert definition.config.optimization is not None
    assert definition.config.optimization.input_pinned_memory is not None
    assert definition.warnings == ()


@pytest.mark.parametrize("backend", ["onnxruntime", "identity"])
def test_a_backend_says_which_fields_it_carries_out(tmp_path: Path, model_repository: Path, backend: str) -> None:
    directory = write_model(tmp_path, "m", config=IDENTITY_CONFIG if backend == "identity" else "")
    source = model_repository / "digits_onnx" / "1" / "model.onnx"
    (directory / "1" / "model.onnx").write_bytes(source.read_bytes())
    with (directory / "config.pbtxt").open("a") as file:
        file.write("optimization { graph { level: 1 } }")
    expected = ["optimization.graph"] if backend == "identity" else []
    assert [warning.field for warning in read(directory).warnings] == expected


_CONTRADICTING_BACKEND = """
from modelserver.backend import Backend, BatchInstance, ConfigError

class Contradicting(Backend):
    @classmethod
    def complete_config(cls, context):
        raise ConfigError("the weights are of another model")

    def create_instance(self, placement):
        return BatchInstance()

BACKEND = Contradicting
"""


def test_a_model_brings_its_own_backend_only_if_allowed(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "m", config=IDENTITY_CONFIG.replace('"identity"', '"mine"'))
    (directory / "mine.py").write_text(_CONTRADICTING_BACKEND)
    with pytest.raises(CompletionError, match="the weights are of another model") as caught:
        read(directory, allow_model_backends=True)
    assert (caught.value.versions, caught.value.needs_change) == ((1,), True)
    assert any("unknown backend 'mine'" in text for text in problems_of(directory).values())
