from __future__ import annotations

from pathlib import Path

import pytest
from modelserver_backends.python.backend import PythonBackend, may_complete_config
from support.contexts import context_of
from support.python_models import write_model

from modelserver.backend import ModelConfig
from modelserver.core.datatype import Datatype
from modelserver.errors import ConfigError

COMPLETING = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        @staticmethod
        def auto_complete_config(auto_complete_model_config):
            auto_complete_model_config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [4]})
            auto_complete_model_config.add_output({"name": "Y", "data_type": "TYPE_STRING", "dims": [-1]})
            auto_complete_model_config.set_max_batch_size(8)
            auto_complete_model_config.set_dynamic_batching()
            return auto_complete_model_config
"""


def completed(root: Path, source: str, config: str = "") -> ModelConfig:
    return PythonBackend.complete_config(context_of(write_model(root, source, config)))


def returning(expression: str) -> str:
    return f"""
        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(config):
                {expression}
    """


def test_the_model_completes_its_config(tmp_path: Path) -> None:
    config = completed(tmp_path, COMPLETING, "instance_group { count: 3 kind: KIND_CPU }")
    assert [(spec.name, spec.data_type, spec.dims) for spec in config.input] == [("X", Datatype.FP32, (4,))]
    assert [(spec.name, spec.data_type, spec.dims) for spec in config.output] == [("Y", Datatype.BYTES, (-1,))]
    assert config.max_batch_size == 8
    assert config.dynamic_batching is not None
    assert config.instance_group[0].count == 3
    assert config.backend == "python"


def test_a_model_without_the_function_keeps_its_config(tmp_path: Path) -> None:
    context = context_of(write_model(tmp_path, "class TritonPythonModel:\n    pass\n", "max_batch_size: 3"))
    assert PythonBackend.complete_config(context) is context.config


@pytest.mark.parametrize(
    ("source", "config", "message"),
    [
        (COMPLETING, "max_batch_size: 16", "specified max_batch_size 16, but"),
        (COMPLETING, 'input { name: "X" data_type: TYPE_INT8 dims: 4 }', "unable to load model 'm', .* TYPE_INT8"),
        (
            returning("return None"),
            "",
            r"must return a valid pb.ModelConfig object\. .*model.py returned NoneType, not ",
        ),
        (returning("return 1 / 0"), "", r"ZeroDivisionError: division by zero\n\nAt:\n.*model.py\(5\): auto_complete"),
        (returning("import os; os._exit(4)"), "", "exited with code 4"),
        ("def broken(:\n", "", "SyntaxError: invalid syntax"),
        ("import no_such_library\n", "", "No module named 'no_such_library'"),
        ("x = 1\n", "", "model.py defines no class TritonPythonModel"),
    ],
)
def test_what_goes_wrong_is_a_config_error(tmp_path: Path, source: str, config: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"model 'm': auto_complete_config failed(.|\n)*{message}"):
        completed(tmp_path, source, config)


def test_a_function_that_hangs_is_given_up(tmp_path: Path) -> None:
    config = 'parameters { key: "START_TIMEOUT_SECONDS" value { string_value: "1" } }'
    with pytest.raises(ConfigError, match=r"did not start within 1\.0 s"):
        completed(tmp_path, returning("import time; time.sleep(60)"), config)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("class TritonPythonModel:\n    def execute(self, requests): ...\n", False),
        ("class TritonPythonModel:\n    def auto_complete_config(config): ...\n", True),
        ("class TritonPythonModel:\n    auto_complete_config = print\n", True),
        ("from base import Base\nclass TritonPythonModel(Base):\n    pass\n", True),
        ("from elsewhere import TritonPythonModel\n", True),
        ("not python at all\n", True),
    ],
)
def test_a_process_is_started_only_where_it_may_be_needed(tmp_path: Path, source: str, expected: bool) -> None:
    path = tmp_path / "model.py"
    path.write_text(source)
    assert may_complete_config(path) is expected
