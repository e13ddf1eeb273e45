"""Models whose instances live in processes: which, and that nothing of them is in the server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from support.contexts import context_of, request_of

from modelserver.backend import (
    Backend,
    BackendContext,
    ConfigError,
    InferResponse,
    InternalError,
    ModelConfig,
    Placement,
)
from modelserver.backend.discovery import find_backend
from modelserver.config.schema import ModelInput, ModelOutput, ModelTransactionPolicy
from modelserver.config.validate import validate
from modelserver.core.datatype import Datatype
from modelserver.execution.process.hosted_backend import complete_config, is_hosted, make_backend
from modelserver.execution.process.instance import ProcessInstance

SOURCE = """
import os
from modelserver.backend import Backend, ConfigError, Datatype, FileSignature, FileTensor, TensorInstance
from .factor import FACTOR

class Scaling(TensorInstance):
    def run(self, inputs):
        return {"y": inputs["x"] * FACTOR, "pid": inputs["x"] * 0 + os.getpid()}

class ScalingBackend(Backend):
    @classmethod
    def complete_config(cls, context):
        if "bad" in context.config.parameters:
            raise ConfigError("the parameter is bad")
        tensors = [FileTensor(name, Datatype.FP64, (2,)) for name in ("x", "y", "pid")]
        return context.complete_config(FileSignature((tensors[0],), tuple(tensors[1:])))

    def create_instance(self, placement):
        return Scaling()

BACKEND = ScalingBackend
"""
HOSTED = {"instance_in_process": "true"}


class Needy(Backend):
    @classmethod
    def needs_process(cls, context: BackendContext) -> bool:
        return context.model_name == "needy"

    def create_instance(self, placement: Placement) -> None:  # type: ignore[override]
        """Never called here."""


def config_of(**parameters: str) -> ModelConfig:
    return ModelConfig("m", backend="scaling", parameters=parameters)


@pytest.fixture
def scaling(tmp_path: Path) -> type[Backend]:
    package = tmp_path / "plugins" / "scaling"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(SOURCE)
    (package / "factor.py").write_text("FACTOR = 3")
    return find_backend("scaling", backend_directories=[tmp_path / "plugins"])


@pytest.fixture
def instance(scaling: type[Backend], tmp_path: Path) -> Iterator[ProcessInstance]:
    context = context_of(tmp_path / "m", config=config_of(**HOSTED))
    context = replace(context, config=complete_config(scaling, context))
    assert [spec.name for spec in context.config.output] == ["y", "pid"]
    backend = make_backend(scaling, context)
    backend.load()
    made = backend.create_instance(Placement("m_0"))
    assert isinstance(made, ProcessInstance)
    yield made
    made.close()


def test_a_third_partys_package_lives_in_a_process(instance: ProcessInstance) -> None:
    (answer,) = instance.execute([request_of(x=np.array([1.0, 2.0]))])
    assert isinstance(answer, InferResponse)
    y, pid = (tensor.data for tensor in answer.outputs)
    assert y.tolist() == [3, 6]
    child = psutil.Process(int(pid[0]))
    assert child.pid == instance.pid
    instance.close()
    assert not child.is_running(), "its memory is not given back"


def test_a_load_may_take_as_long_as_its_parameter_says(scaling: type[Backend], tmp_path: Path) -> None:
    context = context_of(tmp_path / "m", config=config_of(START_TIMEOUT_SECONDS="0.01", **HOSTED))
    with pytest.raises(InternalError, match=r"m_0 did not start within 0\.01 s"):
        make_backend(scaling, context).create_instance(Placement("m_0"))


def test_mistakes_are_told_as_without_a_process(scaling: type[Backend], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^the parameter is bad$"):
        complete_config(scaling, context_of(tmp_path / "m", config=config_of(bad="", **HOSTED)))


@pytest.mark.parametrize(
    ("name", "word", "is_apart"),
    [("needy", None, True), ("needy", "false", False), ("other", None, False), ("other", "true", True)],
)
def test_the_config_has_the_last_word(name: str, word: str | None, is_apart: bool) -> None:
    parameters = {} if word is None else {"instance_in_process": word}
    context = context_of(Path("/models") / name, config=ModelConfig(parameters=parameters))
    assert is_hosted(Needy, context) is is_apart
    assert not is_hosted(find_backend("python"), replace(context, config=ModelConfig(parameters=HOSTED)))


def test_another_word_is_refused() -> None:
    problems = validate(config_of(instance_in_process="True"))
    assert any('parameters["instance_in_process"]: expected true or false' in str(problem) for problem in problems)


def test_decoupled_models_answer_later_from_there(tmp_path: Path) -> None:
    policy = ModelTransactionPolicy(decoupled=True)
    given = (("IN", Datatype.INT32), ("DELAY", Datatype.UINT32), ("WAIT", Datatype.UINT32))
    config = ModelConfig(
        "m",
        backend="repeat",
        input=tuple(ModelInput(name, datatype, dims=(-1 if name != "WAIT" else 1,)) for name, datatype in given),
        output=tuple(
            ModelOutput(name, datatype, dims=(1,))
            for name, datatype in (("OUT", Datatype.INT32), ("IDX", Datatype.UINT32))
        ),
        parameters=HOSTED,
        model_transaction_policy=policy,
    )
    backend = make_backend(find_backend("repeat"), context_of(tmp_path / "m", config=config))
    made = backend.create_instance(Placement("m_0"))
    assert isinstance(made, ProcessInstance)
    assert made.answers_later
    assert not made.is_stepped
    made.close()
